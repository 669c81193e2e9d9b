"""`meshpar plan`: from the arguments to what is printed and written."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..config import ConfigError, ParallelConfig
from ..recipe import Recipe, load_recipe
from ..recipe_yaml import YamlProblem, override
from .calibrate import calibrate_machine, device_here
from .chrome import read_trace
from .devices import ACROSS, DEVICES, Device, device_named
from .forecast import Job, MeshForecast, forecast
from .job import is_recipe, open_job
from .pictures import first_pipeline
from .report import as_text, changes, check_picture, draw, ranking_as_text, written
from .search import search
from .simulate import Timeline

_FLAGS = {
    "pp": "parallel.pp",
    "dp_replicate": "parallel.dp_replicate",
    "dp_shard": "parallel.dp_shard",
    "tp": "parallel.tp",
    "schedule": "parallel.schedule",
    "virtual_stages": "parallel.virtual_stages",
    "activation_checkpoint": "parallel.activation_checkpoint",
    "micro_size": "batch.micro_size",
    "seq_len": "data.seq_len",
    "global_size": "batch.global_size",
}
_NOT_SEARCHED = ("seq_len", "global_size")


def run(args: argparse.Namespace) -> int:
    """Forecast or search, print, and write what was asked for."""
    _check_files(args)
    measured = _measured(args)
    flags = {name: value for name in _FLAGS if (value := getattr(args, name)) is not None}
    settings = _overrides(args.overrides) | {_FLAGS[name]: value for name, value in flags.items()}
    fixed = _fixed(settings) if args.search else {}
    job = open_job(
        args.subject,
        settings,
        args.world_size,
        _device(args),
        args.gpus_per_node,
        args.across or ACROSS,
        search=args.search,
    )
    if args.search:
        ranking = search(job, fixed)
        best, whole = ranking.best[0], ranking.as_dict()
        text = f"{ranking_as_text(ranking)}\n\nThe first of them:\n\n"
    else:
        best, text = _forecast(job), ""
        whole = best.as_dict()
    print(json.dumps(whole) if args.json else text + as_text(best, *_started_from(args, job, best)))
    _write(args, job, best, measured)
    return 0


def _forecast(job: Job) -> MeshForecast:
    """The forecast; a mesh that the model cannot be laid out on is bad usage, as any other that cannot be."""
    try:
        return forecast(job)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a search leaves as it was given. Each is checked by itself: what it goes together with is searched."""
    for key in ("parallel.microbatches", "parallel.stage_layers"):
        if settings.get(key) is not None:
            raise ConfigError(f"{key}={settings[key]} cannot be given to --search, which has its own for every mesh.")
    given = {name: settings[key] for name, key in _FLAGS.items() if key in settings and name not in _NOT_SEARCHED}
    return {name: _legal(name, value) for name, value in given.items() if value != -1}


def _legal(name: str, value: Any) -> Any:
    """The value as a config has it: names in their usual case."""
    if name == "micro_size":
        return value
    alone: dict[str, Any] = {"dp_shard": 1, name: value}
    return getattr(ParallelConfig(**alone), name)


def _overrides(assignments: list[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for assignment in assignments:
        try:
            override(raw, assignment)
        except YamlProblem as problem:
            raise ConfigError(str(problem)) from None
    return {
        f"{section}.{key}" if isinstance(inner, dict) else section: value
        for section, inner in raw.items()
        for key, value in (inner.items() if isinstance(inner, dict) else [("", inner)])
    }


def _check_files(args: argparse.Namespace) -> None:
    """A search may take a minute: what cannot be written or read is refused before it."""
    if args.plot is not None:
        check_picture(args.plot)
    if args.write is not None and args.write.exists():
        raise ConfigError(f"{args.write} exists already; give a new file name.")
    for file in (args.write, args.plot):
        if file is not None and (file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK)):
            raise ConfigError(f"{file} cannot be written; give a file in a directory that is there and writable.")


def _measured(args: argparse.Namespace) -> Timeline | None:
    if args.trace is None:
        return None
    name = f"trace={str(args.trace)!r}"
    if args.plot is None:
        raise ConfigError(f"{name} is drawn beside the forecast; give --plot FILE, too.")
    try:
        found = read_trace(args.trace)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{name} is no trace; a recipe with log.trace=true writes one.") from error
    if len(found.ranks) != args.world_size:
        raise ConfigError(f"{name} is of {len(found.ranks)} processes, and world_size={args.world_size}.")
    return found


def _device(args: argparse.Namespace) -> Device:
    if args.device is None and not args.calibrate:
        raise ConfigError(f"--device is missing; known are: {', '.join(DEVICES)}.")
    if not args.calibrate:
        return device_named(args.device)
    here = device_here(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if args.device is not None and device_named(args.device) != here:
        raise ConfigError(f"device={args.device!r} is not this machine's, which --calibrate measures: {here.name}.")
    most = torch.cuda.device_count() if here.asynchronous else len(os.sched_getaffinity(0))
    dtype = _overrides(args.overrides).get("parallel.compute_dtype", "bfloat16")
    return calibrate_machine(min(most, args.gpus_per_node, args.world_size), dtype).device(here)


def _started_from(args: argparse.Namespace, job: Job, best: MeshForecast) -> list[str]:
    if args.write is not None:
        return [str(args.write)]
    if not is_recipe(args.subject):
        return ["recipe.yaml"]
    return [args.subject, *changes(load_recipe(args.subject), written(job.recipe, best))]


def _write(args: argparse.Namespace, job: Job, best: MeshForecast, measured: Timeline | None) -> None:
    if args.write is not None:
        recipe: Recipe = written(job.recipe, best)
        args.write.write_text(recipe.dump_yaml(), encoding="utf-8")
    if args.plot is not None:
        draw(args.plot, best, measured and first_pipeline(measured, best.config))
