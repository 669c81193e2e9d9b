"""When each action of a step ran on this rank: recorded while `recording` lasts, at no cost else.

On CUDA the times are the device's, from events that are read after the step: the host runs ahead of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .planner.simulate import Action, Kind, Span

_Moment = Callable[[], float]  # a time, to be asked for after the step
_OFF = nullcontext()


class Recorder:
    """Actions of this rank in the order they ran, from the moment it is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Action, _Moment, _Moment]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._first = self._event()
        self._began = time.perf_counter()

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Note when what runs inside starts and finishes."""
        start = self._now()
        yield
        self._marks.append((action, start, self._now()))

    def spans(self) -> list[Span]:
        """Seconds of `time.perf_counter`. The microbatches of a schedule's second pass follow those of the first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        each = 1 + max((action.microbatch for action, _, _ in self._marks), default=0)
        passes: Counter[Action] = Counter()
        spans = []
        for action, start, finish in self._marks:
            numbered = action._replace(microbatch=action.microbatch + each * passes[action])
            passes[action] += 1
            spans.append(Span(numbered, start(), finish()))
        return spans

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            now = time.perf_counter()
            return lambda: now
        event = self._event()
        return lambda: self._began + self._first.elapsed_time(event) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


_recorder: Recorder | None = None


@contextmanager
def recording(device: torch.device) -> Iterator[Recorder]:
    """Record this rank's actions while the context lasts."""
    global _recorder
    _recorder = Recorder(device)
    try:
        yield _recorder
    finally:
        _recorder = None


def timed(kind: Kind, stage: int, microbatch: int) -> AbstractContextManager[None]:
    """Around an action. The first stage has no input gradients: what is called its weights' part is its backward."""
    if _recorder is None or (stage == 0 and kind == "I"):
        return _OFF
    return _recorder.record(Action("B" if stage == 0 and kind == "W" else kind, stage, microbatch))
