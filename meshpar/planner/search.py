"""Every mesh, schedule, microbatch and checkpointing of a job, in the order of the time that a step takes.

Best first: what a setting takes at least is cheap to say, so the one with the least is looked at next, ever closer,
until the first ones are known. What comes after them is never laid out or simulated. No rule about which meshes are
good is in here.
"""

from __future__ import annotations

import gc
import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise, product
from typing import Any, NamedTuple

from ..config import ACTIVATION_CHECKPOINTS, MESH_SIZES, ConfigError, ParallelConfig, check_model, divisors
from ..schedules import SCHEDULES, accepts_microbatches, splits_backward
from ..split import stages_of_rank
from . import timing
from .communication import Microbatches
from .costs import WIDTH, Place, stage_costs
from .forecast import Job, MeshForecast, forecast_of, room
from .orders import most_in_flight
from .study import in_a_pass
from .work import ModelWork

BATCH, SCHEDULE, HEADS, LAYERS, STATE, MEMORY, SLOWER = (
    "the batch does not divide over dp and microbatches",
    "the schedule cannot run the microbatches",
    "tp is more than the heads",
    "more pipeline stages than layers",
    "parameters, gradients and optimizer do not fit",
    "activations do not fit",
    "slower than those that are shown",
)
REFUSED = "the model cannot be laid out so"


class Setting(NamedTuple):
    """A point of the search."""

    config: ParallelConfig
    batch: Microbatches


