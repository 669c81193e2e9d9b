"""A plan as one HTML file that needs nothing else: the pipeline's timeline, memory by rank, the mesh over nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..config import ParallelConfig
from .placement import coordinates, groups
from .simulate import Action, Kind, Timeline

KINDS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
}
_HUES: dict[Kind, float] = {"F": 0.58, "B": 0.36, "I": 0.47, "W": 0.11}
COMPONENTS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
NODES_SHOWN = 32
_GIB = 1 << 30
_WIDTH, _ROW, _LABEL, _BELOW = 1200, 26, 90, 24  # pixels; of the names at the left, and of the axis


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of each component on one rank, or on several that are alike."""

    rank: str
    components: Mapping[str, int]


@dataclass(frozen=True)
class Picture:
    """What there is to draw. ``capacity``: bytes a device has.

    ``forecast`` and ``measured`` are of one pipeline, a rank of each pp rank (`first_pipeline`).
    """

    title: str
    config: ParallelConfig
    per_node: int
    forecast: Timeline | None = None
    measured: Timeline | None = None
    memory: Sequence[MemoryRow] = ()
    capacity: int | None = None

    def timelines(self) -> list[tuple[str, Timeline]]:
        """The timelines that there are, with their captions."""
        both = (("Forecast", self.forecast), ("Measured", self.measured))
        return [(f"{name}: {t.makespan:.4g} s, bubble {t.bubble:.1%}", t) for name, t in both if t is not None]

    def seconds(self) -> float:
        """What the time axis spans, for all timelines alike."""
        return max((timeline.makespan for _, timeline in self.timelines()), default=0.0)


def first_pipeline(every: Timeline, config: ParallelConfig) -> Timeline:
    """Of a trace of all ranks, those that one microbatch goes through: the first of dp and tp."""
    return Timeline([every.ranks[rank] for rank in groups(config, "pp")[0]])


def write_html(path: Path, picture: Picture) -> None:
    """Write the page."""
    parts = [_timeline(caption, timeline, picture) for caption, timeline in picture.timelines()]
    parts += [_memory(picture)] if picture.memory else []
    parts += [_mesh(picture)]
    title = escape(picture.title)
    style = (
        "body{font:14px system-ui,sans-serif;margin:24px;color:#222;background:#fff}"
        "svg{display:block;overflow:visible}text{font:11px system-ui,sans-serif;fill:#222}"
        ".in{fill:#fff;text-anchor:middle;pointer-events:none}.r{text-anchor:end}h2{font-size:16px;margin:28px 0 8px}"
        ".k{display:inline-block;width:12px;height:12px;margin:0 4px 0 14px;vertical-align:-1px}"
    )
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>'
    body = f"<body><h1>{title}</h1>\n" + "\n".join(parts) + "\n</body>"
    path.write_text(f'<!DOCTYPE html>\n<html lang="en">{head}\n{body}</html>\n', encoding="utf-8")


