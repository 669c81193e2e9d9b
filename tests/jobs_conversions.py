"""What the workers run for checkpoints in transformers' original layouts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import meshpar
from meshpar import checkpoint


def read_and_write(directory: Path, config: dict, out: Path) -> None:
    """Read a directory onto the mesh; write it to "saved" in ``out`` and, by way of a checkpoint, to "exported"."""
    model = meshpar.parallelize_model(directory, meshpar.ParallelConfig(**config))
    model.save_pretrained(out / "saved", max_shard_size="100KB")
    checkpoint.save(out / "step-0", model, torch.optim.AdamW(model.parameters()), {})
    if dist.get_rank() == 0:
        checkpoint.export(out / "step-0", out / "exported")
    dist.barrier()