@dataclass(frozen=True)
class Ranking:
    """``best``: the fastest that fit, in order. ``considered``: how many settings there are. ``pruned``: why not."""

    best: tuple[MeshForecast, ...]
    considered: int
    pruned: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The best one as `MeshForecast.as_dict` has it, with the ranking."""
        rows = []
        for one in self.best:
            whole = one.as_dict()
            rows.append(
                {
                    **{name: whole[name] for name in ("mesh", "settings", "bubble", "step_seconds", "mfu")},
                    "tokens_per_second": one.time.tokens_per_second,
                    "memory": one.heaviest.total,
                }
            )
        found = {"considered": self.considered, "pruned": dict(self.pruned), "ranking": rows}
        return {**self.best[0].as_dict(), "search": found}


def search(job: Job, fixed: Mapping[str, Any] | None = None, keep: int = 10) -> Ranking:
    """The ``keep`` fastest settings that fit into the job's devices.

    ``fixed``: settings that are not searched, by their names in `ParallelConfig`, and "micro_size". Raises ConfigError
    where nothing fits, with how many settings failed for which reason.
    """
    collects = gc.isenabled()
    gc.disable()  # a search keeps what it makes: looking for garbage takes a quarter of its time
    try:
        return _Search(job, dict(fixed or {}), keep).run()
    finally:
        if collects:
            gc.enable()


class _OfFirstLayers(NamedTuple):
    """Seconds of a microbatch through the first layers, by how many; no schedule changes them.

    ``whole``: forward and backward; ``split``: with a backward in two parts, or, as some are left, whole.
    """

    forward: list[float]
    whole: list[float]
    split: list[float]


class _Search:
    def __init__(self, job: Job, fixed: dict[str, Any], keep: int) -> None:
        self.job, self.fixed, self.keep = job, fixed, keep
        base = job.recipe.parallel_config()
        sizes: dict[str, Any] = dict.fromkeys(MESH_SIZES, 1)
        self.base = replace(base, **sizes, virtual_stages=1, schedule="1F1B", microbatches=None, stage_layers=None)
        self.pruned: Counter[str] = Counter()
        self.considered = 0
        self.fitting: dict[Hashable, bool] = {}
        self.without_masks: dict[str, bool] = {}
        self.elements: dict[tuple[int, int | None], float] = {}
        self.queue: list[tuple[float, int, str, Setting]] = []
        self.order = count()

    def run(self) -> Ranking:
        for setting in self._shapes():
            self._push(self._least_seconds(setting), "shape", setting)
        best: list[Setting] = []
        while self.queue and len(best) < self.keep:
            _, _, step, setting = heapq.heappop(self.queue)
            if step == "done":
                best.append(setting)
            elif step == "shape":
                self._expand(setting)
            else:
                self._examine(setting)
        for _, _, step, setting in self.queue:
            self.pruned[SLOWER] += len(self._pipelines(setting.config.pp)) if step == "shape" else 1
        if not best:
            reasons = "; ".join(f"{why}: {n}" for why, n in self.pruned.most_common())
            raise ConfigError(f"none of {self.considered} settings fits {self.job.device.name} ({reasons}).")
        found = tuple(forecast_of(self.job, *setting) for setting in best)
        return Ranking(found, self.considered, dict(self.pruned.most_common()))

    def _push(self, seconds: float, step: str, setting: Setting) -> None:
        heapq.heappush(self.queue, (seconds, next(self.order), step, setting))

    # Which settings there are

    def _shapes(self) -> Iterator[Setting]:
        """Meshes with their microbatches and checkpointing, but for what cannot be; the schedule is open."""
        job, total = self.job, self.job.recipe.batch.global_size
        modes = self._choices("activation_checkpoint", ACTIVATION_CHECKPOINTS)
        for sizes in self._meshes():
            config = replace(self.base, **sizes)
            per_rank = total // config.dp
            rows = self._choices("micro_size", sorted(divisors(per_rank)) if per_rank else [1])
            every = len(self._pipelines(config.pp)) * len(modes)
            self.considered += every * len(rows)
            why = self._impossible(config)
            if why is not None:
                self.pruned[why] += every * len(rows)
                continue
            for micro, mode in product(rows, modes):
                batch = Microbatches(micro, job.study.seq_len, per_rank // micro)
                setting = Setting(replace(config, activation_checkpoint=mode), batch)
                if per_rank % micro:
                    self.pruned[BATCH] += every // len(modes)
                elif self._least_state(setting) > room(job.device):
                    self.pruned[STATE] += every // len(modes)
                else:
                    yield setting

    def _meshes(self) -> Iterator[dict[str, Any]]:
        world = self.job.world_size
        for pp in self._choices("pp", sorted(divisors(world))):
            for tp in self._choices("tp", sorted(divisors(world))):
                for replicate in self._choices("dp_replicate", sorted(divisors(world))):
                    shard, rest = divmod(world, pp * tp * replicate)
                    if not rest and shard in self._choices("dp_shard", [shard]):
                        yield {"pp": pp, "dp_replicate": replicate, "dp_shard": shard, "tp": tp}

    def _choices(self, name: str, legal: Sequence[Any]) -> Sequence[Any]:
        return [self.fixed[name]] if name in self.fixed else legal

    def _impossible(self, config: ParallelConfig) -> str | None:
        if self.job.recipe.batch.global_size % config.dp:
            return BATCH
        if config.pp > self.job.study.layers:
            return LAYERS
        try:
            check_model(config, self.job.study.model.config)
        except ConfigError:
            return HEADS
        return None

    def _pipelines(self, pp: int) -> list[tuple[str, int]]:
        """Schedules with the stages that a rank can have."""
        if pp == 1:
            return [("1F1B", 1)]
        most = max(1, self.job.study.layers // pp)
        found = []
        for schedule in self._choices("schedule", list(SCHEDULES)):
            rule = SCHEDULES[schedule]
            virtual = range(rule.least_virtual, min(most, rule.most_virtual or most) + 1)
            found += [(schedule, v) for v in virtual if v in self._choices("virtual_stages", [v])]
        return found

    def _expand(self, shape: Setting) -> None:
        costs = self._of_first_layers(shape)
        for schedule, virtual in self._pipelines(shape.config.pp):
            try:
                config = replace(shape.config, schedule=schedule, virtual_stages=virtual)
            except ConfigError:
                self.pruned[SCHEDULE] += 1
                continue
            setting = Setting(config, shape.batch)
            if not accepts_microbatches(config, shape.batch.count):
                self.pruned[SCHEDULE] += 1
                continue
            try:
                self._push(self._least_filled(setting, costs), "examine", setting)
            except ValueError:
                self.pruned[REFUSED] += 1

    # One setting, ever closer

    def _examine(self, setting: Setting) -> None:
        job, (config, batch) = self.job, setting
        try:
            if self._least_memory(setting) > room(job.device) or not self._fits(setting):
                self.pruned[MEMORY] += 1
                return
            layers = job.study.stage_layers(config)
        except ValueError:
            self.pruned[REFUSED] += 1
            return
        found = timing.forecast(job.study.work(config), config, batch, layers, job.device, job.network)
        self._push(found.step_seconds, "done", setting)

    def _fits(self, setting: Setting) -> bool:
        """Whether every rank's memory does, which is the same for any number of replicas."""
        config, batch = setting
        key = (replace(config, dp_replicate=1), config.dp > 1, batch)
        if key not in self.fitting:
            limit = room(self.job.device)
            self.fitting[key] = all(rank.total <= limit for rank in self.job.study.memory(config, batch))
        return self.fitting[key]

    def _least_state(self, setting: Setting) -> float:
        """Bytes that a rank of average parameters holds at least, whatever the schedule."""
        return sum(_state(setting.config, self._elements(setting.config) / setting.config.pp))

    def _least_memory(self, setting: Setting) -> float:
        """Bytes of the first pp rank at least: its layers' parameters, and what it holds of its microbatches at a time.

        That is activations, and what a stage receives into: one buffer a microbatch and side.
        """
        config, batch = setting
        counts = self.job.study.stage_layers(config)
        stages, count = stages_of_rank(config, 0), in_a_pass(config, batch)
        own = [counts[stage] for stage in stages]
        pairs = most_in_flight(config, count) if config.pp > 1 else 1
        sides = sum((stage > 0) + (stage < config.num_stages - 1) for stage in stages)
        kept, hidden = self._kept(config, batch.rows)
        state, gradients = _state(config, self._elements(config, sum(own)))
        # Of few microbatches, all may be forward before there is a gradient.
        return state + hidden * sides * count + max(gradients, kept * pairs * min(own))

    def _kept(self, config: ParallelConfig, rows: int) -> tuple[int, int]:
        """Bytes that a layer keeps of a microbatch at least, and of what passes between stages."""
        first = self.job.study.activations(config, 1)
        if rows == 1 or self._keeps_no_masks(config):
            return rows * min(layer.kept for layer in first.layers), rows * first.hidden
        second = self.job.study.activations(config, 2)
        pairs = zip(first.layers, second.layers, strict=True)
        return min(a.kept + (rows - 1) * (b.kept - a.kept) for a, b in pairs), rows * first.hidden

    def _keeps_no_masks(self, config: ParallelConfig) -> bool:
        """Whether two rows keep twice what one does, in every layer: a mask may be one for all rows, on any mesh."""
        mode = config.activation_checkpoint
        if mode not in self.without_masks:
            one, two = (self.job.study.activations(config, rows).layers for rows in (1, 2))
            self.without_masks[mode] = all(b.kept == 2 * a.kept for a, b in zip(one, two, strict=True))
        return self.without_masks[mode]

    def _least_seconds(self, shape: Setting) -> float:
        """Seconds that a step takes at least, whatever the schedule: what a pp rank computes on average."""
        work, place = self._placed(shape)
        (whole,) = stage_costs(work, shape.batch, [len(work.layers)], place)
        seconds = whole.forward + min(whole.backward, whole.inputs + whole.weights)
        return shape.batch.count * seconds / shape.config.pp + self._optimizer(shape)

    def _least_filled(self, setting: Setting, costs: _OfFirstLayers) -> float:
        """The same with a schedule: the longest that a rank waits at both ends and computes in between.

        A rank waits for the first microbatch to come through the stages before its own, and at the end for the
        gradients to go back through them, unless its last backward is for weights alone.
        """
        config = setting.config
        starts = [0, *accumulate(self.job.study.stage_layers(config))]
        split = splits_backward(config)
        before, each = (costs.forward, costs.split) if split else (costs.whole, costs.whole)
        busy = [each[stop] - each[start] for start, stop in pairwise(starts)]
        busy[0] = costs.whole[starts[1]]  # the first stage's backward is whole
        longest = max(
            before[starts[rank]] + setting.batch.count * sum(busy[stage] for stage in stages_of_rank(config, rank))
            for rank in range(config.pp)
        )
        return longest + self._optimizer(setting)

    def _optimizer(self, setting: Setting) -> float:
        config = setting.config
        elements = self._elements(config) / config.pp / config.dp_shard
        return timing.OPTIMIZER_BYTES * WIDTH[config.param_dtype] * elements / self.job.device.memory_rate

    def _elements(self, config: ParallelConfig, layers: int | None = None) -> float:
        """Of the first layers, or all, and what is outside of them, on a tp rank; without a head of its own."""
        key = (config.tp, layers)
        if key not in self.elements:
            work = self.job.study.rough_work(config)
            groups = (*(layer.stored for layer in work.layers[:layers]), work.rest)
            self.elements[key] = sum(rows * width for group in groups for rows, width in group)
        return self.elements[key]

    def _of_first_layers(self, shape: Setting) -> _OfFirstLayers:
        work, place = self._placed(shape)
        each = stage_costs(work, shape.batch, [1] * len(work.layers), place)
        return _OfFirstLayers(
            forward=[0.0, *accumulate(cost.forward for cost in each)],
            whole=[0.0, *accumulate(cost.forward + cost.backward for cost in each)],
            split=[0.0, *accumulate(c.forward + min(c.backward, c.inputs + c.weights) for c in each)],
        )

    def _placed(self, setting: Setting) -> tuple[ModelWork, Place]:
        place = Place(setting.config, self.job.device, self.job.network)
        return self.job.study.rough_work(setting.config), place


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
