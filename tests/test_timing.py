"""Times, FLOPs and MFU of a step: against published numbers, and against what torch counts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from meshpar.config import ConfigError, ParallelConfig
from meshpar.flops import flops_per_token
from meshpar.load import skeleton_from_config
from meshpar.planner.communication import Microbatches, ring_bytes
from meshpar.planner.costs import POINTWISE_BACKWARD, Place, layer_cost
from meshpar.planner.devices import DEVICES, device_in_torch, device_named, network_of
from meshpar.planner.links import LINKS, Reach, link_named, reach
from meshpar.planner.timing import forecast, mfu
from meshpar.planner.work import ModelWork, model_work
from tests import models

VECTORS = json.loads((Path(__file__).parent / "time_vectors.json").read_text())
LLAMA = {  # hidden, FFN, layers, heads
    "llama3-8b": (4096, 14336, 32, 32),
    "llama3-70b": (8192, 28672, 80, 64),
    "llama3.1-405b": (16384, 53248, 126, 128),
}
GPT = {"22B": (6144, 48, 64), "175B": (12288, 96, 96), "530B": (20480, 105, 128), "1T": (25600, 128, 160)}
TOKENS = 64
H100 = device_named("h100-80gb")


@cache
def llama(name: str) -> PreTrainedModel:
    hidden, ffn, layers, heads = LLAMA[name]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    return skeleton_from_config(config)


def step(name: str, config: ParallelConfig, microbatches: int, device=H100, rows: int = 1, **changes):
    """The forecast of a Llama at sequences of 8192, its layers as even as they can be."""
    layers, stages = LLAMA[name][2], config.num_stages
    counts = [layers // stages + (i < layers % stages) for i in range(stages)]
    network = network_of(device, **changes)
    return forecast(work(name, config), config, Microbatches(rows, 8192, microbatches), counts, device, network)


def work(name: str, config: ParallelConfig) -> ModelWork:
    return model_work(llama(name), config, 8192)


@pytest.mark.parametrize("name", LLAMA)
def test_flops_of_a_token_are_those_of_published_runs(name):
    """Published pairs of tokens/s and TFLOP/s imply the second number (Megatron-Bridge)."""
    found = work(name, ParallelConfig())
    assert found.parameters == VECTORS["parameters"][name]
    assert found.flops_per_token / 1e9 == pytest.approx(VECTORS["flops_per_token_causal_s8192_G"][name], rel=1e-4)
    assert found.flops_per_token / 1e9 == pytest.approx(VECTORS["published_tokens_and_flops_G"][name], rel=1e-3)


@pytest.mark.parametrize(("name", "gpus", "batch", "seconds", "published"), VECTORS["mfu_iter_seconds_A100"])
def test_mfu_of_published_iterations(name, gpus, batch, seconds, published):
    """arXiv 2205.05198, table 5; its FLOPs count attention without the causal mask, twice as long sequences with it."""
    hidden, layers, heads = GPT[name]
    config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=heads, vocab_size=51200)
    shapes = {f"h.{i}": (12 * hidden, hidden) for i in range(layers)} | {"wte.weight": (51200, hidden)}
    flops, peak = flops_per_token(shapes, config, 2 * 2048), device_named("a100-80gb").peak["bfloat16"]
    assert mfu(flops, batch * 2048 / seconds, gpus, peak) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("gpus", "microbatches", "published"), [(8192, 32, 0.43), (16384, 16, 0.41)])
def test_mfu_of_llama_3_405b_is_what_was_published(gpus, microbatches, published):
    """arXiv 2407.21783, table 4: TP 8, PP 16, sequences of 8192, 16 million tokens a step, interleaved."""
    config = ParallelConfig(
        pp=16, dp_shard=gpus // 128, tp=8, schedule="Interleaved1F1B", virtual_stages=4, compile=True
    )
    assert step("llama3.1-405b", config, microbatches).mfu == pytest.approx(published, rel=0.1)


class MovedBytes(TorchDispatchMode):
    """Bytes that operations other than matrix products and attention read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        product = func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::detach")
        view = func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::t")
        if not product and not view and "attention" not in func._schema.name:
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out


def one_layer(family: str, dtype: str = "float32", **changes):
    """The work of a tiny model's layer, and its forward on 64 tokens as a function without arguments."""
    sizes = dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=1, num_attention_heads=8, head_dim=64)
    model = models.tiny_model(family, **sizes, **changes).to(getattr(torch, dtype))
    layer, given = model.model.layers[0], {}
    handle = layer.register_forward_pre_hook(lambda _, a, k: given.update(args=a, kwargs=k), with_kwargs=True)
    model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64))
    handle.remove()
    hidden = given["args"][0].detach().requires_grad_()
    found = model_work(model, ParallelConfig(compute_dtype=dtype), TOKENS).layers[0]
    return found, lambda: layer(hidden, *given["args"][1:], **given["kwargs"])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_computes_what_torch_counts(family):
    found, forward = one_layer(family, attn_implementation="eager")
    with FlopCounterMode(display=False) as flops:
        forward()
    ops = {op.__name__: n for op, n in flops.get_flop_counts()["Global"].items()}
    assert ops == {"mm": 2 * found.products * TOKENS, "bmm": 2 * found.attention * TOKENS**2}  # without the causal mask


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_moves_the_bytes_that_its_operations_do(family, dtype):
    found, forward = one_layer(family, dtype)
    with MovedBytes() as ahead:
        out = forward()
    with MovedBytes() as back:
        out.backward(torch.ones_like(out))
    assert found.pointwise * TOKENS == pytest.approx(ahead.bytes, rel=0.15)
    assert POINTWISE_BACKWARD * found.pointwise * TOKENS == pytest.approx(back.bytes, rel=0.15)


