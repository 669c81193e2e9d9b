"""Activation checkpointing: what a decoder layer keeps for its backward, and what it computes again."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .split import Hole

# Kept by "selective": results of weight matmuls, and of collectives that leave a block. The attention core, norms,
# activations and gathered inputs are computed again: large, and cheap beside the matmuls (arXiv 2205.05198).
_KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def apply_checkpointing(model: PreTrainedModel, anatomy: Anatomy, mode: str) -> None:
    """Checkpoint each decoder layer of ``model``: "none", "selective", or "full" (only its input is kept)."""
    if mode == "none":
        return
    context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    for layer in model.get_submodule(anatomy.layers):
        if not isinstance(layer, Hole):
            layer.forward = _checkpointed(layer, partial(checkpoint, use_reentrant=False, **context))


def _policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(layer: nn.Module, run) -> object:
    inner = layer.forward

    def forward(*args, **kwargs):
        keep = layer.training and torch.is_grad_enabled()
        return run(inner, *args, **kwargs) if keep else inner(*args, **kwargs)

    return forward
