"""How set-up, a step and memory grow with layers, ranks, microbatches and the vocabulary, beside how they should.

    python -m benchmarks.growth          # prints the table that `make bench` writes to benchmarks/RESULTS.md

One launch for each number of processes. The models of one row are built one after another and then step in turn, so
that a busy machine slows all of them. Times are of CPUs, which ranks share here: what it costs to wait is in the other
tables. Memory is the worst rank's: resident memory at its peak in a step, above what it was before the model was built.
The peak is restarted (/proc/self/clear_refs) before the step that is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import memory
from .processes import under_torchrun

ROUNDS = 4  # the least counts: what else the machine does only adds
TOLERANCE = 0.25  # of an exponent
TIMEOUT = 600  # seconds a launch may take


@dataclass(frozen=True)
class Case:
    """A Llama of 8 heads on a mesh of pp x tp, and its batch of rows x seq_len."""

    layers: int = 4
    hidden: int = 64
    vocabulary: int = 256
    pp: int = 1
    tp: int = 1
    rows: int = 4
    seq_len: int = 64
    microbatches: int = 1

    @property
    def processes(self) -> int:
        return self.pp * self.tp


@dataclass(frozen=True)
class Expected:
    """A quantity that grows as its cause to the power ``most`` at most; ``apart``: beside a part that stays."""

    most: float
    why: str
    apart: bool = True


@dataclass(frozen=True)
class Axis:
    """What grows, three times by the same factor, and how the quantities should follow: quantity -> `Expected`."""

    name: str
    cases: dict[int, Case]
    expected: dict[str, Expected]


QUANTITIES = {
    "set-up": ("set-up, CPU of the busiest rank (s)", 1.0),
    "step": ("step, CPU of all ranks (s)", 1.0),
    "memory": ("peak memory of the worst rank (MiB)", 2.0**20),
}


def _cases(base: Case, name: str, values: tuple[int, ...]) -> dict[int, Case]:
    return {value: replace(base, **{name: value}) for value in values}


_LAYERS = {
    "set-up": Expected(1, "every layer is built, planned, wrapped and read alike"),
    "step": Expected(1, "every layer computes the same"),
    "memory": Expected(1, "every layer has parameters, gradients, states and activations"),
}
_STEP_OF_RANKS = Expected(1, "arithmetic: 0; each rank's own Python and what it sends: 1", apart=False)
_WIDE = Case(layers=4, hidden=512, vocabulary=8192, seq_len=128)
_DEEP = Case(layers=8, hidden=256, vocabulary=1024, rows=8, seq_len=128, microbatches=8)
_PIPE = Case(layers=4, hidden=256, vocabulary=1024, rows=16, pp=2)
AXES = (
    Axis("layers at tp=2", _cases(Case(tp=2), "layers", (4, 16, 64)), _LAYERS),
    Axis("layers at pp=2", _cases(Case(pp=2, microbatches=4), "layers", (4, 16, 64)), _LAYERS),
    Axis(
        "tp",
        _cases(_WIDE, "tp", (1, 2, 4)),
        {
            "set-up": Expected(1, "each block is tried out on the part of every rank; at tp=1 none is", apart=False),
            "step": _STEP_OF_RANKS,
            "memory": Expected(0, "parameters and what is made of them are split: near -1", apart=False),
        },
    ),
    Axis(
        "pp",
        _cases(_DEEP, "pp", (1, 2, 4)),
        {
            "set-up": Expected(
                1, "0 from pp=2 on: every rank builds the whole skeleton; pp=1 records no forward", apart=False
            ),
            "step": _STEP_OF_RANKS,
            "memory": Expected(0, "layers are split: -1; 1F1B keeps pp microbatches of layers / pp: 0", apart=False),
        },
    ),
    Axis(
        "microbatches of one row, pp=2",
        {n: replace(_PIPE, rows=n, microbatches=n) for n in (4, 8, 16)},
        {
            "step": Expected(1, "each computes the same"),
            "memory": Expected(0, "1F1B keeps at most pp of them, whatever their number", apart=False),
        },
    ),
    Axis(
        "microbatches of 16 rows, pp=2",
        _cases(_PIPE, "microbatches", (4, 8, 16)),
        {
            "step": Expected(1, "arithmetic: 0; a fixed cost for each: 1", apart=False),
            "memory": Expected(0, "1F1B keeps at most pp of them, and they get smaller", apart=False),
        },
    ),
    Axis(
        "vocabulary at tp=2",
        _cases(Case(tp=2, rows=4, seq_len=256), "vocabulary", (1024, 8192, 65536)),
        {
            "set-up": Expected(1, "embedding and head are read, beside the layers", apart=False),
            "step": Expected(1, "the head's arithmetic"),
            "memory": Expected(1, "embedding and head; of the logits one chunk, and no more of them beyond 64 MiB"),
        },
    ),
)


def main() -> None:
    """Print the table, or, inside a worker, measure the cases of its number of processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_worker(args.worker)
    else:
        print(table())


