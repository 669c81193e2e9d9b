"""What the workers run for the tests of steps whose numbers go wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshpar
from meshpar.grads import local
from meshpar.recipe import parse_recipe
from meshpar.train import loop
from tests import models
from tests.jobs import make, rows_of_rank


@dataclass(frozen=True)
class Fault:
    """What a module does to a microbatch of the global batches ``batches`` (from 1), on ``rank`` or on every one."""

    kind: str
    module: str
    rank: int | None = None
    microbatch: int | None = None
    batches: tuple[int, ...] = (3,)
    once: bool = False  # not when the step is run again


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


def _nan(module: nn.Module, out: Tensor) -> Tensor:
    return out * torch.nan


def _backward(module: nn.Module, out: Tensor) -> Tensor:
    return _OtherGradient.apply(out, torch.inf)


def _backward_of_weight(module: nn.Module, out: Tensor) -> Tensor:
    return out + 0 * _OtherGradient.apply(module.weight, torch.nan).sum()


def _huge_backward_of_weight(module: nn.Module, out: Tensor) -> Tensor:
    return out + 0 * _OtherGradient.apply(module.weight, 2e38).sum()


def _spike(module: nn.Module, out: Tensor) -> Tensor:
    return out * 30


def _huge(module: nn.Module, out: Tensor) -> Tensor:
    return out + 3e38


_IN_MODULE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "nan": _nan,
    "backward": _backward,
    "backward of weight": _backward_of_weight,
    "huge backward of weight": _huge_backward_of_weight,
    "spike": _spike,
    "nan before": _nan,
    "huge before": _huge,
}


def train(raw: dict, fault: Fault | None = None, pass_over: int = 0) -> dict:
    """The training loop on a recipe, with a fault: what this rank warned of, the error, and what each step did.

    ``pass_over``: global batches that are passed over where the run starts.
    """
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    steps: list[tuple[int, str, str, bool]] = []
    whole_train, error = loop.train, ""

    def train_with_fault(job: loop.Job, *rest) -> None:
        _watch_steps(job, steps)
        if fault is not None:
            _inject(job, fault)
        for _ in range(pass_over):
            job.batches.next()
        whole_train(job, *rest)

    logging.getLogger("meshpar").addHandler(handler)
    loop.train = train_with_fault
    try:
        loop.run(parse_recipe(raw))
    except loop.StepFailed as failed:
        error = str(failed)
    finally:
        logging.getLogger("meshpar").removeHandler(handler)
        loop.train = whole_train
    return {"warnings": warnings, "error": error, "steps": steps}


def find_in_own_loop(config: dict) -> tuple[str, str, bool]:
    """What `find_nonfinite` says of a good list of batches, then of one with a fault; whether the next step is good."""
    model = make(config)
    own = [rows_of_rank(models.make_batch(4, seed=seed), model.mesh) for seed in (1, 2)]
    before = model.forward_backward(own).item(), model.grad_norm().item()
    good = meshpar.find_nonfinite(model, own)
    module = dict(model._runner.model.named_modules()).get("model.layers.3.mlp")
    handles = [module.register_forward_hook(lambda module, args, out: _nan(module, out))] if module else []
    bad = meshpar.find_nonfinite(model, own)
    for handle in handles:
        handle.remove()
    return str(good), str(bad), before == (model.forward_backward(own).item(), model.grad_norm().item())


def _watch_steps(job: loop.Job, steps: list) -> None:
    """Of each step: its number, the guard's verdict and reason, and whether it changed weights or optimizer."""
    step = job.train_step

    def watched():
        before = _own_state(job)
        result = step()
        same = len(before) == len(_own_state(job)) and all(map(torch.equal, before, _own_state(job)))
        assert all(p.grad is None for p in job.model.parameters())
        steps.append((job.step, result[-1].action, result[-1].reason, not same))
        return result

    job.train_step = watched


def _own_state(job: loop.Job) -> list[Tensor]:
    tensors = list(job.model.parameters())
    tensors += [t for state in job.optimizer.state.values() for t in state.values()]
    return [local(t).detach().clone() for t in tensors]


def _inject(job: loop.Job, fault: Fault) -> None:
    """The fault comes with the batch, and so again when the step is run again."""
    calls = runs = 0

    def active() -> bool:
        there = job.batches.rows_seen // job.batches.global_size in fault.batches
        return there and not (fault.once and runs > 1)

    forward_backward = job.model.forward_backward

    def begin(batch):
        nonlocal calls, runs
        calls, runs = 0, runs + 1 if job.batches.rows_seen // job.batches.global_size in fault.batches else 0
        if fault.kind == "weight" and active() and fault.rank == dist.get_rank():
            local(dict(job.model.named_parameters())[fault.module]).view(-1)[0] = torch.inf
        return forward_backward(batch)

    def act(module: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += torch._C._current_graph_task_id() == -1  # not what activation checkpointing computes again
        wanted = fault.microbatch is None or calls == fault.microbatch + 1
        return _IN_MODULE[fault.kind](module, x) if active() and wanted else x

    job.model.forward_backward = begin
    module = dict(job.model._runner.model.named_modules()).get(fault.module)
    if fault.kind == "weight" or module is None or fault.rank not in (None, dist.get_rank()):
        return
    if fault.kind.endswith("before"):
        module.register_forward_pre_hook(lambda module, args: (act(module, args[0]), *args[1:]))
    else:
        module.register_forward_hook(lambda module, args, out: act(module, out))
