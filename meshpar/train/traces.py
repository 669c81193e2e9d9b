"""The actions of one real step, of all ranks on one clock, in output_dir/trace.json."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ..actions import recording
from ..mesh import Mesh, on_first_rank
from ..planner.chrome import write_trace
from ..planner.simulate import Action, Span, Timeline

TRACED = 3  # the step of a run that is traced: the first ones set things up
_ROUNDS = 9


@contextmanager
def traced_step(mesh: Mesh, output_dir: Path, wanted: bool) -> Iterator[None]:
    """Record what runs inside, where it is ``wanted``, and write it on rank 0. Collective then."""
    if not wanted:
        yield
        return
    behind = _clock_behind_first()
    with recording(mesh.device) as recorder:
        yield
    timeline = _on_one_clock(recorder.spans(), behind)
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, ", ".join(f"{dim}={mesh.rank(dim)}" for dim in ("pp", "dp", "tp")))
    labels = [f"rank {i}: {name}" for i, name in enumerate(names)]
    on_first_rank(lambda: write_trace(output_dir / "trace.json", timeline, labels))


def _clock_behind_first() -> float:
    """What to add to this rank's clock for that of rank 0, taken when all leave a barrier: the median of a few."""
    left = []
    for _ in range(_ROUNDS):
        dist.barrier()
        left.append(time.perf_counter())
    every: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, left)
    return statistics.median(first - own for first, own in zip(every[0], left, strict=True))


def _on_one_clock(spans: list[Span], behind: float) -> Timeline:
    """All ranks' spans in seconds from the first of them, on rank 0; plain tuples are sent."""
    own = [(*span.action, span.start + behind, span.finish + behind) for span in spans]
    every: list[list[tuple]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, own)
    zero = min(start for rank in every for *_, start, _ in rank)
    return Timeline(
        [
            [Span(Action(kind, stage, mb), start - zero, finish - zero) for kind, stage, mb, start, finish in rank]
            for rank in every
        ]
    )
