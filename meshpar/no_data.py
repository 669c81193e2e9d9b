"""Running a model's code on tensors without data, also where it asks for values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class NoData(TorchDispatchMode):
    """Runs operations on meta tensors; where one asks for values, nothing is found and every number is zero."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_meta = {t.is_meta for t in tensors_in((args, kwargs))}
        if True not in on_meta:
            return func(*args, **kwargs)
        if False in on_meta:
            args, kwargs = tree_map(_to_meta, (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func is _aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is _aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        if func is _aten.equal.default:
            return False
        if func is _aten._grouped_mm.default:  # torch's own shape rule takes bfloat16 only
            return _grouped_product(*args, **kwargs)
        if func in _INDEXING:
            args = (args[0], _nothing_found(args[1]), *args[2:])
        return func(*args, **kwargs)


def tensors_in(tree) -> Iterator[Tensor]:
    """The tensors of nested lists, tuples and dicts, in order."""
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: object) -> Tensor:
    """A product for each group: of rows with its matrix, or of its columns with its rows."""
    if a.ndim == b.ndim == 2:
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _nothing_found(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices of an indexing operation with boolean masks replaced by what `nonzero` would find in them: nothing."""
    found: list[Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype == torch.bool
        found += [index.new_empty(0, dtype=torch.int64)] * index.ndim if mask else [index]
    return found


def _to_meta(value):
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) and not value.is_meta else value
