"""Tensors that are not read yet: joined, cut and transposed by name alone, then read one slice at a time.

transformers converts a checkpoint's tensors to a model's with ordinary torch operations. Run on `LazyTensor` those
operations move no data; a slice of their result reads only the slices of the files that it is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Index = tuple[slice, ...]
Ranges = list[tuple[int, int]]  # from where to where, one pair a dimension
Read = Callable[[Ranges], Tensor]

aten = torch.ops.aten


class LazyTensor(Tensor):
    """A tensor of a known shape whose elements come from ``read`` when a part of it is asked for.

    ``read`` takes (start, stop) for every dimension. ``sources``: names of all that the tensor is made of. ``dtype``
    is what operations see; the parts come in the dtype that ``read`` gives.

    Of the operations, stack, cat, split, slice, transpose and squeeze read no more than a part needs; a reshape that
    cuts or joins dimensions reads the rows around it; any other reads its inputs whole.
    """

    sources: frozenset[str]
    _read: Read

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], read: Read, sources: Iterable[str], dtype: torch.dtype = torch.float32
    ) -> LazyTensor:
        """See the class."""
        lazy = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        lazy._read, lazy.sources = read, frozenset(sources)
        return lazy

    def __repr__(self) -> str:
        return f"LazyTensor({tuple(self.shape)}, of {len(self.sources)} sources)"

    def part(self, index: Index | None = None) -> Tensor:
        """The tensor, or what ``index`` selects of it (one slice of step 1 a leading dimension)."""
        slices = (*(index or ()), *(slice(None),) * self.ndim)
        bounds = [s.indices(size) for s, size in zip(slices, self.shape, strict=False)]
        return self._read([(start, max(start, stop)) for start, stop, _ in bounds])

    # Plain dispatch: results are wrapped below, not by Tensor's own subclass rules.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Build the result of ``func`` unread; TypeError for an operation that writes into a tensor."""
        if func._schema.is_mutable:
            raise TypeError(f"{func} writes into a tensor, which cannot be done before it is read")
        mapped = _MAPPED.get(func)
        return mapped(*args, **(kwargs or {})) if mapped else _computed(func, args, kwargs or {})


def _computed(func: Any, args: tuple, kwargs: dict) -> Any:
    """Any other operation: the shape from the meta device, the values from whole inputs."""
    inputs: list[LazyTensor] = []

    def on_meta(t: Tensor) -> Tensor:
        if isinstance(t, LazyTensor):
            inputs.append(t)
        return torch.empty(t.shape, dtype=t.dtype, device="meta")

    def whole(t: LazyTensor) -> Tensor:
        return t.part().contiguous()

    result = func(*tree_map_only(Tensor, on_meta, args), **_on_meta(tree_map_only(Tensor, on_meta, kwargs)))
    sources = frozenset().union(*(t.sources for t in inputs))

    def lazy(shape: torch.Size, dtype: torch.dtype, pick: Callable[[Any], Tensor]) -> LazyTensor:
        def read(ranges: Ranges) -> Tensor:
            values = func(*tree_map_only(LazyTensor, whole, args), **tree_map_only(LazyTensor, whole, kwargs))
            return pick(values)[tuple(slice(*r) for r in ranges)]

        return LazyTensor(shape, read, sources, dtype)

    if isinstance(result, Tensor):
        return lazy(result.shape, result.dtype, lambda values: values)
    return [lazy(r.shape, r.dtype, lambda values, i=i: values[i]) for i, r in enumerate(result)]


def _on_meta(kwargs: dict) -> dict:
    return {**kwargs, "device": "meta"} if kwargs.get("device") is not None else kwargs


def _filled(shape: Sequence[int], parts: Iterable[tuple[Ranges, Tensor]], like: LazyTensor) -> Tensor:
    """A tensor of ``shape`` put together from parts and their places in it; ``like`` tells the dtype of none."""
    whole = None
    for place, part in parts:
        whole = part.new_empty(shape) if whole is None else whole
        whole[tuple(slice(*r) for r in place)].copy_(part)
    return like.part((slice(0, 0),) * like.ndim).new_empty(shape) if whole is None else whole


def _sizes(ranges: Ranges) -> list[int]:
    return [stop - start for start, stop in ranges]


