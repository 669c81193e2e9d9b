"""Collectives over the tp group that autograd understands, on plain local tensors.

Each pair is written as Megatron-LM names it (arXiv 2104.04473, 2205.05198): what the forward does decides what the
backward must do. Dropping the backward half leaves the loss exact and the gradients wrong, so the pairs live together.

    function          forward                 backward
    copy_to           identity                all-reduce
    reduce_from       all-reduce              identity
    gather_sequence   all-gather on dim 1     reduce-scatter on dim 1
    gather_alike      all-gather on dim 1     own slice of dim 1
    scatter_sum       reduce-scatter, dim 1   all-gather on dim 1
    split_sequence    own slice of dim 1      all-gather on dim 1
    sum_both          all-reduce              all-reduce
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

# Functional collectives never write into their input, so activation checkpointing may keep or replay any of them.
_c10d = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """Element-wise reduction of ``x`` over ``group``; no gradient."""
    if group.size() == 1:
        return x
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group.group_name))


def all_gather_dim1(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s, ...] on each rank -> [b, size * s, ...] in rank order; no gradient."""
    size = group.size()
    if size == 1:
        return x
    stacked = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    return torch.cat(stacked.split(x.shape[0]), 1)  # in this form, inductor's async tensor parallelism knows it


def reduce_scatter_dim1(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, size * s, ...] summed over the group -> this rank's [b, s, ...]; no gradient."""
    size = group.size()
    if size == 1:
        return x
    blocks = torch.cat(x.split(x.shape[1] // size, 1))
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(blocks, "sum", size, group.group_name))


def storage_of(x: Tensor) -> int:
    """Tells memory from other memory that is in use, on the meta device, too."""
    return x.untyped_storage()._cdata


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_dim1(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_dim1(grad.contiguous(), ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter_dim1(x.contiguous(), group)

    @staticmethod
    def backward(ctx, grad):
        return all_gather_dim1(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size(), dim=1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return all_gather_dim1(grad, ctx.group), None


class _GatherAlike(_Gather):
    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None


class _SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.group), None


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Enter a tensor-parallel block with a tensor every rank holds whole."""
    return x if group.size() == 1 else _Copy.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Leave a tensor-parallel block: sum the ranks' partial outputs."""
    return x if group.size() == 1 else _Reduce.apply(x, group)


def sum_both(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A statistic over all ranks' shards that each rank then uses on its own shard (a norm's mean square)."""
    return x if group.size() == 1 else _SumBoth.apply(x, group)


def scale_grad(x: Tensor, factor: float) -> Tensor:
    """Identity whose gradient is multiplied by ``factor``."""
    return _ScaleGrad.apply(x, factor)


def gather_sequence(x: Tensor, group: dist.ProcessGroup, seq_len: int) -> Tensor:
    """Sequence shards [b, ceil(seq_len / size), h] -> [b, seq_len, h]; the padding of the last shard is cut off."""
    return x if group.size() == 1 else _Gather.apply(x, group)[:, :seq_len].contiguous()  # models view it as rows


class KeepShard(torch.autograd.graph.saved_tensors_hooks):
    """While it is active, what autograd keeps of ``whole`` [b, s, h], gathered from ``shard``, is the shard.

    The backward gathers it again, once for all that kept it (arXiv 2205.05198, section 4.2.2); the ranks of a tp group
    run the same backward, so their all-gathers meet. A zero-bubble schedule goes backward twice: for the gradients of
    inputs alone, a product of ``whole`` and a weight reads the weight, and nothing is gathered.
    """

    def __init__(self, shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(self._pack, self._unpack)
        self._shard, self._group, self._seq_len = shard.detach(), group, whole.shape[1]
        self._storage = storage_of(whole)  # the block's arguments keep it alive
        self._version = whole._version
        self._again: Tensor | None = None
        self._kept = self._wanted = 0

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        del self.pack_hook, self.unpack_hook  # methods of this object: a circle that would outlive the backward

    def _pack(self, x: Tensor) -> Tensor | tuple:
        other = isinstance(x, DTensor) or storage_of(x) != self._storage
        if other or x._version != self._version:
            return x.detach()
        self._kept += 1
        self._wanted += 1
        return x.size(), x.stride(), x.storage_offset()

    def _unpack(self, kept: Tensor | tuple) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not _is_read(*kept[:2]):
            return self._shard.new_zeros(()).expand(kept[0])
        if self._again is None:
            self._again = all_gather_dim1(self._shard, self._group)[:, : self._seq_len].contiguous()
        whole = self._again.as_strided(*kept)
        self._wanted -= 1
        if self._wanted == 0:  # another backward through the same graph starts over
            self._again, self._wanted = None, self._kept
        return whole


# Nodes of matrix products: what they call the first factor, and where among their inputs the second, `mat2`, is.
_PRODUCTS = {"MmBackward0": ("self", 1), "AddmmBackward0": ("mat1", 2)}


def _is_read(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether the node that autograd runs computes with what it unpacks; True where that cannot be told.

    The first factor of a product is unpacked even where no gradient of the second, the weight, is wanted.
    """
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in _PRODUCTS:
        return True
    first, second = _PRODUCTS[node.name()]

    def is_unpacked(factor: str) -> bool:
        shape = getattr(node, f"_saved_{factor}_sym_sizes"), getattr(node, f"_saved_{factor}_sym_strides")
        return shape == (tuple(size), tuple(stride))

    weight = node.next_functions[second][0]
    if not is_unpacked(first) or is_unpacked("mat2") or weight is None:
        return True
    # The engine does not tell of a leaf.
    return weight.name().endswith("AccumulateGrad") or torch._C._will_engine_execute_node(weight)


def gather_alike(x: Tensor, group: dist.ProcessGroup, seq_len: int) -> Tensor:
    """As `gather_sequence`, for what every rank then computes alike: each has the whole gradient already."""
    return x if group.size() == 1 else _GatherAlike.apply(x, group)[:, :seq_len].contiguous()


def scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Partial sums [b, s, h] -> this rank's summed sequence shard [b, ceil(s / size), h]."""
    return x if group.size() == 1 else _ScatterSum.apply(_pad_sequence(x, group.size()), group)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor every rank holds whole, [b, s, h] -> this rank's sequence shard [b, ceil(s / size), h]."""
    return x if group.size() == 1 else _Split.apply(_pad_sequence(x, group.size()), group)


def _pad_sequence(x: Tensor, size: int) -> Tensor:
    missing = -x.shape[1] % size
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing)) if missing else x
