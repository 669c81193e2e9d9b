"""Counts the bytes a rank sends: every collective that torch runs while a counter is active."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshpar.planner.communication import ring_bytes

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")

# Operation -> kind, and the argument that holds what this rank puts in.
_SENDS = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "input_tensors"),
    "c10d::_allgather_base_": ("all_gather", "input_tensor"),
    "c10d::allgather_coalesced_": ("all_gather", "input_list"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "inputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::send": ("p2p", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
}
_SENDS_NOTHING = {"c10d::recv_", "c10d::barrier", "_c10d_functional::wait_tensor"}


class TrafficCounter(TorchDispatchMode):
    """Adds up what this rank sends, by kind and mesh dimension, as a ring would send it.

    ``groups``: mesh dimension -> its process group here. What another group sends stands under that group's name.
    Raises NotImplementedError for a collective it does not know, so that none is missed.
    """

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        super().__init__()
        self._dims = {group.group_name: dim for dim, group in groups.items() if group.size() > 1}
        self._payload: Counter[tuple[str, str, int]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in _NAMESPACES and func._schema.name not in _SENDS_NOTHING:
            names = (argument.name for argument in func._schema.arguments)
            self._note(func._schema.name, {**dict(zip(names, args, strict=False)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, given: dict) -> None:
        if name not in _SENDS:
            raise NotImplementedError(f"how many bytes {name} sends")
        kind, argument = _SENDS[name]
        group = _group(given["process_group"] if "process_group" in given else given["group_name"])
        own = sum(t.numel() * t.element_size() for t in tree_leaves(given[argument]) if isinstance(t, Tensor))
        dim = self._dims.get(group.group_name, group.group_name)
        if group.size() > 1:
            self._payload[kind, dim, group.size()] += own * (group.size() if kind == "all_gather" else 1)
            self.calls[kind, dim] += 1

    def sent(self) -> dict[tuple[str, str], int]:
        """(kind, mesh dimension) -> bytes."""
        sent = {(kind, dim): ring_bytes(kind, whole, n) for (kind, dim, n), whole in self._payload.items()}
        return {key: count for key, count in sorted(sent.items()) if count}


def _group(given: str | torch.ScriptObject | ProcessGroup) -> ProcessGroup:
    if isinstance(given, str):
        return _resolve_process_group(given)
    return given if isinstance(given, ProcessGroup) else ProcessGroup.unbox(given)


def count_traffic(model) -> TrafficCounter:
    """A counter over the mesh of ``model``, to be used as a context."""
    mesh = model._mesh
    return TrafficCounter({dim: mesh.group(dim) for dim in ("pp", "dp", *mesh.dp_dims, "tp")})
