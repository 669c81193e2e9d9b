"""Training state on disk: saved on one mesh, loaded on any.

A checkpoint is a directory. `torch.distributed.checkpoint` (DCP) holds the parameters, the optimizer's state by
parameter name and every rank's random number generators; `config.json` the model's config; `meshpar.json`, written
last, the rest. It is written aside, flushed to the disk and renamed, so that it appears complete or not at all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import AutoConfig, GenerationConfig

from .config import MESH_SIZES
from .load import skeleton_from_config
from .mesh import DEFAULT_TIMEOUT, on_first_rank
from .model import ParallelModel
from .optimizer_state import NamedOptimizer
from .pieces import Piece, StoredTensors, parameter_piece, read_pieces, whole_piece, write_pieces
from .rng import rng_state, seed_rank, set_rng_state
from .weights_convert import original_layout, pin_layout
from .weights_files import listed, resolve_directory
from .weights_out import write_pretrained

log = logging.getLogger("meshpar")

MANIFEST = "meshpar.json"
FORMAT = 1
STEP_DIRECTORY = re.compile(r"step-(\d+)")
UNFINISHED = ".tmp"


def save(directory: str | Path, model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any]) -> None:
    """Write the training state to ``directory``, in place of what is there; collective.

    ``extra`` is what else a run continues from (its step, the scheduler's and the data's ``state_dict()``): anything
    JSON can hold. Its "seed" and "step", where it has them, seed the ranks when another mesh loads it.

    Raises OSError on every rank when one of them could not write; ``directory`` is then as it was.
    """
    _write(Path(directory), _snapshot(model, optimizer, extra))


def load(directory: str | Path, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
    """Load what `save` wrote into ``model`` and ``optimizer``, on any mesh; returns ``extra``. Collective.

    The optimizer must have the same parameter groups, by name; their settings become the saved ones. On the mesh that
    saved, the random number generators continue; on another they are seeded from (seed, step, place in the mesh).

    Raises ValueError, before anything is changed, for an incomplete directory and for the state of another model.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    named = _named(optimizer, model)
    _check(directory, manifest, model, named)
    stored = StoredTensors(directory).entries()
    state = named.empty_state(stored)
    rng = _empty_rng_state(stored, model) if manifest["mesh"] == _mesh_sizes(model) else {}
    rng_pieces = {_rng_prefix(model) + kind: whole_piece(tensor) for kind, tensor in rng.items()}
    read_pieces(directory, _model_pieces(model) | named.pieces(state) | rng_pieces)
    named.load(state, manifest["groups"])
    extra = manifest["extra"]
    seed_rank(extra.get("seed", 0), extra.get("step", 0), model._mesh)
    if rng:
        set_rng_state(rng, model._mesh.device)
    return extra


def latest(checkpoints_dir: str | Path) -> Path | None:
    """The complete ``step-N`` directory with the highest N, or None; what it skips is logged as a warning."""
    found = [(int(m[1]), p) for p in Path(checkpoints_dir).glob("step-*") if (m := STEP_DIRECTORY.match(p.name))]
    for _, path in sorted(found, reverse=True):
        if path.name.endswith(UNFINISHED):
            log.warning("%s is a save that did not finish; skipped", path)
        elif STEP_DIRECTORY.fullmatch(path.name):
            try:
                read_manifest(path)
            except ValueError as problem:
                log.warning("%s; skipped", problem)
            else:
                return path
    return None


def export(checkpoint_dir: str | Path, out_dir: str | Path) -> None:
    """Write a checkpoint's weights as a Hugging Face directory; one process, no process group, one tensor at a time."""
    checkpoint_dir = Path(checkpoint_dir)
    manifest = read_manifest(checkpoint_dir)
    stored, dtype = StoredTensors(checkpoint_dir), getattr(torch, manifest["dtype"])
    entries = [(name, shape, dtype) for name, shape in manifest["parameters"].items()]
    entries += [(name, shape, getattr(torch, kind)) for name, (shape, kind) in manifest.get("buffers", {}).items()]
    config = AutoConfig.from_pretrained(checkpoint_dir)
    skeleton = skeleton_from_config(config)
    pin_layout(skeleton)
    has_generation = (checkpoint_dir / "generation_config.json").is_file()
    write_pretrained(
        out_dir,
        *original_layout(skeleton, entries, ((name, stored.read(f"param.{name}")) for name, *_ in entries)),
        config=config,
        generation_config=GenerationConfig.from_pretrained(checkpoint_dir) if has_generation else None,
        tokenizer_source=_tokenizer_source(manifest["origin"]),
    )


