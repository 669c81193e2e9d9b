"""The mesh against the unmodified Hugging Face model in one process: loss, clip norm, and every parameter's gradient.

Bars in float32: loss within 1e-6, gradients within 1e-5 relative L2, norm within 1e-5 relative.
"""

from __future__ import annotations

import itertools

import pytest

from tests import jobs, models

SINGLE = ("GPipe", "1F1B")
VIRTUAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
MESHES = [m for m in itertools.product((1, 2, 4), repeat=3) if m[0] * m[1] * m[2] in (2, 4, 8)]
NINE_HEADS = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=36)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "granite", "olmo2")


def mesh_config(pp: int, dp: int, tp: int, schedule: str = "1F1B", **more) -> dict:
    """A float32 config that microbatches where there is a pipeline."""
    config = dict(pp=pp, dp_shard=dp, tp=tp, compute_dtype="float32", **more)
    if pp > 1:
        config |= dict(schedule=schedule, virtual_stages=2 if schedule in VIRTUAL else 1, microbatches=pp)
    return config


def world(config: dict) -> int:
    return config.get("pp", 1) * config.get("dp_shard", 1) * config.get("dp_replicate", 1) * config.get("tp", 1)


def assert_parity(pool, config: dict, batches: list[dict], family="llama", changes=None, plan="auto", loss_bar=1e-6):
    """Run ``batches`` as successive accumulated calls on the mesh and compare with one process."""
    results = pool.run(world(config), jobs.gradients, config, batches, family, changes, plan)
    assert_results(results, batches, family, changes, loss_bar)
    return results


def assert_results(results: list[dict], batches: list[dict], family="llama", changes=None, loss_bar=1e-6, source=None):
    """What `jobs.gradients` gave on each rank is what one process gives, of ``source`` where that is given."""
    losses, grads = models.reference(source or models.tiny_model(family, **(changes or {})), *batches)
    for rank, result in enumerate(results):
        for got, want in zip(result["losses"], losses, strict=True):
            assert abs(got - want) <= loss_bar, f"loss {got} on rank {rank}, one process {want}"
        assert result["norm"] == pytest.approx(models.global_norm(grads), rel=1e-5)
    got = results[0]["grads"]
    assert list(got) == list(grads), "names or order differ from the unmodified model's"
    errors = {name: models.relative(got[name], grads[name]) for name in grads}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, f"gradient of {worst} is {errors[worst]:.1e} off"


def mesh_cases():
    """Every mesh, schedule and sequence parallelism, with every checkpointing mode up to 4 ranks, by turns on 8."""
    modes, turn = ("none", "selective", "full"), 0
    for pp, dp, tp in MESHES:
        schedules = (*SINGLE, *VIRTUAL) if pp > 1 else ("1F1B",)
        for schedule, sp in itertools.product(schedules, (True, False) if tp > 1 else (False,)):
            tag = f"{pp}x{dp}x{tp}" + (f"-{schedule}" if pp > 1 else "") + ("-sp" if sp else "")
            turn += 1
            for mode in modes if pp * dp * tp < 8 else modes[turn % 3 :][:1]:
                yield pytest.param(pp, dp, tp, schedule, sp, mode, id=f"{tag}-{mode}")


@pytest.mark.parametrize(("pp", "dp", "tp", "schedule", "sp", "checkpoint"), list(mesh_cases()))
def test_gradients_equal_one_process(pool, pp, dp, tp, schedule, sp, checkpoint):
    config = mesh_config(pp, dp, tp, schedule, sequence_parallel=sp, activation_checkpoint=checkpoint)
    batch = models.make_batch(rows=max(8, 2 * pp * dp), kind="ragged")
    assert_parity(pool, config, [batch], changes=dict(num_hidden_layers=max(3, 2 * pp)))


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(pool, family, mesh):
    assert_parity(pool, mesh_config(*mesh), [models.make_batch(kind="ragged")], family)


