"""Trying a rule out: a block's own code, run whole and run on one rank's part, must make the same of its heads.

How a fused projection's rows divide into heads, which scales or biases go with which head, and which attributes count
heads or features, only the model's code knows. So the code is asked: what its projections give is drawn at random
(their matrices are large, and nothing but products), the code runs on it on the CPU, and what reaches the output
projection is compared, once with everything whole and once for each rank. A rule that fails, for whatever reason, is
not used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from .blocks import Block, hidden_argument
from .calls import SHAPES, Call, Calls, draw_call, runnable_copy
from .layout import Layout
from .primitives import features

_CLOSE = dict(rtol=1e-4, atol=1e-5)
_MOST_DRAWN = 2**24  # elements of parameters
_LARGE = 2**20  # elements of a child that is not called, which are not drawn


class _CannotTry(Exception):
    """A trial would take more than it is worth."""


def kind(module: nn.Module) -> Hashable:
    """Equal for modules that need one trial: alike in class, parameters' shapes and settings, but for their place."""
    described = []
    for name, part in module.named_modules():
        settings = ((n, _setting(v)) for n, v in vars(part).items() if not n.startswith("_") and not _PLACE.search(n))
        described.append((name, type(part), tuple(sorted((s for s in settings if s[1] is not None), key=str))))
    return tuple(described), tuple((n, p.shape) for n, p in module.named_parameters())


_PLACE = re.compile("idx|index|layer_id|layer_number")


def _setting(value: Any) -> Any:
    """What tells two modules of a class apart: numbers, flags, names, and functions by identity."""
    if isinstance(value, bool | int | float | str):
        return (type(value).__name__, value)
    return id(value) if callable(value) and not isinstance(value, nn.Module) else None


def try_out(
    model: PreTrainedModel, size: int, candidates: Mapping[str, Sequence[Block]], trusted: Mapping[str, Block]
) -> dict[str, Block]:
    """Module name -> the first of its ``candidates`` that works on a tp group of ``size`` ranks.

    ``model``: parameters on any device; they are not read. A module that no trial can be made of is what is
    ``trusted`` of it; one that none of its candidates passes for is left out.
    """
    calls, chosen = Calls(model, [n for n, options in candidates.items() if options]), {}
    for name, options in candidates.items():
        try:
            found = next((c for c in options if _passes(model.get_submodule(name), name, calls, c, size)), None)
        except (_CannotTry, KeyError):
            found = trusted.get(name)
        if found is not None:
            chosen[name] = found
    return chosen


def _passes(module: nn.Module, name: str, calls: Calls, candidate: Block, size: int) -> bool:
    for by_head in _by_head(name, calls, candidate):
        candidate.by_head = by_head
        try:
            with torch.random.fork_rng(devices=()):
                if _same(module, calls.first[name], candidate, size):
                    return True
        except _Differs:
            continue
    return False


class _Differs(Exception):
    """The model's code does not run on a part, or makes something else of it."""


def _by_head(name: str, calls: Calls, block: Block) -> Iterator[dict[int | str, int]]:
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
        lengths = (heads, heads * SHAPES[shape][0])
        by_head = [d for d, n in enumerate(value.shape) if n in lengths] if isinstance(value, Tensor) else []
        if len(by_head) == 1:
            found[key] = by_head[0]
    return found


def _same(module: nn.Module, call: Call, block: Block, size: int) -> bool:
    layout = block.out_layout(size)
    for training in (True, False):
        run = _Run(module, call, block, size, training)
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
        if len(seen) != whole.shape[-1]:
            return False
    return True


def position_wise(model: PreTrainedModel, names: Sequence[str]) -> set[str]:
    """Which of ``names`` have code of their own that makes each position of the sequence from that position alone.

    Their children with matrices return the same in both runs, of the whole sequence or a half of it. What cannot be
    tried counts.
    """
    calls = Calls(model, list(names)).first
    return {name for name in names if name not in calls or _is_position_wise(model.get_submodule(name), calls[name])}


