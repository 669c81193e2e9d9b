"""Pipeline schedules: which there are, what they accept, and how many microbatches they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .config import ParallelConfig


@dataclass(frozen=True)
class Schedule:
    """A torch pipeline schedule and what it accepts.

    `microbatches` is the rule torch applies to the number of microbatches of one schedule step: "any"; "stages" (at
    least one a stage); "rounds" (a multiple of the number of rounds, microbatches // pp, where that is at least 1).
    `splits_backward`: a stage's backward comes in two parts, for its inputs and for its weights.
    """

    name: str
    least_virtual: int
    most_virtual: int | None
    microbatches: Literal["any", "stages", "rounds"]
    splits_backward: bool = False


# The rules torch's schedule classes apply; the tests hold this table against the classes themselves.
SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("GPipe", 1, 1, "any"),
        Schedule("1F1B", 1, 1, "stages"),
        Schedule("Interleaved1F1B", 2, None, "rounds"),
        Schedule("InterleavedZeroBubble", 2, None, "rounds", splits_backward=True),
        Schedule("ZBVZeroBubble", 2, 2, "any", splits_backward=True),
        Schedule("LoopedBFS", 2, None, "any"),
        Schedule("DualPipeV", 2, 2, "stages", splits_backward=True),
    )
}


def choose_microbatches(config: ParallelConfig, rows: int) -> int:
    """Microbatches for one schedule step over `rows` rows of a data-parallel rank.

    That is `config.microbatches` where it is set, and 1 without a pipeline. Else the fewest that divide the rows and
    keep the bubble small (at least 4 * pp), in whole rounds of pp where an interleaved schedule can have them; else one
    row each. It can exceed `rows` where the schedule needs more: the caller pads the rows.
    """
    if config.microbatches is not None:
        return config.microbatches
    if config.pp == 1:
        return 1
    fitting = [m for m in range(4 * config.pp, rows + 1) if rows % m == 0 and accepts_microbatches(config, m)]
    if SCHEDULES[config.schedule].microbatches == "rounds":
        fitting = [m for m in fitting if m % config.pp == 0] or fitting
    return fitting[0] if fitting else _next_legal(config, max(rows, 1))


def accepts_microbatches(config: ParallelConfig, microbatches: int) -> bool:
    """Whether the schedule can run one step of this many microbatches. Without a pipeline, any number."""
    if config.pp == 1:
        return microbatches >= 1
    rule = SCHEDULES[config.schedule].microbatches
    if rule == "stages":
        return microbatches >= config.num_stages
    if rule == "rounds":
        return microbatches >= 1 and microbatches % max(1, microbatches // config.pp) == 0
    return microbatches >= 1


def splits_backward(config: ParallelConfig) -> bool:
    """Whether there is a pipeline whose backwards come in two parts."""
    return config.pp > 1 and SCHEDULES[config.schedule].splits_backward


def why_refused(config: ParallelConfig, microbatches: int) -> str:
    """Why the schedule cannot run this many microbatches: the end of a sentence that starts with the number."""
    if SCHEDULES[config.schedule].microbatches == "stages":
        return f"is fewer than the {config.num_stages} stages, which schedule={config.schedule} cannot run"
    rounds = microbatches // config.pp
    return f"is no multiple of the {rounds} rounds that schedule={config.schedule} makes of it at pp={config.pp}"


def microbatches_around(config: ParallelConfig, microbatches: int) -> list[int]:
    """The nearest numbers of microbatches the schedule can run, below (where there is one) and above."""
    below = next((m for m in range(microbatches - 1, 0, -1) if accepts_microbatches(config, m)), None)
    return [*([below] if below else []), _next_legal(config, microbatches + 1)]


def _next_legal(config: ParallelConfig, at_least: int) -> int:
    # Every rule accepts a multiple of num_stages, so the search is short.
    return next(m for m in range(at_least, at_least + config.num_stages + 1) if accepts_microbatches(config, m))