def colour(action: Action, pp: int) -> str:
    """By kind, and darker for each further stage of a rank."""
    red, green, blue = hls_to_rgb(_HUES[action.kind], max(0.25, 0.52 - 0.09 * (action.stage // pp)), 0.5)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def stage_colour(pp_rank: int, pp: int) -> str:
    """Of a pipeline rank's devices."""
    red, green, blue = hls_to_rgb(pp_rank / max(pp, 1), 0.8, 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def components(rows: Sequence[MemoryRow]) -> list[str]:
    """Names of all components, as they come."""
    return list(dict.fromkeys(name for row in rows for name in row.components))


def _timeline(caption: str, timeline: Timeline, picture: Picture) -> str:
    scale = (_WIDTH - _LABEL) / picture.seconds()
    pp, height = len(timeline.ranks), _ROW * len(timeline.ranks)
    drawn = []
    for rank, spans in enumerate(timeline.ranks):
        y = rank * _ROW
        drawn.append(f'<text class="r" x="{_LABEL - 8}" y="{y + 17}">pp rank {rank}</text>')
        for action, start, finish in spans:
            x, width = _LABEL + start * scale, (finish - start) * scale
            what = f"{KINDS[action.kind]}, stage {action.stage}, microbatch {action.microbatch}"
            about = f"{what}: {start:.4g} to {finish:.4g} s"
            drawn.append(
                f'<rect class="span" x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}" '
                f'fill="{colour(action, pp)}" stroke="#fff" stroke-width=".5"><title>{about}</title></rect>'
            )
            if width > 7 * len(str(action.microbatch)):
                drawn.append(f'<text class="in" x="{x + width / 2:.2f}" y="{y + 17}">{action.microbatch}</text>')
    ticks = [
        f'<text x="{_LABEL + part * (_WIDTH - _LABEL):.0f}" y="{height + 16}">{part * picture.seconds():.3g} s</text>'
        for part in (0, 0.25, 0.5, 0.75, 1)
    ]
    used = {span.action.kind for spans in timeline.ranks for span in spans}
    key = _key((name, colour(Action(kind, 0, 0), pp)) for kind, name in KINDS.items() if kind in used)
    note = "Numbers are microbatches; a rank's later stages are darker."
    return f"<h2>{escape(caption)}</h2><p>{key} {note}</p>" + _svg(height + _BELOW, [*drawn, *ticks])


def _memory(picture: Picture) -> str:
    names = components(picture.memory)
    totals = [sum(row.components.values()) for row in picture.memory]
    scale = (_WIDTH - _LABEL - 120) / max(*totals, picture.capacity or 0, 1)
    drawn = []
    for i, (row, total) in enumerate(zip(picture.memory, totals, strict=True)):
        x, y = float(_LABEL), i * _ROW
        drawn.append(f'<text class="r" x="{_LABEL - 8}" y="{y + 17}">{escape(row.rank)}</text>')
        for name, size in row.components.items():
            about = f"{name}: {size / _GIB:.2f} GiB"
            fill = COMPONENTS[names.index(name) % len(COMPONENTS)]
            drawn.append(
                f'<rect class="memory" x="{x:.2f}" y="{y + 3}" width="{size * scale:.2f}" height="{_ROW - 6}" '
                f'fill="{fill}"><title>{escape(about)}</title></rect>'
            )
            x += size * scale
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 17}">{total / _GIB:.2f} GiB</text>')
    height = _ROW * len(picture.memory)
    if picture.capacity:
        x = _LABEL + picture.capacity * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="#c00" stroke-dasharray="4 3"/>')
        drawn.append(f'<text x="{x:.1f}" y="{height + 14}">device: {picture.capacity / _GIB:.1f} GiB</text>')
    key = _key((name, COMPONENTS[i % len(COMPONENTS)]) for i, name in enumerate(names))
    return f"<h2>Memory of each rank</h2><p>{key}</p>" + _svg(height + _BELOW, drawn)


def _mesh(picture: Picture) -> str:
    """A box a node; ranks of one pipeline rank have one colour."""
    config, per_node = picture.config, picture.per_node
    nodes = -(-config.world_size // per_node)
    cell, gap = 96, 12
    across = max(1, _WIDTH // (min(per_node, 4) * cell + gap))
    rows = -(-per_node // 4)
    drawn = []
    for node in range(min(nodes, NODES_SHOWN)):
        left, top = (node % across) * (4 * cell + gap), (node // across) * (rows * _ROW + 30)
        drawn.append(f'<text x="{left}" y="{top + 14}">node {node}</text>')
        for i in range(min(per_node, config.world_size - node * per_node)):
            rank = node * per_node + i
            place = coordinates(config, rank)
            x, y = left + (i % 4) * cell, top + 18 + (i // 4) * _ROW
            name = " ".join(f"{dim.replace('dp_', '')}{at}" for dim, at in place.items())
            about = f"rank {rank}: " + ", ".join(f"{dim}={at}" for dim, at in place.items())
            fill = stage_colour(place["pp"], config.pp)
            drawn.append(
                f'<rect class="device" x="{x}" y="{y}" width="{cell - 4}" height="{_ROW - 4}" rx="3" fill="{fill}">'
                f'<title>{about}</title></rect><text x="{x + 5}" y="{y + 15}">{name}</text>'
            )
    shown = min(nodes, NODES_SHOWN)
    more = f", the first {shown} of them shown" if nodes > shown else ""
    height = -(-shown // across) * (rows * _ROW + 30)
    caption = f"The mesh over {nodes} nodes of {per_node}{more}"
    return f"<h2>{caption}</h2>" + _svg(height, drawn)


def _key(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(f'<span class="k" style="background:{fill}"></span>{escape(name)}' for name, fill in entries)


def _svg(height: int, drawn: Sequence[str]) -> str:
    return f'<svg width="{_WIDTH}" height="{height}" role="img">' + "".join(drawn) + "</svg>"