@pytest.mark.parametrize("kind", ["full", "ragged", "left", "packed"])
@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_and_positions_reach_every_stage(pool, family, mesh, kind):
    assert_parity(pool, mesh_config(*mesh), [models.make_batch(kind=kind)], family)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2), (1, 1, 4)], ids=str)
@pytest.mark.parametrize("seq", [15, 17, 3])
def test_sequence_lengths_that_tp_does_not_divide(pool, mesh, seq):
    assert_parity(pool, mesh_config(*mesh), [models.make_batch(seq=seq)])


@pytest.mark.parametrize("sp", [True, False], ids=["sp", ""])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        dict(vocab_size=97),
        dict(vocab_size=97, tie_word_embeddings=True),
        dict(intermediate_size=65),
        dict(num_key_value_heads=1),
        dict(num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=36),
        dict(num_attention_heads=6, num_key_value_heads=2, head_dim=8, hidden_size=36),
        dict(num_attention_heads=7, num_key_value_heads=1, head_dim=8, hidden_size=35),
        dict(attention_bias=True, mlp_bias=True),
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_sizes_that_tp_does_not_divide(pool, changes, tp, sp):
    batch = models.make_batch(kind="ragged", vocab=changes.get("vocab_size", 96))
    assert_parity(pool, mesh_config(1, 1, tp, sequence_parallel=sp), [batch], changes=changes)


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_head_norms_with_shared_and_padded_heads(pool, family):
    changes = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=8, hidden_size=36)
    assert_parity(
        pool, mesh_config(1, 2, 2), [models.make_batch(kind="ragged")], family, changes if family == "qwen3" else None
    )
    assert_parity(pool, mesh_config(2, 1, 4), [models.make_batch(kind="ragged")], family)


@pytest.mark.parametrize("schedule", [*SINGLE, *VIRTUAL])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 2), (4, 1, 1)], ids=str)
def test_tied_embeddings_across_stages(pool, mesh, schedule):
    changes = dict(tie_word_embeddings=True, num_hidden_layers=8)
    assert_parity(pool, mesh_config(*mesh, schedule), [models.make_batch(kind="ragged")], changes=changes)


@pytest.mark.parametrize(
    "config", [dict(dp_shard=2), dict(tp=2), dict(dp_replicate=2, dp_shard=2), dict(dp_shard=2, tp=2)], ids=str
)
def test_tied_embeddings_without_a_pipeline(pool, config):
    assert_parity(pool, config, [models.make_batch(kind="ragged")], changes=dict(tie_word_embeddings=True))


@pytest.mark.parametrize(
    "config",
    [
        dict(dp_replicate=2, dp_shard=2),
        dict(dp_replicate=2, dp_shard=2, tp=2),
        dict(pp=2, dp_replicate=2, dp_shard=2, microbatches=2),
        dict(pp=2, dp_replicate=2, dp_shard=1, tp=2, microbatches=2),
    ],
    ids=str,
)
def test_hybrid_sharded_data_parallel(pool, config):
    assert_parity(pool, config, [models.make_batch(kind="ragged")])


