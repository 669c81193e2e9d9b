"""The public surface: what may be given to `parallelize_model`, and what its model does and refuses."""

from __future__ import annotations

import pytest
import torch

from tests import jobs_surface as jobs
from tests import models
from tests.bug_models import assert_gradients_close
from tests.test_parity import mesh_config


def test_calling_a_pipeline_names_forward_backward(pool):
    for messages in pool.run(2, jobs.call_of_a_pipeline, mesh_config(2, 1, 1), models.make_batch()):
        assert len(messages) == 2
        assert all("use forward_backward(batch) to train" in message for message in messages)


def test_an_accelerate_config_gives_the_model_of_the_same_sizes(pool):
    for result in pool.run(4, jobs.of_accelerate, dict(dp_shard=2, tp=2), models.make_batch(kind="ragged")):
        assert result["accelerate"] == result["meshpar"]
        assert result["accelerate"][2:] == (("pp", "dp", "tp"), (1, 2, 2))


def test_without_a_config_all_ranks_are_shards(pool):
    batch = models.make_batch(kind="ragged")
    want = models.reference_loss(models.tiny_model(), batch).item()
    for result in pool.run(2, jobs.by_default, batch):
        assert result["shape"] == (1, 2, 1)
        assert (result["config"].dp_shard, result["config"].compute_dtype) == (2, "bfloat16")
        assert result["losses"] == pytest.approx([want], rel=2e-2)  # bfloat16 keeps 8 bits


@pytest.mark.parametrize(
    ("dtype", "config"),
    [(torch.bfloat16, None), ("bfloat16", dict(tp=2)), (torch.float32, dict(tp=2, param_dtype="bfloat16"))],
    ids=str,
)
def test_dtype_is_what_parameters_are_stored_in(pool, dtype, config):
    """It goes before the config's param_dtype."""
    stored = getattr(torch, str(dtype).removeprefix("torch."))
    results = pool.run(2, jobs.stored_as, config, dtype)
    for result in results:
        assert result["parameters"] == result["gradients"] == result["moments"] == {stored}
        assert result["config"] == str(stored).removeprefix("torch.")
    for name, p in models.tiny_model().named_parameters():
        assert torch.equal(results[0]["weights"][name], p.to(stored))


@pytest.mark.parametrize("started", [True, False], ids=["init_distributed", "by-parallelize_model"])
def test_without_torchrun_the_world_is_this_process(pool, started):
    batch = models.make_batch(kind="ragged")
    [result] = pool.run(1, jobs.without_torchrun, batch, started)
    assert result["world"] == (1, 0, "gloo")
    assert result["devices"] == ((torch.device("cpu"),) * 2 if started else (None, None))
    want = models.reference_loss(models.tiny_model(), batch).item()
    assert result["loss"] == pytest.approx(want, abs=1e-6)


def test_full_tensors_of_something_else_are_refused(pool):
    [message] = pool.run(1, jobs.full_tensors_of, "x")
    assert message == 'full_tensors takes "param" or "grad", not \'x\''


def test_what_would_go_past_the_sums_over_the_mesh_is_refused(pool):
    actions = (jobs.assign_state, jobs.step_without_gradients, jobs.step_with_a_hook, jobs.call_with_a_hook, jobs.step)
    for assign, no_grad, *hooks, last in pool.run(2, jobs.messages_of, dict(tp=2), *actions):
        assert assign.startswith("load_state_dict(assign=True) would put other parameters in place")
        assert no_grad.startswith("forward_backward makes gradients, and torch.no_grad() or")
        assert all(text.startswith("model.embed_tokens.weight has a hook on its gradient") for text in hooks)
        assert last == "no error"


def test_a_config_of_another_type_is_refused(pool):
    [[message]] = pool.run(1, jobs.messages_of, dict(dp_shard=1), jobs.set_up_by_a_dict)
    assert message == "config is a dict; pass a ParallelConfig or an accelerate.ParallelismConfig"


def test_an_evaluation_leaves_each_module_s_mode_as_it_was(pool):
    [(before, after)] = pool.run(1, jobs.modes_after_an_evaluation, dict(dp_shard=1), models.make_batch())
    assert before == after
    assert len(before) == 5  # the MLP, its three projections and its activation


def test_autocast_and_copies_are_refused_with_what_to_do_instead(pool):
    actions = (jobs.step_with_autocast, jobs.call_with_autocast, jobs.copy_model, jobs.pickle_model, jobs.step)
    for step, call, copied, pickled, last in pool.run(2, jobs.messages_of, dict(tp=2), *actions):
        assert step == call
        assert step.startswith("torch.autocast is active; ParallelConfig's compute_dtype says what")
        assert copied == pickled
        assert copied.startswith("a ParallelModel holds process groups, which cannot be copied or pickled")
        assert last == "no error"


@pytest.mark.parametrize("config", [dict(dp_shard=2, tp=2), mesh_config(2, 1, 2), mesh_config(2, 2, 1)], ids=str)
def test_a_model_that_ran_in_inference_mode_trains(pool, config):
    batch = models.make_batch(kind="ragged")
    losses, grads = models.reference(models.tiny_model(), batch)
    results = pool.run(4, jobs.first_run_in_inference_mode, config, batch)
    for result in results:
        assert result["losses"] == pytest.approx(losses * len(result["losses"]), abs=1e-6)
    assert_gradients_close(results[0]["grads"], grads)


@pytest.mark.parametrize("sizes", [(1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 1, 2)], ids=str)
def test_a_callers_mesh_may_have_replicas(pool, sizes):
    batch, config = models.make_batch(kind="ragged"), dict(compute_dtype="float32", microbatches=2)
    losses, grads = models.reference(models.tiny_model(), batch)
    results = pool.run(4, jobs.hybrid_mesh_of_the_caller, sizes, config, batch)
    for rank, result in enumerate(results):
        dp = sizes[1] * sizes[2]
        assert result["same"]
        assert result["sizes"] == sizes
        assert result["dp"] == (dp, rank // sizes[3] % dp)
        assert result["loss"] == pytest.approx(losses[0], abs=1e-6)
        assert result["norm"] == pytest.approx(models.global_norm(grads), rel=1e-5)
    assert_gradients_close(results[0]["grads"], grads)


def test_one_rank_finds_and_all_have_it(pool):
    found = pool.run(3, jobs.found_on_first_rank, None)
    assert found == [(0, "of rank 0", 1), (0, "of rank 0", 0), (0, "of rank 0", 0)]


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [(ValueError, ("ValueError", "tp is 3", 0)), (jobs.Unsendable, ("RuntimeError", "Unsendable: tp is 3", 0))],
)
def test_what_one_rank_refuses_all_refuse(pool, error, elsewhere):
    first, *others = pool.run(3, jobs.found_on_first_rank, error)
    assert first == (error.__name__, "tp is 3", 1)
    assert others == [elsewhere] * 2


def test_ranks_that_were_given_other_plans_are_told(pool):
    for message in pool.run(2, jobs.other_overrides):
        assert message.startswith("rank 1 was given another model, config or plan than rank 0")
