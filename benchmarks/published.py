"""The memory forecast beside what others measured: the table of docs/planner.md.

    python -m benchmarks.published

The runs are torchtitan's of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md there). Not published are the
numbers of microbatches, here its default at that time, one a stage, and of stages a rank, here two where interleaved.
"""

from __future__ import annotations

from transformers import LlamaConfig

from meshpar.config import ParallelConfig
from meshpar.planner.activations import measure
from meshpar.planner.memory import heaviest, memory_of_ranks
from meshpar.planner.skeleton import lay_out, no_network, open_skeleton

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


def main() -> None:
    """Print the Markdown."""
    print("| run | published | forecast, whole logits | error | forecast, meshpar's loss |")
    print("| --- | --- | --- | --- | --- |")
    for name, model, settings, rows, published in RUNS:
        whole, own = (forecast(model, ParallelConfig(**settings), rows, lazy) for lazy in (False, True))
        print(f"| {name} | {published} | {whole:.1f} | {whole / published - 1:+.0%} | {own:.1f} |")


def forecast(model: str, config: ParallelConfig, rows: int, lazy: bool) -> float:
    """GiB on the heaviest rank."""
    layers, hidden, ffn, heads = LLAMA[model]
    llama = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    count = config.microbatches or 1
    with no_network(config.tp) as tp:
        skeleton = lay_out(open_skeleton(llama), config, tp)
        kept = measure(skeleton, config, rows // count, SEQ_LEN, lazy=lazy)
    return heaviest(memory_of_ranks(skeleton, config, kept, count)).total / GIB


if __name__ == "__main__":
    main()
