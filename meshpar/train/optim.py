"""The optimizer and the learning-rate schedule of a recipe's `optim` section."""

from __future__ import annotations

import math
from functools import partial

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ..recipe import Optim


def make_optimizer(model: nn.Module, optim: Optim) -> AdamW:
    """AdamW on what trains; weight decay on matrices only, not on norms and biases."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=True)


def make_schedule(optimizer: AdamW, optim: Optim, steps: int) -> LambdaLR:
    """The learning rate of each of ``steps`` steps; call its ``step()`` after the optimizer's."""
    return LambdaLR(optimizer, partial(lr_factor, optim=optim, steps=steps))


def set_rate(optimizer: AdamW, schedule: LambdaLR, optim: Optim, steps: int) -> None:
    """The next step's learning rate: the optimizer of a checkpoint has that of the schedule it was saved with."""
    for group, base in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = base * lr_factor(schedule.last_epoch, optim, steps)


def lr_factor(step: int, optim: Optim, steps: int) -> float:
    """What ``optim.lr`` is multiplied by in the step after ``step`` finished ones.

    It rises to 1 in the last of the warmup steps, then falls along ``optim.schedule`` towards ``min_lr_ratio``, which
    it would reach in the step after the last.
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    done = min(1.0, (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps))
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[optim.schedule]
    return falling if optim.schedule == "constant" else optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * falling
