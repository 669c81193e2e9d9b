"""Apply a plan over the tp group: shrink parameters to this rank's span and put collectives at the blocks' borders.

Compute runs on plain local tensors: a Hugging Face module whose weights are smaller does its own part of the work,
and only block entries, rowwise exits, the embedding and norms over split heads need a collective. Parameters are still
on the meta device here, so shrinking costs nothing; `weights` fills them later from the spans recorded in `ParamSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from . import comm
from .blocks import Block, hidden_argument
from .config import ParallelConfig, torch_dtype
from .dropout import apply_dropout
from .layout import Layout, even, replicated
from .overrides import Style
from .tensor_parallel import TensorParallel
from .tp_plan import Plan


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
    layouts = _layouts(model, plan, tp.size)
    if tp.size > 1:
        for name, module in list(model.named_modules()):
            if name in plan:
                _apply(name, module, plan, tp, layouts)
        for name, block in plan.blocks.items():
            block.localize(model.get_submodule(name), tp.size)
        apply_dropout(model, plan, tp)
    specs = {n: _spec(n, shape, model, plan, tp, layouts[n]) for n, shape in shapes.items()}
    _shrink(model, specs, torch_dtype(config.param_dtype))
    return specs


def _layouts(model: PreTrainedModel, plan: Plan, size: int) -> dict[str, Layout]:
    """The layout of every parameter; one with several names is split if any of them is."""
    layouts: dict[nn.Parameter, Layout] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    for name, param in named:
        layout = _layout(name, tuple(param.shape), plan, size)
        known = layouts.setdefault(param, layout)
        if known.dim is None:
            layouts[param] = layout
        elif layout.dim is not None and layout != known:
            raise ValueError(f"{type(model).__name__} shares {name} between modules that tp={size} splits differently")
    return {name: layouts[param] for name, param in named}


def _layout(name: str, shape: tuple[int, ...], plan: Plan, size: int) -> Layout:
    """How a parameter lies on the tp group by meshpar's own styles."""
    owner, block = name.rpartition(".")[0], plan.block_of(name)
    style = plan[owner]
    if style in ("embedding_rowwise", "vocab_head"):
        return even(shape[0], size)
    if block is None or not isinstance(style, str) or plan.roles[owner] != style:
        return replicated(size)
    cut = plan.blocks[block].cuts.get(name.removeprefix(f"{block}."))
    return cut.layout(size, plan.blocks[block].head_layout(size)) if cut else replicated(size)


def _apply(name: str, module: nn.Module, plan: Plan, tp: TensorParallel, layouts: dict[str, Layout]) -> None:
    style = plan[name]
    if isinstance(style, ParallelStyle):
        _apply_torch_style(module, style, plan.roles.get(name), tp)
        return
    block = plan.block_of(name)
    if style == "rowwise" and block is not None and plan.blocks[block].style == "block_sum":
        return  # its part of the sum leaves with the block's output
    if style in ("block", "block_sum", "pair_in", "vocab_head"):
        _enter_block(module, tp, plan.blocks.get(name, Block()))
    if style == "block_sum" and "norm_of_sum" in plan.blocks[name].styles.values():
        return
    _APPLY[style](module, tp, layouts.get(f"{name}.weight", replicated(tp.size)))


def _spec(
    name: str, shape: tuple[int, ...], model: nn.Module, plan: Plan, tp: TensorParallel, layout: Layout
) -> ParamSpec:
    owner, _, leaf = name.rpartition(".")
    param = model.get_parameter(name)
    if isinstance(param, DTensor):
        return ParamSpec(shape, _torch_layout(name, param, tp.size))
    block = plan.block_of(name)
    after_sum = (
        block is not None and plan.roles[owner] in ("rowwise", "pair_out") and leaf == "bias" and layout.dim is None
    )
    after_sum = after_sum or plan[owner] == "norm_of_sum"
    on_shards = tp.sequence_parallel and (after_sum or plan[owner] == "sequence_parallel")
    partial = on_shards or (block is not None and not after_sum)
    return ParamSpec(shape, layout, layout.copies and tp.size > 1 and partial, layout.padded)


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


def map_hidden(args: tuple, kwargs: dict, fn: Callable[[Tensor], Tensor]) -> tuple[tuple, dict]:
    """Apply ``fn`` to a decoder module's hidden states, wherever among its arguments that tensor is given."""
    hidden = args[0] if args else kwargs[hidden_argument(args, kwargs)]
    result = fn(hidden)
    args = tuple(result if x is hidden else x for x in args)
    return args, {k: result if x is hidden else x for k, x in kwargs.items()}


