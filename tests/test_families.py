"""The table of model families: it says what the code does, and nothing in it is wrong.

Every type is run by `make families`; here the most used ones are, and what the table says of all of them is checked.
"""

from __future__ import annotations

import logging
import re

import pytest
from transformers import CONFIG_MAPPING

from meshpar import ParallelConfig
from meshpar.anatomy import dissect
from meshpar.cli import main
from meshpar.families import as_markdown, read_families
from meshpar.load import meta_copy
from meshpar.stages import stage_ranges
from meshpar.tp_plan import make_plan
from tests import jobs_families, sweep
from tests.tiny_families import causal_types, tiny_model

TABLE = read_families()
DECLARED = [t for t in TABLE if getattr(CONFIG_MAPPING[t], "base_model_tp_plan", None)]
# fmt: off
MOST_USED = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "granite",
    "cohere2", "glm4", "smollm3", "starcoder2", "gpt2", "gpt_neox", "opt", "bloom", "falcon", "mixtral", "qwen2_moe",
    "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4_text", "olmoe", "granitemoe",
    "phimoe", "mamba2", "jamba", "stablelm", "glm4_moe", "ernie4_5_moe",
]
# fmt: on
REFUSED_PIPELINES = [t for t, f in TABLE.items() if f.results.get("2x1x1", "").startswith("refused")]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """transformers warns of every odd size in a tiny config."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_every_type_has_a_row_and_none_is_wrong():
    assert list(TABLE) == causal_types()
    assert [t for t, f in TABLE.items() if f.is_wrong] == []


def test_the_page_shows_the_table():
    assert sweep.DOC.read_text(encoding="utf-8") == as_markdown(TABLE)


def test_most_types_run_and_the_rest_say_why():
    passed = [t for t in DECLARED if TABLE[t].results.get("2x1x2") == "ok"]
    assert len(passed) >= 105
    assert sum((TABLE[t].share or 0) >= 0.95 for t in passed) >= 80
    assert sum(f.results.get("2x1x1") == "ok" for f in TABLE.values()) >= 150
    assert all(f.why for f in TABLE.values() if f.results.get("2x1x1") != "ok")


# transformers' plan splits the projections of these and computes what lies between on every rank; here they run whole.
LESS_THAN_TRANSFORMERS = ["doge", "gemma3n_text"]


def test_what_transformers_divides_is_divided():
    shares = {t: (TABLE[t].share, TABLE[t].transformers_share) for t in DECLARED}
    less = [t for t, (ours, theirs) in shares.items() if ours is not None and ours < theirs - 0.005]
    assert less == LESS_THAN_TRANSFORMERS


def test_every_parameter_of_every_type_is_in_its_plan(pool):
    """A parameter whose module no entry names would be none's to split, sum or store; two processes share the types."""
    types = [t for t in causal_types() if not TABLE[t].unrunnable]
    halves = pool.run(2, jobs_families.unplanned, types, timeout=300)
    missing = {model_type: names for half in halves for model_type, names in half.items()}
    assert missing == {model_type: [] for model_type in types}


@pytest.mark.parametrize("model_type", MOST_USED)
def test_gradients_equal_one_process_as_the_table_says(pool, model_type):
    family = TABLE[model_type]
    assert sweep.run(pool, model_type, sweep.BOTH, family.sequence == "ok") == family.results["2x1x2"] == "ok"


@pytest.mark.parametrize("model_type", ["llama", "phi3", "olmo2", "mixtral", "gpt_oss", "gpt2"])
def test_the_share_that_tp_divides(model_type):
    assert sweep.shares(model_type) == (TABLE[model_type].share, TABLE[model_type].transformers_share)


