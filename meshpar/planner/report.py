"""A forecast and a ranking as text, as pictures, and as a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..recipe import Recipe, parse_recipe
from .forecast import MeshForecast, room
from .memory import MemoryOfRank
from .pictures import MemoryRow, Picture, write_html
from .placement import ADVICE, launch_lines
from .plots import write_png
from .search import Ranking
from .simulate import Timeline
from .timing import FLOP_CONVENTION

_GIB = 1 << 30
_COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "loss", "transient")
_PICTURES = {".html": write_html, ".png": write_png}


def as_text(found: MeshForecast, *recipe: str) -> str:
    """A forecast for people; ``recipe``: what the job will be started from, and any `key=value` laid over it."""
    parts = [_head(found), _memory(found), _communication(found), _time(found)]
    parts += [f"Warning: {span}." for span in found.spans]
    parts += [launch_lines(found.config, found.per_node, *recipe).rstrip()]
    parts += [ADVICE.rstrip()] if found.config.world_size > found.per_node else []
    return "\n\n".join(parts)


def ranking_as_text(ranking: Ranking) -> str:
    """The ranking as a table, and what became of the other settings."""
    titles = ("pp", "dp_replicate", "dp_shard", "tp", "schedule", "stages", "checkpoint", "rows", "microbatches")
    rows: list[tuple[str, ...]] = [("", *titles, "memory", "step", "MFU", "bubble")]
    for i, one in enumerate(ranking.best, 1):
        c, piped = one.config, one.config.pp > 1
        settings = (c.pp, c.dp_replicate, c.dp_shard, c.tp, c.schedule if piped else "-", c.virtual_stages)
        more = (c.activation_checkpoint, one.batch.rows, one.batch.count)
        costs = (_gib(one.heaviest.total), _seconds(one.time.step_seconds), f"{one.time.mfu:.1%}")
        rows.append((str(i), *map(str, settings), *map(str, more), *costs, f"{one.time.bubble:.1%}"))
    pruned = [(f"{count:,}", why) for why, count in ranking.pruned.items()]
    about = f"{ranking.considered:,} settings; of these {len(ranking.best)} are shown, and not shown are:"
    return f"{_table(rows)}\n\n{about}\n{_table(pruned)}"


def written(recipe: Recipe, found: MeshForecast) -> Recipe:
    """The recipe with the mesh and the microbatches of a forecast."""
    raw, c = recipe.model_dump(mode="json", by_alias=True), found.config
    names = ("pp", "dp_replicate", "dp_shard", "tp", "schedule", "virtual_stages", "activation_checkpoint")
    raw["parallel"] |= {name: getattr(c, name) for name in names}
    raw["parallel"]["microbatches"] = c.microbatches if c.microbatches != found.batch.count else None
    raw["parallel"]["stage_layers"] = list(c.stage_layers) if c.stage_layers else None
    raw["batch"]["micro_size"] = found.batch.rows
    return parse_recipe(raw)


def changes(before: Recipe, after: Recipe) -> list[str]:
    """What to lay over a recipe to have another one; a size that is whatever is left stays so."""
    old, new = _flat(before), _flat(after)
    found = {key: value for key, value in new.items() if value != old[key] and old[key] != -1}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in found.items()]


def _flat(recipe: Recipe) -> dict[str, Any]:
    raw = recipe.model_dump(mode="json", by_alias=True)
    sections = {name: keys if isinstance(keys, dict) else {"": keys} for name, keys in raw.items()}
    return {f"{name}.{key}".rstrip("."): value for name, keys in sections.items() for key, value in keys.items()}


def check_picture(path: Path) -> None:
    """Refuse a name whose ending is no picture's, and a PNG where there is nothing to draw it with."""
    if path.suffix not in _PICTURES:
        raise ConfigError(f"plot={str(path)!r} must end in {' or '.join(_PICTURES)}.")
    if path.suffix == ".png" and find_spec("matplotlib") is None:
        raise ConfigError(f'plot={str(path)!r} needs matplotlib: pip install "meshpar[plot]".')


