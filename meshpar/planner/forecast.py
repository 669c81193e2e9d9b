"""The whole forecast of a mesh: memory of every rank, what it sends, how long a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config import ParallelConfig, torch_dtype
from ..recipe import Recipe
from . import timing
from .communication import Microbatches, Traffic
from .devices import Device
from .links import Network
from .memory import MemoryOfRank, heaviest
from .placement import Span, spans
from .study import Study

_CONTEXT = 3 << 30  # bytes of a GPU that CUDA's context and NCCL's buffers take
_MEMORY = ("parameters", "gradients", "optimizer", "activations", "loss", "transient", "total")


@dataclass(frozen=True)
class Job:
    """What is forecast: the job of a ``recipe`` on ``world_size`` devices."""

    study: Study
    recipe: Recipe
    world_size: int
    device: Device
    network: Network


@dataclass(frozen=True)
class MeshForecast:
    """A training step on a mesh.

    ``ranks``: memory, of ranks that are alike the first. ``communication``: bytes that a rank of pp rank
    ``sender`` sends, which sends most. ``spans``: tp groups that are on several nodes, and what that costs.
    """

    parameters: int
    flops_per_token: int
    config: ParallelConfig
    batch: Microbatches
    device: Device
    per_node: int
    ranks: tuple[MemoryOfRank, ...]
    communication: tuple[Traffic, ...]
    sender: int
    time: timing.Forecast
    spans: tuple[Span, ...] = ()

    @cached_property
    def heaviest(self) -> MemoryOfRank:
        """The rank that needs most memory."""
        return heaviest(self.ranks)

    @property
    def fits(self) -> bool:
        """Whether the heaviest rank fits into the device."""
        return self.heaviest.total <= room(self.device)

    def as_dict(self) -> dict[str, Any]:
        """As `meshpar plan --json` prints it."""
        c, width = self.config, torch_dtype(self.config.param_dtype).itemsize
        return {
            "model": {"parameters": self.parameters, "flops_per_token": self.flops_per_token},
            "bytes_per_parameter": {"parameters": width, "gradients": width, "optimizer": 2 * width},
            "mesh": {"pp": c.pp, "dp_replicate": c.dp_replicate, "dp_shard": c.dp_shard, "tp": c.tp},
            "settings": {
                "schedule": c.schedule if c.pp > 1 else None,
                "virtual_stages": c.virtual_stages if c.pp > 1 else 1,
                "activation_checkpoint": c.activation_checkpoint,
                "micro_size": self.batch.rows,
                "microbatches": self.batch.count,
                "seq_len": self.batch.seq_len,
                "global_size": self.batch.rows * self.batch.count * c.dp,
            },
            "device": {"name": self.device.name, "memory": self.device.memory, "per_node": self.per_node},
            "ranks": [_rank(rank) for rank in self.ranks],
            "heaviest": {**_rank(self.heaviest), "moment": self.heaviest.moment},
            "fits": self.fits,
            "communication": [{"kind": t.kind, "dim": t.dim, "bytes": t.bytes} for t in self.communication],
            "bubble": self.time.bubble,
            "step_seconds": self.time.step_seconds,
            "tokens_per_second": self.time.tokens_per_second,
            "mfu": self.time.mfu,
            "warnings": [str(span) for span in self.spans],
        }


def forecast(job: Job) -> MeshForecast:
    """The forecast of the recipe's own mesh. Raises ConfigError, or ValueError for a model that it cannot hold."""
    job.recipe.check(job.world_size)
    config = job.recipe.parallel_config(job.world_size)
    rows, count = job.recipe.batch.micro_size, job.recipe.microbatches_per_step(config.dp)
    return forecast_of(job, config, Microbatches(rows, job.study.seq_len, count))


def forecast_of(job: Job, config: ParallelConfig, batch: Microbatches) -> MeshForecast:
    """The forecast of a resolved ``config`` on ``batch``."""
    study, work = job.study, job.study.work(config)
    sent = [study.traffic(config, batch, rank) for rank in range(config.pp)]
    sender = max(range(config.pp), key=lambda rank: sum(one.bytes for one in sent[rank]))
    place = (study.stage_layers(config), job.device, job.network)
    found = spans(work, config, batch, *place, dims=("tp",))
    return MeshForecast(
        parameters=work.parameters,
        flops_per_token=work.flops_per_token,
        config=config,
        batch=batch,
        device=job.device,
        per_node=job.network.per_node,
        ranks=tuple(study.memory(config, batch)),
        communication=tuple(sent[sender]),
        sender=sender,
        time=timing.forecast(work, config, batch, *place),
        spans=tuple(found),
    )


def room(device: Device) -> int:
    """Bytes of a device that a step can use."""
    return device.memory - (_CONTEXT if device.asynchronous else 0)


def _rank(rank: MemoryOfRank) -> dict[str, Any]:
    memory = {name: getattr(rank, name) for name in _MEMORY}
    return {"pp": rank.pp, "dp": rank.dp, "tp": rank.tp, "count": rank.count, "memory": memory}
