"""Steps that are not one forward and one backward: sums of losses, forwards alone, failed steps, frozen parameters."""

from __future__ import annotations

import pytest

from tests import jobs, models
from tests.test_parity import mesh_config, world


def assert_close(got: dict, want: dict) -> None:
    errors = {name: models.relative(got[name], want[name]) for name in want}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-5, f"gradient of {worst} is {errors[worst]:.1e} off"


@pytest.mark.parametrize("config", [dict(tp=2), dict(dp_shard=2), dict(dp_shard=2, tp=2)], ids=str)
def test_losses_summed_into_one_backward(pool, config):
    batches = [models.make_batch(kind="ragged", seed=s) for s in (1, 2)]
    _, grads = models.reference(models.tiny_model("qwen3"), *batches)
    assert_close(pool.run(world(config), jobs.two_losses_in_one_backward, config, batches, "qwen3")[0]["grads"], grads)


@pytest.mark.parametrize("config", [dict(dp_shard=2), dict(tp=2), mesh_config(2, 1, 2)], ids=str)
def test_a_forward_alone_does_not_freeze_the_weights(pool, config):
    batches = [models.make_batch(kind="ragged", seed=s) for s in (1, 2, 3)]
    model = models.tiny_model()
    want = []
    for batch in batches:
        loss = models.reference_loss(model, batch)
        loss.backward()
        want.append(loss.item())
        for p in model.parameters():
            p.data -= 0.5 * p.grad
            p.grad = None
        want.append(models.reference_loss(model, batch).item())
    for got in pool.run(world(config), jobs.forward_alone_between_steps, config, batches):
        assert got == pytest.approx(want, rel=2e-5)


@pytest.mark.parametrize(
    "config",
    [dict(tp=2, microbatches=2), dict(dp_shard=2, microbatches=2), dict(dp_replicate=2, dp_shard=2, microbatches=2)],
    ids=str,
)
def test_a_step_after_a_failed_one_is_right(pool, config):
    batch = models.make_batch(kind="ragged")
    losses, grads = models.reference(models.tiny_model(), batch)
    result = pool.run(world(config), jobs.step_after_a_failed_one, config, batch)[0]
    assert result["losses"] == pytest.approx(losses, abs=1e-6)
    assert_close(result["grads"], grads)


def test_a_first_step_that_fails_ends_with_what_each_rank_met(pool):
    """The last stage has not run a forward yet when the first one is gone."""
    first, last = pool.run(2, jobs.first_step_that_fails, mesh_config(2, 1, 1), models.make_batch())
    assert "out of memory" in first
    assert last.startswith("RuntimeError")


@pytest.mark.parametrize("config", [dict(tp=2), mesh_config(2, 1, 1), mesh_config(2, 1, 2)], ids=str)
def test_parameters_unfrozen_after_construction(pool, config):
    changes = dict(tie_word_embeddings=True)
    batch = models.make_batch(kind="ragged")
    losses, grads = models.reference(models.tiny_model("qwen3", **changes), batch)
    result = pool.run(world(config), jobs.unfrozen_later, config, batch, "qwen3", changes)[0]
    assert result["losses"] == pytest.approx(losses, abs=1e-6)
    assert_close(result["grads"], grads)


def test_accumulation_with_replicas_and_microbatches(pool):
    config = dict(dp_replicate=2, dp_shard=2, microbatches=2, compute_dtype="float32")
    batches = [models.make_batch(kind="ragged", seed=s) for s in (1, 2)]
    losses, grads = models.reference(models.tiny_model(), *batches)
    result = pool.run(4, jobs.gradients, config, batches)[0]
    assert result["losses"] == pytest.approx(losses, abs=1e-6)
    assert_close(result["grads"], grads)


def test_dp_ranks_with_different_numbers_of_batches_are_refused(pool):
    for message in pool.run(2, jobs.refusal, dict(dp_shard=2), [1, 2]):
        assert "all must give the same" in message
    for message in pool.run(2, jobs.refusal, dict(dp_shard=2), [0, 0]):
        assert "the list of batches is empty" in message
