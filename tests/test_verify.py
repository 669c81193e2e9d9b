"""`meshpar.verify` passes what is right, and finds planted faults and names where they are."""

from __future__ import annotations

import pytest
import torch

from tests import jobs_verify, models

K_NORM = "model.layers.3.self_attn.k_norm"
PIPELINED = dict(pp=2, tp=2, microbatches=2)


@pytest.mark.parametrize(
    "config", [dict(dp_shard=2), dict(tp=2), PIPELINED, dict(pp=2, schedule="ZBVZeroBubble", virtual_stages=2)], ids=str
)
@pytest.mark.parametrize("kind", ["ragged", None])
def test_a_right_mesh_passes(pool, config, kind):
    batch = models.make_batch(kind=kind) if kind else None
    for report in pool.run(world(config), jobs_verify.verify, config, "qwen3", dict(tie_word_embeddings=True), batch):
        assert report.ok, str(report)
        assert report.first_wrong is None
        assert len(report.gradients) == 46
        assert report.worst in report.gradients
        assert report.logits_max_abs < 1e-4


def test_packed_documents_beside_a_mask_of_ones_are_verified(pool):
    """One process has to look for the documents as the mesh does."""
    batch = models.make_batch(kind="packed")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for report in pool.run(2, jobs_verify.verify, dict(tp=2), "llama", None, batch):
        assert report.ok, str(report)


def test_a_directory_of_weights_is_verified_against_from_pretrained(pool, tmp_path):
    models.tiny_model("granite").save_pretrained(tmp_path)
    assert pool.run(2, jobs_verify.verify_path, str(tmp_path), dict(tp=2))[0].ok


def test_random_weights_are_verified(pool):
    assert pool.run(2, jobs_verify.verify_random, dict(pp=2))[1].ok


@pytest.mark.parametrize(
    ("fault", "config", "family", "changes", "named"),
    [
        # The last block of the model is where a missing sum in the backward first does harm.
        ("dropped all-reduce", dict(tp=2, sequence_parallel=False), "llama", None, "model.norm"),
        ("dropped reduce-scatter", dict(tp=2), "llama", None, "model.norm"),
        ("partial gradients left", dict(tp=2, sequence_parallel=False), "qwen3", None, K_NORM),
        ("tied halves left", dict(pp=2), "llama", dict(tie_word_embeddings=True), "model.embed_tokens"),
        ("double-counted", dict(tp=2), "llama", None, "model.layers.0.input_layernorm"),
        ("shifted positions", dict(pp=2), "llama", None, "model.layers.2.self_attn.o_proj"),
        ("mask lost", dict(pp=2), "llama", None, "model.layers.2.self_attn.o_proj"),
        ("bias added twice", dict(tp=2), "llama", dict(attention_bias=True), "model.layers.0.self_attn.o_proj"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_and_named(pool, fault, config, family, changes, named):
    batch = models.make_batch(kind="left")
    reports = pool.run(world(config), jobs_verify.verify, config, family, changes, batch, fault)
    for report in reports:
        assert not report.ok
        assert report.first_wrong == named, str(report)
        assert named in str(report)
        assert "DIFFERS" in str(report)


def world(config: dict) -> int:
    return config.get("pp", 1) * config.get("dp_shard", 1) * config.get("tp", 1)
