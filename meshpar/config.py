"""ParallelConfig: the sizes of the mesh, the pipeline schedule and the dtypes, and what makes them legal together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .schedules import SCHEDULES, accepts_microbatches, microbatches_around, why_refused

if TYPE_CHECKING:
    import torch
    from accelerate import ParallelismConfig

MESH_SIZES = ("pp", "dp_replicate", "dp_shard", "tp")
ACTIVATION_CHECKPOINTS = ("none", "selective", "full")

# float16 is left out: its gradients underflow without loss scaling, which meshpar does not do.
DTYPES = ("float32", "bfloat16")

# torch's PipelineStage carries DTensors between stages from this release on.
PIPELINE_TORCH = (2, 13)


class ConfigError(ValueError):
    """A setting that cannot work. The message starts with the setting and its value: `tp=5 ...`."""


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is laid over the processes of a job: mesh sizes, pipeline schedule, checkpointing and dtypes.

    Args:
        pp: pipeline-parallel size. One of the four mesh sizes may be -1: whatever is left of the world size.
        dp_replicate: data-parallel groups that hold a whole copy of the parameters (HSDP); 1 is plain FSDP.
        dp_shard: processes that one copy of the parameters is sharded over.
        tp: tensor-parallel size.
        sequence_parallel: keep norms, dropout and the residual on sequence shards inside the tp group.
        schedule: a pipeline schedule of torch, in any case; without effect at pp=1.
        virtual_stages: stages a rank holds, for the interleaved and V schedules; without effect at pp=1.
        microbatches: microbatches of one schedule step; None leaves it to `choose_microbatches`.
        stage_layers: decoder layers of each stage, in order; None balances them by FLOPs.
        activation_checkpoint: "none", "selective" or "full".
        reshard_after_forward: give the gathered weights of a layer back after its forward, and gather them again for
            its backward (FSDP); None does so without a pipeline. With one that costs a gather a microbatch, each way.
        compile: run each decoder layer through `torch.compile`.
        async_tp: with ``compile``, on CUDA: collectives of sequence parallelism run in pieces beside the matmuls that
            they feed or follow (torch's symmetric memory).
        param_dtype: dtype the parameters are stored and updated in.
        compute_dtype: dtype of the forward and backward.
        reduce_dtype: dtype gradients are summed in.

    Raises:
        ConfigError: (a ValueError) naming the setting, its value and what would work.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    sequence_parallel: bool = True
    schedule: str = "1F1B"
    virtual_stages: int = 1
    microbatches: int | None = None
    stage_layers: Sequence[int] | None = None
    activation_checkpoint: str = "none"
    reshard_after_forward: bool | None = None
    compile: bool = False
    async_tp: bool = False
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_choices(self)
        _check_async_tp(self)
        _check_stage_layers(self)
        if self.pp > 1:
            _check_reshard(self)
            _check_virtual_stages(self)
            _check_microbatches(self)

    def resolve(self, world_size: int) -> ParallelConfig:
        """The same config with -1 filled in, for a job of `world_size` processes.

        Raises:
            ConfigError: when the sizes do not multiply to `world_size`.
        """
        if not _is_int(world_size) or world_size < 1:
            raise ConfigError(f"world_size={world_size!r} must be a whole number of at least 1.")
        known = math.prod(size for size in self._sizes.values() if size != -1)
        free = [name for name, size in self._sizes.items() if size == -1]
        if free and world_size % known == 0:
            filled: dict[str, Any] = {free[0]: world_size // known}
            return dataclasses.replace(self, **filled)
        if not free and world_size == known:
            return self
        raise ConfigError(_mesh_message(self, known, world_size))

    @classmethod
    def from_accelerate(cls, config: ParallelismConfig) -> ParallelConfig:
        """The mesh of an `accelerate.ParallelismConfig`; everything it has no word for keeps its default.

        Raises:
            ConfigError: when it asks for context or Ulysses sequence parallelism.
        """
        for name in ("cp_size", "sp_size"):
            if getattr(config, name) > 1:
                raise ConfigError(f"{name}={getattr(config, name)} is not supported; set {name}=1.")
        return cls(dp_replicate=config.dp_replicate_size, dp_shard=config.dp_shard_size, tp=config.tp_size)

    @property
    def dp(self) -> int:
        """Data-parallel size: dp_replicate * dp_shard."""
        return self._product("dp_replicate", "dp_shard")

    @property
    def world_size(self) -> int:
        """Processes the mesh needs."""
        return self._product(*MESH_SIZES)

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the model: pp * virtual_stages, or 1 where there is no pipeline."""
        pp = self._product("pp")
        return pp * self.virtual_stages if pp > 1 else 1

    @property
    def reshards(self) -> bool:
        """Whether a layer's weights are gathered anew for its backward."""
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in MESH_SIZES}

    def _product(self, *names: str) -> int:
        for name in names:
            if getattr(self, name) == -1:
                raise ConfigError(f"{name}=-1 is not known yet; call resolve(world_size) first.")
        return math.prod(getattr(self, name) for name in names)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in `DTYPES`."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def check_torch_version(config: ParallelConfig, version: str | None = None) -> None:
    """Refuse a pipeline on a torch that cannot run it. `version` defaults to the installed one.

    Raises:
        ConfigError: when pp is at least 2 and torch is older than 2.13.
    """
    from packaging.version import Version

    version = version or metadata.version("torch")
    if config.pp > 1 and Version(version).release[:2] < PIPELINE_TORCH:
        raise ConfigError(f"pp={config.pp} needs torch >= 2.13, and torch {version} is installed; use pp=1 or upgrade.")


