"""Head and loss at a large vocabulary: meshpar's, which never builds the logits, beside the plain ones.

    python -m benchmarks.loss          # prints the table that `make bench` writes to benchmarks/RESULTS.md

Each way runs in fresh processes, in turn. Memory is the process's peak above what it held with the hidden states and
the head's weight made: gradients of both are part of it, for each way alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from . import memory

TOKENS, VOCABULARY, HIDDEN = 8192, 131072, 128
WAYS = {
    "head, then F.cross_entropy": "plain",
    "F.linear_cross_entropy (torch)": "torch",
    "meshpar": "meshpar",
}
STEPS = 2


def main() -> None:
    """Print the table, or, inside a worker, run one way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker)
    else:
        print(table())


def table(rounds: int = 1) -> str:
    """The Markdown of all ways."""
    results: dict[str, list[dict]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, way in WAYS.items():
            results[name].append(_launch(way))
    plain = results[next(iter(WAYS))]
    lines = [
        f"{TOKENS} tokens, vocabulary {VOCABULARY}, hidden {HIDDEN}, float32, one process; forward and backward.",
        "",
        "| way | peak memory above its inputs (MiB) | of the plain one | time (s) | ratio to the plain one |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        if any("failed" in r for r in runs):
            lines.append(f"| {name} | {runs[0].get('failed', '')} | | | |")
            continue
        memory, seconds = (statistics.median(_all(runs, key)) for key in ("peak", "seconds"))
        plain_memory, plain_seconds = (statistics.median(_all(plain, key)) for key in ("peak", "seconds"))
        lines.append(
            f"| {name} | {memory / 2**20:.0f} | {memory / plain_memory:.3f} | {seconds:.2f} | "
            f"{seconds / plain_seconds:.2f} |"
        )
    return "\n".join([*lines, "", "Goal: at most 1/8 of the plain one's memory, at most 1.1 of its time.", ""])


def _all(runs: list[dict], key: str) -> list[float]:
    return [x for r in runs for x in r[key]]


def _launch(way: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", "--worker", way], capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    return json.loads(lines[-1])


def run_worker(way: str) -> None:
    """Forward and backward, and print {"peak": [bytes], "seconds": [...]}."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from meshpar.loss import LazyLogits, cross_entropy_sum

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN).div_(HIDDEN**0.5).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (1, TOKENS))

    def loss() -> torch.Tensor:
        if way == "plain":
            return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten(), reduction="sum")
        if way == "torch":
            return F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten(), reduction="sum")
        return cross_entropy_sum(LazyLogits.of(hidden, weight, None), targets, 0, VOCABULARY, dist.group.WORLD)

    seconds, before = [], memory.resident()
    memory.restart_peak()
    for _ in range(STEPS):
        start = time.perf_counter()
        loss().backward()
        seconds.append(time.perf_counter() - start)
        hidden.grad = weight.grad = None
    peak = memory.peak_resident() - before
    print(json.dumps({"peak": [peak], "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