def draw(path: Path, found: MeshForecast, measured: Timeline | None = None) -> None:
    """Draw the forecast, beside a ``measured`` step where there is one."""
    first: dict[int, MemoryOfRank] = {}
    for rank in found.ranks:
        if rank.pp not in first or rank.total > first[rank.pp].total:
            first[rank.pp] = rank
    rows = [
        MemoryRow(f"pp={pp} dp={rank.dp}", {name: getattr(rank, name) for name in _COMPONENTS})
        for pp, rank in first.items()
    ]
    title = f"{mesh_name(found)} on {found.config.world_size} x {found.device.name}"
    picture = Picture(title, found.config, found.per_node, found.time.timeline, measured, rows, found.device.memory)
    _PICTURES[path.suffix](path, picture)


def mesh_name(found: MeshForecast) -> str:
    """ "pp=2 x dp_shard=4 x tp=8": what is more than 1."""
    c = found.config
    sizes = {"pp": c.pp, "dp_replicate": c.dp_replicate, "dp_shard": c.dp_shard, "tp": c.tp}
    return " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one process"


def _head(found: MeshForecast) -> str:
    c, batch = found.config, found.batch
    rows = c.dp * batch.count * batch.rows
    lines = [
        f"{found.parameters / 1e9:,.3f}B parameters on {c.world_size:,} x {found.device.name}: {mesh_name(found)}",
        f"a step: {rows:,} rows of {batch.seq_len:,} tokens; {batch.count} microbatches of {batch.rows} a rank; "
        f"checkpointing {c.activation_checkpoint}",
    ]
    return "\n".join(lines + ([f"schedule {c.schedule}, {c.virtual_stages} stages a rank"] if c.pp > 1 else []))


def _memory(found: MeshForecast) -> str:
    top, spare = found.heaviest, room(found.device) - found.heaviest.total
    rows = [(name, _gib(getattr(top, name))) for name in _COMPONENTS]
    rows += [("total", _gib(top.total)), ("usable", _gib(room(found.device)))]
    verdict = f"It fits, with {_gib(spare)} to spare." if spare >= 0 else f"It does NOT fit: {_gib(-spare)} too much."
    ranks = found.ranks
    lightest = min(rank.total for rank in ranks)
    return (
        f"Memory of the heaviest rank (pp={top.pp}, dp={top.dp}, tp={top.tp}; at its {top.moment}); the lightest has "
        f"{_gib(lightest)}\n{_table(rows)}\n{verdict}"
    )


def _communication(found: MeshForecast) -> str:
    rows = [(t.kind, t.dim, _bytes(t.bytes)) for t in found.communication]
    title = f"Sent by a rank a step (pp={found.sender}, which sends most)"
    return f"{title}\n{_table(rows)}" if rows else "Nothing is sent."


def _time(found: MeshForecast) -> str:
    t = found.time
    rows = [
        ("step", _seconds(t.step_seconds), ", ".join(f"{name} {_seconds(s)}" for name, s in t.parts.items())),
        ("bubble", f"{t.bubble:.1%}", "idle time of the pipeline, of the time that its ranks compute"),
        ("tokens/s", f"{t.tokens_per_second:,.0f}", f"{t.tokens_per_second / found.config.world_size:,.0f} a device"),
        ("MFU", f"{t.mfu:.1%}", f"of {found.device.peak[found.config.compute_dtype] / 1e12:,.4g} TFLOP/s a device"),
    ]
    return f"Time (device numbers: {found.device.source})\n{_table(rows)}\nMFU counts {FLOP_CONVENTION}."


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns side by side; those of numbers to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [all(cell[:1].isdigit() for cell in column[1:] or column) for column in columns]
    lines = (
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numbers, strict=True)) for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"


def _bytes(size: float) -> str:
    power = min(int(math.log(size, 1000)), 4) if size >= 1 else 0
    return f"{size / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
