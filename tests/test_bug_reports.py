"""Public bug reports of this field as tests: the loss, the gradient norm, accumulation, and what a pipeline carries.

The ids in docstrings name the case. "close" means: loss within 1e-5, each gradient within 1e-5 relative L2.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshpar.loss import count_targets, shift_labels
from tests import jobs_bugs as jobs
from tests import models
from tests.bug_models import Folders, assert_close, assert_gradients_close, label, mesh, tokens, whole_batch, world


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("bug-models"))


def test_the_reference_gives_the_reported_numbers(folders):
    """The setup itself: one process, without meshpar."""
    model = folders.model()
    assert sum(p.numel() for p in model.parameters()) == 41248
    assert len(list(model.parameters())) == 39
    [loss], grads = models.reference(model, whole_batch(4, 16))
    assert loss == pytest.approx(4.5619, abs=5e-5)
    assert models.global_norm(grads) == pytest.approx(5.94360, abs=5e-6)


# Loss normalisation, accumulation


def uneven_batch() -> dict:
    """3 targets in each of two rows, 15 in each of the other two."""
    batch = whole_batch(4, 16)
    batch["labels"][:2, 4:] = -100
    return batch


def test_ranks_with_few_targets_do_not_weigh_more(pool, folders):
    """T01A; the mean of rank means is 4.5940."""
    results = assert_close(pool, folders, mesh(1, 2, 1), uneven_batch())
    assert results[0]["losses"] == pytest.approx([4.4990], abs=5e-5)


def test_accumulation_steps_with_few_targets_do_not_weigh_more(pool, folders):
    """T01A."""
    _, grads = models.reference(folders.model(), uneven_batch())
    [result] = pool.run(1, jobs.train_in_pieces, mesh(1, 1, 1), folders(), uneven_batch(), 2)
    assert result["losses"] == pytest.approx([4.4990], abs=5e-5)
    assert_gradients_close(result["grads"], grads)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1), (1, 1, 1)], ids=str)
def test_rows_without_targets_add_nothing(pool, folders, sizes, pieces):
    """T32A: one dp rank, microbatch or accumulation step with nothing to predict."""
    batch, config = whole_batch(4, 16), mesh(*sizes)
    batch["labels"][2:] = -100
    want, grads = models.reference(folders.model(), {k: v[:2] for k, v in batch.items()})
    results = pool.run(world(config), jobs.train_in_pieces, config, folders(), batch, pieces)
    for result in results:
        assert result["losses"] == pytest.approx(want, abs=1e-5)
    assert_gradients_close(results[0]["grads"], grads)


@pytest.mark.parametrize(("schedule", "virtual"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_accumulation_on_a_pipeline_is_a_plain_sum(pool, folders, schedule, virtual):
    """T28A: the schedule's own scaling would give 1 : 1.5 : 1.75."""
    batches, config = [whole_batch(4, 8)] * 3, mesh(2, 1, 1, schedule=schedule, virtual_stages=virtual)
    for result in assert_close(pool, folders, config, *batches):
        one = result["norms"][0]
        assert result["norms"] == pytest.approx([one, 2 * one, 3 * one], rel=1e-5)


@pytest.mark.parametrize("config", [mesh(1, 1, 2), mesh(2, 1, 2), mesh(2, 1, 2, microbatches=4)], ids=label)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_head_norm_gradients_accumulate_once(pool, folders, config, calls):
    """Qwen3's q_norm and k_norm: a hook that reduces what is accumulated already gives 1.5x and 2.33x."""
    batches = [whole_batch(4, 16, seed) for seed in range(calls)]
    assert_close(pool, folders, config, *batches, family="qwen3", head_dim=8)


# Gradient norm


