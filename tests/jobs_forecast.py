"""What the workers run to see how much memory a training step holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from benchmarks import memory
from meshpar.fsdp import fsdp_modules, param_groups
from tests.jobs import make, rows_of_rank
from tests.jobs_memory import Alive


def place(mesh) -> dict[str, int]:
    """This rank's coordinates: the rank among those that FSDP shards over stands for dp."""
    shard = "dp_shard" if "dp_shard" in mesh.mesh_dim_names else "dp"
    return {name: mesh[dim].get_local_rank() for name, dim in (("pp", "pp"), ("dp", shard), ("tp", "tp"))}


def state_bytes(cases: list[tuple[dict, str, dict, dict]]) -> list[dict[str, int]]:
    """Of each (config, family, changes to the model, batch): parameters, gradients and AdamW's states on this rank."""
    found = []
    for config, family, changes, batch in cases:
        model = make(config, family, changes)
        optimizer = torch.optim.AdamW(model.parameters())
        model.forward_backward(rows_of_rank(batch, model.mesh))
        optimizer.step()
        params = list(model.parameters())
        states = [s for state in optimizer.state.values() for s in state.values()]
        found.append(
            place(model.mesh)
            | {
                "parameters": _nbytes(params),
                "gradients": _nbytes([p.grad for p in params if p.grad is not None]),
                "optimizer": _nbytes(states),
            }
        )
    return found


def _nbytes(tensors: list[Tensor]) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def kept_activations(cases: list[tuple[dict, str, dict, dict]]) -> list[dict]:
    """Of each case: bytes that each stage's forward leaves for its backward, and the most that this rank has of them.

    "saved": the same for the first forward of each stage, as hooks on what autograd saves count it, weights left out;
    where checkpointing or tensor parallelism have hooks of their own, those hide what they keep.
    """
    return [_kept_in_a_step(*case) for case in cases]


def _kept_in_a_step(config: dict, family: str, changes: dict, batch: dict) -> dict:
    model = make(config, family, changes)
    own = rows_of_rank(batch, model.mesh)
    model.forward_backward(own)
    forwards: list[Alive] = []
    stages: dict[int, int] = {}
    saved: dict[int, int] = {}
    most: list[int] = []  # after each forward

    def measured(module, forward):
        index = module.stage.range.index

        def run(*args, **kwargs):
            sizes: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
                return tensor.detach()  # an output itself would hold the node that holds it

            with Alive() as alive, saved_tensors_hooks(pack, lambda tensor: tensor):
                out = forward(*args, **kwargs)
            of_fsdp = set(_of_fsdp(model._runner))
            inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for key in of_fsdp | inputs:
                alive.made.pop(key, None)
            saved.setdefault(index, sum(size for key, size in sizes.items() if key not in of_fsdp | inputs))
            forwards.append(alive)
            stages[index] = min(alive.nbytes(), stages.get(index, alive.nbytes()))  # gloo may let go of some late
            most.append(sum(one.nbytes() for one in forwards))
            return out

        return run

    for module in model._pipeline.modules:
        module.forward = measured(module, module.forward)
    peaks = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            forwards.clear()
            most.clear()
            model.forward_backward(own)
            peaks.append(max(most))
    finally:
        gc.enable()
    return place(model.mesh) | {"stages": stages, "saved": saved, "most": min(peaks)}


def _of_fsdp(root) -> Iterator[int]:
    """Storages that FSDP made: whole parameters, and what it gathers them through."""
    for module in fsdp_modules(root):
        state = fully_shard.state(module)
        for group in param_groups(state):
            tensors = [group._all_gather_result, group.comm_ctx.all_gather_state]
            for param in group.fsdp_params:
                tensors += [param.all_gather_outputs, param._unsharded_inner_tensors, param.unsharded_param]
                tensors += [param._sharded_param_data, param.sharded_param]
            for tensor in _tensors_in(tensors):
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                yield local.untyped_storage()._cdata


def _tensors_in(tree) -> Iterator[Tensor]:
    for x in tree_leaves(tree):
        if isinstance(x, Tensor):
            yield x
        elif hasattr(x, "_fields") or hasattr(x, "all_gather_result"):
            yield from _tensors_in(list(vars(x).values()) if hasattr(x, "__dict__") else list(x))


def peaks(cases: list[tuple[dict, str, dict, dict]]) -> list[dict[str, int]]:
    """Of each case: bytes of tensors held between steps, and the most in a step of forward, backward and AdamW."""
    found = []
    for config, family, changes, batch in cases:
        model = make(config, family, changes)
        own = rows_of_rank(batch, model.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

        def step(model=model, own=own, optimizer=optimizer) -> None:
            model.forward_backward(own)
            optimizer.step()
            optimizer.zero_grad()

        step()
        states = [s for state in optimizer.state.values() for s in state.values()]
        held = _nbytes([*model.parameters(), *states])
        found.append(place(model.mesh) | {"held": held, "peak": memory.peak_of_tensors(step, times=2)})
    return found
