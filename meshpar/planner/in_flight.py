"""What a pp rank holds of its microbatches at each of its actions, counted: the same for any model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..stages import stage_ranks, stages_of_rank
from .orders import schedule_order
from .simulate import Action

_Row = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class InFlight:
    """Counts at the moments of a step at which a pp rank may hold most; the first four [moments, stages].

    ``kept``: microbatches between forward and backward. ``between``: between the two parts of a backward. ``gone``:
    1 where a stage has gone backward, so that its gradients are there. ``runs``: 1 where a stage's last layer is going
    backward, not for its weights alone. ``sent``: [moments], what was sent and is kept.
    """

    kept: Tensor
    between: Tensor
    gone: Tensor
    runs: Tensor
    sent: Tensor


def in_flight(config: ParallelConfig, microbatches: int, pp_rank: int) -> InFlight:
    """Of one run of the config's schedule over ``microbatches``; without a pipeline, of one of them."""
    if config.pp == 1:
        one = torch.ones(1, 1, dtype=torch.float64)
        return InFlight(one, 0 * one, 0 * one, one, 0 * one[0])
    return _in_flight(config.schedule, config.pp, config.virtual_stages, microbatches, pp_rank)


@lru_cache(maxsize=512)
def _in_flight(schedule: str, pp: int, virtual: int, microbatches: int, pp_rank: int) -> InFlight:
    config = ParallelConfig(pp=pp, dp_shard=1, schedule=schedule, virtual_stages=virtual)
    own, ranks = stages_of_rank(config, pp_rank), [*stage_ranks(config), pp_rank]
    actions = [action for step in schedule_order(config, microbatches)[pp_rank] for action in step]
    most: dict[_Row, int] = {}
    for row, sent in _moments(actions, own, ranks):
        most[row] = max(most.get(row, 0), sent)
    kept, between, gone, runs = (torch.tensor(counts, dtype=torch.float64) for counts in zip(*most, strict=True))
    return InFlight(kept, between, gone, runs, torch.tensor([*most.values()], dtype=torch.float64))


def _moments(actions: Sequence[Action], own: Sequence[int], ranks: Sequence[int]) -> Iterator[tuple[_Row, int]]:
    """As `step_memory` replays a step: a backward starts with all that it needs, and ends with a stage's gradients."""
    place = {stage: i for i, stage in enumerate(own)}
    kept, between, gone, sent = [0] * len(own), [0] * len(own), [0] * len(own), 0
    for kind, stage, _ in actions:
        i = place[stage]
        if kind == "F":
            kept[i] += 1
            continue
        runs = tuple(int(n == i and kind != "W") for n in range(len(own)))
        yield (tuple(kept), tuple(between), tuple(gone), runs), sent
        (between if kind == "W" else kept)[i] -= 1
        if kind != "I" and not gone[i]:
            gone[i] = 1
            yield (tuple(kept), tuple(between), tuple(gone), (0,) * len(own)), sent
        between[i] += kind == "I"
        if len(own) > 1:  # such schedules keep what they sent to the end of a step
            rank = ranks[stage]
            sent += kind != "I" and ranks[stage + 1] != rank
            sent += kind != "W" and stage > 0 and ranks[stage - 1] != rank
