"""Saving training state: how long training stands still for a save, and for one that is written in the background.

    python -m benchmarks.checkpoint    # prints the table that `make bench` writes to benchmarks/RESULTS.md

All ways save the same model and optimizer, in the same processes, in turn, in an order drawn anew for each round. A
time is that between two barriers. A background write has ended, and a step of AdamW has changed everything, before the
next save begins. The first save of each way, in memory that is new to the process, is told apart.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .processes import under_torchrun

# 84 million parameters and AdamW's two moments, float32: 1.0 GB.
MODEL = dict(
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=5,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=16384,
    tie_word_embeddings=False,
)
ROUNDS = 6
SYNC, ASYNC = "meshpar, async: false", "meshpar, async: true"
THEIRS = "torch's dcp.async_save, DefaultStager"


def main() -> None:
    """Print the table, or, inside a worker, measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker)
    else:
        print(table())


def table() -> str:
    """The Markdown of all ways."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:  # a disk's, where /tmp may be memory
        found = under_torchrun("benchmarks.checkpoint", 2, "--worker", directory)
    whole = statistics.median(found["stall"][SYNC][1:])
    lines = [
        f"{found['bytes'] / 1e9:.2f} GB of state (a Llama's parameters and AdamW's moments, float32) on dp_shard=2, to "
        f"a local disk, flushed; {ROUNDS} saves of each way in turn, the first not in the medians.",
        "",
        "| way | training stands still (s) | of async: false | in its first save (s) | until all is on the disk (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for way, times in found["stall"].items():
        stall, until = statistics.median(times[1:]), statistics.median(found["until"][way][1:])
        lines.append(f"| {way} | {stall:.3f} | {stall / whole:.3f} | {times[0]:.3f} | {until:.2f} |")
    return "\n".join([*lines, "", "Goal: at most 0.15 of the synchronous save's time.", ""])


def run_worker(directory: Path) -> None:
    """Save in all ways on this rank; rank 0 prints the times."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig

    import meshpar

    config = meshpar.ParallelConfig(dp_shard=2, compute_dtype="float32")
    model = meshpar.parallelize_model(LlamaConfig(**MODEL), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    ways = make_ways(model, optimizer)
    stall: dict[str, list[float]] = {way: [] for way in ways}
    until: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    for turn in range(ROUNDS):
        for way in order.sample(list(ways), len(ways)):
            target = directory / f"{len(stall[way])}-{list(ways).index(way)}"
            dist.barrier()
            start = time.perf_counter()
            wait = ways[way](target)
            dist.barrier()
            stall[way].append(time.perf_counter() - start)
            wait()
            dist.barrier()
            until[way].append(time.perf_counter() - start)
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"round {turn + 1}: {way}: {stall[way][-1]:.3f} s", flush=True)
                shutil.rmtree(target)
    held = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    if dist.get_rank() == 0:
        print(json.dumps({"stall": stall, "until": until, "bytes": held}), flush=True)


def make_ways(model, optimizer) -> dict[str, Callable[[Path], Callable[[], object]]]:
    """Each way: save to a directory; it returns when training may go on, with what waits for the disk."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from meshpar import checkpoint

    saver, group = checkpoint.BackgroundSaver(), dist.new_group(backend="gloo")
    stager = DefaultStager(StagingOptions(False, False, False, False))  # the options need CUDA

    def at_once(directory: Path) -> Callable[[], object]:
        checkpoint.save(directory, model, optimizer, {})
        return lambda: None

    def behind(directory: Path) -> Callable[[], object]:
        saver.save(directory, model, optimizer, {})
        return saver.wait

    def theirs(directory: Path) -> Callable[[], object]:
        names = {param: name for name, param in model.named_parameters()}
        state = {"model": dict(model.named_parameters())}
        state["optim"] = {names[param]: values for param, values in optimizer.state.items()}
        answer = dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(directory),
            process_group=group,
            async_stager=stager,
        )
        return getattr(answer, "upload_completion", answer).result

    return {SYNC: at_once, ASYNC: behind, THEIRS: theirs}


if __name__ == "__main__":
    main()
