"""Building a model's skeleton: no memory for parameters, not even while it is built; buffers as they should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

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


def without_parameters(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """What ``build`` makes, with its parameters on the meta device and real buffers.

    `init_empty_weights` moves a parameter to meta once a module has it; one that was never in memory is needed for the
    experts of a layer in one tensor. A model whose buffers are as large as that is built again, in memory.
    """
    with init_empty_weights(include_buffers=False):
        with _LargeOnMeta():
            model = build()
        return build() if any(buffer.is_meta for buffer in model.buffers()) else model
