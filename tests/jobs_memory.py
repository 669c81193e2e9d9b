"""What the workers run to see what a forward keeps."""

from __future__ import annotations

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.jobs import make


class Alive(TorchDispatchMode):
    """Remembers the storages that operations made, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def nbytes(self) -> int:
        """Bytes of those that still live."""
        return sum(size for ref, size in self.made.values() if not ref.expired())


def kept_bytes(config: dict, batch: dict) -> tuple[int, int]:
    """Bytes that a forward leaves allocated, as it is and with gathered inputs kept whole."""
    model, found = make(config), []
    model(**batch).loss.backward()  # makes buffers that stay
    for keep_shards in (True, False):
        model._runner.tp.keep_shards = keep_shards
        with Alive() as alive:
            loss = model(**batch).loss
        gc.collect()
        found.append(alive.nbytes())
        loss.backward()
    return found[0], found[1]


def gradients_of_two_backwards(config: dict, batch: dict) -> tuple[dict, dict]:
    """This rank's gradients after one backward of a loss, and after a second one."""
    model = make(config)
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    once = _gradients(model)
    loss.backward()
    return once, _gradients(model)


def _gradients(model) -> dict[str, torch.Tensor]:
    return {n: p.grad.to_local().clone() for n, p in model.named_parameters()}
