"""Timelines as files in the Trace Event Format, which chrome://tracing and ui.perfetto.dev show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .simulate import Action, Span, Timeline

_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def write_trace(path: Path, timeline: Timeline, ranks: Sequence[str] | None = None) -> None:
    """Write a timeline; ``ranks``: what each of its ranks is called."""
    names = ranks or [f"rank {i}" for i in range(len(timeline.ranks))]
    events = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": name}} for rank, name in enumerate(names)
    ]
    events += [_event(rank, span) for rank, spans in enumerate(timeline.ranks) for span in spans]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def read_trace(path: Path) -> Timeline:
    """The timeline of a file that `write_trace` wrote."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ranks: list[list[Span]] = [[] for event in events if event["ph"] == "M"]
    for event in events:
        if event["ph"] == "X":
            start, about = event["ts"] / 1e6, event["args"]
            action = Action(about["kind"], about["stage"], about["microbatch"])
            ranks[event["pid"]].append(Span(action, start, start + event["dur"] / 1e6))
    return Timeline(ranks)


def _event(rank: int, span: Span) -> dict[str, Any]:
    kind, stage, microbatch = span.action
    return {
        "name": f"{_NAMES[kind]} {microbatch}",
        "cat": _NAMES[kind],
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": (span.finish - span.start) * 1e6,
        "pid": rank,
        "tid": stage,
        "args": {"kind": kind, "stage": stage, "microbatch": microbatch},
    }