def _stack(tensors: Sequence[LazyTensor], dim: int = 0) -> LazyTensor:
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        raise ValueError(f"tensors of unlike shapes, {sorted({tuple(t.shape) for t in tensors})}, cannot be stacked")
    dim %= first.ndim + 1

    def read(ranges: Ranges) -> Tensor:
        rest, sizes = ranges[:dim] + ranges[dim + 1 :], _sizes(ranges)
        around = [(0, size) for size in sizes]
        picked = (
            (_put(around, dim, (i, i + 1)), t._read(rest).unsqueeze(dim))
            for i, t in enumerate(tensors[slice(*ranges[dim])])
        )
        return _filled(sizes, picked, first)

    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return LazyTensor(shape, read, frozenset().union(*(t.sources for t in tensors)), first.dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> LazyTensor:
    lazies = [t if isinstance(t, LazyTensor) else _known(t) for t in tensors]
    first = next(t for t in lazies if t.sources)
    dim %= first.ndim
    if any(t.ndim != first.ndim or _without(t.shape, dim) != _without(first.shape, dim) for t in lazies):
        raise ValueError(f"tensors of shapes {[tuple(t.shape) for t in lazies]} cannot be joined along dimension {dim}")
    starts = [0, *accumulate(t.shape[dim] for t in lazies)]

    def read(ranges: Ranges) -> Tensor:
        sizes, (low, high) = _sizes(ranges), ranges[dim]
        return _filled(sizes, _overlapping(lazies, starts, ranges, dim, low, high), first)

    shape = (*first.shape[:dim], starts[-1], *first.shape[dim + 1 :])
    return LazyTensor(shape, read, frozenset().union(*(t.sources for t in lazies)), first.dtype)


def _overlapping(
    tensors: Sequence[LazyTensor], starts: Sequence[int], ranges: Ranges, dim: int, low: int, high: int
) -> Iterable[tuple[Ranges, Tensor]]:
    around = [(0, size) for size in _sizes(ranges)]
    for t, start in zip(tensors, starts, strict=False):
        a, b = max(low, start), min(high, start + t.shape[dim])
        if a < b:
            part = t._read(_put(ranges, dim, (a - start, b - start)))
            yield _put(around, dim, (a - low, b - low)), part


def _known(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, lambda ranges: tensor[tuple(slice(*r) for r in ranges)], (), tensor.dtype)


def _put(ranges: Ranges, dim: int, one: tuple[int, int]) -> Ranges:
    return [*ranges[:dim], one, *ranges[dim + 1 :]]


def _without(shape: Sequence[int], dim: int) -> list[int]:
    return [*shape[:dim], *shape[dim + 1 :]]


def _slice(tensor: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return _computed(aten.slice.Tensor, (tensor, dim, start, end, step), {})
    dim %= tensor.ndim
    first, last, _ = slice(start, end).indices(tensor.shape[dim])

    def read(ranges: Ranges) -> Tensor:
        low, high = ranges[dim]
        return tensor._read(_put(ranges, dim, (low + first, high + first)))

    shape = (*tensor.shape[:dim], max(0, last - first), *tensor.shape[dim + 1 :])
    return LazyTensor(shape, read, tensor.sources, tensor.dtype)


def _split(tensor: LazyTensor, size: int | Sequence[int], dim: int = 0) -> list[LazyTensor]:
    total = tensor.shape[dim]
    sizes = [min(size, total - at) for at in range(0, total, size)] if isinstance(size, int) else size
    ends = list(accumulate(sizes))
    return [_slice(tensor, dim, end - length, end) for length, end in zip(sizes, ends, strict=True)]


def _transpose(tensor: LazyTensor, dim0: int, dim1: int) -> LazyTensor:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]

    def read(ranges: Ranges) -> Tensor:
        return tensor._read([ranges[i] for i in order]).transpose(dim0, dim1)

    return LazyTensor([tensor.shape[i] for i in order], read, tensor.sources, tensor.dtype)


def _squeeze(tensor: LazyTensor, dim: int) -> LazyTensor:
    if tensor.shape[dim] != 1:
        return tensor
    dim %= tensor.ndim

    def read(ranges: Ranges) -> Tensor:
        return tensor._read([*ranges[:dim], (0, 1), *ranges[dim:]]).squeeze(dim)

    return LazyTensor(_without(tensor.shape, dim), read, tensor.sources, tensor.dtype)


def _view(tensor: LazyTensor, shape: Sequence[int]) -> LazyTensor:
    new = list(torch.empty(tensor.shape, device="meta").view(shape).shape)
    if not tensor.numel():
        return _computed(aten.view.default, (tensor, new), {})
    pairs = list(_regrouped(list(tensor.shape), new))

    def read(ranges: Ranges) -> Tensor:
        box, sizes, cut, wanted = [], [], [], iter(ranges)
        for old_dims, new_dims in pairs:
            around, got, inside = _box(old_dims, new_dims, [next(wanted) for _ in new_dims])
            box, sizes, cut = box + around, sizes + got, cut + inside
        return tensor._read(box).reshape(sizes)[tuple(slice(*c) for c in cut)]

    return LazyTensor(new, read, tensor.sources, tensor.dtype)


def _regrouped(old: list[int], new: list[int]) -> Iterable[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions with as many elements in both shapes."""
    old, new = old[::-1], new[::-1]
    while old or new:
        a, b = [old.pop()] if old else [], [new.pop()] if new else []
        while math.prod(a) != math.prod(b):
            longer, rest = (b, new) if math.prod(a) > math.prod(b) else (a, old)
            longer.append(rest.pop())
        yield a, b


def _box(old: list[int], new: list[int], want: Ranges) -> tuple[Ranges, list[int], Ranges]:
    """For ``want`` of the dimensions ``new``: what to read of ``old``, its shape in ``new``, and the place in that."""
    if len(old) == 1 and new:  # one cut into several: whole rows of the first
        (start, stop), width = want[0], math.prod(new[1:])
        return [(start * width, stop * width)], [stop - start, *new[1:]], [(0, stop - start), *want[1:]]
    if len(new) == 1 and len(old) == 2:  # two joined: part of one row, or whole rows
        (start, stop), width = want[0], old[1]
        first, last = start // width, -(-stop // width)
        shift = first * width
        if last - first == 1:
            return [(first, last), (start - shift, stop - shift)], [stop - start], [(0, stop - start)]
        return [(first, last), (0, width)], [(last - first) * width], [(start - shift, stop - shift)]
    return [(0, size) for size in old], new, want


def _same(tensor: LazyTensor, **_: Any) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor._read, tensor.sources, tensor.dtype)


_MAPPED: dict[Any, Callable[..., Any]] = {
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.transpose.int: _transpose,
    aten.squeeze.dim: _squeeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
