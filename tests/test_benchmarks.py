"""What the benchmarks' own parts must do for their figures to mean what they say."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from benchmarks.gpu import launch
from benchmarks.pipeline import Sleeps, put_to_sleep


def sleeping_stage(layers: int):
    """Layers that sleep, their (zero) sleeps counted, with the input and output of one forward."""
    sleeps = Sleeps()
    stage = nn.Sequential(*(nn.ModuleDict({"input_layernorm": nn.LayerNorm(8, bias=False)}) for _ in range(layers)))
    for layer in stage:
        put_to_sleep(layer, sleeps)
    hidden = torch.randn(2, 8, requires_grad=True)
    return stage, sleeps, hidden, stage(hidden)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_split_backward_sleeps_for_inputs_and_then_for_weights(layers):
    stage, sleeps, hidden, out = sleeping_stage(layers)
    assert sleeps.counts == {"F": layers}
    grads, groups = stage_backward_input([out], [torch.ones(2, 8)], [hidden], stage.parameters())
    assert sleeps.counts == {"F": layers, "I": layers}
    assert grads[0].equal(torch.ones(2, 8))
    stage_backward_weight(stage.parameters(), groups)
    assert sleeps.counts == {"F": layers, "I": layers, "W": layers}


def test_a_whole_backward_sleeps_for_both():
    _, sleeps, hidden, out = sleeping_stage(2)
    stage_backward((out,), (torch.ones(2, 8),), [hidden])
    assert sleeps.counts == {"F": 2, "I": 2, "W": 2}


@pytest.mark.parametrize("settings", [{"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "activation_checkpoint": "selective"}])
def test_the_gpu_benchmark_runs_without_one(settings):
    result = launch("tiny", settings)
    assert "failed" not in result, result
    assert result["tokens_per_second"] > 0
    assert result["mfu"] is None
