"""How long a training step takes: the schedule's own actions replayed with each stage's costs, and what is around it.

A send runs beside compute and is there after its latency and bytes. FSDP's first gather and last reduction are not
hidden, nor are the reductions that a pipeline leaves to its end; the optimizer is bound by memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

from ..config import ParallelConfig
from ..stages import stage_ranks
from .communication import Microbatches, Parameter, Share
from .costs import WIDTH, Cost, Place, gather_and_reduce, sent_bytes, stage_costs
from .devices import Device
from .links import Network
from .orders import schedule_order
from .simulate import Action, Kind, Step, Timeline, simulate
from .work import ModelWork

FLOP_CONVENTION = (
    "6 FLOPs a token for each weight that multiplies, of experts those that a token visits, and 6 x layers x heads x "
    "head_dim x seq_len for causal attention; recomputation is not counted"
)
OPTIMIZER_BYTES = 23  # of each byte of a parameter: AdamW's one pass an operation, the norm and clipping
_SCALAR = 8


@dataclass(frozen=True)
class Forecast:
    """A training step: what it takes, and of what.

    ``bubble``: idle time of the pipeline's ranks as a ratio to the time they compute. ``mfu``: by `FLOP_CONVENTION`.
    ``parts``: seconds of the schedule, of FSDP outside of it, of the optimizer, and of what is summed once a step.
    ``timeline``: one pass of the schedule, of ``passes``.
    """

    step_seconds: float
    bubble: float
    tokens_per_second: float
    mfu: float
    stages: tuple[Cost, ...]
    parts: dict[str, float]
    timeline: Timeline
    passes: int


def forecast(
    work: ModelWork,
    config: ParallelConfig,
    batch: Microbatches,
    stage_layers: Sequence[int],
    device: Device,
    network: Network,
) -> Forecast:
    """A step of a resolved ``config`` on ``batch``, all microbatches of a data-parallel rank.

    ``stage_layers``: decoder layers of each stage, in order.
    """
    place = Place(config, device, network)
    stages = stage_costs(work, batch, stage_layers, place)
    in_a_pass = min(config.microbatches or batch.count, batch.count)
    passes = -(-batch.count // in_a_pass)
    latency = _send_seconds(work, batch, place)
    timeline = simulate(_order(config, in_a_pass), lambda stage, kind: stages[stage].of(kind), latency)
    parts = {
        "schedule": passes * timeline.makespan,
        "fsdp": max(_fsdp_outside(work, batch, stage_layers, stages, place)),
        "optimizer": max(_optimizer_seconds(work, stage_layers, place)),
        "once": once_a_step(work, place),
    }
    seconds = sum(parts.values())
    speed = config.dp * batch.count * batch.rows * batch.seq_len / seconds
    utilization = mfu(work.flops_per_token, speed, config.world_size, device.peak[config.compute_dtype])
    return Forecast(seconds, timeline.bubble, speed, utilization, tuple(stages), parts, timeline, passes)


def mfu(flops_per_token: float, tokens_per_second: float, devices: int, peak: float) -> float:
    """The part of all devices' peak FLOP/s that a model's arithmetic is."""
    return flops_per_token * tokens_per_second / (devices * peak)


def _fsdp_outside(
    work: ModelWork, batch: Microbatches, stage_layers: Sequence[int], stages: Sequence[Cost], place: Place
) -> list[float]:
    """Of each pp rank, seconds of FSDP's collectives that no microbatch hides."""
    config = place.config
    outside = [0.0] * config.pp
    of_group = cache(partial(gather_and_reduce, hidden=work.hidden, place=place))  # most layers are alike
    of_stage = cache(partial(between_replicas, hidden=work.hidden, place=place))
    for index, (rank, parameters) in enumerate(_parameters(work, stage_layers, config)):
        gathers, reductions = zip(*(of_group(p) for p in parameters), strict=True)
        if config.reshards:
            outside[rank] += gathers[0] + gathers[-1]
        else:
            beside = stages[index].forward if place.device.asynchronous else 0.0
            outside[rank] += max(0.0, sum(gathers) - beside)
        outside[rank] += sum(reductions) if config.pp > 1 else reductions[0] + reductions[-1]
        outside[rank] += of_stage(tuple(parameters))
    return outside


def between_replicas(parameters: Sequence[Sequence[Parameter]], hidden: int, place: Place) -> float:
    """Seconds of the sum of some groups' gradients over replicas."""
    share = Share(hidden, parameters)
    sent = sent_bytes(share, place.config, Microbatches(1, 1), "dp_replicate")
    return place.seconds("all_reduce", sent["all_reduce"], "dp_replicate", len(parameters)) if sent else 0.0


def _parameters(
    work: ModelWork, stage_layers: Sequence[int], config: ParallelConfig
) -> list[tuple[int, list[tuple[Parameter, ...]]]]:
    """Of each stage, its pp rank and the parameters of its layers, then of what else it holds."""
    ranks = stage_ranks(config) if config.pp > 1 else [0]
    stages, first = [], 0
    for index, count in enumerate(stage_layers):
        held: list[tuple[Parameter, ...]] = [layer.stored for layer in work.layers[first : first + count]]
        first += count
        held += [work.rest] if index == 0 else []
        held += (
            [work.head.stored]
            if index == len(stage_layers) - 1 and not (work.tied and ranks[index] == ranks[0])
            else []
        )
        stages.append((ranks[index], held))
    return stages


def _optimizer_seconds(work: ModelWork, stage_layers: Sequence[int], place: Place) -> list[float]:
    """Of each pp rank: memory-bound passes over its part of parameters, gradients and moments."""
    config = place.config
    elements = [0.0] * config.pp
    for rank, parameters in _parameters(work, stage_layers, config):
        elements[rank] += sum(rows * width for group in parameters for rows, width in group) / config.dp_shard
    each = OPTIMIZER_BYTES * WIDTH[config.param_dtype] / place.device.memory_rate
    return [count * each for count in elements]


def once_a_step(work: ModelWork, place: Place) -> float:
    """Numbers that are summed: token counts and the loss over dp and pp, the norm over every dimension."""
    norm = ("dp_replicate", "dp_shard") if place.config.dp_replicate > 1 else ("dp",)
    sums = ("dp", "dp", "pp", *norm, "tp", "pp")
    seconds = sum(place.seconds("all_reduce", _SCALAR, dim) for dim in sums)
    if work.tied and place.config.pp > 1:
        elements = sum(rows * width for rows, width in work.head.stored) / place.config.dp_shard
        seconds += place.seconds("p2p", elements * WIDTH[place.config.param_dtype], "pp")
    return seconds


def _send_seconds(work: ModelWork, batch: Microbatches, place: Place) -> float:
    """Seconds that hidden states take to the next stage."""
    if place.config.pp == 1:
        return 0.0
    both_ways = sent_bytes(Share(work.hidden, []), place.config, batch, "pp").get("p2p", 0)
    return place.seconds("p2p", both_ways / 2, "pp")


def _order(config: ParallelConfig, microbatches: int) -> list[list[Step]]:
    if config.pp > 1:
        return schedule_order(config, microbatches)
    kinds: tuple[Kind, ...] = ("F", "B")
    return [[(Action(kind, 0, i),) for i in range(microbatches) for kind in kinds]]