@pytest.mark.parametrize(
    ("layers", "stage_layers", "pp", "schedule"),
    [
        (5, None, 2, "1F1B"),
        (6, None, 4, "1F1B"),
        (7, (3, 4), 2, "1F1B"),
        (7, (1, 3, 1, 2), 2, "Interleaved1F1B"),
        (5, (1, 2, 1, 1), 2, "ZBVZeroBubble"),
        (30, None, 4, "1F1B"),
    ],
)
def test_any_number_of_layers_on_any_stages(pool, layers, stage_layers, pp, schedule):
    config = mesh_config(pp, 1, 1, schedule, stage_layers=stage_layers)
    # 30 layers of these large weights amplify rounding; smaller ones keep the comparison about the split.
    changes = dict(num_hidden_layers=layers, initializer_range=0.2 if layers < 10 else 0.08)
    assert_parity(pool, config, [models.make_batch(kind="ragged")], changes=changes)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "config",
    [
        mesh_config(1, 1, 2),
        mesh_config(2, 2, 2),
        mesh_config(1, 2, 2) | dict(microbatches=2),
        mesh_config(2, 1, 2, "ZBVZeroBubble"),
    ],
    ids=str,
)
def test_gradients_accumulate_over_calls(pool, family, config):
    batches = [models.make_batch(kind="ragged", seed=s) for s in (1, 2, 3)]
    changes = dict(tie_word_embeddings=True)
    assert_parity(pool, config, batches, family, changes)


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 3), (2, 4), (5, 2), (7, 7)])
def test_rows_that_microbatches_do_not_divide(pool, rows, microbatches):
    config = mesh_config(2, 1, 1) | dict(microbatches=microbatches)
    assert_parity(pool, config, [models.make_batch(rows=rows, kind="ragged")])
    assert_parity(pool, dict(dp_shard=1, microbatches=microbatches), [models.make_batch(rows=rows, kind="ragged")])


@pytest.mark.parametrize("reshard", [None, True])
def test_dp_ranks_may_have_other_numbers_of_rows(pool, reshard):
    """5 rows over two ranks; with weights gathered anew for each microbatch, all must run as many of them."""
    config = mesh_config(2, 2, 1, reshard_after_forward=reshard)
    assert_parity(pool, config, [models.make_batch(rows=5, kind="ragged")])


@pytest.mark.parametrize("config", [mesh_config(1, 2, 2), mesh_config(2, 2, 1), mesh_config(2, 1, 2)], ids=str)
def test_batches_given_as_a_list_are_one_global_batch(pool, config):
    whole = models.make_batch(kind="ragged")
    losses, grads = models.reference(models.tiny_model(), whole)
    got = pool.run(world(config), jobs.gradients_of_list, config, whole, 2)[0]
    assert got["losses"][0] == pytest.approx(losses[0], abs=1e-6)
    assert max(models.relative(got["grads"][n], grads[n]) for n in grads) <= 1e-5


@pytest.mark.parametrize(
    "config", [dict(dp_shard=2), dict(tp=2), dict(dp_shard=2, tp=2), dict(tp=2, sequence_parallel=False)], ids=str
)
def test_a_plain_loop_gives_the_same_gradients(pool, config):
    batches = [models.make_batch(kind="ragged", seed=s) for s in (1, 2)]
    losses, grads = models.reference(models.tiny_model("qwen3"), *batches)
    results = pool.run(world(config), jobs.plain_loop, config, batches, "qwen3")
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
        assert models.relative(result["logits"], result["reference_logits"]) < 1e-5
    assert max(models.relative(results[0]["grads"][n], grads[n]) for n in grads) <= 1e-5


