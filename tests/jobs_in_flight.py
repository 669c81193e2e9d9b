"""What the workers run to see how many microbatches' activations a rank keeps at once."""

from __future__ import annotations

import gc
from weakref import WeakSet

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.jobs import make


class Kept:
    """Around a tensor that autograd saved: lives as long as the graph keeps that tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def in_flight(config: dict, batch: dict, model_changes: dict) -> list[int]:
    """Within one step, after each forward of a stage on this rank: how many of the forwards so far have tensors saved.

    Without the garbage collector: what only it would free counts as kept.
    """
    model = make(config, model_changes=model_changes)
    model.forward_backward(batch)
    forwards: list[WeakSet[Kept]] = []
    counts: list[int] = []

    def counting(forward):
        def run(*args, **kwargs):
            saved: WeakSet[Kept] = WeakSet()

            def pack(tensor: Tensor) -> Kept:
                kept = Kept(tensor.detach())  # of its own, an output would hold the node that holds it
                saved.add(kept)
                return kept

            with saved_tensors_hooks(pack, lambda kept: kept.tensor):
                out = forward(*args, **kwargs)
            forwards.append(saved)
            counts.append(sum(len(saved) > 0 for saved in forwards))
            return out

        return run

    for module in model._pipeline.modules:
        module.forward = counting(module.forward)
    gc.collect()
    gc.disable()
    try:
        model.forward_backward(batch)
    finally:
        gc.enable()
    if any(forwards):
        raise AssertionError("a step left tensors that autograd saved")
    return counts
