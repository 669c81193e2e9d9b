"""Whether a step's gradients may reach the weights: decided before the optimizer runs, on all ranks at once."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..failure import AllRanksFailed
from ..nonfinite import Culprit
from ..recipe import Guard

log = logging.getLogger("meshpar")

# The second run is without compile.
_NOT_AGAIN = "not seen again when the step was run again: suspect the hardware, or parallel.compile where it is on"
_GOOD, _SPIKE, _NONFINITE = range(3)


class StepFailed(AllRanksFailed, RuntimeError):
    """Training stops at a step whose numbers are wrong; every rank raises it with the same message."""


@dataclass(frozen=True)
class Verdict:
    """What is done about a step ("warn", "skip" or "rollback") and why; no reason where nothing is wrong.

    ``stop``: a signal has asked some rank to end the run after this step.
    """

    action: str = "none"
    reason: str = ""
    stop: bool = False

    @property
    def updates(self) -> bool:
        """Whether the optimizer makes the step."""
        return self.action in ("none", "warn")


class StepGuard:
    """Judges each step by its loss and gradient norm, as a recipe's `guard` section says; ``recoveries`` so far."""

    def __init__(self, settings: Guard) -> None:
        self.settings, self.recoveries = settings, 0
        self._losses: deque[float] = deque(maxlen=settings.spike_window)

    def judge(
        self, step: int, loss: Tensor, grad_norm: Tensor, find: Callable[[], Culprit | None], stop: bool = False
    ) -> Verdict:
        """The verdict on ``step``, the same on every rank; ``find`` looks for the culprit. Collective.

        ``stop``: this rank was asked to end the run.

        Raises StepFailed where the recipe has the run stop, or ``max_recoveries`` are used up.
        """
        kind, stop = self._agree(self._kind(loss, grad_norm), stop)
        if kind == _NONFINITE:
            action, reason = self.settings.on_nonfinite, _not_finite(step, loss, grad_norm, find())
        elif kind == _SPIKE:
            action, reason = self.settings.on_spike, self._spike(step, loss)
        else:
            action, reason = "none", ""
        if action in ("none", "warn") and self.settings.spike_factor is not None:
            self._losses.append(loss.item())
        if action == "stop":
            raise StepFailed(reason)
        if action in ("skip", "rollback"):
            self._count(reason)
            log.warning("%s; %s %d of at most %d", reason, action, self.recoveries, self.settings.max_recoveries)
        elif reason:
            log.warning("%s", reason)
        return Verdict(action, reason, stop)

    def state_dict(self) -> dict[str, Any]:
        """What later verdicts depend on."""
        return {"recoveries": self.recoveries, "losses": list(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; what this run has recovered from since stays counted."""
        self.recoveries = max(self.recoveries, state.get("recoveries", 0))
        self._losses.clear()
        self._losses.extend(state.get("losses", ()))

    def _kind(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        finite = loss.isfinite() & grad_norm.isfinite()
        return torch.where(finite, torch.where(loss > self._limit(), _SPIKE, _GOOD), _NONFINITE)

    def _agree(self, kind: Tensor, stop: bool) -> tuple[int, bool]:
        """Loss and norm are every rank's, but a broken one may have others; a signal may reach one rank alone."""
        worst = torch.stack((kind, torch.full_like(kind, int(stop))))
        dist.all_reduce(worst, dist.ReduceOp.MAX)  # of integers: NaN might not be the largest number
        worst_kind, any_stop = worst.tolist()
        return worst_kind, bool(any_stop)

    def _limit(self) -> float:
        full = len(self._losses) == self.settings.spike_window
        return self.settings.spike_factor * median(self._losses) if full and self.settings.spike_factor else math.inf

    def _spike(self, step: int, loss: Tensor) -> str:
        usual, window = median(self._losses), self.settings.spike_window
        times = f"more than {self.settings.spike_factor:g} times {usual:.4f}, the median of the last {window} good ones"
        return f"loss is {loss.item():.4f} at step {step}, {times}"

    def _count(self, reason: str) -> None:
        if self.recoveries >= self.settings.max_recoveries:
            raise StepFailed(f"{reason}; guard.max_recoveries={self.settings.max_recoveries} are used up")
        self.recoveries += 1


def _not_finite(step: int, loss: Tensor, grad_norm: Tensor, culprit: Culprit | None) -> str:
    numbers = {"loss": loss.item(), "gradient norm": grad_norm.item()}
    wrong = (f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value))
    what = next(wrong, "a number of another rank is not finite")
    return f"{what} at step {step}: {f'first seen on {culprit}' if culprit else _NOT_AGAIN}"
