"""A forward of shapes only, at construction: does the model's own code run on what the plan leaves it?

A module that uses a sharded neighbour's output in a way that no style covers shows here as shapes that do not fit,
before weights are read. Nothing is computed and nothing is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.func import functional_call
from transformers import PreTrainedModel

from .load import skeleton_from_config
from .plan import Plan
from .styles import TensorParallel, map_hidden

_CANNOT_RUN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)


def check_shapes(model: PreTrainedModel, plan: Plan, tp: TensorParallel) -> None:
    """Run ``model``, its styles applied, on one row of fake tensors; does nothing at tp=1.

    Raises ValueError where shapes do not fit. Code that depends on values cannot run on fake ones and is not checked.
    """
    if tp.size == 1 or any(isinstance(style, ParallelStyle) for style in plan.values()):  # a caller's, with DTensors
        return
    tp.seq_len = 2 * tp.size
    with _without_routing(model, plan), _sequence_shards(model, plan, tp):
        failure = _failure(model, tp.seq_len)
    # What stops the unmodified model too is not of the plan's making: code that cannot run without values.
    if failure is not None and str(failure) != str(_failure(skeleton_from_config(model.config), tp.seq_len)):
        raise ValueError(_message(model, tp, failure)) from failure


def _failure(model: PreTrainedModel, seq_len: int) -> Exception | None:
    try:
        _run(model, seq_len)
    except _CANNOT_RUN:
        return None
    except (RuntimeError, ValueError, IndexError) as error:
        return error
    return None


def _run(model: PreTrainedModel, seq_len: int) -> None:
    """A forward of one row of ``seq_len`` tokens on tensors that have shapes but no values."""
    was_training, logger = model.training, logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs in full what the caller is told in a sentence
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            fakes = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors}
            ids = torch.zeros(1, seq_len, dtype=torch.int64)
            functional_call(model.eval(), fakes, kwargs={"input_ids": ids, "use_cache": False}, tie_weights=False)
    finally:
        logger.setLevel(level)
        model.train(was_training)


def _message(model: PreTrainedModel, tp: TensorParallel, error: Exception) -> str:
    why = str(error).splitlines()[0]
    if tp.sequence_parallel:
        return (
            f"{type(model).__name__}'s code between its tensor-parallel blocks does not run on a shard of the sequence "
            f"({why}); set sequence_parallel to false"
        )
    return f"{type(model).__name__}'s code does not run on the parts that tp={tp.size} leaves ({why}); tp must be 1"


@contextmanager
def _without_routing(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Stacked experts send tokens by value: here they return what shape they would."""
    experts = [model.get_submodule(n) for n, style in plan.items() if style == "experts"]
    before = [vars(m).get("forward") for m in experts]
    for module in experts:
        module.forward = lambda hidden_states, *args, **kwargs: torch.empty_like(hidden_states)
    try:
        yield
    finally:
        for module, forward in zip(experts, before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@contextmanager
def _sequence_shards(model: nn.Module, plan: Plan, tp: TensorParallel) -> Iterator[None]:
    """What the first layer of a stage does to whole hidden states."""

    def split(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict) -> tuple[tuple, dict]:
        return map_hidden(args, kwargs, tp.split)

    first = model.get_submodule(plan.anatomy.layer(0))
    handle = first.register_forward_pre_hook(split, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
