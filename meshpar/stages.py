"""Pipeline stages: which decoder layers each of them runs, and on which pp rank it is."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble, get_schedule_class
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .config import ParallelConfig, check_layers
from .flops import matrix_costs
from .flow import Flow


def layer_costs(model: PreTrainedModel, anatomy: Anatomy) -> tuple[list[float], float]:
    """Forward multiply-adds a token of each decoder layer, and of the head: weights alone, as scores are alike."""
    costs = matrix_costs({n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}, model.config)
    layers = [0.0] * anatomy.num_layers
    for name, cost in costs.items():
        index = anatomy.layer_index(name)
        if index is not None:
            layers[index] += cost
    return layers, sum(cost for name, cost in costs.items() if name.startswith(f"{anatomy.head}."))


def balance(costs: list[float], last: float, stages: int, uncut: Collection[int] = ()) -> list[int] | None:
    """Layers per stage, in order, at least one each, with the dearest stage as cheap as can be.

    ``last`` is what the last stage carries besides its layers; no stage starts with a layer in ``uncut``. Among equals
    the most even split wins; None where there is no split.
    """
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    n = len(costs)
    best: list[dict[int, tuple[tuple[float, float], int]]] = [
        {n: ((0.0, 0.0), n)}
    ]  # by stages from the end: start -> cost
    if stages == 1:
        return [n]
    for k in range(1, stages + 1):
        row: dict[int, tuple[tuple[float, float], int]] = {}
        extra = last if k == 1 else 0.0
        for start in range(stages - k, n - k + 1):
            if start in uncut:
                continue
            options = []
            for stop, ((worst, squares), _) in best[-1].items():
                if stop > start:
                    cost = prefix[stop] - prefix[start] + extra
                    options.append(((max(worst, cost), squares + cost * cost), stop))
            if options:
                row[start] = min(options)
        best.append(row)
    if 0 not in best[-1]:
        return None
    counts, start = [], 0
    for k in range(stages, 0, -1):
        stop = best[k][start][1]
        counts.append(stop - start)
        start = stop
    return counts


@dataclass(frozen=True)
class StageRange:
    """Decoder layers ``start`` to ``stop`` are stage ``index`` of ``count``."""

    index: int
    count: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stage_ranges(model: PreTrainedModel, anatomy: Anatomy, config: ParallelConfig, flow: Flow) -> list[StageRange]:
    """All stages in order: by `config.stage_layers`, else balanced by FLOPs with the head counted.

    Raises ValueError where a stage would start with a layer that needs more than hidden states.
    """
    check_layers(config, anatomy.num_layers)
    count = config.num_stages if config.pp > 1 else 1
    given = list(config.stage_layers) if config.stage_layers and config.pp > 1 else None
    layers = given or balance(*layer_costs(model, anatomy), count, flow.uncut)
    if layers is None:
        most = anatomy.num_layers - len(flow.uncut)
        raise ValueError(f"{_reason(flow)}. At most {most} pipeline stages can be made of it, not {count}")
    starts = [sum(layers[:i]) for i in range(count + 1)]
    wrong = [start for start in starts[1:-1] if start in flow.uncut]
    if wrong:
        raise ValueError(f"stage_layers={given} starts a stage with layer {wrong[0]}, but {flow.uncut[wrong[0]]}")
    return [StageRange(i, count, starts[i], starts[i + 1]) for i in range(count)]


def _reason(flow: Flow) -> str:
    """The reason that most borders share."""
    reasons = list(flow.uncut.values())
    return max(reasons, key=reasons.count)


def stage_of(name: str, anatomy: Anatomy, flow: Flow, ranges: list[StageRange]) -> int:
    """The stage that runs the module of parameter ``name``."""
    index = anatomy.layer_index(name)
    if index is not None:
        return next(r.index for r in ranges if r.start <= index < r.stop)
    return len(ranges) - 1 if any(name.startswith(f"{m}.") for m in flow.after) else 0


def stages_of_rank(config: ParallelConfig, pp_rank: int) -> list[int]:
    """Stage indices on a pp rank: every pp-th one, or both arms of a V where the schedule is one."""
    if config.pp == 1:
        return [0]
    if is_v_schedule(config.schedule):
        return [pp_rank, 2 * config.pp - 1 - pp_rank]
    return [pp_rank + v * config.pp for v in range(config.virtual_stages)]


def stage_ranks(config: ParallelConfig) -> list[int]:
    """pp rank of each stage, in stage order."""
    rank_of = {stage: rank for rank in range(config.pp) for stage in stages_of_rank(config, rank)}
    return [rank_of[i] for i in range(len(rank_of))]


def is_v_schedule(name: str) -> bool:
    """Whether a rank holds stages i and 2 pp - 1 - i, so that the first and the last stage share a rank."""
    return issubclass(get_schedule_class(name), (ScheduleZBVZeroBubble, ScheduleDualPipeV))
