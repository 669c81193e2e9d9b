"""Layers through torch.compile: the same gradients and names on every mesh, in one graph a kind of layer.

What is traced is alike for every backend; the real one, which takes a minute to compile, has one test.
"""

from __future__ import annotations

import pytest

from tests import jobs_compile as jobs
from tests import models
from tests.test_parity import assert_results, mesh_config, world


def assert_compiled(pool, config, family="llama", changes=None, backend="aot_eager", graphs: int | None = 1):
    """The gradients of one process, from ``graphs`` graphs without a break (None: however many)."""
    batches = [models.make_batch(kind="ragged")]
    results = pool.run(world(config), jobs.compiled_gradients, config, batches, family, changes, backend, timeout=400.0)
    assert_results(results, batches, family, changes)
    for result in results if graphs is not None else ():
        assert (result["graphs"], result["breaks"]) == (graphs, {})


@pytest.mark.parametrize(
    ("mesh", "schedule", "sp", "mode"),
    [
        ((1, 1, 1), "1F1B", False, "selective"),
        ((1, 2, 1), "1F1B", False, "none"),
        ((1, 1, 2), "1F1B", False, "full"),
        ((1, 1, 2), "1F1B", True, "none"),
        ((1, 2, 2), "1F1B", True, "selective"),
        ((2, 1, 1), "ZBVZeroBubble", False, "full"),
        ((2, 1, 2), "Interleaved1F1B", True, "none"),
        ((2, 1, 2), "InterleavedZeroBubble", True, "selective"),
        ((2, 2, 2), "1F1B", True, "full"),
    ],
)
def test_gradients_equal_one_process(pool, mesh, schedule, sp, mode):
    config = mesh_config(*mesh, schedule, sequence_parallel=sp, activation_checkpoint=mode)
    assert_compiled(pool, config)


def test_the_default_backend(pool):
    assert_compiled(pool, mesh_config(1, 2, 2, activation_checkpoint="selective"), backend="inductor")


def test_collectives_have_the_form_that_async_tp_takes_apart(pool):
    """One gather feeds q, k and v, one gate and up; each block's output projection ends in a scatter."""
    for forward, backward in pool.run(2, jobs.fused_for_async_tp, dict(tp=2), models.make_batch(), timeout=400.0):
        assert forward == {"fused_all_gather_matmul": 2, "fused_matmul_reduce_scatter": 2}
        assert backward["fused_all_gather_matmul"] >= 2


def test_a_split_backward_after_a_whole_one_in_the_same_process(pool):
    """A graph that both share must not write into what the second half of a split backward still needs."""
    batch = models.make_batch(kind="ragged")
    whole, split = pool.run(2, jobs.two_schedules, batch, "inductor", timeout=400.0)[0]
    for result in (whole, split):
        assert_results([result], [batch])


def test_a_compiled_graph_can_be_gone_through_twice(pool, tmp_path):
    """Also where the compiler's cache holds one of the same layers that cannot."""
    batch = models.make_batch(rows=2)
    [(once, twice)] = pool.run(1, jobs.compiled_gradients_of_two_backwards, {}, batch, str(tmp_path), timeout=400.0)
    assert all((2 * once[n]).equal(twice[n]) for n in once)


def test_layers_with_graph_breaks_are_checkpointed(pool):
    """Experts that loop over what tokens chose: the checkpoint around them runs as it is, twice in a split backward."""
    config = mesh_config(2, 1, 1, "ZBVZeroBubble", activation_checkpoint="selective")
    assert_compiled(pool, config, "mixtral", dict(experts_implementation="eager"), graphs=None)


@pytest.mark.parametrize(
    ("family", "graphs"),
    [
        ("gemma2", 1),  # full and windowed attention by turns
        ("gpt2", 1),
        ("olmo2", 1),
        ("qwen3", 1),
        ("mixtral", None),  # experts loop over what tokens chose
    ],
)
def test_families(pool, family, graphs):
    config = mesh_config(1, 1, 2, activation_checkpoint="selective", sequence_parallel=family != "gpt2")
    changes = {
        "gemma2": dict(attn_implementation="eager", sliding_window=8),
        "gpt2": dict(attn_pdrop=0, embd_pdrop=0, resid_pdrop=0),
    }
    assert_compiled(pool, config, family, changes.get(family), graphs=graphs)


def test_results_that_are_changed_in_place(pool):
    """OLMo clamps what its projections give, which selective checkpointing keeps."""
    config = mesh_config(1, 1, 2, activation_checkpoint="selective")
    assert_compiled(pool, config, "olmo", dict(clip_qkv=0.3))


def test_evaluation_and_other_lengths(pool):
    """Graphs without gradients, and for any length once a second one has come."""
    config = mesh_config(1, 1, 2)
    batches = [models.make_batch(seq=seq, kind="ragged") for seq in (16, 24, 17, 32)]
    want = pool.run(1, jobs.steps, dict(dp_shard=1), batches)[0]
    for got in pool.run(2, jobs.compiled_steps, config, batches):
        assert got == [pytest.approx(pair, abs=1e-5) for pair in want]


def test_what_is_gathered_is_not_kept(pool):
    """As without a compiler: attention and MLP each keep 1/tp of what they gather."""
    batch = models.make_batch(rows=2, seq=64)
    config = mesh_config(1, 1, 2)
    kept = pool.run(2, jobs.compiled_kept_bytes, config, batch, True)
    whole = pool.run(2, jobs.compiled_kept_bytes, config, batch, False)
    gathered = 2 * 64 * 32 * 4
    for few, many in zip(kept, whole, strict=True):
        assert many - few >= 4 * 2 * (gathered - gathered // 2)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_dropout(pool, tmp_path, mode):
    """The slope of the loss along its gradient is the gradient's norm only if both have the same masks."""
    dropout = dict(residual_dropout=0.2, embedding_dropout=0.2, attention_dropout=0.2)
    models.tiny_model("starcoder2", **dropout).save_pretrained(tmp_path)
    config = mesh_config(1, 1, 2, activation_checkpoint=mode)
    for result in pool.run(2, jobs.compiled_slope, config, str(tmp_path), models.make_batch(rows=4)):
        assert result["slope"] == pytest.approx(result["norm"], rel=2e-3)


@pytest.mark.parametrize("fault", [None, "bias added twice"])
def test_verify_compares_what_is_compiled(pool, fault):
    for report in pool.run(2, jobs.compiled_verify, dict(tp=2), models.make_batch(kind="ragged"), fault):
        assert report.ok == (fault is None), str(report)
        assert report.first_wrong == ("model.layers.0.self_attn.o_proj" if fault else None)
