"""Rules tried out: the model's own code decides how its heads and features divide, and nothing else is believed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from meshpar import ParallelConfig
from meshpar.blocks import Groups
from meshpar.layout import heads
from meshpar.load import meta_copy
from meshpar.rules import guesses, pair, recognise
from meshpar.tp_plan import make_plan
from meshpar.trial import try_out
from tests import jobs_families, models, sweep
from tests.tiny_families import tiny_model


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """transformers warns of every odd size in a tiny config."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_groups_lie_whole_or_share_a_key_and_value():
    two_groups = Groups(0, 2, 1)  # rows: q0 q1 k v, q2 q3 k v
    assert [p.spans for p in two_groups.layout(2, heads(4, 2, 2)).parts] == [((0, 4), (4, 8))]
    assert [p.spans for p in two_groups.layout(4, heads(4, 2, 4)).parts] == [
        ((0, 1), (1, 2), (4, 5), (5, 6)),
        ((2, 3), (2, 3), (6, 7), (6, 7)),
        ((3, 4), (3, 4), (7, 8), (7, 8)),
    ]


# The layout of each family's fused projection, which its code alone tells: whether queries, keys and values lie in
# groups of a kv head, and whether attributes that count features must shrink.
FUSED = {
    "bloom": ("transformer.h.0.self_attention", True),
    "gpt_neox": ("gpt_neox.layers.0.attention", True),
    "persimmon": ("model.layers.0.self_attn", True),
    "gpt2": ("transformer.h.0.attn", False),
    "mpt": ("transformer.blocks.0.attn", False),
    "phi3": ("model.layers.0.self_attn", False),
    "dbrx": ("transformer.blocks.0.norm_attn_norm.attn", False),
}


@pytest.mark.parametrize("model_type", FUSED)
def test_a_fused_projection_is_divided_as_the_code_reads_it(model_type):
    name, grouped = FUSED[model_type]
    model = meta_copy(tiny_model(model_type))
    found = try_out(model, 2, {name: list(guesses(model.get_submodule(name)))}, {})[name]
    projections = [c for n, c in found.cuts.items() if found.styles.get(n.removesuffix(".weight")) == "colwise"]
    assert [isinstance(cut, Groups) for cut in projections] == [grouped]


@pytest.mark.parametrize(
    "changes", [dict(new_decoder_architecture=True, num_kv_heads=2), dict(multi_query=False)], ids=str
)
@pytest.mark.parametrize("alibi", [True, False])
@pytest.mark.parametrize("tp", [2, 4])
def test_falcon_in_all_its_forms(pool, changes, alibi, tp):
    config = sweep.config_of((1, 1, tp), sequence_parallel=False)
    result = pool.run(tp, jobs_families.outcome, "falcon", config, alibi=alibi, **changes)[0]
    assert result.get("ok"), result


class Attention(nn.Module):
    """A fused attention of one's own; ``order`` is where the code looks for queries, keys and values."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.order = 4, 8, order
        self.qkv_proj, self.out_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, hidden_states, **_):
        qkv = self.qkv_proj(hidden_states)
        b, s, _ = qkv.shape
        if self.order == "head by head":
            q, k, v = qkv.view(b, s, -1, 3, self.head_dim).unbind(3)
        elif self.order == "one after another":
            q, k, v = (x.reshape(b, s, -1, self.head_dim) for x in qkv.chunk(3, dim=-1))
        else:  # features of all heads in turn
            q, k, v = (x.reshape(b, s, self.head_dim, -1).transpose(2, 3) for x in qkv.chunk(3, dim=-1))
        out = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, -1)), None


def model_with(attention: nn.Module):
    model = models.tiny_model(num_hidden_layers=1)
    model.model.layers[0].self_attn = attention
    return meta_copy(model)


@pytest.mark.parametrize(("order", "grouped"), [("head by head", True), ("one after another", False)])
def test_code_of_ones_own_is_read_the_same_way(order, grouped):
    plan = make_plan(model_with(Attention(order)), ParallelConfig(dp_shard=1, tp=2))
    assert plan["model.layers.0.self_attn"] == "block"
    assert isinstance(plan.blocks["model.layers.0.self_attn"].cuts["qkv_proj.weight"], Groups) is grouped


class Renamed(nn.Module):
    """Llama's names with something between them that mixes heads or features."""

    def __init__(self, inner: nn.Module, up: str, down: str, mix) -> None:
        super().__init__()
        self.__dict__.update({k: v for k, v in vars(inner).items() if k != "_modules"})
        self._modules = dict(inner._modules)
        self.up, self.down, self.mix = up, down, mix

    def forward(self, hidden_states, **_):
        return self.get_submodule(self.down)(self.mix(self.get_submodule(self.up)(hidden_states)))


MIXING = {
    "softmax": lambda x: x.softmax(-1),
    "normalized": lambda x: nn.functional.normalize(x, dim=-1),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "reversed": lambda x: x.flip(-1),
}


