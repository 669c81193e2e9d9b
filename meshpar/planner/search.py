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
from itertools import count, product
from typing import Any, NamedTuple

from ..config import ACTIVATION_CHECKPOINTS, MESH_SIZES, ConfigError, ParallelConfig, check_model, divisors
from ..schedules import SCHEDULES, accepts_microbatches
from . import timing
from .bounds import Bounds
from .communication import Microbatches
from .forecast import Job, MeshForecast, forecast_of, room

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


class _Search:
    def __init__(self, job: Job, fixed: dict[str, Any], keep: int) -> None:
        self.job, self.fixed, self.keep = job, fixed, keep
        base = job.recipe.parallel_config()
        sizes: dict[str, Any] = dict.fromkeys(MESH_SIZES, 1)
        self.base = replace(base, **sizes, virtual_stages=1, schedule="1F1B", microbatches=None, stage_layers=None)
        self.bounds = Bounds(job)
        self.pruned: Counter[str] = Counter()
        self.refusal = ""  # what the model says of the first setting that it cannot be laid out on
        self.considered = 0
        self.fitting: dict[Hashable, bool] = {}
        self.queue: list[tuple[float, int, str, Setting]] = []
        self.order = count()

    def run(self) -> Ranking:
        for setting in self._shapes():
            self._push(self.bounds.seconds(*setting), "shape", setting)
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
        if not self.considered:
            given, world = ", ".join(f"{name}={value}" for name, value in self.fixed.items()), self.job.world_size
            raise ConfigError(
                f"none of the settings for world_size={world} has {given}: sizes multiply to it, and a schedule says "
                "how many stages a rank can have."
            )
        if not best:
            reasons = "; ".join(f"{why}: {n}" for why, n in self.pruned.most_common())
            reasons += f"; refused first: {self.refusal}" if self.refusal else ""
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
                elif self.bounds.state(setting.config) > room(job.device):
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
        costs = self.bounds.of_first_layers(*shape)
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
                self._push(self.bounds.seconds_of_schedule(*setting, costs), "examine", setting)
            except ValueError as error:
                self._refuse(error)

    # One setting, ever closer

    def _examine(self, setting: Setting) -> None:
        job, (config, batch) = self.job, setting
        try:
            if not self._fits(setting):
                self.pruned[MEMORY] += 1
                return
            layers = job.study.stage_layers(config)
        except ValueError as error:
            self._refuse(error)
            return
        found = timing.forecast(job.study.work(config), config, batch, layers, job.device, job.network)
        self._push(found.step_seconds, "done", setting)

    def _refuse(self, error: ValueError) -> None:
        self.pruned[REFUSED] += 1
        self.refusal = self.refusal or str(error).splitlines()[0].rstrip(".")

    def _fits(self, setting: Setting) -> bool:
        """Whether every rank's memory does, which is the same for any number of replicas."""
        (config, batch), limit = setting, room(self.job.device)
        key = (replace(config, dp_replicate=1), config.dp > 1, batch)
        if key not in self.fitting:
            self.fitting[key] = (
                self.bounds.memory(config, batch) <= limit
                and self.bounds.memory_in_order(config, batch) <= limit
                and all(rank.total <= limit for rank in self.job.study.memory(config, batch))
            )
        return self.fitting[key]
