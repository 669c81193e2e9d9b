"""The order of actions on every rank of a pipeline: what torch's schedules run."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from ..config import ParallelConfig
from .simulate import Action, Kind, Step


def schedule_order(config: ParallelConfig, microbatches: int) -> list[list[Step]]:
    """Each pp rank's steps in one run of the config's schedule over ``microbatches``."""
    return _order(config.schedule, config.pp, config.virtual_stages, microbatches)


@lru_cache(maxsize=64)
def _order(schedule: str, pp: int, virtual: int, microbatches: int) -> list[list[Step]]:
    cls = get_schedule_class(schedule)
    if issubclass(cls, PipelineScheduleSingle):
        warmups = [microbatches if schedule == "GPipe" else pp - rank for rank in range(pp)]
        return [_one_stage(rank, min(warmup, microbatches), microbatches) for rank, warmup in enumerate(warmups)]
    # An order depends on no more of a stage than this, so that none has to be made; what is sent follows from it.
    stage = SimpleNamespace(num_stages=pp * virtual, group_size=pp, group_rank=0, submod=nn.Module())
    ordering = type(cls.__name__, (cls,), {"_prepare_schedule_with_comms": lambda self, order: None})
    order = ordering([stage] * virtual, microbatches, loss_fn=lambda out, _: out).pipeline_order
    return [[step for action in order[rank] if (step := _step(action))] for rank in range(pp)]


def most_in_flight(config: ParallelConfig, microbatches: int) -> int:
    """(stage, microbatch) pairs that the first pp rank holds between forward and backward at most, by closed forms.

    arXiv 2104.04473 and 2401.10241, and for DualPipeV and short runs what torch's orders give.
    """
    pp, virtual = config.pp, config.virtual_stages
    of_a_round = microbatches // max(1, microbatches // pp)
    most = {
        "1F1B": pp,
        "Interleaved1F1B": 2 * (pp - 1) + (virtual - 1) * of_a_round + 1,
        "InterleavedZeroBubble": pp - 1 + (virtual - 1) * of_a_round + 1,
        "ZBVZeroBubble": min(2 * pp, microbatches + 1),
        "DualPipeV": 2 * pp + 1,
    }
    every = microbatches * virtual
    return min(every, most.get(config.schedule, every))


def _one_stage(stage: int, warmup: int, microbatches: int) -> list[Step]:
    """``warmup`` forwards, then a backward and a forward in turn, then what backwards are left.

    What torch runs for GPipe (all forwards are warm-up) and 1F1B; the order it can show of 1F1B is another one.
    """
    actions = [Action("F", stage, i) for i in range(warmup)]
    for i in range(microbatches):
        actions.append(Action("B", stage, i))
        if warmup + i < microbatches:
            actions.append(Action("F", stage, warmup + i))
    return [(action,) for action in actions]


def _step(action: Any) -> Step:
    """A step of torch's action; empty for a wait, which follows from what actions need.

    The first stage has no input gradients to give: torch runs the whole of its backward where the weights' is due.
    """
    step = []
    for part in (action.sub_actions or (action,)) if action is not None else ():
        kind: Kind = part.computation_type.value
        if part.stage_index == 0 and kind in ("I", "W"):
            if kind == "I":
                continue
            kind = "B"
        step.append(Action(kind, part.stage_index, part.microbatch_index))
    return tuple(step)
