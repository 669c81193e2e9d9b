"""Trying a rule out: a block's own code, run whole and run on one rank's part, must make the same of its heads.

How a fused projection's rows divide into heads, which scales or biases go with which head, and which attributes count
heads or features, only the model's code knows. So the code is asked: what its projections give is drawn at random
(their matrices are large, and nothing but products), the code runs on it on the CPU, and what reaches the output
projection is compared, once with everything whole and once for each rank. A rule that fails, for whatever reason, is
not used.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from .flow import NoData
from .layout import Layout
from .rules import Block, features

_SHAPES = ((3, 10), (5, 14))  # batch and sequence of the recorded forwards: where they differ, it is not by heads
_CLOSE = dict(rtol=1e-4, atol=1e-5)


@dataclass
class Call:
    """How the model's code called a module, with tensors on the meta device, and what its children returned."""

    args: tuple
    kwargs: dict[str, Any]
    returned: dict[str, Any]

    def given(self) -> dict[int | str, Any]:
        """Arguments by position or name."""
        return {**dict(enumerate(self.args)), **self.kwargs}


class _AllSeen(Exception):
    """Ends a recorded forward early."""


class Trials:
    """Tries blocks of ``model`` (parameters on any device, never read) out for a tp group of ``size`` ranks."""

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        self.model, self.size = model, size
        self._calls: dict[str, list[Call]] = {}
        self._passed: dict[tuple, Block | None] = {}

    def first_to_pass(self, name: str, candidates: Iterable[Block]) -> Block | None:
        """The first of ``candidates`` that module ``name`` works as; modules that look the same are tried out once."""
        module = self.model.get_submodule(name)
        key = (type(module), tuple((n, p.shape) for n, p in module.named_parameters()))
        if key not in self._passed:
            self._passed[key] = next((c for c in candidates if self._passes(name, module, c)), None)
        return self._passed[key]

    def _passes(self, name: str, module: nn.Module, candidate: Block) -> bool:
        if not self.can_run(name):
            return False
        calls = self._calls[name]
        candidate.by_head = _by_head(calls, candidate)
        try:
            with torch.random.fork_rng(devices=()):
                return _same(module, calls[0], candidate, self.size)
        except Exception:  # whatever the model's code raises on parts that it was not written for
            return False

    def can_run(self, name: str) -> bool:
        """Whether the forward up to ``name`` runs without data; a call of it for each of `_SHAPES` is kept."""
        if name not in self._calls:
            try:
                self._calls[name] = [_record(self.model, name, shape) for shape in _SHAPES]
            except Exception:  # code that needs values
                self._calls[name] = []
        return bool(self._calls[name])


def _record(model: PreTrainedModel, name: str, shape: tuple[int, int]) -> Call:
    twin = _on_meta(model)
    module, found, returned = twin.get_submodule(name), [], {}

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
        found.append((args, kwargs))

    def leave(*_: object) -> None:
        raise _AllSeen

    for child_name, child in module.named_children():
        child.register_forward_hook(lambda _, args, out, key=child_name: returned.update({key: out}))
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
    ids = torch.zeros(shape, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), NoData():
            twin(input_ids=ids, use_cache=False)
    except _AllSeen:
        pass
    return Call(*found[0], returned)


def _on_meta(module: nn.Module) -> nn.Module:
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
    return copy.deepcopy(module, memo=dict(memo)).eval()


def _by_head(calls: list[Call], block: Block) -> dict[int | str, int]:
    """Arguments that hold something of each query head (ALiBi's biases): argument -> the dimension.

    A dimension that also runs over the batch counts: the batch comes first in it.
    """
    if block.heads is None:
        return {}
    heads, found = block.heads[0], {}
    first, second = (call.given() for call in calls)
    for key, value in first.items():
        other = second.get(key)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor) or value.ndim != other.ndim:
            continue
        sizes = list(zip(value.shape, other.shape, strict=True))
        by_head = [d for d, s in enumerate(sizes) if s in ((heads, heads), tuple(b * heads for b, _ in _SHAPES))]
        if len(by_head) == 1 and heads > 1:
            found[key] = by_head[0]
    return found


def _same(module: nn.Module, call: Call, block: Block, size: int) -> bool:
    run, layout = _Run(module, call, block, size), block.out_layout(size)
    whole = run(None)
    if not whole.isfinite().all():
        return False
    block.inside = run.inside(whole)
    seen: set[int] = set()
    for rank in range(size):
        part = run(rank)
        there, here = _places(layout, rank)
        if part.shape[-1] != layout.local or not torch.allclose(part[..., here], whole[..., there], **_CLOSE):
            return False
        seen.update(there)
    return len(seen) == whole.shape[-1]