def _is_position_wise(module: nn.Module, call: Call) -> bool:
    generator = torch.Generator().manual_seed(0)
    drawn = draw_call(call, generator)
    (rows, length), children = SHAPES[0], dict(module.named_children())
    replayed = [n for n in call.returned if any(p.ndim > 1 for p in children[n].parameters())]
    skipped = tuple(f"{n}." for n in replayed)
    params = {
        n: torch.randn(p.shape, generator=generator)
        for n, p in module.named_parameters()
        if not n.startswith(skipped) and p.numel() < _LARGE
    }

    def run(part: slice) -> list[Tensor]:
        """What enters each replayed child, and what leaves."""
        size, seen = len(range(length)[part]), []

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return x
            if x.ndim > 2 and x.shape[:2] == (rows, length):
                return x[:, part].clone()
            return (
                x.unflatten(0, (rows, length))[:, part].flatten(0, 1) if x.shape[:1] == (rows * length,) else x.clone()
            )

        def see(given: Any) -> None:
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and x.is_floating_point():
                    x = x.unflatten(0, (rows, size)) if x.ndim == 2 and x.shape[0] == rows * size else x
                    seen.extend([x] if x.ndim > 2 and x.shape[:2] == (rows, size) else [])

        def replay(name: str, *args: Any, **kwargs: Any) -> Any:
            see((args, kwargs))
            return tree_map(cut, drawn.returned[name])

        twin = runnable_copy(module, True)
        for name, value in params.items():
            owner, _, leaf = name.rpartition(".")
            twin.get_submodule(owner).register_parameter(leaf, nn.Parameter(value))
        for name in replayed:
            _replace(twin.get_submodule(name), partial(replay, name))
        see(twin(*tree_map(cut, drawn.args), **tree_map(cut, drawn.kwargs)))
        return seen

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            whole = run(slice(None))
            for half in (slice(0, length // 2), slice(length // 2, length)):
                parts = run(half)
                if not all(
                    torch.allclose(p, w[:, half], equal_nan=True, **_CLOSE) for p, w in zip(parts, whole, strict=True)
                ):
                    return False
    except Exception:  # the forward of shapes alone tells it better
        return True
    return True


class _Run:
    """Runs copies of a module on drawn numbers, up to what enters its output projection."""

    def __init__(self, module: nn.Module, call: Call, block: Block, size: int, training: bool) -> None:
        self.module, self.block, self.size, self.training = module, block, size, training
        generator = torch.Generator().manual_seed(0)
        self.call = draw_call(call, generator)
        self.hidden = hidden_argument(call.args, call.kwargs)
        skipped = tuple(f"{n}." for n, style in block.styles.items() if style in ("colwise", "rowwise"))
        # A child with matrices that the rule says nothing of gives what it gave, in shape: attention, beside a pair.
        of_children = ((n, m) for n, m in module.named_children() if n in call.returned)
        self.replayed = [n for n, m in of_children if _has_matrices(m, f"{n}.", skipped)]
        skipped += tuple(f"{n}." for n in self.replayed)
        uncalled = ((n, m) for n, m in module.named_children() if n not in call.returned)
        skipped += tuple(f"{n}." for n, m in uncalled if sum(p.numel() for p in m.parameters()) > _LARGE)
        drawn = {n: p.shape for n, p in module.named_parameters() if not n.startswith(skipped)}
        if sum(shape.numel() for shape in drawn.values()) > _MOST_DRAWN:
            raise _CannotTry
        self.drawn = {n: torch.randn(shape, generator=generator) for n, shape in drawn.items()}
        self.buffers = {n: torch.randn(b.shape, generator=generator) for n, b in _learned_buffers(module)}
        rows = self.call.given()[self.hidden].shape[:2]
        self.projected = {
            n: torch.randn(*rows, features(module.get_submodule(n))[0], generator=generator)
            for n, style in block.styles.items()
            if style == "colwise"
        }
        self.entered: dict[str, list[Tensor]] = {}
        self.normed: dict[str, tuple[Tensor, Tensor]] = {}

    def inside(self, heads: Tensor) -> tuple[int | str, ...]:
        """Arguments beside the hidden states that ``heads``, which the whole run gave, was computed from."""
        found: list[int | str] = []
        for key, value in self.call.given().items():
            leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]
            if key != self.hidden and _depends(heads, leaves):
                found.append(key)
        after = [x for key in found for x in tree_leaves(self.call.given()[key]) if isinstance(x, Tensor)]
        if self.output is not None and _depends(self.output, after):
            raise _Differs("an argument is used before the sum and after it")
        return tuple(found)

    def __call__(self, rank: int | None) -> Tensor:
        """What reaches the output projection of the whole module, or of ``rank``'s part."""
        twin, caught = runnable_copy(self.module, self.training), []
        for name, value in (self.drawn | self.buffers).items():
            owner, _, leaf = name.rpartition(".")
            own = self._own(name, value, rank)
            if name in self.drawn:
                twin.get_submodule(owner).register_parameter(leaf, nn.Parameter(own))
            else:
                twin.get_submodule(owner)._buffers[leaf] = own
        for name, value in self.projected.items():
            own = self._own(f"{name}.weight", value, rank, dim=-1)
            twin.get_submodule(name).forward = partial(self._project, name, own)
        for name, style in self.block.styles.items():
            if style == "colwise_norm":
                norm = twin.get_submodule(name)
                norm.forward = partial(self._norm, name, norm.forward, rank)
        for name in self.replayed:
            _replace(twin.get_submodule(name), partial(self._replay, name))
        out = twin.get_submodule(self.block.out)
        width = features(out)[0]
        out.forward = lambda x: (caught.append(x), x.detach().new_ones(*x.shape[:-1], width))[1]
        args, kwargs = self.call.args, self.call.kwargs
        if rank is not None:
            self.block.localize(twin, self.size)
            args, kwargs = self.block.own_arguments(args, kwargs, self.size, rank)
        try:
            result = twin(*args, **kwargs)
        except Exception as error:  # whatever the model's code raises on parts that it was not written for
            raise _Differs from error
        if len(caught) != 1:
            raise _Differs("the output projection is not called once")
        if rank is None:
            self._check_gradients(caught[0], result, [p for n, p in twin.named_parameters() if n in self.drawn])
        return caught[0]

    def _check_gradients(self, given: Tensor, result: Any, params: list[Tensor]) -> None:
        """A gradient is a term of the ranks' sum if, and only if, it comes through what is summed.

        A block sums its hidden states' gradients and those of all its parameters; so none of them may be used after the
        sum, whose result is a constant here. Of a pair only the projections are a part: nothing else may enter between.
        """
        self.output = next((x for x in tree_leaves(result) if isinstance(x, Tensor)), None)
        replayed = [x for n in self.replayed for x in tree_leaves(self.call.returned[n]) if isinstance(x, Tensor)]
        hidden = [x for x in tree_leaves(self.call.given()[self.hidden]) if isinstance(x, Tensor)]
        if self.block.pair and given.requires_grad:
            raise _Differs("more than the projection before it reaches the second of a pair")
        if not self.block.pair and self.output is not None and _depends(self.output, [*params, *hidden, *replayed]):
            raise _Differs("what is whole on every rank is used after the sum")

    def _own(self, name: str, value: Tensor, rank: int | None, dim: int | None = None) -> Tensor:
        cut = self.block.cuts.get(name)
        if cut is None or rank is None:
            return value
        layout = cut.layout(self.size, self.block.head_layout(self.size))
        there, here = _places(layout, rank)
        dim = layout.dim if dim is None else dim
        shape = list(value.shape)
        shape[dim] = layout.local
        source, target = (torch.tensor(x, dtype=torch.int64) for x in (there, here))
        return value.new_zeros(shape).index_copy(dim, target, value.index_select(dim, source))

    def _project(self, name: str, given: Tensor, x: Tensor) -> Tensor:
        self._check_entering(name, (x,))
        given = given.reshape(*x.shape[:-1], given.shape[-1])
        return given if self.block.pair else given + 0 * x.sum()  # computed from x, as far as autograd can see

    def _norm(self, name: str, forward: Callable, rank: int | None, x: Tensor) -> Tensor:
        """A norm over all heads, whose ranks add their statistics up: each gets its part of what the whole gives."""
        if rank is None:
            self.normed[name] = (x, forward(x))
            return self.normed[name][1]
        before, after = (self._own(f"{name}.weight", value, rank, dim=-1) for value in self.normed[name])
        if before.shape != x.shape or not torch.allclose(before, x, **_CLOSE):
            raise _Differs(f"{name} does not see this rank's heads")
        return after

    def _replay(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._check_entering(name, (args, kwargs))
        return tree_map(_copied, self.call.returned[name])

    def _check_entering(self, name: str, given: tuple) -> None:
        """What enters a module whose result is drawn must not depend on which part runs."""
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        before = self.entered.setdefault(name, tensors)
        pairs = list(zip(before, tensors, strict=False))
        if len(before) != len(tensors) or not all(
            a.shape == b.shape and torch.allclose(a, b, **_CLOSE) for a, b in pairs
        ):
            raise _Differs(f"{name} sees what is split")


def _replace(module: nn.Module, forward: Callable) -> None:
    """Give ``module`` another forward; what is in it has no weights here, and must not be called past it."""

    def refuse(*_: Any, **__: Any) -> None:
        raise _Differs("a part of a child is called past it")

    for part in module.modules():
        part.forward = refuse
    module.forward = forward


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


def _copied(value: Any) -> Any:
    """The code may write into what it is given."""
    return value.clone() if isinstance(value, Tensor) else value


def _depends(output: Tensor, leaves: list[Tensor]) -> bool:
    leaves = [x for x in leaves if x.requires_grad]
    if not leaves or not output.requires_grad:
        return False
    grads = torch.autograd.grad(output.sum(), leaves, allow_unused=True, retain_graph=True)
    return any(grad is not None for grad in grads)


def _learned_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a checkpoint holds."""
    for name, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            if leaf not in part._non_persistent_buffers_set and buffer.is_floating_point():
                yield f"{name}.{leaf}".lstrip("."), buffer
