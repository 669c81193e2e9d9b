"""What a forward leaves for the backward."""

from __future__ import annotations

import pytest

from tests import jobs_memory as jobs
from tests import models
from tests.test_parity import assert_parity, mesh_config

LAYERS, HIDDEN, ROWS, SEQ = 4, 32, 2, 64


@pytest.mark.parametrize("tp", [2, 4])
def test_autograd_keeps_shards_of_what_is_gathered(pool, tp):
    """Attention and MLP each gather [rows, seq, hidden] and keep 1/tp of it (arXiv 2205.05198, section 4.2.2).

    The head keeps its input's gradient instead.
    """
    batch = models.make_batch(rows=ROWS, seq=SEQ)
    config = dict(tp=tp, dp_shard=1)
    gathered = ROWS * SEQ * HIDDEN * 4
    for kept, whole in pool.run(tp, jobs.kept_bytes, config, batch):
        assert whole - kept == 2 * LAYERS * (gathered - gathered // tp)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_selective_checkpointing_keeps_no_partial_sums(pool, tp, sequence_parallel):
    """What is summed over tp is not kept beside the sum; attention's is computed again, the MLP's is not needed."""
    config = dict(dp_shard=1, tp=tp, sequence_parallel=sequence_parallel, compute_dtype="float32")
    layers = models.tiny_config().num_hidden_layers
    for found in pool.run(tp, jobs.kept_and_computed_again, config, models.make_batch(2, 64)):
        (whole, plain), (some, selective), (least, full) = found.values()
        assert selective - plain == layers
        assert full - plain == 6 * layers
        assert least < some < whole


@pytest.mark.parametrize("seq", [15, 16])
def test_a_graph_can_be_gone_through_twice(pool, seq):
    batch = models.make_batch(rows=ROWS, seq=seq)
    for once, twice in pool.run(2, jobs.gradients_of_two_backwards, dict(tp=2, dp_shard=1), batch):
        assert all((2 * once[n]).equal(twice[n]) for n in once)


def test_gradients_taken_apart_are_those_taken_at_once(pool):
    """What is not gathered for the gradients of inputs alone must not be what any gradient is computed from."""
    for found in pool.run(2, jobs.gradients_asked_for_apart, 8):
        assert found.keys() == jobs.PRODUCTS.keys()
        for name, pairs in found.items():
            for apart, at_once in pairs:
                assert apart == pytest.approx(at_once, rel=1e-6), name
                assert at_once > 0


def test_the_heads_gradient_leaves_before_the_layers_go_backward(pool):
    """Whole on a rank it is as large as the logits' own matrix; one that is tied waits for the embedding's part."""
    assert pool.run(2, jobs.head_is_reduced_early, dict(dp_shard=2), {"tie_word_embeddings": False}) == [True] * 2
    assert pool.run(2, jobs.head_is_reduced_early, dict(dp_shard=2), {"tie_word_embeddings": True}) == [False] * 2


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "ZBVZeroBubble"])
def test_weight_gradients_of_their_own_find_it_again(pool, schedule):
    assert_parity(pool, mesh_config(2, 1, 2, schedule) | dict(microbatches=4), [models.make_batch(kind="ragged")])
