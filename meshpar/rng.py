"""Random number generators of a rank: seeding that depends on its place in the mesh, and their state as tensors."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import torch
from torch import Tensor

from .mesh import Mesh


def seed_rank(seed: int, step: int, mesh: Mesh) -> None:
    """Seed torch, CUDA, `random` and numpy from (seed, step, pp and dp coordinate).

    tp peers get the same numbers, so that dropout on what tp replicates is the same mask; dp ranks get different ones.
    """
    key = f"{seed}:{step}:{mesh.rank('pp')}:{mesh.rank('dp')}"
    value = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - libraries that draw from numpy's global state


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """The state of this process's generators, uint8 [bytes] each: torch, cuda (on CUDA), python, numpy."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    state = {
        "torch": torch.get_rng_state(),
        "python": _as_bytes(random.getstate()),
        "numpy": _as_bytes([kind, keys.tolist(), *rest]),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Continue where `rng_state` was taken."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = _from_bytes(state["python"])
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(_from_bytes(state["numpy"])))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _as_bytes(value: object) -> Tensor:
    # JSON, not pickle: reading a checkpoint must not run what is in it.
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(tensor: Tensor):
    return json.loads(bytes(tensor.tolist()))
