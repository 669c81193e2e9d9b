"""Replay a pipeline schedule: when each action runs, how long ranks are idle, how many activations they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

# Forward; whole backward; the part of it that gives input gradients; the part that gives weight gradients.
Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One microbatch through one stage, one way."""

    kind: Kind
    stage: int
    microbatch: int


# Actions a rank runs in turn, and whose results it sends when all are done: one, or an overlapped forward and backward.
Step = tuple[Action, ...]


class Span(NamedTuple):
    """When an action runs, in seconds from the start of the first."""

    action: Action
    start: float
    finish: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found: each rank's actions, in order."""

    ranks: list[list[Span]]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last finish."""
        return max(spans[-1].finish for spans in self.ranks)

    @property
    def bubble(self) -> float:
        """Idle time of all ranks until the last has finished, as a ratio to the time they compute."""
        busy = sum(span.finish - span.start for spans in self.ranks for span in spans)
        return len(self.ranks) * self.makespan / busy - 1

    @property
    def in_flight(self) -> list[int]:
        """Of each rank, the most (stage, microbatch) pairs between their forward and the end of their backward."""
        return [_most_in_flight([span.action for span in spans]) for spans in self.ranks]


def simulate(order: Sequence[Sequence[Step]], cost: Callable[[int, Kind], float], latency: float = 0.0) -> Timeline:
    """Run every rank's steps of ``order`` in turn, each action as soon as what it needs is there.

    ``cost``: seconds of an action by stage and kind; ``latency``: seconds that hidden states or gradients take to
    another rank, during which both ranks compute. Raises ValueError where ranks wait for each other for ever.
    """
    cost = cache(cost)
    last = max(action.stage for steps in order for step in steps for action in step)
    needs = [[[_need(action, last) for action in step] for step in steps] for steps in order]
    results: dict[Action, tuple[int, float]] = {}  # the rank that has it, and since when
    ranks: list[list[Span]] = [[] for _ in order]
    done = [0] * len(order)
    while left := [rank for rank, steps in enumerate(order) if done[rank] < len(steps)]:
        ready = [rank for rank in left if all(n is None or n in results for n in needs[rank][done[rank]])]
        if not ready:
            waiting = ", ".join(f"rank {rank} for {needs[rank][done[rank]]}" for rank in left)
            raise ValueError(f"the order of actions cannot run: {waiting}")
        for rank in ready:
            spans, step = ranks[rank], order[rank][done[rank]]
            clock = spans[-1].finish if spans else 0.0
            for action, need in zip(step, needs[rank][done[rank]], strict=True):
                start = clock
                if need is not None:
                    source, since = results[need]
                    start = max(clock, since + (latency if source != rank else 0.0))
                clock = start + cost(action.stage, action.kind)
                spans.append(Span(action, start, clock))
            results.update({_result(action): (rank, clock) for action in step})
            done[rank] += 1
    return Timeline(ranks)


def _need(action: Action, last: int) -> Action | None:
    """The result that an action waits for: that of the stage before it, or in a backward of the one behind it."""
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage > 0 else None
    if kind == "W":
        return Action("I", stage, microbatch)
    return Action("I", stage + 1, microbatch) if stage < last else Action("F", stage, microbatch)


def _result(action: Action) -> Action:
    """What an action is known by to those that wait for it: a whole backward gives input gradients too."""
    return Action("I", action.stage, action.microbatch) if action.kind == "B" else action


def _most_in_flight(actions: list[Action]) -> int:
    held = most = 0
    for action in actions:
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, held)
    return most
