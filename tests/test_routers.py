"""The routers' balance loss beyond Mixtral, whose own numbers are among the bug reports (T31A), and what is refused."""

from __future__ import annotations

import logging

import pytest

from meshpar import ParallelConfig
from meshpar.load import skeleton_from_config
from meshpar.tp_plan import make_plan
from tests import jobs_families as jobs
from tests import models, sweep
from tests.bug_models import assert_gradients_close
from tests.tiny_families import tiny_config, tiny_model


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """transformers warns of every odd size in a tiny config."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("sp", [True, False], ids=["sp", ""])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "olmoe", "granitemoe", "phimoe"])
def test_the_balance_loss_is_that_of_one_process(pool, model_type, sp):
    source, batch = tiny_model(model_type, **jobs.ROUTED), models.make_batch(4, 16)
    outputs = source(**batch, use_cache=False)
    outputs.loss.backward()
    assert outputs.loss - models.reference_loss(source, batch) > 0.9, "a term that shows"
    results = pool.run(2, jobs.balance, model_type, sweep.config_of(sweep.TP, sp), batch)
    for result in results:
        assert result["loss"] == pytest.approx(outputs.loss.item(), abs=1e-6)
    assert_gradients_close(results[0]["grads"], {n: p.grad for n, p in source.named_parameters()})


def test_a_balance_loss_of_rows_that_fill_up_is_refused_on_every_rank(pool):
    """7 rows: the second dp rank has 3, of which two microbatches make 4."""
    config = dict(dp_shard=2, microbatches=2)
    for message in pool.run(2, jobs.balance_refused, "mixtral", config, models.make_batch(7, 16)):
        assert "the routers' balance loss would see rows that fill a batch up" in message
        assert "set output_router_logits to false" in message


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("bamba", dict(z_loss_coefficient=0.001), r"^BambaForCausalLM's config asks for a z-loss.* to 0$"),
        (
            "deepseek_v3",
            dict(output_router_logits=True),
            r"^DeepseekV3ForCausalLM's config asks for .*\(output_router_logits\), whose coefficient .* does not find",
        ),
    ],
)
def test_router_losses_that_cannot_be_added_are_refused(model_type, changes, message):
    skeleton = skeleton_from_config(tiny_config(model_type, **changes))
    with pytest.raises(ValueError, match=message):
        make_plan(skeleton, ParallelConfig(dp_shard=1))