class _Run:
    """Runs copies of a module on drawn numbers, up to what enters its output projection."""

    def __init__(self, module: nn.Module, call: Call, block: Block, size: int) -> None:
        generator, same = torch.Generator().manual_seed(0), {}
        self.module, self.block, self.size = module, block, size
        self.call = Call(*(tree_map(partial(_drawn, generator, same), part) for part in vars(call).values()))
        skipped = tuple(f"{n}." for n, style in block.styles.items() if style in ("colwise", "rowwise"))
        # A child with matrices that the rule says nothing of gives what it gave, in shape: attention, beside a pair.
        of_children = ((n, m) for n, m in module.named_children() if n in call.returned)
        self.replayed = [n for n, m in of_children if _has_matrices(m, f"{n}.", skipped)]
        skipped += tuple(f"{n}." for n in self.replayed)
        self.drawn = {
            n: torch.randn(p.shape, generator=generator)
            for n, p in module.named_parameters()
            if not n.startswith(skipped)
        }
        rows = self._hidden().shape[:2]
        self.projected = {
            n: torch.randn(*rows, features(module.get_submodule(n))[0], generator=generator)
            for n, style in block.styles.items()
            if style == "colwise"
        }
        self.entered: dict[str, list[Tensor]] = {}

    def _hidden(self) -> Tensor:
        return next(v for v in self.call.given().values() if isinstance(v, Tensor))

    def inside(self, heads: Tensor) -> set[int | str]:
        """Arguments beside the hidden states that ``heads``, which a run gave, was computed from."""
        hidden = self._hidden()
        others = {k: v for k, v in self.call.given().items() if isinstance(v, Tensor) and v.requires_grad}
        others = {k: v for k, v in others.items() if v is not hidden}
        if not others or not heads.requires_grad:
            return set()
        grads = torch.autograd.grad(heads.sum(), list(others.values()), allow_unused=True)
        return {k for k, grad in zip(others, grads, strict=True) if grad is not None}

    def __call__(self, rank: int | None) -> Tensor:
        """What reaches the output projection of the whole module, or of ``rank``'s part."""
        twin, caught = _on_meta(self.module), []
        for name, value in self.drawn.items():
            owner, _, leaf = name.rpartition(".")
            twin.get_submodule(owner).register_parameter(leaf, nn.Parameter(self._own(name, value, rank), False))
        for name, value in self.projected.items():
            own = self._own(f"{name}.weight", value, rank, dim=-1)
            twin.get_submodule(name).forward = partial(self._project, name, own)
        for name in self.replayed:
            twin.get_submodule(name).forward = partial(self._replay, name)
        out = twin.get_submodule(self.block.out)
        width = features(out)[0]
        out.forward = lambda x: (caught.append(x), x.new_zeros(*x.shape[:-1], width))[1]
        args, kwargs = self.call.args, self.call.kwargs
        if rank is not None:
            self.block.localize(twin, self.size)
            args, kwargs = self.block.own_arguments(args, kwargs, self.size, rank)
        twin(*args, **kwargs)
        (given,) = caught
        return given

    def _own(self, name: str, value: Tensor, rank: int | None, dim: int | None = None) -> Tensor:
        cut = self.block.cuts.get(name)
        if cut is None or rank is None:
            return value
        layout = cut.layout(self.size, self.block.head_layout(self.size))
        there, here = _places(layout, rank)
        dim = layout.dim if dim is None else dim
        shape = list(value.shape)
        shape[dim] = layout.local
        return value.new_zeros(shape).index_copy(dim, torch.tensor(here), value.index_select(dim, torch.tensor(there)))

    def _project(self, name: str, given: Tensor, x: Tensor) -> Tensor:
        self._check_entering(name, (x,))
        return given.reshape(*x.shape[:-1], given.shape[-1])

    def _replay(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._check_entering(name, (args, kwargs))
        return self.call.returned[name]

    def _check_entering(self, name: str, given: tuple) -> None:
        """What enters a module whose result is drawn must not depend on which part runs."""
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        before = self.entered.setdefault(name, tensors)
        if not all(a.shape == b.shape and torch.allclose(a, b, **_CLOSE) for a, b in zip(before, tensors, strict=True)):
            raise ValueError(f"{name} sees what is split")


def _has_matrices(module: nn.Module, prefix: str, known: tuple[str, ...]) -> bool:
    return any(p.ndim > 1 and not f"{prefix}{n}".startswith(known) for n, p in module.named_parameters())


def _places(layout: Layout, rank: int) -> tuple[list[int], list[int]]:
    """Where a rank's own elements lie in the whole and where it stores them."""
    there: list[int] = []
    here: list[int] = []
    at = 0
    for part in layout.parts:
        start, stop = part.spans[rank]
        there += range(start, stop)
        here += range(at, at + stop - start)
        at += part.local
    return there, here


def _drawn(generator: torch.Generator, same: dict[int, Tensor], value: Any) -> Any:
    """Random values for a recorded tensor, the same each time; a mask looks back, so that no row is without a key."""
    if not isinstance(value, Tensor):
        return value
    if id(value) not in same:
        if value.is_floating_point():
            same[id(value)] = torch.randn(value.shape, generator=generator).requires_grad_()
        elif value.dtype == torch.bool:
            mask = torch.ones(value.shape, dtype=torch.bool)
            same[id(value)] = mask.tril() if value.ndim > 1 else mask
        else:
            same[id(value)] = torch.arange(value.numel(), dtype=value.dtype).reshape(value.shape)
    return same[id(value)]
