"""Training state on disk: saved on one mesh, loaded on any.

A checkpoint is a directory. `torch.distributed.checkpoint` (DCP) holds the parameters, the optimizer's state by
parameter name and every rank's random number generators; `config.json` the model's config; `meshpar.json`, the
manifest, the rest. `checkpoint_files` makes it appear complete or not at all, and finds damage.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import GenerationConfig

from .checkpoint_files import (
    UNFINISHED,
    CheckpointError,
    check_contents,
    finish_replacing,
    make_empty,
    publish,
    read_manifest,
    reading,
)
from .config import MESH_SIZES
from .load import skeleton_from_config
from .mesh import DEFAULT_TIMEOUT, default_device, on_every_rank, on_first_rank
from .model import ParallelModel
from .optimizer_state import NamedOptimizer
from .pieces import Piece, StoredTensors, parameter_piece, read_pieces, whole_piece, write_pieces
from .pretrained import read_config
from .rng import rng_state, seed_rank, set_rng_state
from .weights_convert import original_layout, pin_layout
from .weights_files import listed, resolve_directory
from .weights_out import write_pretrained

log = logging.getLogger("meshpar")

STEP_DIRECTORY = re.compile(r"step-(\d+)")


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

    Raises, before anything is changed and on every rank, CheckpointError for a directory that is incomplete or whose
    files are not as they were written, and ValueError for the state of another model.
    """
    directory = Path(directory)
    with reading(directory):
        manifest, named, stored = on_every_rank(lambda: _checked(directory, model, optimizer))
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
    """The complete ``step-N`` directory with the highest N, or None; what it skips is logged as a warning.

    Complete: its manifest is whole, and its files have their sizes. `load` reads them and finds what else is wrong.
    """
    return next(newest_first(checkpoints_dir), None)


def newest_first(checkpoints_dir: str | Path) -> Iterator[Path]:
    """The complete ``step-N`` directories from the highest N down, as `latest` finds them."""
    found = [(int(m[1]), p) for p in Path(checkpoints_dir).glob("step-*") if (m := STEP_DIRECTORY.match(p.name))]
    for _, path in sorted(found, reverse=True):
        if path.name.endswith(UNFINISHED):
            log.warning("%s is a save that did not finish; skipped", path)
        elif STEP_DIRECTORY.fullmatch(path.name):
            try:
                read_manifest(path)
            except CheckpointError as problem:
                log.warning("%s; skipped", problem)
            else:
                yield path


