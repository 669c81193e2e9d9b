"""Building a model's skeleton: no memory for parameters, not even while it is built; buffers as they should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from torch.overrides import TorchFunctionMode

from .weights_files import listed

LARGE = 2**24  # elements; buffers are smaller, and what a layer makes below it is freed before the next
FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


class _LargeOnMeta(TorchFunctionMode):
    """Sends each new tensor of more than `LARGE` elements to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTORIES and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            on_meta = func(*args, **{k: v for k, v in kwargs.items() if k != "generator"} | {"device": "meta"})
            if on_meta.numel() > LARGE:
                return on_meta
        return func(*args, **kwargs)


@contextmanager
def unallocated() -> Iterator[Callable[[nn.Module], None]]:
    """Models built here have their parameters on the meta device and real buffers.

    `init_empty_weights` moves a parameter to meta once a module has it; one that was never in memory is needed for the
    experts of a layer in one tensor. Yields a check of the model that was built: ValueError when a buffer of it has no
    values.
    """
    with init_empty_weights(include_buffers=False), _LargeOnMeta():
        yield _check_buffers


def _check_buffers(model: nn.Module) -> None:
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ValueError(f"{type(model).__name__} computes buffers of more than {LARGE} elements: {listed(empty)}")