# Heads, kv heads, expert widths and FFN widths that tp does not divide; kv heads fewer than tp.
ODD = {
    "phi3": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, intermediate_size=62),
    "gpt_neox": {},
    "deepseek_v3": dict(moe_intermediate_size=52),
    "gpt_oss": dict(num_attention_heads=6, num_key_value_heads=2, intermediate_size=44),
    "mixtral": dict(intermediate_size=52),
    "minimax_m2": {},
    "cohere": dict(use_qk_norm=True),
}


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize("model_type", ODD)
def test_gradients_equal_one_process_where_tp_does_not_divide(pool, model_type, tp):
    result = pool.run(tp, jobs_families.outcome, model_type, sweep.config_of((1, 1, tp)), **ODD[model_type])[0]
    assert result.get("ok"), result


@pytest.mark.parametrize("model_type", ["axk1", "axk2", "longcat_flash", "inkling_text"])
@pytest.mark.parametrize(("mesh", "sp"), [((1, 1, 2), False), ((1, 1, 3), True), ((1, 2, 2), True)], ids=str)
def test_mixtures_with_more_than_a_sum(pool, model_type, mesh, sp):
    """A norm of the sum, experts that return their input, shared experts in one tensor."""
    world = mesh[1] * mesh[2]
    result = pool.run(world, jobs_families.outcome, model_type, sweep.config_of(mesh, sequence_parallel=sp))[0]
    assert result.get("ok"), result


@pytest.mark.parametrize("model_type", ["gpt_oss", "phi3", "deepseek_v3"])
def test_padding_stays_out_of_adamw_steps(pool, model_type):
    off = pool.run(3, jobs_families.after_adamw, model_type, sweep.config_of((1, 1, 3)))[0]
    worst = max(off, key=off.__getitem__)
    assert off[worst] <= 1, worst


SIX = ["mamba", "hybrid"] * 3


@pytest.mark.parametrize(
    ("model_type", "changes", "config"),
    [
        ("zamba", dict(num_hidden_layers=6, layers_block_type=SIX), dict(pp=3, microbatches=3)),
        ("zamba", {}, dict(pp=2, dp_shard=2, tp=2, microbatches=2, activation_checkpoint="full")),
        ("zamba2", {}, dict(pp=2, microbatches=4, schedule="ZBVZeroBubble", virtual_stages=2)),
        ("zamba2", {}, dict(pp=4, microbatches=4)),
        ("zamba2", {}, dict(dp_shard=4)),
    ],
    ids=["three-stages-share", "pp-dp-tp", "zbv", "pp4", "dp"],
)
def test_the_embedding_and_shared_layers_cross_stages(pool, model_type, changes, config):
    """Each hybrid layer uses the embedding and one set of weights: both are needed, and get gradients, on each."""
    world = config.get("pp", 1) * config.get("dp_shard", 1) * config.get("tp", 1)
    result = pool.run(world, jobs_families.outcome, model_type, {"dp_shard": 1, **config}, **changes)[0]
    assert result.get("ok"), result
    assert result["norm"] <= 1e-5


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_copies_on_several_stages_stay_equal_in_adamw_steps(pool, model_type):
    config = dict(pp=2, dp_shard=1, microbatches=2)
    off = pool.run(2, jobs_families.after_adamw, model_type, config)[0]
    worst = max(off, key=off.__getitem__)
    assert off[worst] <= 1, worst


@pytest.mark.parametrize("model_type", REFUSED_PIPELINES)
def test_pipelines_are_refused_with_the_sentence_in_the_table(model_type):
    sentence = TABLE[model_type].results["2x1x1"].removeprefix("refused: ")
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        cut_in_two(meta_copy(tiny_model(model_type)))


def cut_in_two(model):
    config = ParallelConfig(pp=2, dp_shard=1, compute_dtype="float32")
    return stage_ranges(model, dissect(model), config, make_plan(model, config).flow)


def test_the_command_prints_the_table(capsys):
    assert main(["families", "llama", "gpt_oss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["gpt_oss", "GptOssForCausalLM", "yes", "yes", "yes"],
        ["llama", "LlamaForCausalLM", "yes", "yes", "yes"],
    ]
    assert main(["families", "lama"]) == 2