@pytest.mark.parametrize("mix", MIXING)
def test_names_alone_are_not_believed(mix):
    model = models.tiny_model(num_hidden_layers=1)
    mlp = Renamed(model.model.layers[0].mlp, "up_proj", "down_proj", MIXING[mix])
    del mlp._modules["gate_proj"], mlp._modules["act_fn"]
    assert recognise(mlp) is not None
    model.model.layers[0].mlp = mlp
    assert make_plan(meta_copy(model), ParallelConfig(dp_shard=1, tp=2))["model.layers.0.mlp"] == "whole"
    mlp.mix = nn.functional.silu
    assert make_plan(meta_copy(model), ParallelConfig(dp_shard=1, tp=2))["model.layers.0.mlp"] == "block"


def test_what_no_guess_fits_runs_whole():
    plan = make_plan(model_with(Attention("features in turn")), ParallelConfig(dp_shard=1, tp=2))
    assert plan["model.layers.0.self_attn"] == "whole"


class Layer(nn.Module):
    """A layer with its own pair of projections, and ``between`` them."""

    def __init__(self, inner: nn.Module, between) -> None:
        super().__init__()
        self.inner, self.between = inner, between
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden_states, **kwargs):
        hidden_states = self.inner(hidden_states, **kwargs)
        return hidden_states + self.fc2(self.between(self.fc1(hidden_states)))


@pytest.mark.parametrize(
    ("between", "splits"), [(nn.functional.gelu, True), (lambda x: x.softmax(-1), False), (lambda x: x.flip(-1), False)]
)
def test_a_pair_in_a_layers_own_code_splits_where_what_is_between_is_element_wise(between, splits):
    model = models.tiny_model(num_hidden_layers=1)
    model.model.layers[0] = Layer(model.model.layers[0], between)
    plan = make_plan(meta_copy(model), ParallelConfig(dp_shard=1, tp=2))
    styles = plan["model.layers.0.fc1"], plan["model.layers.0.fc2"]
    assert styles == (("pair_in", "pair_out") if splits else ("whole", "whole"))


