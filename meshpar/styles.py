"""Apply a plan over the tp group: shrink parameters to this rank's span and put collectives at the blocks' borders.

Compute runs on plain local tensors: a Hugging Face module whose weights are smaller does its own part of the work,
and only block entries, rowwise exits, the embedding and norms over split heads need a collective. Parameters are still
on the meta device here, so shrinking costs nothing; `weights` fills them later from the spans recorded in `ParamSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers import PreTrainedModel

from . import comm
from .config import ParallelConfig, torch_dtype
from .dropout import apply_dropout
from .layout import HeadLayout, Layout, even, heads, replicated
from .plan import Plan, Style


@dataclass
class TensorParallel:
    """The tp group of this rank and how the current batch lies on it."""

    mesh: DeviceMesh
    sequence_parallel: bool
    seq_len: int = 0  # of the batch in flight: the shards alone do not tell how much of the last one is padding
    group: dist.ProcessGroup = field(init=False)
    size: int = field(init=False)
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.mesh.get_group()
        self.size, self.rank = self.mesh.size(), self.mesh.get_local_rank()
        self.sequence_parallel = self.sequence_parallel and self.size > 1

    def enter(self, x: Tensor) -> Tensor:
        """Into a block: [b, shard, h] gathered to [b, seq_len, h], or [b, seq_len, h] as it is."""
        if self.sequence_parallel:
            return comm.gather_sequence(x, self.group, self.seq_len)
        return comm.copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Out of a block: partial [b, seq_len, h] summed, and cut to this rank's shard under sequence parallelism."""
        return comm.scatter_sum(x, self.group) if self.sequence_parallel else comm.reduce_from(x, self.group)

    def split(self, x: Tensor) -> Tensor:
        """From whole [b, seq_len, h] to what lies between blocks."""
        return comm.split_sequence(x, self.group) if self.sequence_parallel else x

    def local_seq_len(self, seq_len: int) -> int:
        """Length of the sequence dimension between blocks."""
        return -(-seq_len // self.size) if self.sequence_parallel else seq_len


@dataclass(frozen=True)
class ParamSpec:
    """What a rank stores of one parameter: Hugging Face's shape, and its layout over the tp group.

    ``partial``: this rank's gradient is one term of a sum over the tp ranks that hold the same elements.
    ``hold_zero``: the padding would get a gradient; it must be cleared.
    """

    shape: tuple[int, ...]
    layout: Layout
    partial: bool = False
    hold_zero: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape stored by every rank of the tp group."""
        return self.layout.local_shape(self.shape)


def apply_styles(
    model: PreTrainedModel, plan: Plan, tp: TensorParallel, config: ParallelConfig
) -> dict[str, ParamSpec]:
    """Apply ``plan`` in place to a meta-device ``model``; returns parameter name -> `ParamSpec` for all of it."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    layouts = _Layouts(model, plan, tp.size)
    if tp.size > 1:
        for name, module in list(model.named_modules()):
            if name in plan:
                _apply(name, module, plan, tp, layouts)
        apply_dropout(model, plan, tp)
    blocks = [n for n, style in plan.items() if style == "block"]
    specs = {n: _spec(n, shape, model, plan, tp, layouts, blocks) for n, shape in shapes.items()}
    _shrink(model, specs, torch_dtype(config.param_dtype))
    return specs


def _apply(name: str, module: nn.Module, plan: Plan, tp: TensorParallel, layouts: _Layouts) -> None:
    style = plan[name]
    if isinstance(style, ParallelStyle):
        _apply_torch_style(module, style, plan.roles.get(name), tp)
    else:
        _APPLY[style](module, tp, layouts.of(name))
    if style == "block" and hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = layouts.kv_groups


def _spec(
    name: str,
    shape: tuple[int, ...],
    model: nn.Module,
    plan: Plan,
    tp: TensorParallel,
    layouts: _Layouts,
    blocks: list[str],
) -> ParamSpec:
    owner, _, leaf = name.rpartition(".")
    style, param = plan[owner], model.get_parameter(name)
    if isinstance(param, DTensor):
        return ParamSpec(shape, _torch_layout(name, param, tp.size))
    if isinstance(style, ParallelStyle):
        style = "replicate"
    layout = layouts.of(owner) if isinstance(plan[owner], str) else replicated(tp.size)
    own = _param_layout(style, leaf, layout, tp.size)
    inside = any(owner.startswith(b + ".") for b in blocks) and not (style == "rowwise" and leaf == "bias")
    return ParamSpec(
        shape, own, own.copies and (inside or tp.sequence_parallel), style == "rowwise" and _is_padded(layout)
    )


def _torch_layout(name: str, param: DTensor, size: int) -> Layout:
    placement = param.placements[0]
    if not placement.is_shard():
        return replicated(size)
    if param.shape[placement.dim] % size:
        raise ValueError(
            f"{name} has {param.shape[placement.dim]} elements in dim {placement.dim}, which a torch ParallelStyle "
            f"splits unevenly over tp={size}; use meshpar's own style there"
        )
    return even(param.shape[placement.dim], size, placement.dim)


def _is_padded(layout: Layout) -> bool:
    return any(b - a < layout.local for a, b in layout.spans)


def _param_layout(style: str, leaf: str, layout: Layout, size: int) -> Layout:
    if style == "rowwise":
        return layout.along(1) if leaf == "weight" else replicated(size)
    if style in ("colwise", "vocab_head", "embedding_rowwise", "colwise_norm"):
        return layout
    return replicated(size)


def _shrink(model: nn.Module, specs: dict[str, ParamSpec], dtype: torch.dtype) -> None:
    """Replace whole meta parameters by local ones; tied names keep sharing one parameter."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(param, DTensor):
            continue
        if param not in new:
            data = torch.empty(specs[name].local_shape, dtype=dtype, device=param.device)
            new[param] = nn.Parameter(data, requires_grad=param.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, new[param])


class _Layouts:
    """Module name -> the layout of the dimension its style splits."""

    def __init__(self, model: PreTrainedModel, plan: Plan, size: int) -> None:
        self.model, self.plan, self.size = model, plan, size
        config = model.config.get_text_config()
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.q_heads, self.kv_heads = config.num_attention_heads, kv_heads
        self.heads: HeadLayout = heads(self.q_heads, self.kv_heads, size)
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}

    def of(self, name: str) -> Layout:
        style = self.plan[name]
        if style in ("embedding_rowwise", "vocab_head"):
            return even(self._width(name, style), self.size)
        if style not in ("colwise", "rowwise", "colwise_norm", "block"):
            return replicated(self.size)
        block = name if style == "block" else name.rpartition(".")[0]
        head_dim = self._head_dim(block)
        if head_dim is None:
            return replicated(self.size) if style == "block" else even(self._width(name, style), self.size)
        is_kv = name.rpartition(".")[2] in ("k_proj", "v_proj", "k_norm")
        return self.heads.kv(head_dim) if is_kv else self.heads.q(head_dim)

    def _head_dim(self, block: str) -> int | None:
        """The head dimension if ``block`` is attention with separate q, k and v projections."""
        children = {n for n, _ in self.model.get_submodule(block).named_children()}
        return self.model.get_submodule(block).head_dim if {"q_proj", "k_proj", "v_proj"} <= children else None

    def _width(self, name: str, style: Style) -> int:
        return self.shapes[f"{name}.weight"][1 if style == "rowwise" else 0]

    @property
    def kv_groups(self) -> int:
        return self.heads.q_local // self.heads.kv_local


def map_hidden(args: tuple, kwargs: dict, fn: Callable[[Tensor], Tensor]) -> tuple[tuple, dict]:
    """Apply ``fn`` to a decoder module's hidden states: its first positional argument, or ``hidden_states``."""
    if args:
        return (fn(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": fn(kwargs["hidden_states"])}


def _enter_block(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    module.register_forward_pre_hook(lambda _, args, kwargs: map_hidden(args, kwargs, tp.enter), with_kwargs=True)


def _rowwise(module: nn.Linear, tp: TensorParallel, layout: Layout) -> None:
    def forward(x: Tensor) -> Tensor:
        y = tp.leave(F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    module.forward = forward


def _embedding(module: nn.Embedding, tp: TensorParallel, layout: Layout) -> None:
    start, stop = layout.spans[tp.rank]
    if module.padding_idx is not None:
        inside = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if inside else None
    absent: list[Tensor] = []

    def local_ids(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        # Ids beyond the vocabulary are no rank's: left as they are, they fail the lookup, as in one process.
        elsewhere = (args[0] < start) | (args[0] >= stop)
        absent.append(elsewhere & (args[0] >= 0) & (args[0] < layout.spans[-1][1]))
        return (args[0] - start).masked_fill(absent[-1], 0)

    def sum_found(_: nn.Module, args: tuple, rows: Tensor) -> Tensor:
        return comm.reduce_from(rows.masked_fill(absent.pop().unsqueeze(-1), 0), tp.group)

    module.register_forward_pre_hook(local_ids)
    module.register_forward_hook(sum_found)


def _colwise_norm(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    """RMSNorm over a dimension that is split: the mean square is summed over the ranks, each element counted once."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    total, real = layout.spans[-1][1], layout.real(tp.rank)
    counted = real if layout.is_first_copy(tp.rank) else 0

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        square = comm.sum_both(wide[..., :counted].pow(2).sum(-1, keepdim=True), tp.group)
        return (module.weight * (wide * torch.rsqrt(square / total + eps))).to(x.dtype)

    module.forward = forward


def _nothing(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    """A smaller weight is all this style needs."""


_APPLY: dict[str, Callable[..., None]] = {
    "embedding_rowwise": _embedding,
    "block": _enter_block,
    "colwise": _nothing,
    "rowwise": _rowwise,
    "colwise_norm": _colwise_norm,
    "replicate": _nothing,
    "sequence_parallel": _nothing,
    "vocab_head": _enter_block,
}


def _apply_torch_style(module: nn.Module, style: ParallelStyle, role: Style | None, tp: TensorParallel) -> None:
    """A caller's own torch style, fitted to what lies around it.

    torch's styles take whole tensors and give back the whole input gradient; a block sums its colwise projections'
    input gradients once more (hence 1 / size), and expects a sequence shard from its rowwise one.
    """
    parallelize_module(module, tp.mesh, style)
    if role == "colwise":
        module.register_forward_pre_hook(lambda _, args: (comm.scale_grad(args[0], 1 / tp.size), *args[1:]))
    elif role == "rowwise":
        module.register_forward_hook(lambda _, args, out: tp.split(out))