def export(
    checkpoint_dir: str | Path,
    out_dir: str | Path,
    max_shard_size: int | str = "500MB",
    trust_remote_code: bool = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face directory; one process, no process group, one tensor at a time.

    It holds one file of ``max_shard_size`` and two tensors at most. ``trust_remote_code``: run the Python code that
    came with the model, of which the checkpoint has a copy, and with its tokenizer, where that is read from.

    Raises, before anything is written, CheckpointError for a directory that is incomplete or damaged, and ConfigError
    for a model whose code would have to run and is not trusted.
    """
    checkpoint_dir = Path(checkpoint_dir)
    with reading(checkpoint_dir):
        manifest = read_manifest(checkpoint_dir)
        check_contents(checkpoint_dir, manifest["files"])
        _export(checkpoint_dir, manifest, Path(out_dir), max_shard_size, trust_remote_code)


def _export(
    checkpoint_dir: Path, manifest: dict[str, Any], out_dir: Path, max_shard_size: int | str, trusted: bool
) -> None:
    stored, dtype = StoredTensors(checkpoint_dir), getattr(torch, manifest["dtype"])
    entries = [(name, shape, dtype) for name, shape in manifest["parameters"].items()]
    entries += [(name, shape, getattr(torch, kind)) for name, (shape, kind) in manifest.get("buffers", {}).items()]
    config = read_config(checkpoint_dir, trusted)
    skeleton = skeleton_from_config(config, trusted)
    pin_layout(skeleton)
    has_generation = (checkpoint_dir / "generation_config.json").is_file()
    write_pretrained(
        out_dir,
        *original_layout(skeleton, entries, ((name, stored.read(f"param.{name}")) for name, *_ in entries)),
        config=config,
        generation_config=GenerationConfig.from_pretrained(checkpoint_dir) if has_generation else None,
        tokenizer_source=_tokenizer_source(manifest["origin"]),
        max_shard_size=max_shard_size,
        trust_remote_code=trusted,
        with_code_of=(config, skeleton),
    )


class BackgroundSaver:
    """Saves that are written while training goes on, from a copy in host memory, one at a time. Collective, as `save`.

    The copy's memory, as large as what the rank holds of the state, is kept for the next save: memory that is new to
    the process costs more time than the copy. ``timeout`` bounds the wait for a peer while writing.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        # Its collectives run beside training's, so they need a group of their own.
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint", _use_device, (default_device(),))
        self._writing: Future[None] | None = None
        self._memory: dict[str, Piece] = {}

    def save(
        self,
        directory: str | Path,
        model: ParallelModel,
        optimizer: Optimizer,
        extra: dict[str, Any],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """As `save`, but returns when the copy is made; what the write raises comes from the next `save` or `wait`.

        ``then``: what rank 0 does in the background as well, once the checkpoint is complete.
        """
        self.wait()
        snapshot = _snapshot(model, optimizer, extra, self._stage)
        self._writing = self._thread.submit(_write, Path(directory), snapshot, self._group, then)

    def wait(self) -> None:
        """Return when the write in progress is on the disk; raises what it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def is_writing(self) -> bool:
        """Whether a save is not yet waited for."""
        return self._writing is not None

    def has_ended(self) -> bool:
        """Whether the write in progress has ended on every rank, so that `wait` does not wait."""
        ended = torch.tensor(self._writing is None or self._writing.done(), dtype=torch.int32)
        dist.all_reduce(ended, dist.ReduceOp.MIN)
        return bool(ended)

    def _stage(self, pieces: dict[str, Piece]) -> dict[str, Piece]:
        self._memory = {name: piece.staged(self._memory.get(name)) for name, piece in pieces.items()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._memory


def _use_device(device: torch.device) -> None:
    """A new thread's CUDA device is the first one, where DCP would make every rank a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


# What is saved


@dataclass(frozen=True)
class _Snapshot:
    pieces: dict[str, Piece]
    manifest: dict[str, Any]
    texts: dict[str, str]


def _snapshot(
    model: ParallelModel,
    optimizer: Optimizer,
    extra: dict[str, Any],
    stage: Callable[[dict[str, Piece]], dict[str, Piece]] = dict,
) -> _Snapshot:
    def own() -> tuple[NamedOptimizer, _Snapshot]:
        named = _named(optimizer, model)
        rng = {_rng_prefix(model) + kind: whole_piece(t) for kind, t in rng_state(model._mesh.device).items()}
        pieces = stage(_model_pieces(model) | named.pieces(optimizer.state) | rng)
        return named, _Snapshot(pieces, _manifest(model, extra), _configs(model))

    named, snapshot = on_every_rank(own)
    snapshot.manifest["groups"] = named.groups()
    return snapshot


def _manifest(model: ParallelModel, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "mesh": _mesh_sizes(model),
        "dtype": model.parallel_config.param_dtype,
        "parameters": model._full.shapes,
        "buffers": {n: (s, str(d).removeprefix("torch.")) for n, (s, d) in model._full.buffers.items()},
        "origin": _lasting(model._origin),
        "extra": json.loads(json.dumps(extra)),
    }


def _configs(model: ParallelModel) -> dict[str, str]:
    texts = {**model._own_code, "config.json": model.config.to_json_string(use_diff=True)}
    generation_config = getattr(model._runner.model, "generation_config", None)
    if generation_config is not None:
        texts["generation_config.json"] = generation_config.to_json_string(keys_to_pop=["compile_config"])
    return texts


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


def _write(
    directory: Path,
    snapshot: _Snapshot,
    group: dist.ProcessGroup | None = None,
    then: Callable[[], None] = lambda: None,
) -> None:
    aside = directory.with_name(directory.name + UNFINISHED)
    try:
        on_first_rank(lambda: _prepare(directory, aside), group)
        files = write_pieces(aside, snapshot.pieces, group)
        on_first_rank(lambda: publish(aside, directory, snapshot.manifest, snapshot.texts, files), group)
    except OSError:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)  # it may be what fills the disk
        raise
    if dist.get_rank() == 0:
        then()


def _prepare(directory: Path, aside: Path) -> None:
    finish_replacing(directory)
    make_empty(aside)


# How it is loaded


Entries = dict[str, tuple[torch.Size, torch.dtype]]


def _checked(
    directory: Path, model: ParallelModel, optimizer: Optimizer
) -> tuple[dict[str, Any], NamedOptimizer, Entries]:
    """The manifest, the optimizer by name and what is stored; refuses what is damaged or does not fit.

    Each rank reads its part of the files, and sees only its own stage's part of the optimizer.
    """
    manifest, named = read_manifest(directory), _named(optimizer, model)
    problem = _difference(manifest, model) or named.difference(manifest["groups"])
    if problem is not None:
        raise ValueError(f"{directory} is a checkpoint of another model or optimizer; {problem}")
    check_contents(directory, manifest["files"], dist.get_rank(), dist.get_world_size())
    return manifest, named, StoredTensors(directory).entries()


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


def _empty_rng_state(stored: Entries, model: ParallelModel) -> dict[str, Tensor]:
    prefix = _rng_prefix(model)
    mine = {name.removeprefix(prefix): entry for name, entry in stored.items() if name.startswith(prefix)}
    return {kind: torch.empty(shape, dtype=dtype) for kind, (shape, dtype) in mine.items()}


def _tokenizer_source(origin: str | None) -> str | None:
    try:
        return None if origin is None else str(resolve_directory(origin))
    except ValueError as error:
        log.warning("no tokenizer is written: %s", error)
        return None
