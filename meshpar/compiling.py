"""torch.compile of each decoder layer: one graph for all layers that are alike, and parameters keep their names."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
import torch._inductor.config
from torch import nn

from .config import SPLIT_BACKWARD, ParallelConfig

log = logging.getLogger("meshpar")

# Graphs that one layer's code may need: for each kind of layer, with and without gradients, for one length and for any.
_GRAPHS = 64


def apply_compile(layers: Iterable[nn.Module], config: ParallelConfig) -> None:
    """Compile the forward of each of ``layers`` when it first runs, if ``config`` says so.

    What fully_shard and pipeline stages hook onto a layer stays outside of the graph; collectives over tp are in it.
    """
    if not config.compile:
        return
    if config.async_tp:  # the pass looks for nccl and symmetric memory itself, and leaves the graph alone without
        torch._inductor.config._micro_pipeline_tp = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
    if config.pp > 1 and config.schedule in SPLIT_BACKWARD:
        # A compiled backward may otherwise write into what the second one still needs.
        torch._functorch.config.donated_buffer = False
        log.warning(
            "compile=True with schedule=%s: the backward of a compiled layer does not come in two parts, so all of it "
            "runs twice; a schedule without a split backward (1F1B, Interleaved1F1B) costs less",
            config.schedule,
        )
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
