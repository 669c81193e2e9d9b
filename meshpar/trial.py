"""Trying a rule out: a block's own code, run whole and run on one rank's part, must make the same of its heads.

How a fused projection's rows divide into heads, which scales or biases go with which head, and which attributes count
heads or features, only the model's code knows. So the code is asked: what its projections give is drawn at random
(their matrices are large, and nothing but products), the code runs on it on the CPU, and what reaches the output
projection is compared, once with everything whole and once for each rank. A rule that fails, for whatever reason, is
not used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
_MOST_DRAWN = 2**24  # elements of parameters


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


class _CannotTry(Exception):
    """A trial would take more than it is worth."""


def kind(module: nn.Module) -> Hashable:
    """Equal for modules that need one trial: of one class, with parameters of one shape and the same flags."""
    flags = ((n, v) for n, v in vars(module).items() if isinstance(v, bool | str | None))
    return type(module), tuple((n, p.shape) for n, p in module.named_parameters()), tuple(sorted(flags, key=str))


def try_out(
    model: PreTrainedModel, size: int, candidates: Mapping[str, Sequence[Block]], trusted: Mapping[str, Block]
) -> dict[str, Block]:
    """Module name -> the first of its ``candidates`` that works on a tp group of ``size`` ranks.

    ``model``: parameters on any device; they are not read. A module that no trial can be made of is what is
    ``trusted`` of it; one that none of its candidates passes for is left out.
    """
    calls, chosen = _Calls(model, [n for n, options in candidates.items() if options]), {}
    for name, options in candidates.items():
        try:
            found = next((c for c in options if _passes(model.get_submodule(name), name, calls, c, size)), None)
        except (_CannotTry, KeyError):
            found = trusted.get(name)
        if found is not None:
            chosen[name] = found
    return chosen


def _passes(module: nn.Module, name: str, calls: _Calls, candidate: Block, size: int) -> bool:
    for by_head in _by_head(name, calls, candidate):
        candidate.by_head = by_head
        try:
            with torch.random.fork_rng(devices=()):
                if _same(module, calls.first[name], candidate, size):
                    return True
        except _CannotTry:
            raise
        except Exception:  # whatever the model's code raises on parts that it was not written for
            continue
    return False


class _Calls:
    """The first call of each of ``names`` in forwards of `_SHAPES`, as far as they run without data."""

    def __init__(self, model: PreTrainedModel, names: list[str]) -> None:
        self.model, self.names = model, names
        self.first = _record_once(model, names, _SHAPES[0])

    @cached_property
    def second(self) -> dict[str, Call]:
        """Of the second shape: only where the first one leaves a question."""
        return _record_once(self.model, self.names, _SHAPES[1])


def _record_once(model: PreTrainedModel, names: list[str], shape: tuple[int, int]) -> dict[str, Call]:
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
        with torch.no_grad(), NoData():
            twin(input_ids=ids, use_cache=False)
    except Exception:  # all are seen, or the code needs values
        pass
    return found


def _on_meta(module: nn.Module) -> nn.Module:
    memo = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
    return copy.deepcopy(module, memo=dict(memo)).eval()


def _by_head(name: str, calls: _Calls, block: Block) -> Iterator[dict[int | str, int]]:
    """Arguments that may hold something of each query head (ALiBi's biases): argument -> the dimension.

    None of them first, then all that are as long as there are heads, then each alone: other sizes may be equal to that
    by chance. A dimension that also runs over the batch counts: the batch comes first in it.
    """
    yield {}
    if block.heads is None or block.heads[0] == 1:
        return
    dims = [_dims_by_head(calls.first[name], block.heads[0], 0)]
    if dims[0]:
        dims.append(_dims_by_head(calls.second[name], block.heads[0], 1))
    found = {key: dim for key, dim in dims[0].items() if dims[-1].get(key) == dim}
    if found:
        yield found
    if len(found) > 1:
        yield from ({key: dim} for key, dim in found.items())


def _dims_by_head(call: Call, heads: int, shape: int) -> dict[int | str, int]:
    """The one dimension of each argument that is as long as there are heads, alone or in each row of the batch."""
    found = {}
    for key, value in call.given().items():
        lengths = (heads, heads * _SHAPES[shape][0])
        by_head = [d for d, n in enumerate(value.shape) if n in lengths] if isinstance(value, Tensor) else []
        if len(by_head) == 1:
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
        drawn = {n: p.shape for n, p in module.named_parameters() if not n.startswith(skipped)}
        if sum(shape.numel() for shape in drawn.values()) > _MOST_DRAWN:
            raise _CannotTry
        self.drawn = {n: torch.randn(shape, generator=generator) for n, shape in drawn.items()}
        rows = self._hidden().shape[:2]
        self.projected = {
            n: torch.randn(*rows, features(module.get_submodule(n))[0], generator=generator)
            for n, style in block.styles.items()
            if style == "colwise"
        }
        self.entered: dict[str, list[Tensor]] = {}
        self.normed: dict[str, tuple[Tensor, Tensor]] = {}

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
        for name, style in self.block.styles.items():
            if style == "colwise_norm":
                norm = twin.get_submodule(name)
                norm.forward = partial(self._norm, name, norm.forward, rank)
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

    def _norm(self, name: str, forward: Callable, rank: int | None, x: Tensor) -> Tensor:
        """A norm over all heads, whose ranks add their statistics up: each gets its part of what the whole gives."""
        if rank is None:
            self.normed[name] = (x, forward(x))
            return self.normed[name][1]
        before, after = (self._own(f"{name}.weight", value, rank, dim=-1) for value in self.normed[name])
        if before.shape != x.shape or not torch.allclose(before, x, **_CLOSE):
            raise ValueError(f"{name} does not see this rank's heads")
        return after

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
        same[id(value)] = _random(generator, value)
    return same[id(value)]


def _random(generator: torch.Generator, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.polar(torch.ones(like.shape), torch.randn(like.shape, generator=generator))
    if like.is_floating_point():
        return torch.randn(like.shape, generator=generator).requires_grad_()
    if like.dtype == torch.bool:
        mask = torch.ones(like.shape, dtype=torch.bool)
        return mask.tril() if like.ndim > 1 else mask
    places = torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape)
    return places % like.shape[-1] if like.ndim else places.reshape(())
