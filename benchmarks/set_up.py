"""Setting up one rank of a world of 1024: how long `parallelize_model` takes with the number of layers.

    python -m benchmarks.set_up        # prints the table that `make bench` writes to benchmarks/RESULTS.md

The model is a Llama of 70B's widths on the meta device: no weights are read or drawn. The process group is torch's fake
one, in which one process is a rank of a world without others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

WIDTHS = dict(
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)
SIZES = dict(pp=8, dp_shard=16, tp=8)
WORLD = 1024
LAYERS = (8, 40, 80)
RANKS = (0, 517)


def main() -> None:
    """Print the table, or, inside a worker, set one rank up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(*args.worker)
    else:
        print(table())


def table() -> str:
    """The Markdown of all numbers of layers."""
    mesh = " x ".join(f"{name}={size}" for name, size in SIZES.items())
    lines = [
        f"`parallelize_model` of a Llama of 70B's widths on {mesh}, {WORLD} ranks, on the meta device: one process is "
        "one rank of torch's fake process group. Imports are done before. In brackets: processor time.",
        "",
        "| layers | " + " | ".join(f"rank {rank} (s)" for rank in RANKS) + " |",
        "| --- |" + " --- |" * len(RANKS),
    ]
    for layers in LAYERS:
        cells = [launch(layers, rank) for rank in RANKS]
        lines.append(f"| {layers} | " + " | ".join(f"{c['seconds']:.1f} ({c['busy']:.1f})" for c in cells) + " |")
    return "\n".join([*lines, "", "Goal: at most 20 s for 80 layers.", ""])


def launch(layers: int, rank: int) -> dict[str, float]:
    """Seconds that one rank takes in a fresh process, and those of the processor."""
    command = [sys.executable, "-m", "benchmarks.set_up", "--worker", str(layers), str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{layers} layers, rank {rank} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_worker(layers: int, rank: int) -> None:
    """Set the model up as ``rank`` and print {"seconds": ..., "busy": ...}."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama  # noqa: F401  (an import, not part of the time)

    import meshpar

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    start, busy = time.perf_counter(), time.process_time()
    config = LlamaConfig(**WIDTHS, num_hidden_layers=layers)
    meshpar.parallelize_model(config, meshpar.ParallelConfig(**SIZES), device="meta")
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    print(json.dumps({"seconds": seconds, "busy": busy}), flush=True)


if __name__ == "__main__":
    main()
