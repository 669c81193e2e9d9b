"""What is to be forecast: a recipe or a model, a number of devices, and where they are."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..config import ConfigError, ParallelConfig
from ..recipe import Recipe, load_recipe, parse_recipe, shipped_recipes
from .devices import ACROSS, Device, device_named, network_of
from .forecast import Job, MeshForecast, forecast
from .links import link_named
from .names import nearest_name
from .skeleton import open_skeleton
from .study import Study

Subject = str | os.PathLike[str] | Recipe | PreTrainedConfig | PreTrainedModel
SEQ_LEN = 8192  # of a model for which none is given
_SEARCHED = {"parallel.pp": 1, "parallel.microbatches": None, "parallel.stage_layers": None}
_OF_A_MODEL: dict[str, Any] = {
    "data": {"path": "train.jsonl", "format": "text", "seq_len": SEQ_LEN, "pack": False},
    "batch": {"global_size": 1},
    "optim": {"lr": 1e-5},
    "train": {"steps": 1000},
}


def plan(
    model_or_recipe: Subject,
    config: ParallelConfig | None = None,
    *,
    world_size: int,
    device: str | Device,
    gpus_per_node: int = 8,
    seq_len: int | None = None,
    micro_size: int | None = None,
    global_size: int | None = None,
    packed: bool | None = None,
    across: str = ACROSS,
) -> MeshForecast:
    """Forecast memory, communication, bubble and time of a training step, without weights, a GPU or a process group.

    Args:
        model_or_recipe: a directory, a hub id, a `transformers` config or model; or a recipe, its file, or the name of
            a shipped one.
        config: the mesh; None leaves a recipe's own, and for a model is FSDP over all devices.
        world_size: how many devices there are.
        device: a name of `meshpar.planner.devices.DEVICES`, or a `Device`.
        gpus_per_node: devices of a node; ``across``, a name of `meshpar.planner.links.LINKS`, joins nodes.
        seq_len, micro_size, global_size: tokens a row; rows a microbatch, and a step of all devices. None is a
            recipe's own; for a model 8192 tokens, one row, and four microbatches for each pipeline rank.
        packed: whether rows hold several documents, which takes a mask.

    Raises:
        ConfigError: for a name, mesh or batch that cannot be.
        ValueError: for a model that the mesh cannot hold.
    """
    settings = {
        "data.seq_len": seq_len,
        "batch.micro_size": micro_size,
        "batch.global_size": global_size,
        "data.pack": packed,
    }
    if config is not None:
        settings |= _of_config(config)
    given = {key: value for key, value in settings.items() if value is not None}
    return forecast(open_job(model_or_recipe, given, world_size, device, gpus_per_node, across))


def open_job(
    subject: Subject,
    settings: Mapping[str, Any],
    world_size: int,
    device: str | Device,
    per_node: int = 8,
    across: str = ACROSS,
    search: bool = False,
) -> Job:
    """The job of a recipe or a model with ``settings`` (key.path -> value) laid over it.

    The batch of a model without batch.global_size is four microbatches for each pipeline rank, or, to ``search``, one
    row a device.
    """
    for name, value in (("world_size", world_size), ("gpus_per_node", per_node)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    device = device_named(device) if isinstance(device, str) else device
    network = network_of(device, per_node, link_named(across))
    raw = _raw(subject)
    is_model = "output_dir" not in raw
    _lay_over(raw, {"output_dir": "out/plan", **settings} if is_model else settings)
    _lay_over(raw, _SEARCHED if search else {})  # a given schedule needs not go with the mesh that the search replaces
    recipe = parse_recipe(raw)
    if is_model and "batch.global_size" not in settings:
        rows = world_size if search else _rows(recipe, world_size)
        recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_size": rows})})
    kernels = "cpu" if device.name == "cpu" else "cuda"
    study = Study(_open(subject, recipe), recipe.data.seq_len, recipe.data.pack, kernels)
    return Job(study, recipe, world_size, device, network)


def is_recipe(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a recipe, and not of a model."""
    path = os.fspath(name)
    return Path(path).is_file() or path in shipped_recipes() or path.endswith((".yaml", ".yml"))


def _raw(subject: Subject) -> dict[str, Any]:
    if isinstance(subject, (str, os.PathLike)):
        if is_recipe(subject):
            return load_recipe(subject).model_dump(mode="json", by_alias=True)
        path = os.fspath(subject)
    elif isinstance(subject, Recipe):
        return subject.model_dump(mode="json", by_alias=True)
    else:
        path = subject.name_or_path or type(subject).__name__
    return {"model": {"path": path}, **{name: dict(section) for name, section in _OF_A_MODEL.items()}}


def _open(subject: Subject, recipe: Recipe) -> PreTrainedModel:
    if isinstance(subject, (PreTrainedConfig, PreTrainedModel)):
        return open_skeleton(subject)
    path = recipe.model.path
    try:
        return open_skeleton(path, recipe.model.trust_remote_code)
    except ConfigError:
        raise
    except ValueError as error:
        if Path(path).is_dir():
            raise ConfigError(str(error)) from error
        if isinstance(subject, str) and not is_recipe(subject):
            known = nearest_name(path, shipped_recipes())
            raise ConfigError(
                f"{path} is neither a recipe nor a model: no directory with a config.json, nor on the hub; of the "
                f"shipped recipes, {known}."
            ) from error
        raise ConfigError(
            f"model.path={path} is no directory with a config.json, and the hub does not give it; set model.path."
        ) from error


def _of_config(config: ParallelConfig) -> dict[str, Any]:
    settings = {f"parallel.{field.name}": getattr(config, field.name) for field in fields(config)}
    if config.stage_layers is not None:
        settings["parallel.stage_layers"] = list(config.stage_layers)
    return settings | {"model.dtype": settings.pop("parallel.param_dtype")}


def _lay_over(raw: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value


def _rows(recipe: Recipe, world_size: int) -> int:
    """Rows of a step: four microbatches for each pipeline rank."""
    config = recipe.parallel_config().resolve(world_size)
    microbatches = config.microbatches or (4 * config.pp if config.pp > 1 else 1)
    return math.prod((config.dp, recipe.batch.micro_size, microbatches))
