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
    # An order depends on no more of a stage than this, so that none has to be made.
    stage = SimpleNamespace(num_stages=pp * virtual, group_size=pp, group_rank=0, submod=nn.Module())
    order = cls([stage] * virtual, microbatches, loss_fn=lambda out, _: out).pipeline_order
    return [[step for action in order[rank] if (step := _step(action))] for rank in range(pp)]


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
