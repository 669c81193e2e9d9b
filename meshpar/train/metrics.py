"""What a run reports: metrics.jsonl, a progress bar and trackers on rank 0; speed, memory and MFU of all ranks."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ..flops import flops_per_token
from ..mesh import on_first_rank
from ..model import ParallelModel
from ..planner.devices import device_in_torch
from ..recipe import Recipe
from .trackers import start_trackers

log = logging.getLogger("meshpar")


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of a device in ``dtype``, None where it is not known."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    known = device_in_torch(torch.cuda.get_device_name(device))
    return known.peak[dtype] if known is not None else None


def peak_memory_bytes(device: torch.device) -> int:
    """The most this process has held so far: torch's memory on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Metrics:
    """Times steps and reports them: every rank calls it, rank 0 writes. ``step`` and ``tokens`` are done already.

    An output that fails, a full disk or a tracker's server, is warned of once; training goes on, and so does the output
    when it works again.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel, console: Console, step: int, tokens: int) -> None:
        self._device, self._every = model._mesh.device, recipe.log.every
        self._flops = flops_per_token(model._full.shapes, model.config, recipe.data.seq_len)
        self._peak = peak_flops(self._device, recipe.parallel.compute_dtype)
        self._tokens, self._steps, self._seconds = tokens, 0, 0.0  # at the last row; since the last row
        self._outputs: list[Any] = []
        self._failed: set[Any] = set()
        on_first_rank(lambda: self._open(recipe, console, step))

    def _open(self, recipe: Recipe, console: Console, step: int) -> None:
        out = Path(recipe.output_dir)
        trackers = start_trackers(recipe.log.trackers, out, recipe.model_dump(mode="json", by_alias=True))
        bar = ProgressBar(console, step, recipe.train.steps)
        self._outputs = [MetricsFile(out / "metrics.jsonl", step), bar, *map(_Tracker, trackers)]

    def start_step(self) -> None:
        """The clock runs from here to `end_step`: evaluations and checkpoints do not count."""
        self._started = time.perf_counter()

    def end_step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, tokens: Tensor) -> None:
        """Report a finished step where it is due; ``tokens`` of all ranks since the start of the run."""
        self._steps += 1
        due = step % self._every == 0
        row = {"step": step, "loss": loss.item(), "grad_norm": grad_norm.item(), "lr": lr} if due else {}
        self._seconds += time.perf_counter() - self._started
        if due:
            self._report(row | self._speed(int(tokens.item())))

    def evaluation(self, step: int, loss: float) -> None:
        """Report an evaluation."""
        self._report({"step": step, "eval_loss": loss})

    def event(self, step: int, event: str, reason: str) -> None:
        """Report what the numbers alone do not tell."""
        self._report({"step": step, "event": event, "reason": reason})

    def go_back(self, step: int, tokens: int) -> None:
        """The run goes on from an earlier step: rows of later ones are dropped."""
        self._tokens, self._steps, self._seconds = tokens, 0, 0.0
        if self._outputs:
            self._try(self._outputs[0], lambda: self._outputs[0].go_back(step))

    def close(self) -> None:
        """Finish the bar, the file and the trackers."""
        for output in self._outputs:
            self._try(output, output.close)

    def _speed(self, tokens: int) -> dict[str, Any]:
        peak = torch.tensor(peak_memory_bytes(self._device), device=self._device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        speed = (tokens - self._tokens) / self._seconds
        known = self._peak is not None
        numbers = {
            "tokens": tokens,
            "tokens_per_second": speed,
            "step_seconds": self._seconds / self._steps,
            "peak_memory_bytes": int(peak.item()),
            "mfu": speed * self._flops / (self._peak * dist.get_world_size()) if known else None,
        }
        self._tokens, self._steps, self._seconds = tokens, 0, 0.0
        return numbers

    def _report(self, row: dict[str, Any]) -> None:
        for output in self._outputs:
            self._try(output, lambda output=output: output.write(row))

    def _try(self, output: Any, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a tracker may raise anything, and only this rank has it
            if output not in self._failed:
                log.warning("%s failed, and training goes on: %s: %s", output.name, type(error).__name__, error)
            self._failed.add(output)
        else:
            self._failed.discard(output)


class MetricsFile:
    """One JSON object a line. Rows that a run which got further than ``step`` has left are dropped first."""

    def __init__(self, path: Path, step: int) -> None:
        self.name, self._path = str(path), path
        self._file = _open_after(path, step)
        self._waiting: list[bytes] = []  # rows
        self._begun = 0  # bytes of the first of them that are in the file
        self._back_to: int | None = None  # the last step whose rows stay, where later ones are still to be dropped

    def go_back(self, step: int) -> None:
        """Drop the rows of steps after ``step``; where this raises, the next row tries again."""
        self._waiting = [row for row in self._waiting if _step_of(row) <= step]
        self._back_to = step if self._back_to is None else min(step, self._back_to)
        self._catch_up()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; it is in the file when this returns. What it raises for is written with the next one."""
        self._waiting.append(json.dumps({key: _or_null(value) for key, value in row.items()}).encode() + b"\n")
        self._catch_up()

    def close(self) -> None:
        try:
            self._catch_up()
        finally:
            self._file.close()

    def _catch_up(self) -> None:
        if self._back_to is not None:
            file = _open_after(self._path, self._back_to)  # without a row that is there in part
            self._file.close()
            self._file, self._begun, self._back_to = file, 0, None
        while self._waiting:
            self._begun += self._file.write(self._waiting[0][self._begun :]) or 0
            if self._begun == len(self._waiting[0]):
                self._waiting.pop(0)
                self._begun = 0


def _open_after(path: Path, step: int) -> FileIO:
    kept = [line for line in _lines(path) if _step_of(line) <= step] if step else []
    aside = path.with_suffix(".tmp")
    aside.write_bytes(b"".join(kept))
    os.replace(aside, path)
    return path.open("ab", buffering=0)  # of a buffer, a full disk may lose rows


def _or_null(value: object) -> object:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"] if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf  # what a killed process left half written


class ProgressBar:
    """Step, loss, gradient norm and tokens a second; on what is no terminal, a line for each reported step."""

    def __init__(self, console: Console, step: int, steps: int) -> None:
        self.name, self._steps = "the progress bar", steps
        columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=step)
        self._bar.start()

    def write(self, row: dict[str, Any]) -> None:
        """Show a row; of an event the log has told."""
        if "event" in row:
            return
        text = _in_words(row)
        if self._bar.disable:
            print(f"step {row['step']}/{self._steps}  {text}", flush=True)
        elif "eval_loss" in row:
            self._bar.console.print(f"step {row['step']}  {text}")
        else:
            self._bar.update(self._task, completed=row["step"], description=text)

    def close(self) -> None:
        self._bar.stop()


def _in_words(row: dict[str, Any]) -> str:
    if "eval_loss" in row:
        return f"eval loss {row['eval_loss']:.4f}"
    numbers = f"loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}"
    return f"{numbers}  {row['tokens_per_second']:,.0f} tokens/s"


class _Tracker:
    def __init__(self, tracker: Any) -> None:
        self.name, self._tracker = f"the tracker {tracker.name}", tracker

    def write(self, row: dict[str, Any]) -> None:
        numbers = {key: value for key, value in row.items() if key != "step" and isinstance(value, int | float)}
        if numbers:
            self._tracker.log(numbers, step=row["step"])

    def close(self) -> None:
        self._tracker.finish()
