"""The checkpoints of a run: where it resumes, how they are named, which are kept."""

from __future__ import annotations

import logging
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .. import checkpoint
from ..checkpoint import MANIFEST, STEP_DIRECTORY, UNFINISHED
from ..config import ConfigError
from ..mesh import on_first_rank
from ..model import ParallelModel
from ..recipe import Recipe

log = logging.getLogger("meshpar")

SUPERSEDED = ".superseded"


class Checkpoints:
    """``output_dir/checkpoints/step-N``, the newest ``keep`` of them. Every method is collective."""

    def __init__(self, recipe: Recipe) -> None:
        self.directory = Path(recipe.output_dir) / "checkpoints"
        self._keep, self._resume = recipe.checkpoint.keep, recipe.checkpoint.resume
        self._start: Path | None = None  # where this run resumed
        self._saved = False  # whether it has saved since
        timeout = timedelta(seconds=recipe.distributed.timeout_seconds)
        self._background = checkpoint.BackgroundSaver(timeout) if recipe.checkpoint.async_ else None

    def resume(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load the checkpoint to continue from; what it was saved with, or None where the run starts anew.

        Checkpoints of later steps are set aside: they belong to a run that this one does not continue.
        """
        self._start = source = on_first_rank(self._find)
        extra = checkpoint.load(source, model, optimizer) if source is not None else None
        step = 0 if extra is None else extra["step"]
        on_first_rank(lambda: self._set_aside_after(step))
        if source is not None:
            log.info("resumed from %s", source)
        return extra

    def roll_back(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any] | None:
        """Load the newest checkpoint of this run; what it was saved with, or None where there is none yet."""
        self.wait()
        source = on_first_rank(lambda: checkpoint.latest(self.directory)) if self._saved else self._start
        extra = checkpoint.load(source, model, optimizer) if source is not None else None
        if source is not None:
            log.warning("went back to %s", source)
        return extra

    def save(self, model: ParallelModel, optimizer: Optimizer, extra: dict[str, Any]) -> None:
        """Save after step ``extra["step"]``, in the background where the recipe has it so."""
        directory = self.directory / f"step-{extra['step']}"
        self._saved = True
        if self._background is not None:
            self.wait()
            self._background.save(directory, model, optimizer, extra)
        else:
            checkpoint.save(directory, model, optimizer, extra)
            self._prune()

    def wait(self) -> None:
        """Return when every checkpoint is on the disk; raises what a background write raised."""
        if self._background is not None:
            self._background.wait()
            self._prune()

    def _find(self) -> Path | None:
        if self._resume == "never":
            return None
        if self._resume == "auto":
            return checkpoint.latest(self.directory)
        try:
            checkpoint.read_manifest(Path(self._resume))
        except ValueError as problem:
            raise ConfigError(f"checkpoint.resume={self._resume} cannot be used: {problem}.") from None
        return Path(self._resume)

    def _set_aside_after(self, step: int) -> None:
        for path in self._complete():
            if _step(path) > step:
                aside = path.with_name(path.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(path, aside)
                log.warning("%s is ahead of the step this run starts from; moved to %s", path, aside)

    def _prune(self) -> None:
        on_first_rank(self._remove_old)

    def _remove_old(self) -> None:
        """Remove all but the newest ``keep``, and what unfinished saves and removals left."""
        kept = self._complete()[-self._keep :]
        oldest = _step(kept[0]) if kept else 0
        for path in self.directory.glob("step-*"):
            old = STEP_DIRECTORY.fullmatch(path.name) and _step(path) < oldest
            if old or path.name.endswith(UNFINISHED):
                # Without its manifest it is no checkpoint: a removal that is interrupted leaves none that looks whole.
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)

    def _complete(self) -> list[Path]:
        steps = [path for path in self.directory.glob("step-*") if STEP_DIRECTORY.fullmatch(path.name)]
        return sorted((path for path in steps if (path / MANIFEST).is_file()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
