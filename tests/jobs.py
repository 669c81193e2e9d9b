"""What the workers run: module-level functions, so that a fresh process can import them."""

from __future__ import annotations

import torch
import torch.distributed as dist

import meshpar
from tests import models


def rows_of_rank(batch: dict, mesh) -> dict:
    """This data-parallel rank's rows of a global batch."""
    size, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    return {k: v.chunk(size)[rank] for k, v in batch.items()}


def make(config: dict, family: str = "llama", model_changes: dict | None = None, plan="auto", source=None):
    """A tiny float32 model on the mesh of ``config``."""
    config = meshpar.ParallelConfig(**{"compute_dtype": "float32", **config})
    built = source if source is not None else models.tiny_model(family, **(model_changes or {}))
    return meshpar.parallelize_model(built, config, plan=plan)


def gradients(config: dict, batches: list[dict], family="llama", model_changes=None, plan="auto") -> dict:
    """Losses of successive `forward_backward` calls, the clip norm and every whole gradient (rank 0)."""
    model = make(config, family, model_changes, plan)
    losses = [model.forward_backward(rows_of_rank(b, model.mesh)).item() for b in batches]
    norm = model.grad_norm().item()
    return {"losses": losses, "norm": norm, "grads": dict(model.full_tensors("grad")), "names": [n for n, _ in model.named_parameters()]}