class BackgroundSaver:
    """Saves that are written while training goes on, from a copy in host memory, one at a time. Collective, as `save`.

    ``timeout`` bounds the wait for a peer while writing.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        # Its collectives run beside training's, so they need a group of their own.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, directory: str | Path, model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any]) -> None:
        """As `save`, but returns when the copy is made; what the write raises comes from the next `save` or `wait`."""
        self.wait()
        snapshot = _snapshot(model, optimizer, extra).on_cpu()
        self._writing = self._thread.submit(_write, Path(directory), snapshot, self._group)

    def wait(self) -> None:
        """Return when the write in progress is on the disk; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def read_manifest(directory: Path) -> dict[str, Any]:
    """What `meshpar.json` says; ValueError when ``directory`` is no complete checkpoint."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{directory} is no complete checkpoint: it has no {MANIFEST}") from None
    except ValueError as error:
        raise ValueError(f"{directory / MANIFEST} is damaged: {error}") from None
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(f"{directory / MANIFEST} has format {found!r}; this version reads format {FORMAT}")
    return manifest


# What is saved


@dataclass(frozen=True)
class _Snapshot:
    pieces: dict[str, Piece]
    files: dict[str, str]

    def on_cpu(self) -> _Snapshot:
        return replace(self, pieces={name: piece.on_cpu() for name, piece in self.pieces.items()})


def _snapshot(model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any]) -> _Snapshot:
    named = _named(optimizer, model)
    rng = {_rng_prefix(model) + kind: whole_piece(t) for kind, t in rng_state(model._mesh.device).items()}
    manifest = {
        "format": FORMAT,
        "mesh": _mesh_sizes(model),
        "dtype": model.parallel_config.param_dtype,
        "parameters": model._full.shapes,
        "buffers": {n: (s, str(d).removeprefix("torch.")) for n, (s, d) in model._full.buffers.items()},
        "groups": named.groups(),
        "origin": _lasting(model._origin),
        "extra": extra,
    }
    files = {"config.json": model.config.to_json_string(use_diff=True), MANIFEST: json.dumps(manifest, indent=1)}
    generation_config = getattr(model._runner.model, "generation_config", None)
    if generation_config is not None:
        files["generation_config.json"] = generation_config.to_json_string(keys_to_pop=["compile_config"])
    return _Snapshot(_model_pieces(model) | named.pieces(optimizer.state) | rng, files)


def _named(optimizer: Optimizer, model: ParallelModel) -> NamedOptimizer:
    return NamedOptimizer(optimizer, dict(model.named_parameters()), model._full.specs, model._mesh)


def _model_pieces(model: ParallelModel) -> dict[str, Piece]:
    specs, mesh = model._full.specs, model._mesh
    params = {f"param.{n}": parameter_piece(p, specs[n], mesh) for n, p in model.named_parameters()}
    buffers = {f"param.{n}": whole_piece(b) for n, b in model.named_buffers() if n in model._full.buffers}
    return params | buffers


def _mesh_sizes(model: ParallelModel) -> dict[str, int]:
    return {name: getattr(model.parallel_config, name) for name in MESH_SIZES}


def _rng_prefix(model: ParallelModel) -> str:
    return "rng." + "-".join(f"{dim}{model._mesh.rank(dim)}" for dim in ("pp", "dp", "tp")) + "."


def _lasting(origin: str | None) -> str | None:
    return str(Path(origin).resolve()) if origin is not None and Path(origin).is_dir() else origin


# How it gets to the disk


def _write(directory: Path, snapshot: _Snapshot, group: dist.ProcessGroup | None = None) -> None:
    aside = directory.with_name(directory.name + UNFINISHED)
    on_first_rank(lambda: _make_empty(aside), group)
    write_pieces(aside, snapshot.pieces, group)
    on_first_rank(lambda: _complete(aside, directory, snapshot.files), group)


def _make_empty(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _complete(aside: Path, directory: Path, files: dict[str, str]) -> None:
    for name in sorted(files, key=lambda name: name == MANIFEST):
        with (aside / name).open("w", encoding="utf-8") as file:
            file.write(files[name])
            file.flush()
            os.fsync(file.fileno())
    _flush_list(aside)
    if directory.exists():
        replaced = directory.with_name(f"{directory.name}.replaced{UNFINISHED}")
        os.replace(directory, replaced)
        os.replace(aside, directory)
        shutil.rmtree(replaced)
    else:
        os.replace(aside, directory)
    _flush_list(directory.parent)


def _flush_list(directory: Path) -> None:
    """Make sure a directory's list of files is on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# How it is loaded


def _check(directory: Path, manifest: dict[str, Any], model: ParallelModel, named: NamedOptimizer) -> None:
    """Refuse what does not fit; each rank sees only its own stage's part of the optimizer, and all must agree."""
    own = _difference(manifest, model) or named.difference(manifest["groups"])
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    first = next((problem for problem in found if problem), None)
    if first is not None:
        raise ValueError(f"{directory} is a checkpoint of another model or optimizer; {first}")


def _difference(manifest: dict[str, Any], model: ParallelModel) -> str | None:
    there = {name: tuple(shape) for name, shape in manifest["parameters"].items()}
    here = model._full.shapes
    wrong = [f"{n} {there[n]} there, {here[n]} here" for n in there.keys() & here.keys() if there[n] != here[n]]
    problems = {
        "parameters it lacks": here.keys() - there.keys(),
        "buffers it lacks": model._full.buffers.keys() - manifest.get("buffers", {}).keys(),
        "parameters the model lacks": there.keys() - here.keys(),
        "other shapes": wrong,
    }
    found = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    dtype = model.parallel_config.param_dtype
    if manifest["dtype"] != dtype:
        found.append(f"parameters stored in {manifest['dtype']} there, {dtype} here")
    return "; ".join(found) or None


def _empty_rng_state(stored: dict[str, tuple[torch.Size, torch.dtype]], model: ParallelModel) -> dict[str, Tensor]:
    prefix = _rng_prefix(model)
    mine = {name.removeprefix(prefix): entry for name, entry in stored.items() if name.startswith(prefix)}
    return {kind: torch.empty(shape, dtype=dtype) for kind, (shape, dtype) in mine.items()}


def _tokenizer_source(origin: str | None) -> str | None:
    try:
        return None if origin is None else str(resolve_directory(origin))
    except ValueError as error:
        log.warning("no tokenizer is written: %s", error)
        return None
