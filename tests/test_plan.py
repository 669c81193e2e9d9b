"""Plans: what the model declares, what a caller lays over it, and what is refused."""

from __future__ import annotations

import pytest
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from meshpar import ParallelConfig
from meshpar.load import skeleton_from_config
from meshpar.tp_plan import make_plan
from tests import jobs, models
from tests.test_parity import assert_parity


def plan_of(family: str = "llama", overrides="auto", **sizes):
    config = ParallelConfig(**{"dp_shard": 1, "tp": 2, **sizes})
    return make_plan(skeleton_from_config(models.tiny_config(family)), config, overrides)


def test_a_plan_reads_as_a_table():
    table = str(plan_of("olmo2"))
    assert "model.layers.*.self_attn.q_norm" in table
    for line in ("embedding_rowwise", "colwise_norm", "vocab_head", "0-3"):
        assert line in table


def test_norms_are_sharded_over_the_sequence_only_with_sequence_parallelism():
    name = "model.layers.0.input_layernorm"
    assert plan_of()[name] == "sequence_parallel"
    assert plan_of(sequence_parallel=False)[name] == plan_of(tp=1)[name] == "replicate"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model.layers.*.mlp.up": "colwise"}, "matches no module"),
        ({"model.layers.*.mlp": "replicate"}, "matches no module .* that holds parameters"),
        ({"lm_head": "replicate"}, "lm_head .*'replicate'.* can only be 'vocab_head'"),
        ({"model.embed_tokens": "replicate"}, "can only be 'embedding_rowwise'"),
        ({"model.layers.*.mlp.up_proj": "rowwise"}, "can only be 'replicate' or 'colwise'"),
        ({"model.layers.0.mlp.up_proj": "sideways"}, "the styles are"),
        ({"model.layers.0.mlp.up_proj": "replicate"}, "split together or not at all"),
        ({"model.layers.*.mlp.up_proj": "ep_dispatch_experts"}, "expert parallelism.* meshpar splits each of them"),
        ({"model.norm": SequenceParallel()}, "set sequence_parallel in the config"),
        ("manual", 'must be "auto" or a dict'),
    ],
    ids=str,
)
def test_overrides_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        plan_of(overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "sequence_parallel"),
    [
        ({"model.layers.*.mlp.*": "replicate"}, False),
        ({"model.layers.*.mlp.*": "replicate"}, True),
        ({"model.layers.1.self_attn.*": "replicate"}, False),
        ({"*.up_proj": ColwiseParallel(), "*.gate_proj": ColwiseParallel(), "*.down_proj": RowwiseParallel()}, True),
        ({"*.up_proj": ColwiseParallel(), "*.down_proj": RowwiseParallel()}, False),
        ({"*.q_proj": ColwiseParallel(), "*.o_proj": RowwiseParallel()}, True),
    ],
    ids=str,
)
def test_overrides_keep_parity(pool, overrides, sequence_parallel):
    config = dict(dp_shard=2, tp=2, sequence_parallel=sequence_parallel)
    assert_parity(pool, config, [models.make_batch(kind="ragged")], plan=overrides)


def test_named_parameters_are_dtensors_of_the_whole_parameter(pool):
    for whole in pool.run(4, jobs.whole_dtensors, dict(dp_shard=2, tp=2)):
        assert whole
