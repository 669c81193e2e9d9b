"""What the workers run for the tests of a caller's own hooks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import models
from tests.jobs import make, rows_of_rank


def add_hooks(model: nn.Module, names: Iterable[str]) -> None:
    """Add to what each module gives, alike for every position; modules of other stages are left out."""
    modules = dict(model.named_modules())
    for name in names:
        if name in modules:
            modules[name].register_forward_hook(_shift)


def gradients_with_hooks(config: dict, batch: dict, early: tuple[str, ...], late: tuple[str, ...]) -> dict:
    """As `jobs.gradients`; ``early`` hooks are the given model's, ``late`` ones are added to the one on the mesh."""
    source = models.tiny_model()
    add_hooks(source, early)
    model = make(config, source=source)
    add_hooks(model._runner.model, late)
    return _result(model, batch)


def gradients_differ(one: nn.Module, other: nn.Module, batch: dict) -> bool:
    """Whether some gradient of the two differs by more than a hundredth."""
    ours, theirs = (models.reference(model, batch)[1] for model in (one, other))
    return max(models.relative(ours[name], theirs[name]) for name in ours) > 1e-2


def error_with_late_hook(config: dict, batch: dict, name: str, inplace: bool) -> str:
    """The error of the first step with a hook that changes what a module gives, in place or not."""
    model = make(config)
    module = dict(model._runner.model.named_modules()).get(name)
    if module is not None:
        module.register_forward_hook(_shift_in_place if inplace else _shift)
    try:
        model.forward_backward(rows_of_rank(batch, model.mesh))
    except RuntimeError as error:  # torch says around it which stage failed
        return str(error.__cause__ or error)
    return ""


def gradients_seen_by_one_rank(config: dict, batch: dict, name: str) -> dict:
    """As `jobs.gradients`, with a hook on rank 0 that only looks; "seen": how often it was called."""
    model, seen = make(config), []
    if dist.get_rank() == 0:
        model._runner.model.get_submodule(name).register_forward_hook(lambda module, args, out: seen.append(out.shape))
    return _result(model, batch) | {"seen": len(seen)}


def _result(model, batch: dict) -> dict:
    loss, norm = model.forward_backward(rows_of_rank(batch, model.mesh)).item(), model.grad_norm().item()
    return {"losses": [loss], "norm": norm, "grads": dict(model.full_tensors("grad"))}


def _shift(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return out + torch.arange(out.shape[-1], dtype=out.dtype).cos() / 10


def _shift_in_place(module: nn.Module, args: tuple, out: Tensor) -> None:
    out.add_(torch.arange(out.shape[-1], dtype=out.dtype).cos() / 10)
