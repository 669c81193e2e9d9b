"""`meshpar plan`: from the arguments to what is printed and written."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from ..config import ConfigError
from ..recipe import Recipe
from ..recipe_yaml import YamlProblem, override
from .calibrate import calibrate_machine, device_here
from .chrome import read_trace
from .devices import ACROSS, DEVICES, Device, device_named
from .forecast import Job, MeshForecast, forecast
from .job import is_recipe, open_job
from .pictures import first_pipeline
from .report import as_text, check_picture, draw, ranking_as_text, written
from .search import search

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
    flags = {name: value for name in _FLAGS if (value := getattr(args, name)) is not None}
    settings = _overrides(args.overrides) | {_FLAGS[name]: value for name, value in flags.items()}
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
        ranking = search(job, {name: _legal(job, name) for name in flags if name not in _NOT_SEARCHED})
        best, whole = ranking.best[0], ranking.as_dict()
        text = f"{ranking_as_text(ranking)}\n\nThe first of them:\n\n"
    else:
        best, text = _forecast(job), ""
        whole = best.as_dict()
    print(json.dumps(whole) if args.json else text + as_text(best, _started_from(args)))
    _write(args, job, best)
    return 0


def _forecast(job: Job) -> MeshForecast:
    """The forecast; a mesh that the model cannot be laid out on is bad usage, as any other that cannot be."""
    try:
        return forecast(job)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _legal(job: Job, name: str) -> Any:
    """The value of a flag as the recipe has it: names in their usual case."""
    return job.recipe.batch.micro_size if name == "micro_size" else getattr(job.recipe.parallel_config(), name)


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
    if args.plot is not None:
        check_picture(args.plot)
    if args.write is not None and args.write.exists():
        raise ConfigError(f"{args.write} exists already; give a new file name.")
    for file in (args.write, args.plot):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file} cannot be written: there is no directory {file.parent}.")
    if args.trace is not None and not args.trace.is_file():
        raise ConfigError(f"trace={str(args.trace)!r} is no file; a recipe with log.trace=true writes one.")


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


def _started_from(args: argparse.Namespace) -> str:
    return str(args.write or (args.subject if is_recipe(args.subject) else "recipe.yaml"))


def _write(args: argparse.Namespace, job: Job, best: MeshForecast) -> None:
    if args.write is not None:
        recipe: Recipe = written(job.recipe, best)
        args.write.write_text(recipe.dump_yaml(), encoding="utf-8")
    if args.plot is not None:
        measured = first_pipeline(read_trace(Path(args.trace)), best.config) if args.trace is not None else None
        draw(args.plot, best, measured)
