"""What a token costs: for MFU, and for where a model is cut into stages."""

from __future__ import annotations

import pytest
from transformers import DeepseekV3Config

from meshpar.anatomy import dissect
from meshpar.config import ParallelConfig
from meshpar.flops import flops_per_token, matrix_costs
from meshpar.load import skeleton_from_config
from meshpar.planner.work import model_work
from meshpar.stages import balance, layer_costs
from tests.test_families import TABLE
from tests.tiny_families import causal_types, tiny_model


@pytest.fixture(scope="module")
def deepseek_v3():
    """Its published size: 671 billion parameters, of which a token visits 37."""
    return skeleton_from_config(DeepseekV3Config())


def test_a_token_costs_the_experts_it_visits(deepseek_v3):
    shapes = {n: p.shape for n, p in deepseek_v3.named_parameters()}
    assert sum(s.numel() for s in shapes.values()) / 1e9 == pytest.approx(671.0, abs=0.1)
    visited = sum(matrix_costs(shapes, deepseek_v3.config).values()) / 1e9
    assert visited == pytest.approx(37.5, abs=0.2)  # arXiv 2412.19437 says 37
    attention = 6 * 61 * 128 * (192 + 128) / 2 * 4096
    embedding = 129280 * 7168
    want = 6 * (visited * 1e9 - embedding)
    assert flops_per_token(shapes, deepseek_v3.config, 4096) == pytest.approx(want + attention, rel=0.001)


def test_stages_are_balanced_by_what_a_token_costs(deepseek_v3):
    layers, head = layer_costs(deepseek_v3, dissect(deepseek_v3))
    stages = balance(layers, head, 8)
    assert stages == [8, 7, 8, 8, 8, 8, 8, 6]


@pytest.mark.parametrize("model_type", [t for t in causal_types() if not TABLE[t].unrunnable])
def test_every_type_has_a_cost(model_type):
    model = tiny_model(model_type)
    assert flops_per_token({n: p.shape for n, p in model.named_parameters()}, model.config, 16) > 0
    work = model_work(model, ParallelConfig(), 16)
    assert all(layer.products > 0 and layer.pointwise > 0 for layer in (*work.layers, work.head))