def test_checkpointing_costs_a_forward_more_and_leaves_the_loss():
    batch = Microbatches(1, 8192)

    def layer(mode: str, **changes):
        config = ParallelConfig(dp_shard=1, activation_checkpoint=mode, **changes)
        place = Place(config, H100, network_of(H100))
        found = work("llama3-70b", config)
        return layer_cost(found.layers[0], found.hidden, batch, place)

    plain, selective, full = map(layer, ("none", "selective", "full"))
    assert plain.forward == selective.forward == full.forward
    assert full.backward == pytest.approx(plain.backward + plain.forward)
    assert plain.backward < selective.backward < full.backward
    assert plain.inputs + plain.weights == pytest.approx(plain.backward)
    assert full.inputs + full.weights == pytest.approx(plain.backward + 2 * plain.forward)  # replayed for both parts


def test_the_experts_rules_come_out_of_the_costs():
    """tp inside a node, and no more of it than needed; many microbatches; a bubble that more of them shrink."""
    mesh = dict(compute_dtype="bfloat16")
    speed = {tp: step("llama3-70b", ParallelConfig(dp_shard=64 // tp, tp=tp, **mesh), 8) for tp in (2, 4, 8, 16)}
    speeds = [speed[tp].tokens_per_second for tp in (2, 4, 8, 16)]
    assert speeds == sorted(speeds, reverse=True)
    pipeline = ParallelConfig(pp=8, dp_shard=1, tp=8)
    few, enough, many = (step("llama3-70b", pipeline, m) for m in (8, 32, 128))
    assert few.bubble > 0.875 > enough.bubble > many.bubble > 7 / 128  # the last stage has the head beside its layers
    assert few.mfu < enough.mfu < many.mfu
    slow = step("llama3-70b", ParallelConfig(dp_shard=64), 8, across=link_named("ethernet-10g"))
    assert slow.step_seconds > 2 * step("llama3-70b", ParallelConfig(dp_shard=64), 8).step_seconds


def test_replicas_and_shards_are_both_paid_for():
    whole = step("llama3-8b", ParallelConfig(dp_shard=64), 1)
    hybrid = step("llama3-8b", ParallelConfig(dp_replicate=8, dp_shard=8), 1)
    alone = step("llama3-8b", ParallelConfig(dp_shard=8), 1)
    assert hybrid.parts["fsdp"] > alone.parts["fsdp"]
    assert hybrid.parts["optimizer"] == alone.parts["optimizer"] > whole.parts["optimizer"]


def test_a_ring_of_eight_sends_seven_quarters():
    assert ring_bytes("all_reduce", 1_000_000, 8) == VECTORS["allreduce_bytes_per_rank"]["n8_factor"] * 1_000_000
    network = network_of(replace(H100, inside=replace(LINKS["nvlink4"], efficiency=1.0, latency=0.0, start=0.0)))
    sent = ring_bytes("all_reduce", 2 * 8192 * 8192, 8)
    assert network.seconds("all_reduce", sent, Reach(8, 1, 8)) == pytest.approx(0.52e-3, rel=0.005)


@pytest.mark.parametrize(
    ("ranks", "stride", "want"),
    [(8, 1, (1, 8)), (16, 1, (2, 8)), (4, 8, (4, 1)), (4, 4, (2, 2)), (3, 1, (2, 1)), (2, 4, (1, 2))],
)
def test_where_the_worst_group_of_a_dimension_sits(ranks, stride, want):
    found = reach(ranks, stride, 8)
    assert (found.nodes, found.per_node) == want


def test_numbers_of_devices_have_a_source_and_are_in_order():
    assert [x.name for x in (*DEVICES.values(), *LINKS.values()) if not x.source] == []
    peaks = {d.name: [d.peak[t] for t in ("bfloat16", "tf32", "float32")] for d in DEVICES.values() if d.asynchronous}
    assert [name for name, peak in peaks.items() if peak != sorted(peak, reverse=True)] == []


def test_names_of_devices():
    names = {
        "NVIDIA A100-SXM4-40GB": "a100-40gb",
        "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
        "NVIDIA H100 80GB HBM3": "h100-80gb",
        "NVIDIA H100 PCIe": "h100-pcie-80gb",
        "NVIDIA GH200 480GB": "gh200-96gb",
        "NVIDIA H200": "h200",
        "NVIDIA B200": "b200",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {name: device_in_torch(name).name for name in names} == names
    assert device_in_torch("Tesla T4") is None
    with pytest.raises(ConfigError, match=r"device='h100-80' is not known; did you mean h100-80gb\?"):
        device_named("h100-80")
    with pytest.raises(ConfigError, match=r"link='nvlink' is not known; did you mean nvlink\d"):
        link_named("nvlink")
