"""Data parallelism: FSDP2 over dp, parameters declared as DTensors over dp x tp, gradients reduced when told to.

`fully_shard` sees plain local tensors, so compute stays on plain tensors. When the real weights are put in place, each
sharded parameter becomes a DTensor on the (dp, tp) mesh; FSDP re-reads a parameter's placement at its first forward
(as it does after `load_state_dict(assign=True)`), so gradients and optimizer states carry it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .config import ParallelConfig, torch_dtype
from .mesh import Mesh
from .styles import ParamSpec


def apply_fsdp(root: nn.Module, layers: list[nn.Module], head: nn.Module, mesh: Mesh, config: ParallelConfig) -> None:
    """Wrap each decoder layer and the head, then ``root``, whose group is the embedding and the last norm.

    What shares a parameter with anything outside it, as a tied head, stays in the root's group: FSDP has one group a
    parameter. The head's weights stay gathered for its backward, which comes first. Gradients are summed, not averaged:
    the loss already is a sum over the token count of the whole step. Under pp the weights stay gathered for the step
    unless the config says otherwise, or every microbatch would gather them again.
    """
    if mesh.fsdp.size() > 1:
        _refuse_own_backward(layers)
    policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(config.compute_dtype), reduce_dtype=torch_dtype(config.reduce_dtype)
    )
    reshard = reshards(layers, config)
    for module in (*_apart(root, [*layers, head]), root):
        is_layer = module is not root and module is not head
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=reshard and is_layer)
    for module in fsdp_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def reshards(layers: list[nn.Module], config: ParallelConfig) -> bool:
    """Whether weights are gathered anew for the backward, which FSDP must see for that."""
    return config.reshards and not any(map(_runs_own_backward, layers))


def _runs_own_backward(layer: nn.Module) -> bool:
    """Whether ``layer`` is reversible, and runs again in its backward."""
    return hasattr(layer, "backward_pass")


def _refuse_own_backward(layers: list[nn.Module]) -> None:
    """Reversible layers run again in a backward of their own, past the hooks that gather their parameters."""
    own = [layer for layer in layers if _runs_own_backward(layer)]
    if own:
        raise ValueError(
            f"{type(own[0]).__name__} runs a backward of its own (backward_pass), in which parameters sharded over dp "
            "are not gathered; dp_shard and dp_replicate must be 1"
        )


def _apart(root: nn.Module, modules: list[nn.Module]) -> list[nn.Module]:
    """Those of ``modules`` that have parameters and share none with each other or with what is around them."""
    uses = Counter(id(p) for _, p in root.named_parameters(remove_duplicate=False))

    def is_apart(module: nn.Module) -> bool:
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        return bool(inside) and all(uses[p] == count for p, count in inside.items())

    return [module for module in modules if is_apart(module)]


def placements(mesh: Mesh, spec: ParamSpec) -> tuple[Placement, ...]:
    """Placements of a parameter on ``mesh.state``: FSDP splits dimension 0 of what tp left on the rank."""
    tp = Replicate() if spec.layout.dim is None else Shard(spec.layout.dim)
    tp_size = mesh.size("tp")
    shard: Placement = Shard(0)
    if spec.layout.dim == 0 and tp_size > 1:
        shard = _StridedShard(0, split_factor=tp_size)
    return (Replicate(),) * (len(mesh.dp_dims) - 1) + (shard, tp)


def fsdp_rows(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Which of ``rows`` rows of a tp-local tensor this rank stores (torch.chunk's split)."""
    shard = mesh.fsdp.size(mesh.fsdp.ndim - 1)
    index = mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1)
    chunk = -(-rows // shard)
    return min(index * chunk, rows), min((index + 1) * chunk, rows)


def materialize(
    model: nn.Module, specs: dict[str, ParamSpec], mesh: Mesh, read: Callable[[str, ParamSpec, tuple[int, int]], Tensor]
) -> None:
    """Give every meta parameter its values: ``read(name, spec, rows)`` returns this rank's rows of the local tensor."""
    done: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param not in done:
            spec = specs[name]
            local = read(name, spec, fsdp_rows(mesh, spec.local_shape[0])).to(mesh.device, param.dtype)
            done[param] = nn.Parameter(_as_dtensor(param, local, spec, mesh), requires_grad=param.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner).register_parameter(leaf, done[param])


def _as_dtensor(param: DTensor, local: Tensor, spec: ParamSpec, mesh: Mesh) -> DTensor:
    if param.device_mesh.ndim > mesh.fsdp.ndim:  # a caller's torch style made it one before fully_shard
        state_mesh, where, shape = param.device_mesh, param.placements, param.shape
    else:
        state_mesh, where = mesh.state, placements(mesh, spec)
        shape = torch.Size(global_shape(spec, mesh.size("tp")))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local.contiguous(), state_mesh, where, run_check=False, shape=shape, stride=stride)


