"""How hidden states lie on the tp group between blocks and inside them, and the ways from one to the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import comm


@dataclass
class TensorParallel:
    """The tp group of this rank and how the current batch lies on it."""

    mesh: DeviceMesh
    sequence_parallel: bool
    keep_shards: bool = False  # autograd keeps shards of what is gathered
    sum_at_layers: bool = False  # what the embedding looks up is summed where the first layer begins
    compiled: bool = False  # layers are compiled
    rows: int = 0  # of the batch in flight, and
    seq_len: int = 0  # its length: the shards alone do not tell how much of the last one is padding
    partial: tuple[Tensor, int] | None = None  # what the embedding gave where it is still to be summed, and its version
    group: dist.ProcessGroup = field(init=False)
    size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group()
        self.size, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.sequence_parallel = self.sequence_parallel and self.size > 1
        self.keep_shards = self.keep_shards and self.sequence_parallel
        self.sum_at_layers = self.sum_at_layers and self.sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        """Into a block: [b, shard, h] gathered to [b, seq_len, h], or [b, seq_len, h] as it is."""
        if self.sequence_parallel:
            return self._by_rows(x, self.local_seq_len(), lambda r: comm.gather_sequence(r, self.group, self.seq_len))
        return comm.copy_to(x, self.group)

    def enter_beside(self, x: object) -> object:
        """What else a block's heads are computed from: whole, and where it is computed itself, its gradient summed."""
        if not isinstance(x, Tensor):
            return x
        if self.sequence_parallel and x.ndim > 2 and x.shape[1] == self.local_seq_len() != self.seq_len:
            return self.enter(x)
        return comm.copy_to(x, self.group) if x.requires_grad else x

    def leave(self, x: Tensor) -> Tensor:
        """Out of a block: partial [b, seq_len, h] summed, and cut to this rank's shard under sequence parallelism."""
        if self.sequence_parallel:
            return self._by_rows(x, self.seq_len, lambda rows: comm.scatter_sum(rows, self.group))
        return comm.reduce_from(x, self.group)

    def whole(self, x: Tensor) -> Tensor:
        """Into a module that every rank runs alike: [b, shard, h] gathered to [b, seq_len, h]."""
        if not self.sequence_parallel:
            return x
        return self._by_rows(x, self.local_seq_len(), lambda rows: comm.gather_alike(rows, self.group, self.seq_len))

    def split(self, x: Tensor) -> Tensor:
        """From whole [b, seq_len, h] to what lies between blocks."""
        if not self.sequence_parallel:
            return x
        return self._by_rows(x, self.seq_len, lambda rows: comm.split_sequence(rows, self.group))

    def enter_layers(self, x: Tensor) -> Tensor:
        """Into the first decoder layer: [b, seq_len, h] to what lies between blocks.

        Raises RuntimeError where a caller's hook has changed what was to be summed first.
        """
        if not self.sum_at_layers:
            return self.split(x)
        given, self.partial = self.partial, None
        if given is None or comm.storage_of(x) != comm.storage_of(given[0]) or x._version != given[1]:
            raise RuntimeError(
                "what the embedding gives was changed before the first layer, by a hook for example, but it is summed "
                "over tp only there; register the hook before parallelize_model, or set sequence_parallel=False"
            )
        return self.leave(x)

    def _by_rows(self, x: Tensor, length: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """``fn`` of [b, length, ...], which some code flattens to [b * length, ...]."""
        if x.ndim == 2 and x.shape[0] == self.rows * length:
            return fn(x.unflatten(0, (self.rows, length))).flatten(0, 1)
        if x.ndim < 3 or x.shape[1] != length:
            raise ValueError(f"a module takes or returns {list(x.shape)} for a sequence of {length}")
        return fn(x)

    def local_seq_len(self, seq_len: int | None = None) -> int:
        """Length of the sequence dimension between blocks, of the batch in flight unless given."""
        seq_len = self.seq_len if seq_len is None else seq_len
        return -(-seq_len // self.size) if self.sequence_parallel else seq_len
