"""The same pictures as a PNG, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .pictures import COMPONENTS, KINDS, NODES_SHOWN, Picture, colour, components, stage_colour
from .placement import coordinates
from .simulate import Action

_GIB = 1 << 30


def write_png(path: Path, picture: Picture) -> None:
    """Draw the picture. Raises ModuleNotFoundError, with how to install it, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError('a PNG needs matplotlib: pip install "meshpar[plot]"') from None
    timelines = picture.timelines()
    heights = [1.0 + 0.3 * len(timeline.ranks) for _, timeline in timelines]
    heights += [1.2 + 0.3 * len(picture.memory)] if picture.memory else []
    heights.append(1.0 + 0.3 * min(NODES_SHOWN, -(-picture.config.world_size // picture.per_node)))
    figure = Figure(figsize=(14, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    figure.suptitle(picture.title)
    for axis, (caption, timeline) in zip(axes, timelines, strict=False):
        axis.set_title(caption, loc="left", fontsize=10)
        _draw_timeline(axis, timeline.ranks, picture.seconds())
    if picture.memory:
        _draw_memory(axes[len(timelines)], picture)
    _draw_mesh(axes[-1], picture)
    figure.savefig(path, dpi=120)


def _draw_timeline(axis: Any, ranks: list[Any], seconds: float) -> None:
    for rank, spans in enumerate(ranks):
        bars = [(start, finish - start) for _, start, finish in spans]
        colours = [colour(action, len(ranks)) for action, _, _ in spans]
        axis.broken_barh(bars, (rank - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.4)
        for action, start, finish in spans:
            if finish - start > 0.012 * seconds:
                at = (start + finish) / 2
                axis.text(at, rank, str(action.microbatch), ha="center", va="center", fontsize=7, color="white")
    used = {span.action.kind for spans in ranks for span in spans}
    for kind, name in KINDS.items():
        if kind in used:
            axis.broken_barh([], (0, 0), facecolors=colour(Action(kind, 0, 0), len(ranks)), label=name)
    _legend(axis)
    axis.set(xlim=(0, seconds), ylim=(len(ranks) - 0.5, -0.5), xlabel="seconds", yticks=range(len(ranks)))
    axis.set_yticklabels([f"pp rank {rank}" for rank in range(len(ranks))])


def _draw_memory(axis: Any, picture: Picture) -> None:
    left = [0.0] * len(picture.memory)
    for i, name in enumerate(components(picture.memory)):
        sizes = [row.components.get(name, 0) / _GIB for row in picture.memory]
        axis.barh(range(len(sizes)), sizes, left=left, label=name, color=COMPONENTS[i % len(COMPONENTS)])
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if picture.capacity:
        axis.axvline(picture.capacity / _GIB, color="#c00", linestyle="--", label="device")
    axis.set(xlabel="GiB", yticks=range(len(picture.memory)), ylim=(len(picture.memory) - 0.5, -0.5))
    axis.set_yticklabels([row.rank for row in picture.memory])
    axis.set_title("Memory of each rank", loc="left", fontsize=10)
    _legend(axis)


def _legend(axis: Any) -> None:
    axis.legend(fontsize=7, ncols=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _draw_mesh(axis: Any, picture: Picture) -> None:
    config, per_node = picture.config, picture.per_node
    nodes = min(NODES_SHOWN, -(-config.world_size // per_node))
    for rank in range(min(config.world_size, nodes * per_node)):
        place, node, i = coordinates(config, rank), rank // per_node, rank % per_node
        axis.barh(node, 0.94, left=i, height=0.86, color=stage_colour(place["pp"], config.pp))
        name = " ".join(f"{dim.replace('dp_', '')}{at}" for dim, at in place.items())
        axis.text(i + 0.47, node, name, ha="center", va="center", fontsize=6)
    axis.set(xlim=(0, per_node), ylim=(nodes - 0.5, -0.5), yticks=range(nodes), xticks=[])
    axis.set_yticklabels([f"node {node}" for node in range(nodes)])
    axis.set_title("The mesh over nodes", loc="left", fontsize=10)