@pytest.mark.parametrize(
    "config",
    [
        mesh_config(1, 2, 2),
        mesh_config(2, 1, 2),
        mesh_config(2, 1, 1, "ZBVZeroBubble"),
        mesh_config(2, 2, 1, "Interleaved1F1B"),
        mesh_config(1, 1, 2),
    ],
    ids=str,
)
def test_evaluation_between_steps_with_other_shapes(pool, config):
    train = [models.make_batch(kind="ragged", seed=1), models.make_batch(kind="ragged", seed=2, seq=12)]
    held_out = models.make_batch(rows=4, seq=10, seed=9, kind="left")
    reference = models.tiny_model()
    want_eval = models.reference_loss(reference, held_out).item()
    losses, grads = models.reference(reference, *train)
    results = pool.run(world(config), jobs.train_eval_train, config, train, held_out)
    for result in results:
        assert result["evals"] == pytest.approx([want_eval] * 3, abs=1e-6)
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
    assert max(models.relative(results[0]["grads"][n], grads[n]) for n in grads) <= 1e-5


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (mesh_config(1, 2, 2), None),
        (mesh_config(2, 2, 2), dict(tie_word_embeddings=True)),
        (mesh_config(2, 1, 2, "ZBVZeroBubble"), dict(tie_word_embeddings=True)),
        (mesh_config(1, 1, 2), dict(NINE_HEADS, vocab_size=97)),
        (mesh_config(1, 1, 4), dict(num_attention_heads=7, num_key_value_heads=1, head_dim=8, hidden_size=35)),
        (dict(dp_replicate=2, dp_shard=2, tp=2), None),
    ],
    ids=str,
)
def test_five_adamw_steps_with_clipping(pool, config, changes):
    batches = [models.make_batch(kind="ragged", seed=s, vocab=(changes or {}).get("vocab_size", 96)) for s in range(5)]
    want = jobs.adamw_steps_in_one_process(batches, changes)
    results = pool.run(world(config), jobs.adamw_steps, config, batches, changes)
    for result in results:
        assert result["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(want["norms"], rel=1e-5)
    params = results[0]["params"]
    assert list(params) == list(want["params"])
    assert max(models.relative(params[n], p) for n, p in want["params"].items()) <= 1e-5


@pytest.mark.parametrize(
    "config", [mesh_config(1, 2, 2), mesh_config(2, 1, 2), mesh_config(2, 2, 1, "ZBVZeroBubble")], ids=str
)
def test_no_counted_token_gives_zero_loss_and_zero_gradients(pool, config):
    batch = models.make_batch()
    batch["labels"][:] = -100
    for result in pool.run(world(config), jobs.gradients, config, [batch]):
        assert result["losses"] == [0.0]
        assert result["norm"] == 0.0
        assert all(not g.any() for g in result["grads"].values() if g is not None)


# bfloat16 keeps 8 bits: one rounding is 2**-9 relative, and gradients pass some tens of them. The mesh must be no
# further from the float32 truth than one process in bfloat16 is, or half as much again for another order of rounding.
@pytest.mark.parametrize(
    "config", [dict(dp_shard=2), dict(tp=2), mesh_config(2, 1, 2), mesh_config(2, 2, 2, "ZBVZeroBubble")], ids=str
)
def test_bfloat16_compute_with_float32_reduction(pool, config):
    batch = models.make_batch(kind="ragged")
    _, exact = models.reference(models.tiny_model(initializer_range=0.08), batch)
    changes = dict(initializer_range=0.08)
    alone = pool.run(1, jobs.gradients, dict(compute_dtype="bfloat16"), [batch], "llama", changes)[0]["grads"]
    mesh = pool.run(world(config), jobs.gradients, config | dict(compute_dtype="bfloat16"), [batch], "llama", changes)[
        0
    ]["grads"]
    total = sum(g.double().norm() ** 2 for g in exact.values()) ** 0.5
    off = {
        k: (sum((v[n].double() - exact[n].double()).norm() ** 2 for n in exact) ** 0.5 / total).item()
        for k, v in [("alone", alone), ("mesh", mesh)]
    }
    assert all(g.dtype.is_floating_point and g.dtype.itemsize == 4 for g in mesh.values())
    assert 0 < off["mesh"] <= 1.5 * off["alone"], off


@pytest.mark.parametrize(
    "config",
    [
        mesh_config(1, 2, 1, reshard_after_forward=False) | dict(microbatches=2),
        mesh_config(2, 2, 1, reshard_after_forward=True) | dict(microbatches=4),
        mesh_config(2, 2, 2, "Interleaved1F1B", reshard_after_forward=True, activation_checkpoint="full"),
    ],
    ids=["1x2x1-gathered-once", "2x2x1-gathered-anew", "2x2x2-gathered-anew"],
)
def test_when_weights_are_gathered(pool, config):
    assert_parity(pool, config, [models.make_batch(kind="ragged")] * 2)
