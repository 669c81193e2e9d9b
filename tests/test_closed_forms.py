"""The forecast's skeletons and measurements against published formulas, and those against published numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from meshpar.config import ParallelConfig
from meshpar.planner.activations import measure
from meshpar.planner.closed_forms import gpt_layer_bytes, llama_layer_bytes, megatron_state_bytes
from meshpar.planner.memory import heaviest, memory_of_ranks
from meshpar.planner.orders import schedule_order
from meshpar.planner.simulate import simulate
from meshpar.planner.skeleton import Skeleton, lay_out, no_network, open_skeleton
from tests.models import tiny_config

VECTORS = json.loads((Path(__file__).parent / "cost_vectors.json").read_text())
WIDTHS = dict(  # layers, hidden size, FFN width, heads, kv heads
    zip(
        ("8b", "70b", "405b", "1b"),
        (
            (32, 4096, 14336, 32, 8),
            (80, 8192, 28672, 64, 8),
            (126, 16384, 53248, 128, 8),
            (16, 2048, 8192, 32, 8),
        ),
        strict=True,
    )
)
NAMES = {"8b": "llama3-8b", "70b": "llama3-70b", "405b": "llama3.1-405b", "1b": "llama3.2-1b-tied"}


def llama(size: str, layers: int | None = None) -> LlamaConfig:
    all_layers, hidden, ffn, heads, kv_heads = WIDTHS[size]
    return LlamaConfig(
        num_hidden_layers=layers or all_layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64 if size == "1b" else 128,
        vocab_size=128256,
        tie_word_embeddings=size == "1b",
    )


def skeleton(size: str, config: ParallelConfig, layers: int | None = None) -> Skeleton:
    with no_network(config.tp) as tp:
        return lay_out(open_skeleton(llama(size, layers)), config, tp)


def parameters(laid_out: Skeleton) -> int:
    return sum(w.rows * w.width for w in laid_out.weights)


@pytest.mark.parametrize("size", WIDTHS)
def test_parameters_of_published_models(size):
    assert parameters(skeleton(size, ParallelConfig(dp_shard=1))) == VECTORS["params"][NAMES[size]]


@pytest.mark.parametrize("row", VECTORS["state_bytes_GB"], ids=lambda r: f"{r['model']}-zero{r['zero']}-d{r['d']}")
def test_state_of_published_models(row):
    """Of the skeleton's first stage, with as many layers as a stage has on average, at Megatron's bytes a parameter."""
    laid_out, layers = skeleton(row["model"], ParallelConfig(tp=row["t"], dp_shard=1), 2), WIDTHS[row["model"]][0]
    of = {part: sum(w.rows * w.width for w in laid_out.weights if w.part == part) for part in ("root", "head", 1)}
    ends = of["root"] + of["head"] if row["p"] == 1 else of["root"] - WIDTHS[row["model"]][1]  # no last norm
    own = ends + layers / row["p"] * of[1]
    assert megatron_state_bytes(own, row["d"], row["zero"]) / 1e9 == pytest.approx(row["GB"], rel=5e-3)


@pytest.mark.parametrize(("p", "m", "v", "in_flight"), VECTORS["inflight_stage0"])
def test_microbatches_in_flight(p, m, v, in_flight):
    config = ParallelConfig(pp=p, schedule="1F1B" if v == 1 else "Interleaved1F1B", virtual_stages=v, microbatches=m)
    assert simulate(schedule_order(config, m), lambda *_: 1.0).in_flight[0] / v == in_flight


GPT = {"22B": (6144, 64, 4), "175B": (12288, 96, 1), "530B": (20480, 128, 1), "1T": (25600, 160, 1)}


@pytest.mark.parametrize("size", GPT)
def test_activations_of_gpt(size):
    h, a, b = GPT[size]
    columns = [
        dict(),
        dict(t=8),
        dict(t=8, sequence_parallel=True),
        dict(t=8, checkpoint="selective"),
        dict(t=8, sequence_parallel=True, checkpoint="selective"),
        dict(checkpoint="full"),
    ]
    for want, column in zip(VECTORS["act_MiB_per_layer_2205.05198"][size], columns, strict=True):
        assert gpt_layer_bytes(2048, b, h, a, **column) / 2**20 == pytest.approx(want, rel=5e-3)


@pytest.mark.parametrize("size", ["8b", "70b", "405b"])
def test_a_llama_layer_keeps_what_its_formula_says(size):
    """Measured, but for transformers' norms, which are not fused: each keeps its input in float32 (4 h for 2 h), what
    it makes of that in 16 bits (2 h), and a float32 a token."""
    _, hidden, ffn, heads, kv_heads = WIDTHS[size]
    vectors, seq = VECTORS["act_bytes_per_token_layer_llama"][size], 256
    for tp, want in ((1, vectors["t1"]), (8, vectors.get("t8_sp", vectors.get("t8_sp_megatron")))):
        closed = llama_layer_bytes(hidden, heads, kv_heads, 128, ffn, tp, sequence_parallel=True)
        assert closed == pytest.approx(want, rel=5e-3)
        config = ParallelConfig(tp=tp, dp_shard=1)
        with no_network(tp) as group:
            laid_out = lay_out(open_skeleton(llama(size, 3)), config, group)
            kept = measure(laid_out, config, 1, seq).layers[0].kept / seq
        unfused_norms = 2 * (4 * hidden + 4) / tp
        assert kept - unfused_norms == pytest.approx(want, rel=5e-3)
    if "t8_sp_dtensor" in vectors:
        whole = llama_layer_bytes(hidden, heads, kv_heads, 128, ffn, 8, sequence_parallel=True, gathered=True)
        assert whole == pytest.approx(vectors["t8_sp_dtensor"], rel=5e-3)


def test_every_rank_of_a_mesh_of_16384_is_forecast():
    config = ParallelConfig(pp=16, dp_shard=128, tp=8, activation_checkpoint="full")
    with no_network(config.tp) as group:
        laid_out = lay_out(open_skeleton(llama("405b")), config, group)
        ranks = list(memory_of_ranks(laid_out, config, measure(laid_out, config, 1, 8192), 16))
    assert sum(rank.count for rank in ranks) == config.world_size
    assert heaviest(ranks).pp < 2
    one_each = {rank.pp: rank for rank in reversed(ranks)}.values()
    assert 128 * 8 * sum(rank.parameters for rank in one_each) == pytest.approx(4 * 405_853_388_800, rel=1e-3)


def test_a_model_that_tp_cannot_run_is_refused():
    config = ParallelConfig(tp=2, dp_shard=1)
    with (
        no_network(2) as group,
        pytest.raises(ValueError, match=r"GPT2LMHeadModel does not run at tp=2.*parallel=true"),
    ):
        measure(lay_out(open_skeleton(tiny_config("gpt2")), config, group), config, 2, 16)