def test_clip_norm_is_over_all_stages(pool, folders):
    """T02A: clipping each stage by its own norm leaves 1.0 on both."""
    first, last = assert_close(pool, folders, mesh(2, 1, 1, stage_layers=(2, 2)), whole_batch(4, 16))
    assert first["reported"] == last["reported"] == pytest.approx(5.9436, abs=5e-5)
    assert first["stage_norm"] == pytest.approx(0.9631, abs=1e-4)
    assert last["stage_norm"] == pytest.approx(0.2693, abs=1e-4)
    assert first["norm_after"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        mesh(2, 2, 1),
        mesh(2, 1, 1, schedule="Interleaved1F1B", virtual_stages=2),
        mesh(2, 1, 1, schedule="ZBVZeroBubble", virtual_stages=2, microbatches=4),
        mesh(1, 2, 2),
        mesh(2, 1, 2),
    ],
    ids=label,
)
def test_clip_norm_is_over_the_whole_mesh(pool, folders, config):
    """T02A."""
    for result in assert_close(pool, folders, config, whole_batch(4, 16)):
        assert result["reported"] == pytest.approx(5.9436, abs=5e-5)
        assert result["norm_after"] == pytest.approx(1.0, abs=1e-5)


# Masks, positions, packing


def left_padded_batch() -> dict:
    batch = whole_batch(2, 12, 3)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :5] = batch["input_ids"][0, :5] = 0
    batch["labels"][0, :5] = -100
    return batch


@pytest.mark.parametrize(
    "config",
    [mesh(4, 1, 1), mesh(4, 1, 1, schedule="GPipe", microbatches=2), mesh(2, 1, 1), mesh(2, 1, 2)],
    ids=label,
)
def test_every_stage_sees_the_attention_mask(pool, folders, config):
    """T08A: left padding, as right padding hides a lost mask."""
    batch = left_padded_batch()
    without = {k: v for k, v in batch.items() if k != "attention_mask"}
    [masked], [unmasked] = (models.reference(folders.model(), b)[0] for b in (batch, without))
    assert masked == pytest.approx(4.8304, abs=5e-5)
    assert unmasked == pytest.approx(4.9415, abs=5e-5), "a lost mask shows"
    assert_close(pool, folders, config, batch)
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(2)]
    want = [models.reference_loss(folders.model(), row).item() for row in rows]
    for got in pool.run(world(config), jobs.losses_of_rows, config, folders(), batch):
        assert got == pytest.approx(want, abs=1e-5)


def packed_batch(ones_mask: bool) -> dict:
    """Documents of 6 and 10 tokens in one row: 14 targets."""
    ids = torch.cat((tokens(1, 6, 5), tokens(1, 10, 6)), dim=1)
    positions = torch.cat((torch.arange(6), torch.arange(10)))[None]
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions}
    batch["labels"][0, 6] = -100
    return batch | ({"attention_mask": torch.ones_like(ids)} if ones_mask else {})


def documents_alone(model) -> tuple[torch.Tensor, float, dict]:
    """Logits, loss and gradients of the two documents, each run by itself."""
    model.zero_grad()
    parts = [tokens(1, 6, 5), tokens(1, 10, 6)]
    logits = [model(part, use_cache=False).logits for part in parts]
    losses = [
        F.cross_entropy(out[0, :-1], part[0, 1:], reduction="sum") for out, part in zip(logits, parts, strict=True)
    ]
    loss = sum(losses) / 14
    loss.backward()
    return torch.cat(logits, dim=1).detach(), loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("ones_mask", [False, True], ids=["no-mask", "mask-of-ones"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 1, 2)], ids=str)
def test_packed_documents_do_not_see_each_other(pool, folders, sizes, ones_mask):
    """T08C: transformers looks for packing only where there is no mask; with a mask of ones the logits are 4.5 off."""
    batch, config = packed_batch(ones_mask), mesh(*sizes)
    want_logits, want_loss, want = documents_alone(folders.model())
    assert want_loss == pytest.approx(4.6992, abs=5e-5)
    results = pool.run(world(config), jobs.train, config, folders(), [batch])
    assert results[0]["losses"] == pytest.approx([want_loss], abs=1e-5)
    assert_gradients_close(results[0]["grads"], want)
    if config["pp"] == 1:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        for [logits] in pool.run(world(config), jobs.logits, config, folders(), [inputs]):
            assert (logits - want_logits).abs().max() < 1e-4