def _enter_block(module: nn.Module, tp: TensorParallel, block: Block) -> None:
    """The hidden states become whole on every rank, and so does what else each rank makes its own heads of."""
    active: list[comm.KeepShard] = []

    def gather(x: Tensor) -> Tensor:
        if tp.keep_shards and torch.compiler.is_compiling():  # there, this says what the graph computes again
            return checkpoint(tp.enter, x, use_reentrant=False)
        whole = tp.enter(x)
        if tp.keep_shards and not tp.compiled and torch.is_grad_enabled() and x.ndim > 2:
            active.append(comm.KeepShard(x, whole, tp.group))
            active[-1].__enter__()
        return whole

    def enter(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        key = hidden_argument(args, kwargs)
        hidden = args[0] if args else kwargs[key]
        whole = gather(hidden)

        def own(at: int | str, value: object) -> object:
            if at == key or (value is hidden and at in block.inside):
                return whole
            return tree_map(tp.enter_beside, value) if at in block.inside else value

        args = tuple(own(i, x) for i, x in enumerate(args))
        return block.own_arguments(args, {k: own(k, x) for k, x in kwargs.items()}, tp.size, tp.rank)

    def leave(*_: object) -> None:
        while active:  # one, or none
            active.pop().__exit__()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    if tp.keep_shards and not tp.compiled:
        module.register_forward_hook(leave, always_call=True)


def _block_sum(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    module.register_forward_hook(lambda _, args, out: _map_output(out, tp.leave))


def _norm_of_sum(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    module.register_forward_pre_hook(lambda _, args: (tp.leave(args[0]), *args[1:]))


def _identity_expert(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    module.register_forward_hook(lambda _, args, out: out / tp.size)


def _whole(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    module.register_forward_pre_hook(lambda _, args, kwargs: map_hidden(args, kwargs, tp.whole), with_kwargs=True)
    module.register_forward_hook(lambda _, args, out: _split_output(module, out, tp))


def _split_output(module: nn.Module, output: Tensor | tuple | list, tp: TensorParallel) -> Tensor | tuple | list:
    """Everything that a module which runs whole returns for each position goes back to sequence shards."""
    if isinstance(output, Tensor) or not tp.sequence_parallel:
        return tp.split(output) if isinstance(output, Tensor) else output
    own = {id(p) for p in module.parameters(recurse=False)}
    if any(id(x) in own for x in tree_leaves(output)):
        raise ValueError(f"a {type(module).__name__} returns a parameter, for use on parts of the sequence")

    def has_positions(x: object) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point() and x.shape[:2] == output[0].shape[:2]

    return _like(output, (tp.split(x) if has_positions(x) else x for x in output))


def _map_output(output: Tensor | tuple | list, fn: Callable[[Tensor], Tensor]) -> Tensor | tuple | list:
    """Apply ``fn`` to the hidden states that a module returns, alone or first of several."""
    return fn(output) if isinstance(output, Tensor) else _like(output, (fn(output[0]), *output[1:]))


def _like(output: tuple | list, items: Iterable) -> tuple | list:
    return output._make(items) if hasattr(output, "_make") else type(output)(items)


def _colwise(module: nn.Linear | Conv1D, tp: TensorParallel, layout: Layout) -> None:
    """A smaller weight is all a Linear needs."""
    if isinstance(module, Conv1D):
        module.nf = layout.local


def _rowwise(module: nn.Linear | Conv1D, tp: TensorParallel, layout: Layout) -> None:
    def forward(x: Tensor) -> Tensor:
        y = tp.leave(x @ module.weight if isinstance(module, Conv1D) else F.linear(x, module.weight))
        return y if module.bias is None else y + module.bias

    module.forward = forward


def _embedding(module: nn.Embedding, tp: TensorParallel, layout: Layout) -> None:
    start, stop = layout.only.spans[tp.rank]
    if module.padding_idx is not None:
        inside = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if inside else None
    absent: list[Tensor] = []

    def local_ids(_: nn.Module, args: tuple[Tensor]) -> Tensor:
        # Ids beyond the vocabulary are no rank's: left as they are, they fail the lookup, as in one process.
        elsewhere = (args[0] < start) | (args[0] >= stop)
        absent.append(elsewhere & (args[0] >= 0) & (args[0] < layout.only.spans[-1][1]))
        return (args[0] - start).masked_fill(absent[-1], 0)

    def sum_found(_: nn.Module, args: tuple, rows: Tensor) -> Tensor:
        found = rows.masked_fill(absent.pop().unsqueeze(-1), 0)
        tp.partial = (found, found._version) if tp.sum_at_layers else None
        return found if tp.sum_at_layers else comm.reduce_from(found, tp.group)

    module.register_forward_pre_hook(local_ids)
    module.register_forward_hook(sum_found)


def _colwise_norm(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    """RMSNorm over a dimension that is split: the mean square is summed over the ranks, each element counted once."""
    eps = getattr(module, "variance_epsilon", None) or module.eps
    total, real = layout.only.spans[-1][1], layout.only.real(tp.rank)
    counted = real if layout.only.is_first_copy(tp.rank) else 0
    even = total == tp.size * layout.only.local  # then every rank's elements count

    def forward(x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.pow(2)
        if not even:  # by a mask: ranks whose shapes differed could be compiled into other orders of collectives
            squares = squares * (torch.arange(x.shape[-1], device=x.device) < counted)
        square = comm.sum_both(squares.sum(-1, keepdim=True), tp.group)
        return (module.weight * (wide * torch.rsqrt(square / total + eps))).to(x.dtype)

    module.forward = forward


def _nothing(module: nn.Module, tp: TensorParallel, layout: Layout) -> None:
    """A smaller weight, or the entry into a block, is all this style needs."""


_APPLY: dict[str, Callable[..., None]] = {
    "embedding_rowwise": _embedding,
    "block": _nothing,
    "block_sum": _block_sum,
    "whole": _whole,
    "colwise": _colwise,
    "rowwise": _rowwise,
    "pair_in": _colwise,
    "pair_out": _rowwise,
    "experts": _nothing,
    "identity_expert": _identity_expert,
    "norm_of_sum": _norm_of_sum,
    "colwise_norm": _colwise_norm,
    "by_head": _nothing,
    "replicate": _nothing,
    "sequence_parallel": _nothing,
    "vocab_head": _nothing,
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