def global_shape(spec: ParamSpec, tp_size: int) -> tuple[int, ...]:
    """Shape of the DTensor: Hugging Face's, or larger along the tp dimension where spans are padded or shared."""
    shape = list(spec.local_shape)
    if spec.layout.dim is not None:
        shape[spec.layout.dim] *= tp_size
    return tuple(shape)


class Sharded:
    """The modules under ``root`` that `fully_shard` wraps, and what a step tells them.

    They are found once: to walk through all modules of a model takes longer than to set what is set here.
    """

    def __init__(self, root: FSDPModule, layers: list[nn.Module]) -> None:
        self._root, self._modules = root, fsdp_modules(root)
        self._layers = [layer for layer in layers if isinstance(layer, FSDPModule)]

    def reshard(self) -> None:
        """Put every parameter back in shards: a forward without a backward leaves some whole."""
        for module in self._modules:
            module.reshard()

    def reshard_layers(self, reshard: bool) -> None:
        """Whether layers' weights are whole only while they are used; on one rank, FSDP's copies of them."""
        for layer in self._layers:
            layer.set_reshard_after_forward(reshard, recurse=False)
            layer.set_reshard_after_backward(reshard, recurse=False)

    def begin_piece(self, last: bool, reshard: bool) -> None:
        """Before one of several microbatches whose gradients are reduced one by one; ``reshard``: see `reshards`."""
        self._root.set_is_last_backward(last)
        for module in self._modules:
            # What a forward leaves whole, as it does the root's, no backward before the last need shard.
            module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_all_reduce(last, recurse=False)  # between replicas
        if reshard:
            self.reshard_layers(True)

    def hold_gradients(self) -> None:
        """Until `reduce_gradients`: backwards add to whole gradients."""
        self._set_last_backward(False)

    def reduce_gradients(self) -> None:
        """Reduce the held gradients over dp and shard the weights again.

        FSDP does this from autograd hooks of the last backward; a pipeline schedule has no single last backward (a zero
        bubble schedule ends in weight-only ones), so its per-group post-backward is called by hand, as torch's own
        `PipelineStage` does for a stage that is itself an FSDP root.
        """
        self._set_last_backward(True)
        state = fully_shard.state(self._root)  # type: ignore[attr-defined]
        for fsdp_state in state._state_ctx.all_states:
            for group in param_groups(fsdp_state):
                group.post_backward()
        state._root_post_backward_final_callback()

    def discard_step(self) -> None:
        """After an exception within a step: drop what its backwards left behind, so that the next step can be right."""
        # Before this rank's first forward FSDP has nothing to reset, and fails at it.
        begun = fully_shard.state(self._root)._is_root  # type: ignore[attr-defined]
        if begun and hasattr(self._root, "reset_iter_state"):  # torch >= 2.13
            self._root.reset_iter_state()
        for module in self._modules:
            for group in param_groups(fully_shard.state(module)):  # type: ignore[attr-defined]
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):
                        param._unsharded_param.grad = None
        self._set_last_backward(True)

    def _set_last_backward(self, last: bool) -> None:
        self._root.set_is_last_backward(last)
        for module in self._modules:
            module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_gradient_sync(last, recurse=False)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """The modules under ``root``, itself included, that `fully_shard` wraps."""
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def param_groups(state) -> list:
    """The parameter groups of one such module's state."""
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.12
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []
