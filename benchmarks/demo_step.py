"""Step time of the demo model on meshes of 1 to 6 processes beside plain transformers, and the bytes a rank reads.

    make demo                            # once: makes the checkpoint
    python -m benchmarks.demo_step       # prints the table that `make bench` writes to benchmarks/RESULTS.md

Every configuration runs once a round, in turn, each in fresh processes; a row is the median over all timed steps of all
rounds, and its ratio to the median of plain transformers in the same run. All share this machine's cores, so more
processes cannot be faster here: the ratio is what the mesh costs on top of the same arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

from .processes import under_torchrun

MODEL = "out/demo/model"
PLAIN = "transformers, one process"
MESHES = {
    "1 process": {},
    "pp=2 tp=2": {"pp": 2, "tp": 2},
    "pp=2 tp=3": {"pp": 2, "tp": 3},
}
ROWS, SEQ_LEN, WARMUP, STEPS = 4, 128, 1, 1


def main() -> None:
    """Print the table, or, inside a worker, run one configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        run_worker(args.model, args.worker)
    else:
        print(table(args.model, args.rounds))


def table(model: str = MODEL, rounds: int = 2) -> str:
    """The Markdown of all configurations."""
    results: dict[str, list[dict]] = {name: [] for name in (PLAIN, *MESHES)}
    for turn in range(rounds):
        for name in results:
            results[name].append(launch(model, name))
            seconds = statistics.median(results[name][-1]["seconds"])
            print(f"round {turn + 1}: {name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return _report(results, rounds)


def launch(model: str, name: str) -> dict:
    """One configuration in fresh processes; what its rank 0 reports."""
    sizes = MESHES.get(name, {})
    world = sizes.get("pp", 1) * sizes.get("dp_shard", 1) * sizes.get("tp", 1)
    threads = max(1, (os.cpu_count() or 1) // world)
    return under_torchrun("benchmarks.demo_step", world, "--model", model, "--worker", name, threads=threads)


def run_worker(model: str, name: str) -> None:
    """Load, step, and print {"seconds": [...], "read_over_shard": worst rank's} on rank 0."""
    import torch

    ids = torch.randint(0, 40000, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    result = plain_steps(model, batch) if name == PLAIN else mesh_steps(model, MESHES[name], batch)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(result), flush=True)


def timed(step) -> list[float]:
    """Seconds of each step after the warm-up."""
    seconds = []
    for _ in range(WARMUP + STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[WARMUP:]


def plain_steps(model: str, batch: dict) -> dict:
    """Forward, backward, clip and AdamW of the unmodified model, rows one by one as the meshes' microbatches are."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)

    def step() -> None:
        for row in range(ROWS):
            part = {k: v[row : row + 1] for k, v in batch.items()}
            (net(**part, use_cache=False).loss / ROWS).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"seconds": timed(step), "read_over_shard": None}


def mesh_steps(model: str, sizes: dict, batch: dict) -> dict:
    """The same on a mesh; and the bytes read while loading over the bytes of the rank's shard, the worst rank's."""
    import torch
    import torch.distributed as dist

    import meshpar
    from meshpar.load import open_model

    rows = ROWS // sizes.get("dp_shard", 1)
    config = meshpar.ParallelConfig(**sizes, compute_dtype="float32", microbatches=rows)
    net, read = _load_counting(model, config, meshpar, open_model)
    shard = sum(p.to_local().nbytes for p in net.parameters())
    ratio = torch.tensor(read / shard)
    dist.all_reduce(ratio, op=dist.ReduceOp.MAX)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    rank = net.mesh["dp"].get_local_rank()
    own = {k: v[rank * rows : (rank + 1) * rows] for k, v in batch.items()}

    def step() -> None:
        net.forward_backward(own)
        net.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"seconds": timed(step), "read_over_shard": ratio.item()}


def _load_counting(path: str, config, meshpar, open_model):
    """The model, and how many bytes of tensor data this rank read for it."""
    import meshpar.model as module

    opened = []

    def counting(*args, **kwargs):
        opened.append(open_model(*args, **kwargs))
        return opened[-1]

    module.open_model = counting
    try:
        net = meshpar.parallelize_model(path, config)
    finally:
        module.open_model = open_model
    return net, opened[0].source.bytes_read


def _report(results: dict[str, list[dict]], rounds: int) -> str:
    medians = {name: statistics.median(s for r in runs for s in r["seconds"]) for name, runs in results.items()}
    lines = [
        f"SmolLM2-135M (30 layers, hidden 576, tied), float32, {ROWS} rows of {SEQ_LEN} tokens a step, one row a "
        f"microbatch; forward, backward, clipping and AdamW; {rounds} rounds in turn, of each the second step. "
        "All processes share the machine's cores: more of them cannot be faster here, and the ratio is what the mesh "
        "costs on top of the same arithmetic.",
        "",
        "| configuration | processes | median step (s) | ratio to plain | bytes read / shard, worst rank |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        sizes = MESHES.get(name, {})
        world = sizes.get("pp", 1) * sizes.get("dp_shard", 1) * sizes.get("tp", 1)
        read = runs[0]["read_over_shard"]
        cells = [name, str(world), f"{medians[name]:.2f}", f"{medians[name] / medians[PLAIN]:.2f}"]
        lines.append("| " + " | ".join([*cells, "" if read is None else f"{read:.3f}"]) + " |")
    lines += ["", "Goal for the last column: at most 1.02.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
