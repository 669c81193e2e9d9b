"""A forward of shapes only, at construction: does the model's own code run on what the plan leaves it?

A module that uses a sharded neighbour's output in a way that no style covers shows here as shapes that do not fit, or
as a split projection that runs outside of its block, before weights are read. Nothing is computed and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import PreTrainedModel

from .load import meta_copy
from .no_data import NoData
from .styles import map_hidden
from .tensor_parallel import TensorParallel
from .tp_plan import Plan


def check_shapes(model: PreTrainedModel, unmodified: PreTrainedModel, plan: Plan, tp: TensorParallel) -> None:
    """Run ``model``, its styles applied, on one row without data; does nothing at tp=1.

    Raises ValueError where shapes do not fit, and where a part of a projection would be taken for the whole.
    """
    if tp.size == 1 or any(isinstance(style, ParallelStyle) for style in plan.values()):  # a caller's, with DTensors
        return
    tp.rows, tp.seq_len = 1, 2 * tp.size
    twin = meta_copy(model)  # a forward may leave tensors on the module, as CTRL's does, and here they have no data
    with _sequence_shards(twin, plan, tp):
        outside = _split_outside(twin, plan)
        failure = _failure(twin, tp.seq_len)
    if outside:
        block = plan.block_of(outside[0])
        raise ValueError(
            f"{type(model).__name__}'s code uses {outside[0]} outside of {block}, where tp={tp.size} leaves a part of "
            f'it; set tp to 1, or keep the block whole with plan={{"{block}.*": "replicate"}}'
        )
    if failure is None:
        return
    # What stops the unmodified model too is not of the plan's making: code that cannot run without values.
    of_unmodified = _failure(unmodified, tp.seq_len)
    if of_unmodified is None or str(failure.error) != str(of_unmodified.error):
        raise ValueError(_message(model, tp, failure)) from failure.error


@dataclass(frozen=True)
class _Failure:
    error: Exception
    module: str  # the innermost that was running


def _failure(model: PreTrainedModel, seq_len: int) -> _Failure | None:
    ids = torch.zeros((1, seq_len), dtype=torch.int64, device="meta")
    running: list[str] = []
    with _names_of_running(model, running):
        try:
            with torch.no_grad(), NoData():
                model.eval()(input_ids=ids, use_cache=False)
        except Exception as error:  # whatever the model's code raises on parts that it was not written for
            return _Failure(error, running[-1] if running else "")
    return None


@contextmanager
def _names_of_running(model: nn.Module, running: list[str]) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name), prepend=True))
        handles.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _split_outside(model: nn.Module, plan: Plan) -> list[str]:
    """A list that a forward fills with the split modules it runs outside of their blocks: a sum or mean over such an
    output fits in shape, and is wrong."""
    running: set[str] = set()
    outside: list[str] = []
    for name, module in model.named_modules():
        block = plan.block_of(name)
        if block == name:
            module.register_forward_pre_hook(lambda *_, block=name: running.add(block))
            module.register_forward_hook(lambda *_, block=name: running.discard(block), always_call=True)
        elif block is not None and plan.get(name, "replicate") != "replicate":

            def note(*_: object, name: str = name, block: str = block) -> None:
                if block not in running:
                    outside.append(name)

            module.register_forward_pre_hook(note)
    return outside


def _message(model: PreTrainedModel, tp: TensorParallel, failure: _Failure) -> str:
    label, where = type(model).__name__, f"in {failure.module}: " if failure.module else ""
    why = where + f"{type(failure.error).__name__}: {failure.error}".splitlines()[0]
    if tp.sequence_parallel:
        return (
            f"{label}'s code between its tensor-parallel blocks does not run on a shard of the sequence ({why}); set "
            "sequence_parallel to false"
        )
    return f"{label}'s code does not run on the parts that tp={tp.size} leaves ({why}); tp must be 1"


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
