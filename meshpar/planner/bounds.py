"""What a setting of a search takes and holds at least, without laying it out: time and memory, each ever closer.

A bound is no more than the whole forecast says, for every schedule. It may be less: what is a little below its bound
costs a forecast, what is above is left out for good.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..schedules import splits_backward
from ..stages import stages_of_rank
from . import timing
from .communication import Microbatches, Parameter
from .costs import WIDTH, Place, gather_and_reduce, stage_costs
from .forecast import Job
from .in_flight import in_flight
from .orders import most_in_flight
from .study import in_a_pass
from .work import ModelWork


class OfFirstLayers(NamedTuple):
    """Seconds of a microbatch through the first layers, by how many; no schedule changes them.

    ``whole``: forward and backward; ``split``: with a backward in two parts, or, as some are left, whole. ``through``:
    of all layers, forward and backward for inputs alone.
    """

    forward: list[float]
    whole: list[float]
    split: list[float]
    through: float


class Outside(NamedTuple):
    """Seconds of a step that are no microbatch's; the first two of the first layers, by how many.

    ``gathers``: of weights that stay gathered. ``ends``: reductions, sums over replicas and the optimizer's. ``rest``
    and ``head``: both, of what is outside of the layers. ``once``: of a few numbers.
    """

    gathers: list[float]
    ends: list[float]
    rest: tuple[float, float]
    head: tuple[float, float]
    once: float


class Bounds:
    """Of the settings of a ``job``."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._without_masks: dict[str, bool] = {}
        self._of_meshes: dict[tuple[int, ...], Outside] = {}
        self._by_layers: dict[tuple[Hashable, ...], list[float]] = {}  # sums over the first layers, by how many

    # Memory of a rank, in bytes

    def state(self, config: ParallelConfig) -> float:
        """Of a rank with the average of parameters, whatever the schedule."""
        state, gradients = _state(config, self._elements(config) / config.pp)
        return state + gradients

    def memory(self, config: ParallelConfig, batch: Microbatches) -> float:
        """Of the first pp rank: its parameters, and the most of activations or gradients, without the schedule's order.

        And what a stage receives into: one buffer a microbatch and side.
        """
        stages, count = stages_of_rank(config, 0), in_a_pass(config, batch)
        pairs = most_in_flight(config, count) if config.pp > 1 else 1
        state, gradients = _state(config, sum(self._elements_of(config, stages)))
        held = pairs * min(self._kept(config, batch.rows, stages))
        return state + self._buffers(config, batch, stages) + max(gradients, held)

    def memory_in_order(self, config: ParallelConfig, batch: Microbatches) -> float:
        """The same with the order of the rank's actions: activations, gradients and what was sent, at the same moment.

        And what the layer needs that goes backward. Where backwards come in two parts, ranks behind the first one hold
        more than it does, and two of them are looked at too.
        """
        ranks = {0, config.pp // 2, config.pp - 1} if splits_backward(config) else {0}
        return max(self._in_order(config, batch, rank) for rank in ranks)

    def _in_order(self, config: ParallelConfig, batch: Microbatches, pp_rank: int) -> float:
        stages, count = stages_of_rank(config, pp_rank), in_a_pass(config, batch)
        elements, held = self._elements_of(config, stages), in_flight(config, count, pp_rank)
        state, _ = _state(config, sum(elements))
        kept, left = self._kept(config, batch.rows, stages), self._kept(config, batch.rows, stages, "between")
        gradients = torch.zeros(())
        if config.pp > 1:
            width = WIDTH[config.param_dtype]
            whole = held.gone @ _tensor(elements) * WIDTH[config.reduce_dtype]
            gradients = (whole - width * sum(elements) / config.dp_shard).clamp(min=0)
        sent = held.sent * self._hidden(config, batch.rows)
        needed = held.runs @ _tensor(self._needed(config, batch.rows, stages))
        moments = held.kept @ _tensor(kept) + held.between @ _tensor(left) + needed + sent + gradients
        return state + self._buffers(config, batch, stages) + float(moments.max())

    def _buffers(self, config: ParallelConfig, batch: Microbatches, stages: Sequence[int]) -> int:
        sides = sum((stage > 0) + (stage < config.num_stages - 1) for stage in stages)
        return sides * in_a_pass(config, batch) * self._hidden(config, batch.rows)

    def _hidden(self, config: ParallelConfig, rows: int) -> int:
        """Bytes of a microbatch that pass between stages."""
        return rows * self.job.study.activations(config, 1).hidden

    def _needed(self, config: ParallelConfig, rows: int, stages: Sequence[int]) -> list[float]:
        """Bytes that the last layer of each of some stages needs in its backward beside what is kept, at least.

        That is the most of several moments, each so much and so much a row, less what is kept: convex in the rows.
        """
        stops = [*accumulate(self.job.study.stage_layers(config))]
        one, two = (self.job.study.activations(config, min(rows, n)).layers for n in (1, 2))
        ends = [(one[stops[stage] - 1].backward, two[stops[stage] - 1].backward) for stage in stages]
        return [max(0.0, first + (rows - 1) * (second - first)) for first, second in ends]

    def _kept(self, config: ParallelConfig, rows: int, stages: Sequence[int], name: str = "kept") -> list[float]:
        """Bytes that each of some stages' layers keep of a microbatch at least, or have ``between`` two backwards."""
        key = (config.tp, config.pp > 1, config.activation_checkpoint, rows, name)
        if key not in self._by_layers:
            first = [getattr(layer, name) for layer in self.job.study.activations(config, 1).layers]
            more = first
            if rows > 1 and not self._keeps_no_masks(config):
                second = self.job.study.activations(config, 2)
                more = [getattr(layer, name) - one for layer, one in zip(second.layers, first, strict=True)]
            each = (one + (rows - 1) * another for one, another in zip(first, more, strict=True))
            self._by_layers[key] = [0.0, *accumulate(each)]
        return self._of_stages(config, self._by_layers[key], stages)

    def _keeps_no_masks(self, config: ParallelConfig) -> bool:
        """Whether two rows keep twice what one does, in every layer: a mask may be one for all rows, on any mesh."""
        mode = config.activation_checkpoint
        if mode not in self._without_masks:
            one, two = (self.job.study.activations(config, rows).layers for rows in (1, 2))
            self._without_masks[mode] = all(b.kept == 2 * a.kept for a, b in zip(one, two, strict=True))
        return self._without_masks[mode]

    # Time of a step, in seconds

    def seconds(self, config: ParallelConfig, batch: Microbatches) -> float:
        """Whatever the schedule: what a pp rank is busy on average."""
        work, place = self._placed(config)
        (whole,) = stage_costs(work, batch, [len(work.layers)], place)
        each = whole.forward + min(whole.backward, whole.inputs + whole.weights)
        out = self._outside(config)
        gathers, ends = (sum(of) for of in zip((out.gathers[-1], out.ends[-1]), out.rest, out.head, strict=True))
        shown = max(0.0, gathers - self._beside(whole.forward))
        return (batch.count * each + shown + ends) / config.pp + out.once

    def seconds_of_schedule(self, config: ParallelConfig, batch: Microbatches, costs: OfFirstLayers) -> float:
        """The same with a schedule: the longest that a rank waits at both ends and is busy in between.

        A rank waits for the first microbatch to come through the stages before its own, and at the end for the
        gradients to go back through them, unless its last backward is for weights alone. Of few microbatches, what one
        takes through all stages and back may be longer.
        """
        starts = [0, *accumulate(self.job.study.stage_layers(config))]
        split, out = splits_backward(config), self._outside(config)
        before, each = (costs.forward, costs.split) if split else (costs.whole, costs.whole)
        busy = [batch.count * (each[stop] - each[start]) for start, stop in pairwise(starts)]
        busy[0] = batch.count * costs.whole[starts[1]]  # the first stage's backward is whole
        gathers = [out.gathers[stop] - out.gathers[start] for start, stop in pairwise(starts)]
        ends = [out.ends[stop] - out.ends[start] for start, stop in pairwise(starts)]
        for stage, (gather, end) in ((0, out.rest), (-1, out.head)):
            gathers[stage] += gather
            ends[stage] += end
        for stage, (start, stop) in enumerate(pairwise(starts)):
            shown = gathers[stage] - self._beside(costs.forward[stop] - costs.forward[start])
            busy[stage] += max(0.0, shown) + ends[stage]
        longest = max(
            before[starts[rank]] + sum(busy[stage] for stage in stages_of_rank(config, rank))
            for rank in range(config.pp)
        )
        through = costs.through if split else costs.whole[-1]
        return max(longest, through) + out.once

    def of_first_layers(self, config: ParallelConfig, batch: Microbatches) -> OfFirstLayers:
        """What `seconds_of_schedule` takes, for all schedules of a mesh and batch."""
        work, place = self._placed(config)
        each = stage_costs(work, batch, [1] * len(work.layers), place)
        return OfFirstLayers(
            forward=[0.0, *accumulate(cost.forward for cost in each)],
            whole=[0.0, *accumulate(cost.forward + cost.backward for cost in each)],
            split=[0.0, *accumulate(c.forward + min(c.backward, c.inputs + c.weights) for c in each)],
            through=sum(c.forward + min(c.backward, c.inputs) for c in each),
        )

    def _outside(self, config: ParallelConfig) -> Outside:
        """Of a mesh, whatever the batch and the schedule."""
        mesh = (config.pp, config.dp_replicate, config.dp_shard, config.tp)
        if mesh not in self._of_meshes:
            work, place = self._placed(config)
            of_group = cache(partial(self._of_group, hidden=work.hidden, place=place))
            layers = [of_group(layer.stored) for layer in work.layers]
            self._of_meshes[mesh] = Outside(
                gathers=[0.0, *accumulate(gather for gather, _ in layers)],
                ends=[0.0, *accumulate(end for _, end in layers)],
                rest=of_group(work.rest),
                head=(0.0, 0.0) if work.tied else of_group(work.head.stored),
                once=timing.once_a_step(work, place),
            )
        return self._of_meshes[mesh]

    def _of_group(self, stored: tuple[Parameter, ...], hidden: int, place: Place) -> tuple[float, float]:
        """Of one of FSDP's groups, its gather, and what comes at the end of a step."""
        config, width = place.config, WIDTH[place.config.param_dtype]
        elements = _count(stored) / config.dp_shard
        end = timing.between_replicas([stored], hidden, place)
        end += timing.OPTIMIZER_BYTES * width * elements / self.job.device.memory_rate
        gather, reduction = gather_and_reduce(stored, hidden, place)
        if config.pp == 1:  # beside the microbatches' compute, most of both
            return 0.0, end
        return 0.0 if config.reshards else gather, end + reduction

    def _beside(self, forward: float) -> float:
        """Of a forward, the seconds that hide a gather."""
        return forward if self.job.device.asynchronous else 0.0

    # What both need

    def _elements(self, config: ParallelConfig) -> float:
        """Of a tp rank's parameters, without a head of its own."""
        return self._layer_elements(config)[-1] + _count(self.job.study.rough_work(config).rest)

    def _elements_of(self, config: ParallelConfig, stages: Sequence[int]) -> list[float]:
        """Of each of a rank's stages."""
        found = self._of_stages(config, self._layer_elements(config), stages)
        if stages[0] == 0:
            found[0] += _count(self.job.study.rough_work(config).rest)
        return found

    def _layer_elements(self, config: ParallelConfig) -> list[float]:
        """Of the first layers, by how many."""
        key = (config.tp,)
        if key not in self._by_layers:
            layers = self.job.study.rough_work(config).layers
            self._by_layers[key] = [0.0, *accumulate(_count(layer.stored) for layer in layers)]
        return self._by_layers[key]

    def _of_stages(self, config: ParallelConfig, first: Sequence[float], stages: Sequence[int]) -> list[float]:
        """Sums over the layers of each of some stages, of what is known of the first layers."""
        starts = [0, *accumulate(self.job.study.stage_layers(config))]
        return [first[starts[stage + 1]] - first[starts[stage]] for stage in stages]

    def _placed(self, config: ParallelConfig) -> tuple[ModelWork, Place]:
        return self.job.study.rough_work(config), Place(config, self.job.device, self.job.network)


def _state(config: ParallelConfig, elements: float) -> tuple[float, float]:
    """Bytes of a rank with so many parameters: they, gradients and moments; and what a pipeline adds of gradients.

    A pipeline keeps weights and gradients whole. The first includes whole weights; the second is what whole gradients
    are more than their shards.
    """
    width = WIDTH[config.param_dtype]
    least = 4 * width * elements / config.dp_shard
    if config.pp == 1 or config.reshards:
        return least, 0.0
    gradients = max(0.0, WIDTH[config.reduce_dtype] - width / config.dp_shard)
    return least + WIDTH[config.compute_dtype] * elements, gradients * elements


def _count(stored: Iterable[Parameter]) -> int:
    return sum(rows * columns for rows, columns in stored)


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
