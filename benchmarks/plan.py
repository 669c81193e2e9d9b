"""The planner's forecast of a step beside the step, on every mesh of 4 processes; and how good its first choice is.

    make demo                       # once: makes the checkpoint
    python -m benchmarks.plan       # prints the table that `make bench` writes to benchmarks/RESULTS.md

The machine is calibrated with as many processes at work, then the search ranks the meshes. Each mesh then runs once a
round, in turn, in the same processes; its time is the median.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from .processes import under_torchrun

MODEL = "out/demo/model"
PROCESSES, ROWS, SEQ_LEN, ROUNDS = 4, 8, 64, 2
MESHES = [(pp, PROCESSES // pp // tp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4) if pp * tp <= PROCESSES]


def main() -> None:
    """Print the table, or, inside a worker, run all meshes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.model)
    else:
        print(table(args.model))


def table(model: str = MODEL) -> str:
    """The Markdown of all meshes, in the search's order."""
    ranked = forecasts(model)
    measured = [
        statistics.median(runs) for runs in under_torchrun("benchmarks.plan", PROCESSES, "--worker", "--model", model)
    ]
    seconds = dict(zip(MESHES, measured, strict=True))
    lines = [
        f"SmolLM2-135M, float32, {ROWS} rows of {SEQ_LEN} tokens a step, one row a microbatch, 1F1B on pipelines: "
        "forward, backward, clipping and AdamW. In the order of the search, which knows what `--calibrate` measures of "
        f"this machine with {PROCESSES} processes at work.",
        "",
        "| pp | dp_shard | tp | forecast (s) | measured (s) | forecast / measured | of the fastest |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    fastest = min(measured)
    for mesh, forecast in ranked.items():
        real = seconds[mesh]
        cells = [*map(str, mesh), f"{forecast:.2f}", f"{real:.2f}", f"{forecast / real:.2f}", f"{real / fastest:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Goal: the first row within 1.10 of the fastest.", ""])


def forecasts(model: str) -> dict[tuple[int, int, int], float]:
    """Seconds of a step on each mesh, the search's first choice first."""
    from meshpar.planner.calibrate import calibrate_machine
    from meshpar.planner.devices import device_named
    from meshpar.planner.job import open_job
    from meshpar.planner.search import search

    device = calibrate_machine(PROCESSES, "float32").device(device_named("cpu"))
    settings = {"data.seq_len": SEQ_LEN, "batch.global_size": ROWS, "parallel.compute_dtype": "float32"}
    job = open_job(model, settings, PROCESSES, device, per_node=PROCESSES, search=True)
    fixed = {"dp_replicate": 1, "schedule": "1F1B", "activation_checkpoint": "none", "micro_size": 1}
    ranking = search(job, fixed, keep=len(MESHES))
    return {(f.config.pp, f.config.dp_shard, f.config.tp): f.time.step_seconds for f in ranking.best}


def run_worker(model: str) -> None:
    """Print each mesh's seconds a step on rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ids = torch.randint(0, 40000, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    seconds: list[list[float]] = [[] for _ in MESHES]
    for _ in range(ROUNDS):
        for sizes, found in zip(MESHES, seconds, strict=True):
            found.append(step_seconds(model, sizes, ids))
            gc.collect()
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def step_seconds(model: str, sizes: tuple[int, int, int], ids) -> float:
    """Of the second step, until the slowest rank has done it."""
    import torch
    import torch.distributed as dist

    import meshpar

    pp, dp, tp = sizes
    rows = ROWS // dp
    config = meshpar.ParallelConfig(pp=pp, dp_shard=dp, tp=tp, compute_dtype="float32", microbatches=rows)
    net = meshpar.parallelize_model(model, config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    rank = net.mesh["dp"].get_local_rank()
    own = ids[rank * rows : (rank + 1) * rows]
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        net.forward_backward({"input_ids": own, "labels": own})
        net.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
