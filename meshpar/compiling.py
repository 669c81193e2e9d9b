"""torch.compile of each decoder layer: one graph for all layers that are alike, and parameters keep their names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor, nn

from .config import ParallelConfig
from .schedules import splits_backward
from .tensor_parallel import TensorParallel

log = logging.getLogger("meshpar")

# Of one layer: with and without gradients, for one length and for any.
_GRAPHS = 4


def apply_compile(layers: Sequence[nn.Module], tp: TensorParallel, config: ParallelConfig) -> None:
    """Compile the forward of each of ``layers`` when it first runs, if ``config`` says so.

    What fully_shard and pipeline stages hook onto a layer stays outside of the graph; collectives over tp are in it.
    """
    if not config.compile:
        return
    # Of layers that all differ, none falls back to running as it is.
    limit = max(torch._dynamo.config.recompile_limit, _GRAPHS * len(layers))
    torch._dynamo.config.recompile_limit = limit
    # A backward may run twice, as a zero-bubble schedule's does: it must not write into what was saved for it.
    torch._functorch.config.donated_buffer = False
    if splits_backward(config):
        log.warning(
            "compile=True with schedule=%s: the backward of a compiled layer does not come in two parts, so all of it "
            "runs twice; a schedule without a split backward (1F1B, Interleaved1F1B) costs less",
            config.schedule,
        )
    backend = _inductor_async_tp if config.async_tp and _enable_symmetric_memory(tp) else _inductor
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend)


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
    """torch's default, by a name of its own: graphs that others made of the same code are not taken."""
    return _compile(graph, inputs)


def _inductor_async_tp(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
    """Collectives run in pieces beside the matmuls that they feed or follow."""
    return _compile(graph, inputs, _micro_pipeline_tp=True)


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], **settings: object) -> Callable:
    from torch._inductor.compile_fx import compile_fx  # seconds, which a model that is not compiled need not wait
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class NothingDonated(CustomGraphPass):
        """Leaves the graph alone, but keeps it apart in the cache on disk.

        There, as of torch 2.13, one that writes into what was saved for it is the same as one that must not.
        """

        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "meshpar: a backward may run twice"

    return compile_fx(graph, inputs, config_patches={"post_grad_custom_post_pass": NothingDonated(), **settings})


def _enable_symmetric_memory(tp: TensorParallel) -> bool:
    """Whether tp ranks may write into each other's memory; False, with a warning, where torch has no such thing."""
    if not tp.sequence_parallel:
        return False
    if dist.get_backend(tp.group) != "nccl":
        log.warning("async_tp=True has no effect here: it needs CUDA devices with nccl")
        return False
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        # torch 2.13 calls this needless, but its own pass over the graph looks for groups that it was called for.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(tp.group.group_name)
    return True