def check_model(config: ParallelConfig, hf_config: Any) -> None:
    """Refuse a model that the mesh cannot hold. Sizes that tp does not divide are padded; heads must be at least tp.

    Args:
        config: a resolved config.
        hf_config: the `transformers` config of the model.

    Raises:
        ConfigError: naming the setting, its value and the nearest values that work for this model.
    """
    check_torch_version(config)
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    _check_heads(config, text)
    layers = num_layers(text)
    if layers is not None:
        check_layers(config, layers)


def num_layers(text: Any) -> int | None:
    """Decoder layers of a text config by any of their names; a decoder's own where there may be an encoder too."""
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    counts = (getattr(text, name, None) for name in names)
    return next((count for count in counts if isinstance(count, int)), None)


def divisors(number: int) -> set[int]:
    """What divides ``number``."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}


def nearest(wanted: int, working: Iterable[int]) -> str:
    """The working values closest to the wanted one, below and above: "3", "2 or 4"."""
    values = sorted(working)
    below = [value for value in values if value < wanted][-1:]
    above = [value for value in values if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(config: ParallelConfig) -> None:
    for name, size in config._sizes.items():
        if not _is_int(size) or (size < 1 and size != -1):
            raise ConfigError(
                f"{name}={size!r} must be a whole number of at least 1, or -1 for whatever is left of the world size."
            )
    free = [name for name, size in config._sizes.items() if size == -1]
    if len(free) > 1:
        raise ConfigError(f"{free[0]}=-1 and {free[1]}=-1 cannot both be what is left; set one of them to its size.")
    for name in ("virtual_stages", "microbatches"):
        value = getattr(config, name)
        if value is None and name == "microbatches":
            continue
        if not _is_int(value) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")


def _check_choices(config: ParallelConfig) -> None:
    for name in ("sequence_parallel", "compile", "async_tp"):
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r} must be True or False.")
    if config.reshard_after_forward is not None and not isinstance(config.reshard_after_forward, bool):
        raise ConfigError(f"reshard_after_forward={config.reshard_after_forward!r} must be True, False or None.")
    canonical = {name.lower(): name for name in SCHEDULES}
    _choose(config, "schedule", canonical.get(str(config.schedule).lower(), config.schedule), SCHEDULES)
    _choose(config, "activation_checkpoint", config.activation_checkpoint, ACTIVATION_CHECKPOINTS)
    for name in ("param_dtype", "compute_dtype", "reduce_dtype"):
        dtype = str(getattr(config, name)).removeprefix("torch.")
        if dtype == "float16":
            raise ConfigError(f"{name}='float16' would need loss scaling, which meshpar does not do; use 'bfloat16'.")
        _choose(config, name, dtype, DTYPES)


def _check_async_tp(config: ParallelConfig) -> None:
    for name in ("compile", "sequence_parallel") if config.async_tp else ():
        if not getattr(config, name):
            raise ConfigError(f"async_tp=True needs {name}=True: a compiler splits the collectives of shards.")


def _choose(config: ParallelConfig, name: str, value: Any, legal: Iterable[str]) -> None:
    if value not in list(legal):
        raise ConfigError(f"{name}={getattr(config, name)!r} must be one of {', '.join(legal)}.")
    object.__setattr__(config, name, value)


def _check_stage_layers(config: ParallelConfig) -> None:
    layers = config.stage_layers
    if layers is None:
        return
    if not isinstance(layers, Sequence) or not layers or not all(_is_int(n) and n >= 1 for n in layers):
        raise ConfigError(f"stage_layers={layers!r} must list whole numbers of at least 1: the layers of each stage.")
    object.__setattr__(config, "stage_layers", tuple(layers))
    if config.pp != -1 and len(layers) != config.num_stages:
        made_of = f"pp={config.pp} x virtual_stages={config.virtual_stages}" if config.pp > 1 else "pp=1"
        raise ConfigError(
            f"stage_layers={list(layers)} has {len(layers)} entries; {made_of} makes {config.num_stages} stages, "
            "so give that many."
        )


def _check_reshard(config: ParallelConfig) -> None:
    if config.reshard_after_forward and SCHEDULES[config.schedule].splits_backward:
        raise ConfigError(
            f"reshard_after_forward=True does not work with schedule={config.schedule}, which needs the weights again "
            "after the backward that FSDP gathers them for; use 1F1B or Interleaved1F1B, or reshard_after_forward=None."
        )


def _check_virtual_stages(config: ParallelConfig) -> None:
    schedule, value = SCHEDULES[config.schedule], config.virtual_stages
    if value < schedule.least_virtual:
        working = f"{schedule.least_virtual}" + ("" if schedule.most_virtual else " or more")
    elif schedule.most_virtual and value > schedule.most_virtual:
        working = f"{schedule.most_virtual}"
    else:
        return
    advice = "" if value == 1 or schedule.most_virtual == 2 else ", or schedule=Interleaved1F1B"
    raise ConfigError(
        f"virtual_stages={value} does not work with schedule={config.schedule} at pp={config.pp}; "
        f"set virtual_stages={working}{advice}."
    )


def _check_microbatches(config: ParallelConfig) -> None:
    wanted = config.microbatches
    if wanted is None or accepts_microbatches(config, wanted):
        return
    working = nearest(wanted, microbatches_around(config, wanted))
    raise ConfigError(f"microbatches={wanted} {why_refused(config, wanted)}; nearest that work: {working}.")


def _mesh_message(config: ParallelConfig, known: int, world_size: int) -> str:
    sizes = {name: size for name, size in config._sizes.items() if size != -1}
    spelled = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if len(sizes) == len(MESH_SIZES):
        verdict = f"makes {known} processes, but world_size={world_size}; start {known} processes"
    else:
        below = world_size // known * known
        around = f"{below} or {below + known}" if below else f"{known}"
        verdict = f"makes {known} processes, which does not divide world_size={world_size}; start {around} processes"
    changes = [f"{name}={values}" for name in sizes if (values := _working_sizes(config, name, world_size))]
    return f"{spelled} {verdict}" + (f", or set {', or '.join(changes)}." if changes else ".")


def _working_sizes(config: ParallelConfig, name: str, world_size: int) -> str:
    others = math.prod(size for other, size in config._sizes.items() if other != name and size != -1)
    rest_is_free = -1 in config._sizes.values()
    fits = [
        v
        for v in range(1, world_size + 1)
        if (world_size % (others * v) == 0 if rest_is_free else others * v == world_size)
    ]
    return nearest(config._sizes[name], fits)


def _check_heads(config: ParallelConfig, text: Any) -> None:
    """Zero heads fill up a count that does not divide (see `layout.heads`), but every rank needs a head of its own."""
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and config.tp > heads:
        raise ConfigError(
            f"tp={config.tp} is more than the model's num_attention_heads={heads}; "
            f"tp from 1 to {heads} work for this model."
        )


def check_layers(config: ParallelConfig, layers: int) -> None:
    """Refuse more stages than layers, and `stage_layers` that do not add up to them."""
    stages = config.num_stages
    if layers < stages:
        pp, virtual = config.pp, config.virtual_stages
        fewer = f"pp={layers // virtual}" if layers >= virtual else "pp=1"
        raise ConfigError(
            f"pp={pp} x virtual_stages={virtual} makes {stages} stages, more than the model's "
            f"num_hidden_layers={layers}; the most that works is {fewer} with virtual_stages={virtual}."
        )
    if config.stage_layers is not None and sum(config.stage_layers) != layers:
        even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        raise ConfigError(
            f"stage_layers={list(config.stage_layers)} adds up to {sum(config.stage_layers)}, but the model has "
            f"num_hidden_layers={layers}; {even} would work."
        )
