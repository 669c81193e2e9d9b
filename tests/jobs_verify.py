"""Verification with a fault planted in this process, to see it found and named."""

from __future__ import annotations

from contextlib import contextmanager

import torch

import meshpar
from meshpar import comm, grads, model, pipeline, styles
from tests import models


@contextmanager
def replaced(owner, name: str, value):
    """``owner.name`` is ``value`` while the context lasts."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _dropped_all_reduce():
    """The input gradient of a block is not summed over tp: the article's ColumnParallelLinear."""
    return replaced(comm._Copy, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def _dropped_reduce_scatter():
    def own_chunk(ctx, grad):
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None

    return replaced(comm._Gather, "backward", staticmethod(own_chunk))


def _partial_gradients_left():
    return replaced(grads.GradientSums, "_sum_over_tp", lambda self: None)


def _tied_halves_left():
    return replaced(grads.GradientSums, "_sum_copies", lambda self, *_: None)


def _double_counted():
    return replaced(model, "pieces", lambda grad, spec, mesh: [(grads.local(grad), True)])


def _shifted_positions():
    forward = pipeline.StageModule.forward

    def shifted(self, x, *, targets, **inputs):
        if self.stage.range.index == 1:
            positions = torch.arange(targets.shape[1]).repeat(targets.shape[0], 1)
            inputs["position_ids"] = positions.roll(1, dims=1)
        return forward(self, x, targets=targets, **inputs)

    return replaced(pipeline.StageModule, "forward", shifted)


def _mask_lost_after_first_stage():
    forward = pipeline.StageModule.forward

    def unmasked(self, x, *, targets, attention_mask=None, **inputs):
        kept = {"attention_mask": attention_mask} if self.stage.range.is_first else {}
        return forward(self, x, targets=targets, **kept, **inputs)

    return replaced(pipeline.StageModule, "forward", unmasked)


def _bias_added_by_every_rank():
    original = styles._rowwise

    def rowwise(module, tp, layout):
        original(module, tp, layout)
        inner = module.forward
        module.forward = lambda x: inner(x) if module.bias is None else inner(x) + module.bias

    return replaced(styles, "_APPLY", {**styles._APPLY, "rowwise": rowwise})


FAULTS = {
    "dropped all-reduce": _dropped_all_reduce,
    "dropped reduce-scatter": _dropped_reduce_scatter,
    "partial gradients left": _partial_gradients_left,
    "tied halves left": _tied_halves_left,
    "double-counted": _double_counted,
    "shifted positions": _shifted_positions,
    "mask lost": _mask_lost_after_first_stage,
    "bias added twice": _bias_added_by_every_rank,
}


def verify(config: dict, family: str, changes: dict | None, batch: dict | None, fault: str | None = None):
    """The report of `meshpar.verify` on a tiny model, with a fault or without."""
    source = models.tiny_model(family, **(changes or {}))
    run = lambda: meshpar.verify(source, meshpar.ParallelConfig(**config), batch)  # noqa: E731
    if fault is None:
        return run()
    with FAULTS[fault]():
        return run()


def verify_path(path: str, config: dict):
    """The report for a directory of weights, with a batch of random tokens."""
    return meshpar.verify(path, meshpar.ParallelConfig(**config))


def verify_random(config: dict):
    """The report for a config's random weights."""
    return meshpar.verify(models.tiny_config(), meshpar.ParallelConfig(**config), seed=3)