def table() -> str:
    """The Markdown of all axes."""
    measured: dict[str, dict[str, dict]] = {axis.name: {} for axis in AXES}
    for processes in sorted({case.processes for axis in AXES for case in axis.cases.values()}):
        for name, results in launch(processes).items():
            measured[name] |= results
    lines = [
        "A quantity y grows as the power k of its cause x: y = a + b x^k where most of it should grow, y = b x^k where "
        f"most should stay or shrink. Expected is the largest k that is right; beyond {TOLERANCE} more it says so.",
        "",
        "| what grows | quantity | | | | k | expected at most | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for axis in AXES:
        lines += _rows(axis, {x: measured[axis.name][str(x)] for x in axis.cases})
    return "\n".join([*lines, ""])


def _rows(axis: Axis, measured: dict[int, dict]) -> list[str]:
    rows = []
    for quantity, expected in axis.expected.items():
        label, unit = QUANTITIES[quantity]
        ys = [measured[x][quantity] / unit for x in axis.cases]
        k = exponent(list(axis.cases), ys, expected.apart)
        verdict = "" if k <= expected.most + TOLERANCE else "**grows faster**"
        values = [f"{x}: {y:.3g}" for x, y in zip(axis.cases, ys, strict=True)]
        cells = [axis.name, label, *values, f"{k:.2f}", f"{expected.most:g}: {expected.why}", verdict]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def exponent(xs: list[int], ys: list[float], apart: bool) -> float:
    """k of y = a + b x^k through three points, each x the same multiple of the one before.

    Of y = b x^k where nothing is ``apart``, or where y does not grow twice: least squares of the logarithms.
    """
    first, second = ys[1] - ys[0], ys[2] - ys[1]
    if apart and first > 0 and second > 0:
        return math.log(second / first, xs[1] / xs[0])
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def launch(processes: int) -> dict[str, dict[str, dict]]:
    """What rank 0 reports: axis -> value -> quantity -> seconds or bytes."""
    return under_torchrun("benchmarks.growth", processes, "--worker", str(processes), timeout=TIMEOUT)


def run_worker(processes: int) -> None:
    """Measure the cases for so many processes and print them on rank 0."""
    import torch.distributed as dist

    import meshpar

    meshpar.init_distributed("cpu")
    results: dict[str, dict[int, dict]] = {}
    with tempfile.TemporaryDirectory() as directory:
        paths = [directory]
        dist.broadcast_object_list(paths)
        warm_up = Case(pp=processes, layers=processes, microbatches=processes)
        Run(warm_up, Path(paths[0]))  # what a process does once
        for axis in AXES:
            cases = {x: case for x, case in axis.cases.items() if case.processes == processes}
            results[axis.name] = measure(cases, Path(paths[0]))
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def measure(cases: dict[int, Case], directory: Path) -> dict[int, dict]:
    """Value -> quantity -> seconds or bytes; all cases of one axis, built one by one, then timed in turn."""
    import torch.distributed as dist

    runs = {x: Run(case, directory) for x, case in cases.items()}
    seconds: dict[int, list[float]] = {x: [] for x in runs}
    for _ in range(ROUNDS):
        for x, run in runs.items():
            seconds[x].append(cpu_seconds(run.step))
    results = {}
    for x, run in runs.items():
        everyone = [(0.0, 0.0, 0)] * dist.get_world_size()
        dist.all_gather_object(everyone, (run.setup, min(seconds[x]), run.peak))
        setup, step, peak = zip(*everyone, strict=True)
        results[x] = {"set-up": max(setup), "step": sum(step), "memory": max(peak)}
    return results


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU seconds of this rank for what all ranks do: waiting, for others or for a core, does not count."""
    import torch.distributed as dist

    dist.barrier()
    start = time.process_time()
    action()
    return time.process_time() - start


class Run:
    """A case's model on this rank with its batch and AdamW; building it measures set-up and memory."""

    def __init__(self, case: Case, directory: Path) -> None:
        import torch

        path = _saved(case, directory)
        ids = torch.randint(0, case.vocabulary, (case.rows, case.seq_len), generator=torch.Generator().manual_seed(0))
        self.batch = {"input_ids": ids, "labels": ids}
        with memory.own_pages():
            memory.settle()
            before = memory.resident()
            self.setup = cpu_seconds(lambda: self._build(case, path))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
            self.step()  # makes the optimizer's states
            memory.settle()
            memory.restart_peak()
            self.step()
            self.peak = memory.peak_resident() - before

    def _build(self, case: Case, path: Path) -> None:
        import meshpar

        config = meshpar.ParallelConfig(
            pp=case.pp, tp=case.tp, dp_shard=1, microbatches=case.microbatches, compute_dtype="float32"
        )
        self.model = meshpar.parallelize_model(path, config)

    def step(self) -> None:
        """Forward, backward, clipping and AdamW."""
        self.model.forward_backward(self.batch)
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _saved(case: Case, directory: Path) -> Path:
    """The directory of a case's model, which rank 0 writes if there is none."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, LlamaConfig

    path = directory / f"{case.layers}-{case.hidden}-{case.vocabulary}"
    if dist.get_rank() == 0 and not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=case.layers,
            hidden_size=case.hidden,
            intermediate_size=3 * case.hidden,
            vocab_size=case.vocabulary,
            num_attention_heads=8,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    dist.barrier()
    return path


if __name__ == "__main__":
    main()
