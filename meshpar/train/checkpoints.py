"""The checkpoints of a run: where it resumes, how they are named, which are kept."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from .. import checkpoint
from ..checkpoint import STEP_DIRECTORY
from ..checkpoint_files import (
    MANIFEST,
    REPLACED,
    UNFINISHED,
    CheckpointError,
    finish_replacing,
    read_manifest,
    remove,
)
from ..config import ConfigError
from ..failure import AllRanksFailed
from ..mesh import on_first_rank
from ..model import ParallelModel
from ..recipe import Recipe

log = logging.getLogger("meshpar")

SUPERSEDED = ".superseded"


class SaveFailed(AllRanksFailed, OSError):
    """A checkpoint could not be written; every rank raises it with the same message."""


class Checkpoints:
    """``output_dir/checkpoints/step-N``, the newest ``keep`` of them. Every method is collective.

    A save that fails leaves the older ones whole. Training then stops or goes on, as the recipe has it; the failure of
    the run's last save is kept for `finish`, so that what else the run leaves can be written before.

    ``started_at``: the step at which this run began, where torchrun has restarted it since.
    """

    def __init__(self, recipe: Recipe, started_at: int | None = None) -> None:
        self._started_at = started_at
        self.directory = Path(recipe.output_dir) / "checkpoints"
        self._keep, self._resume = recipe.checkpoint.keep, recipe.checkpoint.resume
        self._goes_on = recipe.checkpoint.on_error == "continue"
        timeout = timedelta(seconds=recipe.distributed.timeout_seconds)
        self._background = checkpoint.BackgroundSaver(timeout) if recipe.checkpoint.async_ else None
        self._source: Path | None = None  # of the state that this run began with
        self._begun_at = 0
        self._step, self._is_last = 0, False  # of the last save
        self._failure: str | None = None  # of the last save

    def resume(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load the checkpoint to continue from; what it was saved with, or None where the run starts anew.

        Checkpoints of later steps are set aside: they belong to a run that this one does not continue.
        """
        on_first_rank(self._finish_replacing)
        extra = self._load(model, optimizer)
        self._begun_at = 0 if extra is None else extra["step"]
        on_first_rank(lambda: self._set_aside_after(self._begun_at))
        on_first_rank(self._remove_unfinished)
        return extra

    def roll_back(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load the newest whole checkpoint of this run, or what it resumed from; None where there is neither."""
        self.wait()
        extra = self._newest_whole(model, optimizer, self._begun_at)
        if extra is None and self._source is not None:
            extra = self._resumed(self._source, model, optimizer)
        if extra is not None:
            step = extra["step"]
            on_first_rank(lambda: self._set_aside_after(step))  # damaged ones
        return extra

    def save(self, model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any], is_last: bool) -> None:
        """Save after step ``extra["step"]``, ``is_last`` of this run, in the background where the recipe has it so.

        Raises SaveFailed on every rank where it fails and the recipe has training stop.
        """
        self.wait()
        self._step, self._is_last = extra["step"], is_last
        directory = self.directory / f"step-{self._step}"
        if self._background is not None:
            background = self._background
            self._complete_save(lambda: background.save(directory, model, optimizer, extra, self._remove_old))
        else:
            self._complete_save(lambda: self._save_now(directory, model, optimizer, extra))

    def poll(self) -> None:
        """See to a background write that has ended; one number is summed over the ranks while there is one."""
        if self._background is not None and self._background.is_writing() and self._background.has_ended():
            self.wait()

    def wait(self) -> None:
        """Return when the write in progress has ended; raises as `save`."""
        if self._background is not None and self._background.is_writing():
            self._complete_save(self._background.wait)

    def finish(self) -> None:
        """Raises SaveFailed on every rank when the last save failed."""
        self.wait()
        if self._failure is not None:
            raise SaveFailed(self._failure)

    def _complete_save(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._report(error)
        else:
            self._failure = None

    def _save_now(self, directory: Path, model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any]) -> None:
        checkpoint.save(directory, model, optimizer, extra)
        if dist.get_rank() == 0:
            self._remove_old()

    def _report(self, error: OSError) -> None:
        newest = on_first_rank(self._newest)
        kept = f"the newest whole checkpoint is {newest}" if newest else "there is no whole checkpoint"
        then = "it was the last" if self._is_last else "training goes on" if self._goes_on else "training stops"
        self._failure = f"step {self._step} could not be saved; {then}; {kept}; the cause is {_in_words(error)}"
        if not self._is_last and not self._goes_on:
            raise SaveFailed(self._failure) from error
        log.warning("%s", self._failure)

    def _load(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any] | None:
        if self._started_at is not None:  # this run's own, whatever the recipe says of earlier ones
            extra = self._newest_whole(model, optimizer, self._started_at)
            if extra is not None:
                return extra
        if self._resume == "auto":
            return self._newest_whole(model, optimizer)
        if self._resume == "never":
            return None
        try:
            return self._resumed(Path(self._resume), model, optimizer)
        except CheckpointError as problem:
            raise ConfigError(f"checkpoint.resume={self._resume} cannot be used: {problem}.") from None

    def _newest_whole(self, model: ParallelModel, optimizer: Optimizer, after: int = -1) -> dict[str, Any] | None:
        """Load the newest whole checkpoint of a step after ``after``, if there is one."""
        found = (path for path in checkpoint.newest_first(self.directory) if _step(path) > after)
        while (source := on_first_rank(lambda: next(found, None))) is not None:
            try:
                return self._resumed(source, model, optimizer)
            except CheckpointError as problem:
                log.warning("%s; skipped", problem)
        return None

    def _resumed(self, source: Path, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
        extra = checkpoint.load(source, model, optimizer)
        self._source = source
        log.info("resumed from %s", source)
        return extra

    def _set_aside_after(self, step: int) -> None:
        for path in self._complete():
            if _step(path) > step:
                aside = path.with_name(path.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
                log.warning("%s is ahead of the step this run starts from; moved to %s", path, aside)

    def _remove_old(self) -> None:
        """Remove all but the newest ``keep``, and what unfinished saves and removals left; not what is being read."""
        try:
            kept = [path for path in self._complete() if _step(path) <= self._step][-self._keep :]
            oldest = _step(kept[0]) if kept else 0
            for path in self.directory.glob("step-*"):
                if STEP_DIRECTORY.fullmatch(path.name) and _step(path) < oldest:
                    _try_to_remove(path)
            self._remove_unfinished()
        except OSError as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def _finish_replacing(self) -> None:
        for path in self.directory.glob(f"step-*{REPLACED}"):
            finish_replacing(path.with_name(path.name.removesuffix(REPLACED)))

    def _remove_unfinished(self) -> None:
        for path in self.directory.glob(f"step-*{UNFINISHED}"):
            _try_to_remove(path)

    def _newest(self) -> Path | None:
        for path in reversed(self._complete()):
            with suppress(CheckpointError):
                read_manifest(path)
                return path
        return None

    def _complete(self) -> list[Path]:
        steps = [path for path in self.directory.glob("step-*") if STEP_DIRECTORY.fullmatch(path.name)]
        return sorted((path for path in steps if (path / MANIFEST).is_file()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _try_to_remove(path: Path) -> None:
    try:
        remove(path)
    except BlockingIOError:
        log.info("%s is kept while it is read", path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def _in_words(error: OSError) -> str:
    return str(error) if type(error) is OSError else f"{type(error).__name__}: {error}"
