"""How a model's own code calls its modules: recorded in a forward without data, to be made again on drawn numbers.

`Calls` records, `draw_call` gives a recorded call its numbers, and `runnable_copy` is what it is made on.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .no_data import NoData

SHAPES = ((3, 10), (5, 14))  # batch and sequence of the recorded forwards: where they differ, it is not by heads


@dataclass
class Call:
    """How the model's code called a module, with tensors on the meta device, and what its children returned."""

    args: tuple
    kwargs: dict[str, Any]
    returned: dict[str, Any]

    def given(self) -> dict[int | str, Any]:
        """Arguments by position or name."""
        return {**dict(enumerate(self.args)), **self.kwargs}


class Calls:
    """The first call of each of ``names`` in forwards of `SHAPES`, as far as they run without data."""

    def __init__(self, model: PreTrainedModel, names: list[str]) -> None:
        self.model, self.names = model, names
        self.first = _record_calls(model, names, SHAPES[0])

    @cached_property
    def second(self) -> dict[str, Call]:
        """Of the second shape: only where the first one leaves a question."""
        return _record_calls(self.model, self.names, SHAPES[1])


def _record_calls(model: PreTrainedModel, names: list[str], shape: tuple[int, int]) -> dict[str, Call]:
    if not names:
        return {}
    twin, begun, found = _on_meta(model), {}, {}

    def enter(name: str, _: nn.Module, args: tuple, kwargs: dict) -> None:
        begun.setdefault(name, Call(args, kwargs, {}))

    def leave_child(name: str, child: str, _: nn.Module, args: tuple, out: Any) -> None:
        if name in begun and name not in found:
            begun[name].returned[child] = out

    def leave(name: str, *_: object) -> None:
        found.setdefault(name, begun[name])
        if len(found) == len(names):
            raise _AllSeen

    for name in names:
        module = twin.get_submodule(name)
        for child_name, child in module.named_children():
            child.register_forward_hook(partial(leave_child, name, child_name))
        module.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
        module.register_forward_hook(partial(leave, name))
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), NoData():
            twin(input_ids=ids, use_cache=False)
    except Exception:  # all are seen, or the code needs values
        pass
    return found


class _AllSeen(Exception):
    """Ends a recorded forward early."""


def _on_meta(module: nn.Module) -> nn.Module:
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
    return copy.deepcopy(module, memo=dict(memo)).eval()


def runnable_copy(module: nn.Module, training: bool) -> nn.Module:
    """A copy without weights that drops nothing, and whose attention runs on any device."""
    twin = _on_meta(module).train(training)
    for part in twin.modules():
        config = vars(part).get("config")
        for holder in (part, config) if config is not None else (part,):
            for name, value in list(vars(holder).items()):
                if isinstance(value, float) and ("drop" in name or "jitter" in name or name == "p"):
                    setattr(holder, name, 0.0)
        if getattr(config, "_attn_implementation", "eager") not in ("eager", "sdpa"):
            config._attn_implementation = "sdpa"
    return twin


def draw_call(call: Call, generator: torch.Generator) -> Call:
    """Random values for a recorded call; what was one tensor has equal values, each of its own."""
    same: dict[int, Tensor] = {}

    def draw(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in same:
            same[id(value)] = _random(generator, value)
        own = same[id(value)].clone()
        return own.requires_grad_() if own.is_floating_point() else own

    return Call(*(tree_map(draw, part) for part in (call.args, call.kwargs, call.returned)))


def _random(generator: torch.Generator, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.polar(torch.ones(like.shape), torch.randn(like.shape, generator=generator))
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator)
    if like.dtype == torch.bool:  # a mask that looks back: no row is without a key
        mask = torch.ones(like.shape, dtype=torch.bool)
        return mask.tril() if like.ndim > 1 else mask
    places = torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape)
    return places % min(like.shape) if like.ndim else places
