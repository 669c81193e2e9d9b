"""Experiment trackers by name, through `accelerate.tracking`: tensorboard, wandb, mlflow and the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from ..config import ConfigError

OWN = "jsonl"  # metrics.jsonl, which is always written


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError when the package of a tracker is not installed."""
    missing = [name for name in names if name != OWN and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"log.trackers={list(names)} needs {' and '.join(missing)}, which is not installed; "
            f"run `pip install {' '.join(missing).replace('_', '-')}` or take the name out."
        )


def start_trackers(names: Sequence[str], output_dir: Path, settings: Mapping[str, Any]) -> list[GeneralTracker]:
    """Started trackers, one a name; call it on one rank. ``settings`` (nested) are logged as hyperparameters.

    The run is named after ``output_dir``; what a tracker keeps on disk goes to ``output_dir/trackers``.
    """
    PartialState()  # the trackers' own logging asks for it
    trackers = []
    for name in (n for n in names if n != OWN):
        kind = LOGGER_TYPE_TO_CLASS[name]
        place = (str(output_dir / "trackers"),) if kind.requires_logging_directory else ()
        tracker = kind(output_dir.name, *place)
        tracker.start()
        tracker.store_init_configuration(flat(settings))
        trackers.append(tracker)
    return trackers


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """{"optim": {"lr": 1e-5}} as {"optim.lr": 1e-5}; lists as text, what is None left out."""
    values: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        elif value is not None:
            values[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return values
