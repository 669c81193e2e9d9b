"""A caller's own forward hooks: on every mesh they do what they do in one process."""

import pytest

from tests import jobs_hooks as jobs
from tests import models
from tests.test_parity import assert_results, mesh_config, world

HOOKED = ("model.embed_tokens", "model.layers.1", "model.layers.2.mlp", "model.norm")
BEHIND = "what the embedding gives was changed before the first layer"


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_hooks_of_the_model_and_of_the_caller_change_what_modules_give(pool, mesh, sp):
    """Layer 1 is the last one of its stage at pp=2. Under sp, a hook on the embedding must be there from the start."""
    config, batch = mesh_config(*mesh, sequence_parallel=sp), models.make_batch(kind="ragged")
    early = HOOKED[:1] if sp else ()
    results = pool.run(world(config), jobs.gradients_with_hooks, config, batch, early, HOOKED[len(early) :])
    source = models.tiny_model()
    jobs.add_hooks(source, HOOKED)
    assert_results(results, [batch], source=source)
    assert jobs.gradients_differ(source, models.tiny_model(), batch), "the hooks change nothing"


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_change_to_terms_of_the_embedding_is_refused(pool, mesh, inplace):
    config, batch = mesh_config(*mesh), models.make_batch()
    errors = pool.run(world(config), jobs.error_with_late_hook, config, batch, "model.embed_tokens", inplace)
    first_stage = errors[: mesh[2]]
    assert all(BEHIND in error and "sequence_parallel=False" in error for error in first_stage)
    assert all("Connection" in error or "closed" in error for error in errors[mesh[2] :]), errors


def test_one_rank_alone_may_look_at_what_the_embedding_gives(pool):
    config, batch = mesh_config(1, 1, 2), models.make_batch()
    results = pool.run(2, jobs.gradients_seen_by_one_rank, config, batch, "model.embed_tokens")
    assert_results(results, [batch])
    assert [result["seen"] for result in results] == [1, 0]
