"""The planner's memory and speed beside what others measured: the tables of docs/planner.md.

    python -m benchmarks.published

The runs are torchtitan's of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md there) and Llama 3's (arXiv
2407.21783, table 4). Not published are the numbers of microbatches of torchtitan's pipelines, here its default at that
time, one a stage, and of stages a rank, here two where interleaved; and Llama 3's stages a rank, here four.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import LlamaConfig

from meshpar.config import ParallelConfig
from meshpar.planner.activations import measure
from meshpar.planner.communication import Microbatches
from meshpar.planner.devices import Device, device_named, network_of
from meshpar.planner.memory import heaviest, memory_of_ranks
from meshpar.planner.skeleton import lay_out, no_network, open_skeleton
from meshpar.planner.study import Study
from meshpar.planner.timing import Forecast
from meshpar.planner.timing import forecast as forecast_time

GIB, SEQ_LEN, VOCABULARY = 2**30, 8192, 128256
LLAMA = {  # layers, hidden size, FFN width, heads; 8 kv heads
    "8B": (32, 4096, 14336, 32),
    "405B": (126, 16384, 53248, 128),
}
_405B = dict(pp=8, tp=8, dp_shard=8, activation_checkpoint="full")
RUNS = [  # name, model, config, rows of a data-parallel rank, GiB
    ("8B, FSDP on 8 GPUs", "8B", dict(dp_shard=8, activation_checkpoint="selective"), 2, 82.4),
    ("8B, FSDP on 128 GPUs", "8B", dict(dp_shard=128, activation_checkpoint="selective"), 2, 67.0),
    ("405B, 1F1B", "405B", dict(_405B, microbatches=8), 32, 82.5),
    (
        "405B, Interleaved1F1B",
        "405B",
        dict(_405B, schedule="Interleaved1F1B", virtual_stages=2, microbatches=16),
        32,
        72.7,
    ),
]
_H100 = device_named("h100-80gb")
# torchtitan's cards have 2.4 TB/s of memory and a limit of 500 W instead of 700.
_OF_TORCHTITAN = replace(_H100, bandwidth=2.4e12)
_8B = dict(activation_checkpoint="selective")
_LLAMA_3 = dict(pp=16, tp=8, schedule="Interleaved1F1B", virtual_stages=4, compile=True)
SPEEDS = [  # name, model, config, device, rows, microbatches, tokens/s a device or MFU
    ("8B, FSDP on 8 GPUs", "8B", dict(_8B, dp_shard=8), _OF_TORCHTITAN, 2, 1, 5762),
    ("the same, compiled", "8B", dict(_8B, dp_shard=8, compile=True), _OF_TORCHTITAN, 2, 1, 6667),
    ("8B, FSDP on 128 GPUs", "8B", dict(_8B, dp_shard=128), _OF_TORCHTITAN, 2, 1, 5605),
    ("the same, compiled", "8B", dict(_8B, dp_shard=128, compile=True), _OF_TORCHTITAN, 2, 1, 6514),
    ("405B on 8,192 GPUs", "405B", dict(_LLAMA_3, dp_shard=64), _H100, 1, 32, 0.43),
    ("405B on 16,384 GPUs", "405B", dict(_LLAMA_3, dp_shard=128), _H100, 1, 16, 0.41),
]


def main() -> None:
    """Print the Markdown."""
    print_memory()
    print()
    print_speed()


def print_memory() -> None:
    """GiB of the heaviest rank."""
    print("| run | published | forecast, whole logits | error | forecast, meshpar's loss |")
    print("| --- | --- | --- | --- | --- |")
    for name, model, settings, rows, published in RUNS:
        whole, own = (forecast(model, ParallelConfig(**settings), rows, lazy) for lazy in (False, True))
        print(f"| {name} | {published} | {whole:.1f} | {whole / published - 1:+.0%} | {own:.1f} |")


def print_speed() -> None:
    """Tokens a second and device, or MFU where that is what was published."""
    print("| run | published | forecast | error |")
    print("| --- | --- | --- | --- |")
    for name, model, settings, device, rows, count, published in SPEEDS:
        found = speed(model, ParallelConfig(**settings), device, rows, count)
        value = found.mfu if published < 1 else found.tokens_per_second / ParallelConfig(**settings).world_size
        texts = [f"{x:.0%} MFU" if published < 1 else f"{x:,.0f} tokens/s" for x in (published, value)]
        print(f"| {name} | {texts[0]} | {texts[1]} | {value / published - 1:+.0%} |")


def speed(model: str, config: ParallelConfig, device: Device, rows: int, count: int) -> Forecast:
    """A step of ``count`` microbatches a data-parallel rank, on nodes of 8."""
    study = Study(open_skeleton(llama(model)), SEQ_LEN)
    batch, layers = Microbatches(rows, SEQ_LEN, count), study.stage_layers(config)
    return forecast_time(study.work(config), config, batch, layers, device, network_of(device))


def llama(model: str) -> LlamaConfig:
    """Llama 3.1 of a size."""
    layers, hidden, ffn, heads = LLAMA[model]
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )


def forecast(model: str, config: ParallelConfig, rows: int, lazy: bool) -> float:
    """GiB on the heaviest rank."""
    count = config.microbatches or 1
    with no_network(config.tp) as tp:
        skeleton = lay_out(open_skeleton(llama(model)), config, tp)
        kept = measure(skeleton, config, rows // count, SEQ_LEN, lazy=lazy)
    return heaviest(memory_of_ranks(skeleton, config, kept, count)).total / GIB


if __name__ == "__main__":
    main()