def test_arguments_with_something_of_each_head_are_found():
    model = meta_copy(tiny_model("bloom"))
    found = make_plan(model, ParallelConfig(dp_shard=1, tp=2)).blocks["transformer.h.0.self_attention"]
    assert found.by_head == {"alibi": 0}  # [batch * heads, 1, seq]
    batch, heads_, seq = 3, found.heads[0], 5
    alibi = torch.arange(batch * heads_ * seq).reshape(batch * heads_, 1, seq)
    _, own = found.own_arguments((), {"alibi": alibi}, 2, 1)
    want = alibi.reshape(batch, heads_, 1, seq)[:, heads_ // 2 :].flatten(0, 1)
    assert torch.equal(own["alibi"], want)


@pytest.mark.parametrize("splits", [True, False])
def test_a_subclass_of_linear_splits_if_it_only_multiplies(splits):
    class Own(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if splits else y.cumsum(-1)

    model = models.tiny_model(num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Own(32, 64, bias=False)
    assert (recognise(mlp) is not None) is splits


def test_a_layer_without_a_pair_has_none():
    assert pair(models.tiny_model().model.layers[0]) is None


# Equal functions of the heads are not enough: every gradient must enter and leave where the block's sums are.


class Beside(nn.Module):
    """`Attention` with something more; ``what`` says what."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner, self.what = Attention("one after another"), what
        self.num_heads, self.head_dim = 4, 8
        self.qkv_proj, self.out_proj, self.norm = self.inner.qkv_proj, self.inner.out_proj, nn.LayerNorm(32)
        del self.inner.qkv_proj, self.inner.out_proj

    def forward(self, hidden_states, **_):
        b, s, _ = hidden_states.shape
        q, k, v = (
            x.reshape(b, s, -1, self.head_dim).transpose(1, 2) for x in self.qkv_proj(hidden_states).chunk(3, -1)
        )
        if self.what == "mixes heads in training" and self.training:
            q = q.mean(1, keepdim=True).expand(q.shape)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1)
        out = self.out_proj(out)
        if self.what == "adds its input":
            out = out + hidden_states
        return (self.norm(out) if self.what == "norms its sum" else out), None


@pytest.mark.parametrize(
    ("what", "style"),
    [
        ("nothing", "block"),
        ("norms its sum", "whole"),
        ("adds its input", "whole"),
        ("mixes heads in training", "whole"),
    ],
)
def test_what_is_used_after_the_sum_keeps_a_block_whole(what, style):
    plan = make_plan(model_with(Beside(what)), ParallelConfig(dp_shard=1, tp=2, sequence_parallel=False))
    assert plan["model.layers.0.self_attn"] == style


class Gated(Layer):
    """A pair with a gate from beside it between its projections."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner, nn.functional.gelu)
        self.gate = nn.Linear(32, 64)

    def forward(self, hidden_states, **kwargs):
        hidden_states = self.inner(hidden_states, **kwargs)
        return hidden_states + self.fc2(self.between(self.fc1(hidden_states)) * self.gate(hidden_states).sigmoid())


def test_a_pair_with_more_between_stays_whole():
    model = models.tiny_model(num_hidden_layers=1)
    model.model.layers[0] = Gated(model.model.layers[0])
    plan = make_plan(meta_copy(model), ParallelConfig(dp_shard=1, tp=2))
    assert plan["model.layers.0.fc1"] == plan["model.layers.0.fc2"] == "whole"


def test_layers_that_look_alike_are_tried_out_one_by_one():
    model = models.tiny_model(num_hidden_layers=2)
    for index, between in enumerate((nn.functional.gelu, lambda x: x.softmax(-1))):
        model.model.layers[index] = Layer(model.model.layers[index], between)
    plan = make_plan(meta_copy(model), ParallelConfig(dp_shard=1, tp=2))
    assert [plan[f"model.layers.{i}.fc1"] for i in range(2)] == ["pair_in", "whole"]


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi3", "opt", "bloom", "mpt", "stablelm"])
def test_a_rank_may_have_no_heads(model_type):
    """4 heads on 3 ranks: 2, 2 and none."""
    plan = make_plan(meta_copy(tiny_model(model_type)), ParallelConfig(dp_shard=1, tp=3, sequence_parallel=False))
    assert "whole" not in plan.values()


@pytest.mark.parametrize("model_type", ["olmo2", "olmoe", "deepseek_v2", "deepseek_v32", "cohere2_moe", "bitnet"])
def test_all_layers_of_a_family_are_blocks(model_type):
    plan = make_plan(meta_copy(tiny_model(model_type)), ParallelConfig(dp_shard=1, tp=2, sequence_parallel=False))
    assert "whole" not in plan.values()


class Shifting(nn.Module):
    """Shifts the sequence by one before the child it holds (a layer's or a wrapper's own code)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        return self.inner(nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1], **kwargs)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_code_that_mixes_positions_does_not_run_on_shards(sequence_parallel):
    config = ParallelConfig(dp_shard=1, tp=2, sequence_parallel=sequence_parallel)
    model = models.tiny_model(num_hidden_layers=1)
    model.model.layers[0].mlp = Shifting(model.model.layers[0].mlp)
    plan = make_plan(meta_copy(model), config)
    assert plan.get("model.layers.0.mlp") == ("whole" if sequence_parallel else None)
    model.model.layers[0] = Shifting(model.model.layers[0])
    if sequence_parallel:
        with pytest.raises(ValueError, match="mixes positions outside its blocks; set sequence_parallel to false"):
            make_plan(meta_copy(model), config)


# Stock models whose code does one of these things; the bar is every gradient.
ODD_ONES = {
    "opt with a learned activation": ("opt", dict(activation_function="xielu")),
    "xglm with a learned activation": ("xglm", dict(activation_function="xielu")),
    "bloom with its norm's output as residual": ("bloom", dict(apply_residual_connection_post_layernorm=True)),
    "bloom that slices weights itself": ("bloom", dict(pretraining_tp=2, slow_but_exact=True)),
}


@pytest.mark.parametrize("case", ODD_ONES)
def test_gradients_of_stock_models_with_odd_settings(pool, case):
    model_type, changes = ODD_ONES[case]
    result = pool.run(2, jobs_families.outcome, model_type, sweep.config_of((1, 1, 2), False), **changes)[0]
    assert result.get("ok"), result


class Mixture(nn.Module):
    """A router, stacked experts and what else is given: children of the experts, and of the block behind them."""

    def __init__(self, of_experts: dict[str, nn.Module], behind: dict[str, nn.Module]) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4, bias=False), nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 128, 32))
        self.experts.down_proj = nn.Parameter(torch.zeros(4, 32, 64))
        for name, module in of_experts.items():
            self.experts.add_module(name, module)
        for name, module in behind.items():
            self.add_module(name, module)


@pytest.mark.parametrize(
    ("of_experts", "behind", "splits"),
    [
        ({}, {}, True),
        ({"identity_expert": nn.Identity()}, {}, True),
        ({"dropout": nn.Identity()}, {}, False),
        ({}, {"post_mlp_layernorm": nn.LayerNorm(32)}, True),
        ({}, {"post_mlp_layernorm": nn.LayerNorm(32), "act": nn.SiLU()}, False),
    ],
)
def test_mixtures_are_taken_for_what_they_are_known_to_be(of_experts, behind, splits):
    """They are not tried out: an Identity may stand for dropout, and a norm may be followed by more."""
    assert (recognise(Mixture(of_experts, behind)) is not None) is splits
