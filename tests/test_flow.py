"""Pipeline stages of models that are not built like Llama: where they may be cut, and that the cut changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshpar.anatomy import dissect
from meshpar.config import ParallelConfig
from meshpar.flow import Flow, follow
from meshpar.load import skeleton_from_config
from meshpar.split import Carried, Injection, Stage
from meshpar.stages import StageRange, stage_ranges
from meshpar.tp_plan import make_plan
from tests import jobs, models

# Learned positions and fused projections; tuples from layers, a tied head of three modules, named before the embedding;
# lists from layers; a projection around the layers; mask and positions from the ids.
FAMILIES = {
    "gpt2": dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, tie_word_embeddings=True),
    "camembert": dict(
        is_decoder=True, tie_word_embeddings=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "openai-gpt": dict(attn_implementation="eager", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "opt": dict(word_embed_proj_dim=16, ffn_dim=64, dropout=0.0, attention_dropout=0.0),
    "gpt_neox": dict(attention_dropout=0.0, hidden_dropout=0.0),
}
SCHEDULES = {"1F1B": {}, "Interleaved1F1B": dict(virtual_stages=2), "ZBVZeroBubble": dict(virtual_stages=2)}


def flow_of(family: str, **changes) -> Flow:
    model = skeleton_from_config(models.tiny_config(family, **FAMILIES.get(family, {}), **changes))
    return follow(model, dissect(model), torch.float32, "pp=2")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_of_other_trees_equal_one_process(pool, family, schedule):
    batch = models.make_batch(kind="ragged")
    losses, grads = models.reference(models.tiny_model(family, **FAMILIES[family]), batch)
    config = dict(pp=2, dp_shard=1, microbatches=2, schedule=schedule, **SCHEDULES[schedule])
    for result in pool.run(2, jobs.gradients, config, [batch], family, FAMILIES[family]):
        assert result["losses"] == pytest.approx(losses, abs=1e-6)
        assert result["norm"] == pytest.approx(models.global_norm(grads), rel=1e-5)
        got = result["grads"]
        for name in grads if got[next(iter(grads))] is not None else ():
            # A key's bias moves no score against another: its gradient is rounding.
            floor = 1e-3 * models.global_norm(grads)
            off = (got[name].double() - grads[name].double()).norm() / max(grads[name].double().norm(), floor)
            assert off <= 1e-5, f"gradient of {name} is {off:.1e} off"


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", ["model.embed_tokens"], ["model.norm", "lm_head"]),
        ("gpt2", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"]),
        ("camembert", ["roberta.embeddings"], ["lm_head"]),
        (
            "opt",
            ["model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in"],
            ["model.decoder.project_out", "model.decoder.final_layer_norm", "lm_head"],
        ),
    ],
)
def test_what_runs_before_and_after_the_layers(family, before, after):
    flow = flow_of(family)
    assert (sorted(flow.before), sorted(flow.after)) == (sorted(before), sorted(after))
    assert flow.trailing == (32,)
    assert not flow.uncut


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "roformer",
            dict(attn_implementation="eager", is_decoder=True),
            "besides its hidden states, roformer.encoder.layer.1 uses a value computed from the embeddings",
        ),
        (
            "gemma3n_text",
            dict(num_kv_shared_layers=0, layer_types=None),
            r"has layers that return \[4, 2, 16, 32\] for ids of \[2, 16\]",
        ),
        (
            "xlm",
            dict(attn_implementation="eager", emb_dim=32, n_layers=4, n_heads=4),
            "between decoder layers, so that several stages would need it",
        ),
    ],
)
def test_a_model_that_needs_more_than_hidden_states_is_refused(family, changes, words):
    model = skeleton_from_config(models.tiny_config(family, **changes))
    anatomy = dissect(model)
    with pytest.raises(ValueError, match=words):
        stage_ranges(model, anatomy, ParallelConfig(pp=2, dp_shard=1), follow(model, anatomy, torch.float32, "pp=2"))


def with_late_embedding(touch):
    """A Llama whose layers are given what ``touch`` makes of the embedding beside their hidden states."""
    model, given = models.tiny_model("llama"), []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: given.append(out))
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: (args[0] + touch(given[-1]), *args[1:]))
    return model


@pytest.mark.parametrize(
    ("touch", "carried"),
    [
        (lambda embedded: embedded * 2, True),
        (lambda embedded: embedded.mul_(2), False),
        (lambda embedded: nn.functional.dropout(embedded, 0.5), False),
    ],
    ids=["read", "changed in place", "random"],
)
def test_the_embedding_is_carried_only_if_it_stays_what_it_was(touch, carried):
    """A later stage would change what is already changed once more, or drop other elements."""
    model = with_late_embedding(touch)
    flow = follow(model, dissect(model), torch.float32, "pp=2")
    assert (flow.carried, bool(flow.uncut)) == (carried, not carried)


@pytest.mark.parametrize(
    ("family", "straight"),
    [("llama", True), ("qwen3", True), ("gemma3_text", True), ("granite", False), ("gpt2", False)],
)
def test_whether_the_first_layer_is_given_the_embedding_as_it_is(family, straight):
    """Granite scales it first and GPT-2 adds positions; Gemma's embedding scales what it gives itself."""
    assert flow_of(family).straight == straight


def test_an_embedding_that_layers_use_once_more_does_not_go_straight_to_the_first():
    model = with_late_embedding(lambda embedded: embedded * 2)
    assert not follow(model, dissect(model), torch.float32, "pp=2").straight


def test_what_is_received_can_be_viewed_and_asked_for_its_device():
    """Two rows: hidden states and embedding lie in turn in what is received. Code reads the embedding's device."""
    carried, injection = Carried(nn.Embedding(9, 8, device="meta")), Injection(nn.Identity())
    stage = Stage(StageRange(1, 2, 2, 4), injection=injection, blanks=[carried], embedding=carried)
    sent = torch.randn(2, 8 + 16, 8)
    stage.receive(sent, 16)
    assert torch.equal(injection.received.view(-1, 8), sent[:, :8].reshape(-1, 8))
    assert torch.equal(carried(None).view(-1, 8), sent[:, 8:].reshape(-1, 8))
    assert carried.weight.device == sent.device
    with stage.active():
        pass
    assert carried.received is None


def test_layers_dropped_at_random_are_refused():
    model = skeleton_from_config(models.tiny_config("opt", **FAMILIES["opt"], layerdrop=0.1))
    with pytest.raises(ValueError, match="layerdrop to 0"):
        make_plan(model, ParallelConfig())
