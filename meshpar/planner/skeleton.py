"""A model laid out for a mesh without a rank of it: its plan, stages, and what a tp rank stores of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy import dissect
from ..config import ParallelConfig, check_model, torch_dtype
from ..flow import Flow
from ..load import meta_copy, skeleton_from_config
from ..pretrained import read_config
from ..split import shared_names
from ..stages import StageRange, stage_of, stage_ranges, stage_ranks
from ..styles import ParamSpec, apply_styles
from ..tensor_parallel import TensorParallel
from ..tp_plan import Plan, make_plan
from ..trial import kind


@dataclass(frozen=True)
class Weight:
    """What a tp rank stores of one parameter, padding included: ``rows`` of ``width`` elements of ``itemsize`` bytes.

    ``part``: the decoder layer it is in, or "head" or "root", as FSDP groups them; a parameter that is shared between
    any of these is in "root". ``ranks``: the pp ranks that have it.
    """

    name: str
    rows: int
    width: int
    itemsize: int
    trains: bool
    part: int | str
    ranks: tuple[int, ...]
    partial: bool

    def shard_bytes(self, shards: int, rank: int) -> int:
        """What FSDP leaves of it to one of ``shards`` ranks: torch.chunk's split of its rows."""
        chunk = -(-self.rows // shards)
        return max(0, min(chunk, self.rows - rank * chunk)) * self.width * self.itemsize


@dataclass(frozen=True)
class Skeleton:
    """``model`` as every rank of a tp group has it, all layers in it; parameters on the meta device.

    ``kinds``: for each decoder layer, the first one that is like it. ``shared``: the names of each parameter that has
    several.
    """

    model: PreTrainedModel
    plan: Plan
    tp: TensorParallel
    specs: dict[str, ParamSpec]
    ranges: list[StageRange]
    stage_ranks: list[int]
    weights: list[Weight]
    kinds: list[int]
    shared: list[list[str]]


@contextmanager
def no_network(size: int) -> Iterator[DeviceMesh]:
    """A tp group of ``size`` ranks in this process: collectives return at once, and what they return has no meaning."""
    if dist.is_initialized():
        raise RuntimeError("a forecast is made outside of a job: it has a process group of its own, without a network")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    finally:
        dist.destroy_process_group()


def open_skeleton(
    model: str | Path | PreTrainedConfig | PreTrainedModel, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model on the meta device, from its config alone."""
    if isinstance(model, PreTrainedModel):
        return meta_copy(model)
    config = model if isinstance(model, PreTrainedConfig) else read_config(model, trust_remote_code)
    return skeleton_from_config(config, trust_remote_code)


def lay_out(
    model: PreTrainedModel,
    config: ParallelConfig,
    mesh: DeviceMesh,
    once: Callable[[Callable[[], Any]], Any] = lambda find: find(),
    flow: Flow | None = None,
) -> Skeleton:
    """``model`` (left as it is) on the tp group ``mesh`` of a job of ``config``, which is resolved.

    ``once``, ``flow``: as `make_plan` has them. Raises ValueError for what `parallelize_model` would refuse.
    """
    check_model(config, model.config)
    model = meta_copy(model)
    plan = make_plan(model, config, once=once, flow=flow)
    anatomy = plan.anatomy
    ranges, shared = stage_ranges(model, anatomy, config, plan.flow), shared_names(model)
    kinds = _kinds(model, plan)
    tp = TensorParallel(
        mesh,
        config.sequence_parallel,
        keep_shards=config.activation_checkpoint == "none",
        sum_at_layers=plan.flow.straight and plan[anatomy.embedding] == "embedding_rowwise",
    )
    specs = apply_styles(model, plan, tp, config)
    parts = _parts(plan, specs, shared)

    def weight(name: str, spec: ParamSpec) -> Weight:
        return Weight(
            name,
            spec.local_shape[0],
            math.prod(spec.local_shape[1:]),
            torch_dtype(config.param_dtype).itemsize,
            model.get_parameter(name).requires_grad,
            parts[name],
            (),
            spec.partial,
        )

    weights = [weight(name, specs[name]) for name, _ in model.named_parameters()]
    return staged(Skeleton(model, plan, tp, specs, [], [], weights, kinds, shared), ranges, config)


def staged(skeleton: Skeleton, ranges: list[StageRange], config: ParallelConfig) -> Skeleton:
    """The same layout with its layers on the stages ``ranges`` of a config's pipeline."""
    anatomy, flow, ranks = skeleton.plan.anatomy, skeleton.plan.flow, stage_ranks(config)
    names_of = {names[0]: names for names in skeleton.shared}

    def ranks_of(name: str) -> tuple[int, ...]:
        stages = {stage_of(n, anatomy, flow, ranges) for n in names_of.get(name, [name])}
        return tuple(sorted({ranks[stage] for stage in stages}))

    weights = [replace(w, ranks=ranks_of(w.name)) for w in skeleton.weights]
    return replace(skeleton, ranges=ranges, stage_ranks=ranks, weights=weights)


def _parts(plan: Plan, names: Iterable[str], shared: list[list[str]]) -> dict[str, int | str]:
    """FSDP's group of each parameter: what shares one with another part is in the root's."""
    anatomy = plan.anatomy

    def part(name: str) -> int | str:
        index = anatomy.layer_index(name)
        if index is not None:
            return index
        return "head" if name.startswith(f"{anatomy.head}.") else "root"

    joined = {part(n) for several in shared if len({*map(part, several)}) > 1 for n in several}
    return {name: "root" if part(name) in joined else part(name) for name in names}


def _kinds(model: PreTrainedModel, plan: Plan) -> list[int]:
    """Layers are alike where their modules are and the config has one word for them."""
    types = getattr(model.config.get_text_config(), "layer_types", None)
    first: dict[object, int] = {}
    found = []
    for i in range(plan.anatomy.num_layers):
        word = types[i] if isinstance(types, list) and i < len(types) else None
        found.append(first.setdefault((word, kind(model.get_submodule(plan.anatomy.layer(i)))), i))
    return found


def standing_for(kinds: Sequence[int]) -> list[int]:
    """For each layer the one that stands for it in a measurement: the first like it, or itself.

    Of those alike the one behind the first and the last stand for themselves: what follows one may keep its output.
    """
    last = len(kinds) - 1
    left = {*kinds, *(min(i + 1, last) for i in kinds), last}
    return [i if i in left else kinds[i] for i in range(len(kinds))]


def without_alike(model: PreTrainedModel, kinds: Sequence[int]) -> PreTrainedModel:
    """A copy without the layers that another one stands for, to lay out for a measurement: in their place is nothing.

    ``kinds``: as a `Skeleton` of the whole model has them.
    """
    model = meta_copy(model)
    anatomy = dissect(model)
    for i, first in enumerate(standing_for(kinds)):
        if i != first:
            model.set_submodule(anatomy.layer(i), nn.Module())
    return model
