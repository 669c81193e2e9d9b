"""Training steps in bfloat16 on CUDA: tokens a second, MFU and peak memory of layers shaped like those of an 8B Llama.

    python -m benchmarks.gpu           # prints the table that `make bench` writes to benchmarks/RESULTS.md, on CUDA

One process a GPU of this machine. The configurations of one mesh run one after another in fresh processes; a figure is
the median of the steps after the first ones, which compile and warm up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass

import torch

from .processes import under_torchrun


@dataclass(frozen=True)
class Shape:
    """A Llama's layers, and the batch of one data-parallel rank."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    rows: int
    seq_len: int


SHAPES = {
    "8B": Shape(4096, 14336, 32, 8, layers=8, vocabulary=128256, rows=1, seq_len=8192),
    "tiny": Shape(64, 128, 4, 2, layers=2, vocabulary=256, rows=1, seq_len=32),  # to try the code without a GPU
}
STEPS, WARMUP = 6, 3
WAYS = {
    "": {},
    "compile": {"compile": True},
    "selective": {"activation_checkpoint": "selective"},
    "compile, selective": {"compile": True, "activation_checkpoint": "selective"},
}


def main() -> None:
    """Print the table, or, inside a worker, run one configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker[0], json.loads(args.worker[1]))
    else:
        print(table())


def table() -> str:
    """The Markdown of all meshes and ways."""
    gpus, shape = torch.cuda.device_count(), SHAPES["8B"]
    lines = [
        f"{gpus} x {torch.cuda.get_device_name(0)}, nccl; {shape.layers} layers shaped like Llama-3.1-8B's, "
        f"{shape.rows} x {shape.seq_len} tokens a data-parallel rank; float32 parameters, bfloat16 compute; forward, "
        "backward, clipping and AdamW. MFU counts causal attention, and no recomputation.",
        "",
        "| mesh | way | step (ms) | tokens / s | MFU | peak memory (GiB) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for mesh in meshes(gpus):
        name = " ".join(f"{dim}={size}" for dim, size in mesh.items())
        for way, settings in WAYS.items():
            result = launch("8B", mesh | settings)
            if "failed" in result:
                lines.append(f"| {name} | {way} | {result['failed']} | | | |")
                continue
            mfu = "" if result["mfu"] is None else f"{result['mfu']:.1%}"
            lines.append(
                f"| {name} | {way} | {result['seconds'] * 1e3:.0f} | {result['tokens_per_second']:.0f} | {mfu} | "
                f"{result['peak_memory_bytes'] / 2**30:.1f} |"
            )
    return "\n".join([*lines, ""])


def meshes(gpus: int) -> list[dict[str, int]]:
    """One GPU; all of them on dp, and on tp and pp where there are some."""
    chosen = [{"dp_shard": 1}]
    if gpus > 1:
        chosen += [{"dp_shard": gpus}, {"dp_shard": 1, "tp": gpus}]
    if gpus >= 4 and gpus % 4 == 0:
        chosen += [{"dp_shard": gpus // 2, "tp": 2}, {"pp": 2, "dp_shard": gpus // 4, "tp": 2, "microbatches": 8}]
    return chosen


def launch(shape: str, settings: dict) -> dict:
    """What rank 0 reports of one configuration, or why it failed."""
    world = settings.get("pp", 1) * settings["dp_shard"] * settings.get("tp", 1)
    try:
        return under_torchrun("benchmarks.gpu", world, "--worker", shape, json.dumps(settings))
    except SystemExit as failure:
        errors = [line for line in str(failure).splitlines() if "Error" in line]
        return {"failed": (errors or ["killed"])[0][:200]}


def run_worker(name: str, settings: dict) -> None:
    """Steps of one configuration; rank 0 prints what they took."""
    import torch.distributed as dist
    from transformers import LlamaConfig

    import meshpar
    from meshpar.flops import flops_per_token
    from meshpar.train.metrics import peak_flops, peak_memory_bytes

    shape = SHAPES[name]
    llama = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=False,
    )
    config = meshpar.ParallelConfig(**settings)
    model = meshpar.parallelize_model(llama, config)
    device = model._mesh.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    rows = shape.rows * settings.get("microbatches", 1)
    generator = torch.Generator().manual_seed(model.mesh["dp"].get_local_rank())
    ids = torch.randint(0, shape.vocabulary, (rows, shape.seq_len), generator=generator).to(device)
    seconds = []
    for turn in range(WARMUP + STEPS):
        start = time.perf_counter()
        model.forward_backward({"input_ids": ids, "labels": ids})
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= WARMUP:
            seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds)
    speed = ids.numel() * config.resolve(dist.get_world_size()).dp / step
    peak = peak_flops(device, config.compute_dtype)
    flops = flops_per_token(model._full.shapes, llama, shape.seq_len)
    memory = torch.tensor(peak_memory_bytes(device), device=device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        result = {
            "seconds": step,
            "tokens_per_second": speed,
            "mfu": peak and speed * flops / (peak * dist.get_world_size()),
            "peak_memory_bytes": int(memory.item()),
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
