"""What meshpar refuses, with words that say why: batches that would train on something else, models it cannot split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshpar import ParallelConfig
from meshpar.batch import make_batch
from meshpar.tp_plan import make_plan
from tests import jobs_bugs, models
from tests import jobs_surface as jobs
from tests.bug_models import mesh, world
from tests.tiny_families import tiny_config

IDS = torch.arange(8).view(2, 4)
BATCH = {"input_ids": IDS, "labels": IDS}
PACKED, HOLED = torch.tensor([[0, 1, 0, 1]] * 2), torch.tensor([[1, 1, 1, 0]] * 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BATCH | {"tokens": IDS, "lengths": IDS}, r"keys lengths, tokens; meshpar takes input_ids, labels, atten"),
        ({"input_ids": IDS}, r"^batch lacks 'labels'$"),
        ({"labels": IDS}, r"^batch lacks 'input_ids'$"),
        (BATCH | {"input_ids": IDS + 89}, r"batch\['input_ids'\] has ids from 89 to 96; the vocabulary has 96"),
        (BATCH | {"input_ids": IDS - 1}, r"batch\['input_ids'\] has ids from -1 to 6"),
        (BATCH | {"labels": IDS + 89}, r"batch\['labels'\] has ids from 89 to 96; the vocabulary has 96"),
        (BATCH | {"labels": IDS - 1}, r"batch\['labels'\] has negative ids other than -100"),
        (BATCH | {"labels": IDS - 101}, r"batch\['labels'\] has ids from -101 to -94"),
        (BATCH | {"labels": IDS[:, :3]}, r"batch\['labels'\] has shape \[2, 3\], input_ids has \[2, 4\]"),
        (BATCH | {"labels": None}, r"^batch lacks 'labels'$"),
        (BATCH | {"labels": IDS.tolist()}, r"batch\['labels'\] is a list, not a torch tensor"),
        (BATCH | {"labels": IDS.float()}, r"batch\['labels'\] is torch\.float32; ids are torch\.int64 or torch\.int32"),
        (BATCH | {"input_ids": IDS.byte()}, r"batch\['input_ids'\] is torch\.uint8; ids are"),
        (BATCH | {"input_ids": IDS[0]}, r"batch\['input_ids'\] has shape \[4\]; it must be \[rows, seq\]"),
        (BATCH | {"input_ids": IDS[:, :0]}, r"batch\['input_ids'\] has shape \[2, 0\]; it must be"),
        (BATCH | {"labels": IDS[..., None]}, r"batch\['labels'\] has shape \[2, 4, 1\], input_ids has \[2, 4\]"),
        (BATCH | {"position_ids": IDS[0]}, r"batch\['position_ids'\] has shape \[4\], input_ids has \[2, 4\]"),
        (BATCH | {"attention_mask": torch.ones(2, 1, 4, 3)}, r"has shape \[2, 1, 4, 3\], input_ids has \[2, 4\]"),
        (BATCH | {"attention_mask": torch.ones(2, 4, 4)}, r"has shape \[2, 4, 4\], input_ids has \[2, 4\]"),
        ([BATCH], r"^a batch is a dict of tensors input_ids, .*, not a list$"),
        (BATCH | {"attention_mask": HOLED[:1]}, r"batch\['attention_mask'\] has shape \[1, 4\], input_ids has"),
        (
            BATCH | {"position_ids": PACKED, "attention_mask": HOLED},
            r"position_ids that restart .* attention_mask",
        ),
    ],
    ids=lambda x: None if isinstance(x, dict) else x[:36],
)
def test_batches_are_refused_by_key(batch, message):
    with pytest.raises(ValueError, match=message):
        make_batch(batch, torch.device("cpu"), 96)


def test_batches_at_the_edge_of_what_is_refused():
    batch = {"input_ids": IDS + 88, "labels": IDS.clone().fill_(-100), "position_ids": PACKED}
    made = make_batch(batch | {"attention_mask": torch.ones_like(IDS)}, torch.device("cpu"), 96)
    assert made.attention_mask is None, "a mask of ones would hide the documents from transformers"
    assert make_batch(BATCH | {"attention_mask": HOLED}, torch.device("cpu"), 96).attention_mask is HOLED


@pytest.mark.parametrize("config", [dict(dp_shard=2), dict(dp_replicate=2, dp_shard=1)], ids=str)
def test_reversible_layers_are_refused_on_dp(pool, config):
    for message in pool.run(2, jobs_bugs.refusal, config, tiny_config("reformer")):
        assert message.startswith("ValueError: ReformerLayer runs a backward of its own (backward_pass)")
        assert "dp_shard and dp_replicate must be 1" in message


class ScaledEmbedding(nn.Embedding):
    """A table and a scale."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(sizes[1]))


class ScaledHead(nn.Module):
    """A head that is no Linear."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def test_heads_that_tp_cannot_split_are_refused():
    tied = models.tiny_model(tie_word_embeddings=True)
    tied.model.embed_tokens = ScaledEmbedding(96, 32)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    other = models.tiny_model()
    other.lm_head = ScaledHead(other.lm_head.weight)
    for model, message in (
        (tied, r"embedding model\.embed_tokens is more than a table and tied to the head"),
        (other, r"head lm_head is a ScaledHead; .* torch\.nn\.Linear only"),
    ):
        with pytest.raises(ValueError, match=rf"^LlamaForCausalLM's {message}.*tp must be 1 for this model$"):
            make_plan(model, ParallelConfig(dp_shard=1, tp=2, sequence_parallel=False))
        make_plan(model, ParallelConfig(dp_shard=1, tp=1))


def test_a_matrix_that_modules_share_and_tp_would_split_in_two_ways_is_refused(pool):
    for message in pool.run(2, jobs.refusal_of, jobs.shares_a_matrix, mesh(1, 1, 2)):
        name = "model.layers.1.self_attn.o_proj.weight"
        assert message == f"LlamaForCausalLM shares {name} between modules that tp=2 splits differently"
    assert pool.run(2, jobs.refusal_of, jobs.shares_a_matrix, mesh(1, 2, 1)) == ["no error"] * 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (mesh(1, 1, 2), ["code between its tensor-parallel blocks does not run on a shard of the sequence", "[16]"]),
        (mesh(1, 1, 2, sequence_parallel=False), ["code does not run on the parts that tp=2 leaves", "[16]"]),
        (mesh(1, 2, 1), ["no error"]),
    ],
    ids=["sp", "tp", "dp"],
)
def test_code_that_does_not_run_on_a_part_is_refused(pool, config, words):
    """The shape probe: a residual of [batch, seq, 32] plus a weight's mean of [16]."""
    for message in pool.run(world(config), jobs.refusal_of, jobs.adds_weights, config):
        assert all(word in message for word in words), message


@pytest.mark.parametrize("sp", [True, False], ids=["sp", ""])
def test_code_that_would_take_a_part_for_the_whole_is_refused(pool, sp):
    """The mean over a rank's own queries fits the residual like the mean over all of them."""
    config, block = mesh(1, 1, 2, sequence_parallel=sp), "model.layers.1.self_attn"
    for message in pool.run(2, jobs.refusal_of, jobs.adds_queries, config):
        assert f"code uses {block}.q_proj outside of {block}, where tp=2 leaves a part of it" in message
        assert f'plan={{"{block}.*": "replicate"}}' in message
    kept = {f"{block}.*": "replicate"}
    assert pool.run(2, jobs.refusal_of, jobs.adds_queries, config, kept) == ["no error"] * 2