@pytest.mark.parametrize("sizes", [(1, 1, 2), (1, 1, 4), (2, 1, 2)], ids=str)
def test_labels_are_shifted_before_the_sequence_is_cut(pool, folders, sizes):
    """T09A: shifting each shard alone leaves 56 targets and loss 4.6078."""
    batch = whole_batch(4, 16)
    assert count_targets(shift_labels(batch["labels"])) == 60
    for result in assert_close(pool, folders, mesh(*sizes), batch):
        assert result["losses"] == pytest.approx([4.5619], abs=5e-5)


# Stages and microbatches


@pytest.mark.parametrize(("layers", "pp", "virtual"), [(6, 4, 1), (5, 2, 1), (7, 2, 2)])
def test_every_layer_is_on_exactly_one_stage(pool, folders, layers, pp, virtual):
    """T10A: integer division drops the remainder."""
    schedule = "1F1B" if virtual == 1 else "Interleaved1F1B"
    config = mesh(pp, 1, 1, schedule=schedule, virtual_stages=virtual)
    results = assert_close(pool, folders, config, whole_batch(4, 16), num_hidden_layers=layers)
    names = [name for result in results for name in result["names"]]
    want = [name for name, _ in folders.model(num_hidden_layers=layers).named_parameters()]
    assert len(names) == len(set(names))
    assert set(names) == set(want)
    sizes = [result["layers"] for result in results]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 3), (8, 5), (2, 4)])
def test_microbatches_that_do_not_divide_the_batch(pool, folders, rows, microbatches):
    """T12A: receive buffers of the first microbatch's size do not fit the others."""
    assert_close(pool, folders, mesh(2, 1, 1, microbatches=microbatches), whole_batch(rows, 8))


def test_sequence_length_may_change_between_steps(pool, folders):
    """T13A: train on 8, 12, 8, 8 tokens and evaluate on 10 in between."""
    batches = [whole_batch(4, seq, seed) for seed, seq in enumerate((8, 12, 8, 8))]
    held_out, model = whole_batch(4, 10, 9), folders.model()
    want_eval = models.reference_loss(model, held_out).item()
    results = pool.run(2, jobs.step_by_step, mesh(2, 1, 1), folders(), batches, held_out)
    for i, batch in enumerate(batches):
        [loss], grads = models.reference(model, batch)
        for steps in results:
            assert steps[i]["loss"] == pytest.approx(loss, abs=1e-5)
            assert steps[i]["eval"] == pytest.approx(want_eval, abs=1e-5)
        assert_gradients_close(results[0][i]["grads"], grads)


@pytest.mark.parametrize("microbatches", [2, 3, 4, 8])
def test_interleaved_stages_finish_when_a_rank_is_slow(pool, folders, microbatches):
    """T14A: activations of 0.25 to 1 MB, which a blocking send does not buffer."""
    changes = dict(hidden_size=128, max_position_embeddings=512)
    config = mesh(2, 1, 1, schedule="Interleaved1F1B", virtual_stages=2, microbatches=microbatches)
    batch = whole_batch(8, 512)
    with torch.no_grad():
        want = models.reference_loss(folders.model(**changes), batch).item()
    for losses in pool.run(2, jobs.slow_rank_steps, config, folders(**changes), batch, 10, timeout=90):
        assert losses == pytest.approx([want] * 10, abs=1e-5)


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_what_a_model_does_before_its_first_layer_is_done_once(pool, folders, schedule, virtual):
    """Granite scales its embeddings outside the embedding: a stage that starts from hidden states must not."""
    config = mesh(2, 1, 1, schedule=schedule, virtual_stages=virtual)
    changes = dict(embedding_multiplier=12.0, logits_scaling=3.0)
    assert_close(pool, folders, config, whole_batch(4, 16), family="granite", **changes)


@pytest.mark.parametrize("stage_layers", [(1, 3), (3, 1)])
def test_layers_keep_their_index_after_the_split(pool, folders, stage_layers):
    """Gemma2 chooses sliding or full attention by index: layers counted from 0 on each stage change the loss."""
    changes = dict(sliding_window=8, head_dim=8, query_pre_attn_scalar=8)
    assert_close(
        pool, folders, mesh(2, 1, 1, stage_layers=stage_layers), whole_batch(4, 16), family="gemma2", **changes
    )
