"""Public bug reports of this field as tests: heads, vocabulary and sequences over tp, norms, recomputation, dropout.

The ids in docstrings name the case. "close" means: loss within 1e-5, each gradient within 1e-5 relative L2.
"""

from __future__ import annotations

import pytest
import torch
from transformers import MixtralConfig

from tests import jobs_bugs as jobs
from tests import jobs_dropout, models
from tests.bug_models import (
    LLAMA,
    Folders,
    assert_close,
    assert_gradients_close,
    label,
    mesh,
    one_process,
    tokens,
    whole_batch,
    world,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("bug-models"))


def assert_logits_close(pool, folders, config: dict, batch: dict, **changes) -> None:
    """pp=1: whole logits on every rank within 1e-4 of one process."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    with torch.no_grad():
        want = folders.model(**changes)(**inputs, use_cache=False).logits
    for [logits] in pool.run(world(config), jobs.logits, config, folders(**changes), [inputs]):
        assert (logits - want).abs().max() < 1e-4


SGD_STEPS = 3


def sgd_in_one_process(model, batches: list[dict], lr: float) -> tuple[list[float], dict, dict]:
    """Losses, the first gradients and the weights after; ``model`` is not changed."""
    before = {n: t.clone() for n, t in model.state_dict().items()}
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=lr), [], None
    for batch in batches:
        optimizer.zero_grad()
        loss = models.reference_loss(model, batch)
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.load_state_dict(before)
    return losses, first, after


@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 1), (2, 1, 2)], ids=str)
def test_tied_embeddings_stay_one_parameter(pool, folders, sizes):
    """T03A: untied by loading or wrapping, the embedding trains on half its gradient."""
    config, batches = mesh(*sizes), [whole_batch(4, 16)] * SGD_STEPS
    losses, grads, params = sgd_in_one_process(folders.model(tie_word_embeddings=True), batches, 0.1)
    results = pool.run(
        world(config), jobs.optimize, config, folders(tie_word_embeddings=True), batches, optimizer="SGD", lr=0.1
    )
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-5)
        assert config["pp"] > 1 or result["distinct"] == 38
    assert_gradients_close(results[0]["first_grads"], grads)
    assert_gradients_close(results[0]["params"], params)
    for step in range(SGD_STEPS):
        copies = [copy for result in results[:: world(config) // config["pp"]] for copy in result["ends"][step]]
        assert len(copies) >= 2
        assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (2, 4), (1, 4)])
def test_fewer_kv_heads_than_tp_ranks(pool, folders, kv_heads, tp):
    """T04A: without replicated kv heads the forward dies in a reshape."""
    config, batch, changes = mesh(1, 1, tp), whole_batch(4, 16), dict(num_key_value_heads=kv_heads)
    assert_close(pool, folders, config, batch, **changes)
    assert_logits_close(pool, folders, config, batch, **changes)


def odd_vocabulary_batch() -> dict:
    """The last id of a vocabulary of 65 is among inputs and labels."""
    batch = whole_batch(2, 9)
    for row, column in ((0, 0), (0, 5), (1, 3), (1, 8)):
        batch["input_ids"][row, column] = batch["labels"][row, column] = 64
    return batch


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_twenty_steps_with_an_odd_vocabulary(pool, folders, sp):
    """T05A: the loss must not drift from one process."""
    config, batches = mesh(1, 1, 2, sequence_parallel=sp), [odd_vocabulary_batch()] * 20
    model = folders.model(vocab_size=65)
    assert_close(pool, folders, config, batches[0], vocab_size=65)
    assert_logits_close(pool, folders, config, batches[0], vocab_size=65)
    results = pool.run(2, jobs.optimize, config, folders(vocab_size=65), batches, optimizer="AdamW", lr=1e-3)
    optimizer, want = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for batch in batches:
        optimizer.zero_grad()
        loss = models.reference_loss(model, batch)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    model.load_state_dict(before)
    assert want[-1] < want[0] - 0.1
    for result in results:
        assert result["losses"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 1, 2)], ids=str)
def test_vocabulary_of_129(pool, folders, sizes, tied):
    assert_close(pool, folders, mesh(*sizes), whole_batch(4, 16), vocab_size=129, tie_word_embeddings=tied)


PHI3 = dict(num_hidden_layers=2)


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)], ids=str)
def test_fused_projections_are_cut_part_by_part(pool, folders, sizes):
    """T06A: a row split of [q|k|v] or [gate|up] hands each rank the wrong mix; at tp=4 two ranks share a kv head."""
    assert_close(pool, folders, mesh(*sizes), whole_batch(4, 16), family="phi3", **PHI3)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("seq", [8, 9, 7])
def test_sequence_parallel_with_any_length(pool, folders, seq, sizes):
    """T07A: shards glued as if they were equal."""
    config, batch = mesh(*sizes), whole_batch(2, seq)
    assert_close(pool, folders, config, batch)
    if config["pp"] == 1:
        assert_logits_close(pool, folders, config, batch)


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_norm_gradients_are_summed_and_equal_on_tp_peers(pool, folders, sizes, sp):
    """T37A: partial sums over sequence shards; declared replicated they come out twice as large, or unequal."""
    config, batches = mesh(*sizes, sequence_parallel=sp), [whole_batch(4, 16)] * SGD_STEPS
    losses, grads, params = sgd_in_one_process(folders.model(), batches, 0.1)
    results = pool.run(world(config), jobs.optimize, config, folders(), batches, optimizer="SGD", lr=0.1)
    assert results[0]["losses"] == pytest.approx(losses, abs=1e-5)
    assert_gradients_close(results[0]["first_grads"], grads)
    assert_gradients_close(results[0]["params"], params)
    for one, peer in zip(results[::2], results[1::2], strict=True):
        for what in ("norm_grads", "norm_weights"):
            for mine, yours in zip(one[what], peer[what], strict=True):
                assert mine
                assert all(torch.equal(mine[name], yours[name]) for name in mine)


@pytest.mark.parametrize(
    "config", [mesh(1, 1, 2), mesh(1, 1, 2, sequence_parallel=False), mesh(1, 2, 2), mesh(2, 1, 2)], ids=label
)
def test_checkpointing_changes_nothing(pool, folders, config):
    """T25A: what is computed again must see the layouts of the first pass."""
    grads = {}
    for mode in ("none", "selective", "full"):
        results = assert_close(pool, folders, config | dict(activation_checkpoint=mode), whole_batch(4, 16))
        grads[mode] = results[0]["grads"]
    assert_gradients_close(grads["selective"], grads["none"])
    assert_gradients_close(grads["full"], grads["none"])


def test_generation_is_refused(pool, folders):
    """T30A: sampling on each rank for itself picks different tokens."""
    for message in pool.run(2, jobs.generates, mesh(1, 1, 2), folders()):
        assert "does not generate" in message
        assert "save_pretrained" in message


ROUTED = dict(
    num_hidden_layers=2,
    intermediate_size=32,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
)


@pytest.mark.parametrize("config", [mesh(1, 1, 1), mesh(1, 1, 2), mesh(1, 1, 2, sequence_parallel=False)], ids=label)
def test_the_balance_loss_of_routers_is_that_of_one_process(pool, config):
    """T31A: lost, or with a wrong factor, it leaves the loss curve plausible and the routers untrained."""
    batch = whole_batch(4, 16)
    source = one_process("mixtral", **ROUTED)
    outputs = source(**batch, use_cache=False)
    expected = outputs.loss
    expected.backward()
    assert expected.item() == pytest.approx(5.5689, abs=5e-5)
    assert outputs.aux_loss.item() == pytest.approx(2.0595, abs=5e-5)
    results = pool.run(world(config), jobs.train_routed, config, ROUTED, [batch])
    assert results[0]["losses"][0] == pytest.approx(expected.item(), abs=1e-6)
    assert_gradients_close(results[0]["grads"], {n: p.grad for n, p in source.named_parameters()})


@pytest.mark.parametrize("config", [mesh(1, 2, 1), mesh(1, 2, 2), mesh(1, 1, 2)], ids=label)
def test_the_balance_loss_is_the_mean_over_microbatches(pool, config):
    """T31A: its unit is one microbatch of one dp rank; a list of batches is as many microbatches."""
    batch, source = whole_batch(4, 16), one_process("mixtral", **ROUTED)
    halves = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    losses = [source(**half, use_cache=False).loss / 2 for half in halves]
    sum(losses).backward()
    pieces = halves if config["dp_shard"] == 1 else [batch]
    results = pool.run(world(config), jobs.train_routed, config, ROUTED, pieces)
    assert results[0]["losses"][0] == pytest.approx(sum(losses).item(), abs=1e-6)
    assert_gradients_close(results[0]["grads"], {n: p.grad for n, p in source.named_parameters()})


def test_a_balance_loss_over_pipeline_stages_is_refused(pool):
    """T31A: each stage has routers of its own, and the loss is a product over all of them."""
    for message in pool.run(2, jobs.refusal, mesh(2, 1, 1), MixtralConfig(**{**LLAMA, **ROUTED})):
        assert "balance loss (output_router_logits)" in message
        assert "set pp to 1" in message


# Dropout

DROPOUT = {
    "llama": dict(attention_dropout=0.5),
    "starcoder2": dict(residual_dropout=0.3, embedding_dropout=0.1),
    "falcon": dict(attention_dropout=0.2, hidden_dropout=0.2),
}


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("family", ["llama", "starcoder2"])
def test_dropout_is_shared_by_tp_peers_and_not_by_dp_ranks(pool, folders, family, sp):
    """T15A: the same rows on both dp ranks, seeded by dp rank."""
    config, changes = mesh(1, 2, 2, sequence_parallel=sp), DROPOUT[family]
    batch = {k: v.repeat(2, 1) for k, v in whole_batch(2, 16).items()}
    results = pool.run(4, jobs_dropout.steps, config, folders(family, **changes), batch, SGD_STEPS)
    for one, peer in (results[:2], results[2:]):
        assert one["local_loss"] == peer["local_loss"]
        assert one["losses"] == peer["losses"]
        for mine, yours in zip(one["norm_weights"], peer["norm_weights"], strict=True):
            assert all(torch.equal(mine[name], yours[name]) for name in mine)
    assert abs(results[0]["local_loss"] - results[2]["local_loss"]) > 1e-4
    reference = folders.model(family, **changes)
    before = {n: t.clone() for n, t in reference.state_dict().items()}
    reference.load_state_dict(results[0]["params"])
    with torch.no_grad():
        want = models.reference_loss(reference, batch).item()
    reference.load_state_dict(before)
    for result in results:
        assert result["eval"] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_dropout_on_attention_differs_between_tp_ranks(pool, folders, sp):
    """T15A: with all heads alike, equal masks would show as equal attention outputs."""
    config = mesh(1, 1, 2, sequence_parallel=sp)
    folder = folders(num_key_value_heads=4, attention_dropout=0.5)
    one, peer = pool.run(2, jobs_dropout.attention_outputs_of_equal_heads, config, folder, tokens(2, 16))
    assert torch.equal(one["eval"], peer["eval"])
    assert models.relative(one["train"], peer["train"]) > 0.1


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_dropout_on_the_residual_follows_its_layout(pool, folders, sp):
    """T15A: one mask on replicated activations, one for each sequence shard."""
    config = mesh(1, 1, 2, sequence_parallel=sp)
    one, peer = pool.run(
        2, jobs_dropout.residual_masks, config, folders("starcoder2", residual_dropout=0.5), tokens(2, 16)
    )
    assert len(one) == 8, "attention and MLP of each layer"
    for mine, yours in zip(one, peer, strict=True):
        assert 0.4 < mine.float().mean() < 0.6
        assert torch.equal(mine, yours) != sp


@pytest.mark.parametrize(
    "config",
    [
        mesh(1, 1, 2),
        mesh(1, 1, 2, sequence_parallel=False),
        mesh(2, 1, 2),
        mesh(2, 1, 2, sequence_parallel=False, schedule="ZBVZeroBubble", virtual_stages=2, microbatches=4),
    ],
    ids=label,
)
def test_recomputation_and_backward_use_the_masks_of_the_forward(pool, folders, config):
    """T15A: the slope of the loss along its gradient is the gradient's norm only if both have the same masks."""
    changes = dict(attention_dropout=0.2, **DROPOUT["starcoder2"])
    grads = {}
    for mode in ("none", "selective", "full"):
        config = config | dict(activation_checkpoint=mode)
        result = pool.run(
            world(config), jobs_dropout.slope, config, folders("starcoder2", **changes), whole_batch(4, 16)
        )
        assert result[0]["slope"] == pytest.approx(result[0]["norm"], rel=2e-3)
        grads[mode] = result[0]["grads"]
    assert_gradients_close(grads["selective"], grads["none"])
    assert_gradients_close(grads["full"], grads["none"])


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_what_runs_whole_drops_alike(pool, folders, checkpointing):
    """T15A: attention that no rule splits, between layers that run on sequence shards."""
    config, folder = mesh(1, 1, 2, activation_checkpoint=checkpointing), folders("falcon", **DROPOUT["falcon"])
    for result in pool.run(2, jobs_dropout.slope, config, folder, whole_batch(4, 16)):
        assert result["slope"] == pytest.approx(result["norm"], rel=2e-3)


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_routers_jitter_alike(pool, folders, sp):
    """T15A: tp peers that send a token to different experts add up halves of different outputs."""
    config, folder = mesh(1, 1, 2, sequence_parallel=sp), folders("mixtral", router_jitter_noise=0.5)
    one, peer = pool.run(2, jobs_dropout.router_logits, config, folder, tokens(2, 16))
    still, _ = pool.run(2, jobs_dropout.router_logits, config, folders("mixtral"), tokens(2, 16))
    assert all(torch.equal(mine, yours) for mine, yours in zip(one, peer, strict=True))
    assert not torch.equal(one[0], still[0])


def test_tp_peers_with_different_seeds_are_refused(pool, folders):
    for message in pool.run(
        2, jobs_dropout.seeded_by_rank, mesh(1, 1, 2), folders("starcoder2", residual_dropout=0.5), whole_batch(2, 16)
    ):
        assert "tp peers have different random states" in message
        assert "torch.manual_seed" in message


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nothing_is_drawn_without_dropout(pool, folders, dropout):
    """In evaluation, and in training of a model that has none, the generators stay where they are."""
    folder = folders(attention_dropout=dropout)
    for result in pool.run(2, jobs_dropout.draws, mesh(1, 1, 2), folder, whole_batch(2, 16)):
        assert result == {"train": dropout > 0, "eval": False}


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_a_failed_forward_leaves_tp_peers_on_their_common_stream(pool, folders, sp):
    """The next step's masks on replicated activations would differ otherwise."""
    config, folder = mesh(1, 1, 2, sequence_parallel=sp), folders("starcoder2", **DROPOUT["starcoder2"])
    one, peer = pool.run(2, jobs_dropout.states_after_a_failed_forward, config, folder, whole_batch(2, 16))
    assert torch.equal(one, peer)
