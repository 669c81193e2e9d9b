"""Activation checkpointing: what a decoder layer keeps for its backward, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .comm import storage_of
from .tensor_parallel import TensorParallel

_SUMS = {
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
# Kept by "selective": results of weight matmuls, and of collectives that leave a block. The attention core, norms,
# activations and gathered inputs are computed again: large, and cheap beside the matmuls (arXiv 2205.05198).
_KEPT = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, *_SUMS}


def apply_checkpointing(model: PreTrainedModel, anatomy: Anatomy, mode: str, tp: TensorParallel) -> None:
    """Checkpoint each decoder layer of ``model``: "none", "selective", or "full" (only its input is kept)."""
    if mode == "none":
        return
    context = {"context_fn": _selective} if mode == "selective" else {}
    for i in range(anatomy.num_layers):
        layer = model.get_submodule(anatomy.layer(i))
        layer.forward = _checkpointed(layer, partial(checkpoint, use_reentrant=False, **context), tp)


def _checkpointed(layer: nn.Module, run: Callable, tp: TensorParallel) -> Callable:
    inner = layer.forward

    def at_shape(rows: int, seq_len: int, *args, **kwargs):
        if (tp.rows, tp.seq_len) != (rows, seq_len):  # another batch has run before this one is computed again
            tp.rows, tp.seq_len = rows, seq_len
        return inner(*args, **kwargs)

    def forward(*args, **kwargs):
        keep = layer.training and torch.is_grad_enabled()
        return run(at_shape, tp.rows, tp.seq_len, *args, **kwargs) if keep else inner(*args, **kwargs)

    return forward


def _selective() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        return create_selective_checkpoint_contexts(_choose)  # a compiler sees a graph, not operations as they run
    kept: list[Tensor | None] = []
    return _Keep(kept), _Replay(kept)


def _choose(context: object, func: object, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Keep(TorchDispatchMode):
    """Remembers the results of `_KEPT` in the order of a layer's forward."""

    def __init__(self, kept: list[Tensor | None]) -> None:
        super().__init__()
        self.kept = kept
        self.source: dict[int, int] = {}  # of a storage, the one that it is a copy of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable or func in _SUMS:
            self._forget(args)
        out = func(*args, **(kwargs or {}))
        if func in _KEPT:
            self.kept.append(out.detach())  # the result itself would keep its own graph alive
            self.source.pop(storage_of(out), None)
        elif func is torch.ops.aten.cat.default and len(sources := {storage_of(tensor) for tensor in args[0]}) == 1:
            self.source[storage_of(out)] = sources.pop()  # a result in another order, as it is scattered
        return out

    def _forget(self, args: tuple) -> None:
        """Have results computed again that the layer changes in place (OLMo clamps its projections) or sums over tp.

        What is summed is as large as tp ranks' shards of the sum, which is kept, and no backward reads it: of the two
        in a layer, attention's is computed again on the way to the MLP, and the MLP's ends the layer.
        """
        given = {storage_of(a) for a in args if isinstance(a, Tensor)}
        given |= {self.source.pop(key) for key in given & self.source.keys()}
        for i, tensor in enumerate(self.kept):
            if tensor is not None and storage_of(tensor) in given:
                self.kept[i] = None


class _Replay(TorchDispatchMode):
    """Hands the remembered results out again, from the first one each time the layer is computed again.

    torch's own selective checkpointing forgets a result once it is used; a zero-bubble schedule goes backward through
    a layer twice, for its inputs and for its weights.
    """

    def __init__(self, kept: list[Tensor | None]) -> None:
        super().__init__()
        self.kept, self.next = kept, 0

    def __enter__(self):
        self.next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        self.next += 1
        tensor = self.kept[self.next - 1]
        return func(*args, **(kwargs or {})) if tensor is None else tensor.detach()
