"""A user's overrides of a plan: what they may say of a module, and what they leave of its blocks.

A style is one of those that the table in `tp_plan` explains, or a torch `ParallelStyle`, which only a user gives.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from transformers import PreTrainedModel

from .blocks import Block

Style = str | ParallelStyle
STYLES = (
    "embedding_rowwise",
    "block",
    "block_sum",
    "whole",
    "colwise",
    "rowwise",
    "pair_in",
    "pair_out",
    "experts",
    "identity_expert",
    "norm_of_sum",
    "colwise_norm",
    "by_head",
    "replicate",
    "sequence_parallel",
    "vocab_head",
)
_SPLIT = ("colwise", "rowwise", "experts")
_MAY_BE_WHOLE = ("experts", "colwise_norm", "by_head", "pair_in", "pair_out")
_EXPERT_PARALLEL = ("grouped_gemm", "ep_router", "ep_dispatch_experts")  # transformers' words


def apply_overrides(
    entries: dict[str, Style],
    blocks: dict[str, Block],
    model: PreTrainedModel,
    overrides: str | Mapping[str, Style],
    tp: int,
) -> None:
    """Lay ``overrides`` over a plan's ``entries``, and take the blocks that they keep whole out of ``blocks``.

    Raises ValueError for a style that is not understood or does not fit the module, for a pattern that matches no
    module, and where a block would be split by half.
    """
    _lay_over(entries, model, overrides, tp)
    _keep_whole(entries, blocks)


def _lay_over(entries: dict[str, Style], model: PreTrainedModel, overrides: str | Mapping[str, Style], tp: int) -> None:
    if isinstance(overrides, str):
        raise ValueError(f'plan is {overrides!r}; it must be "auto" or a dict from module-name pattern to style')
    leaves = [n for n in entries if next(model.get_submodule(n).parameters(recurse=False), None) is not None]
    roles = dict(entries)
    for pattern, style in overrides.items():
        if style in _EXPERT_PARALLEL:
            raise ValueError(
                f"plan[{pattern!r}] is {style!r}, which spreads experts over ranks (expert parallelism); meshpar "
                "splits each of them inside over tp instead"
            )
        if isinstance(style, str) and style not in STYLES:
            raise ValueError(
                f"plan[{pattern!r}] is {style!r}; the styles are {', '.join(STYLES)}, or a torch ParallelStyle"
            )
        if isinstance(style, SequenceParallel):
            raise ValueError(
                f"plan[{pattern!r}] is torch's SequenceParallel, which needs DTensors around it; meshpar runs on plain "
                "tensors there: set sequence_parallel in the config instead"
            )
        matched = fnmatch.filter(leaves, pattern)
        if not matched:
            raise ValueError(f"plan[{pattern!r}] matches no module of {type(model).__name__} that holds parameters")
        for name in matched if tp > 1 else ():
            _check_override(name, roles[name], style)
            entries[name] = style


def _check_override(name: str, role: Style, style: Style) -> None:
    """What a module does in its block is the model's own doing; a caller may keep it whole or split it another way."""
    if role in ("colwise", "rowwise"):
        if isinstance(style, ParallelStyle):
            return
        allowed: tuple[Style, ...] = ("replicate", role)
    else:
        allowed = (role, "replicate") if role in _MAY_BE_WHOLE else (role,)
        if role == "replicate" and isinstance(style, ParallelStyle):
            return
    if style not in allowed:
        raise ValueError(
            f"plan gives {name} the style {style_name(style)!r}, but it can only be {' or '.join(map(repr, allowed))}"
            + (" or a torch ParallelStyle" if role in ("colwise", "rowwise", "replicate") else "")
        )


def _keep_whole(entries: dict[str, Style], blocks: dict[str, Block]) -> None:
    """A block none of whose projections is split any more runs whole; one with some of them left is refused."""
    for projections, members in _units(blocks):
        whole = [n for n in projections if entries[n] == "replicate"]
        if not whole:
            continue
        if len(whole) < len(projections):
            split = next(n for n in projections if n not in whole)
            raise ValueError(
                f"plan keeps {whole[0]} whole but splits {split}; a block's projections split together or not at all"
            )
        for name in members:
            entries |= {n: "replicate" for n in entries if n.startswith(f"{name}.")}
            entries[name] = "whole"
            del blocks[name]


def _units(blocks: Mapping[str, Block]) -> list[tuple[list[str], list[str]]]:
    """What splits together: the projections of a block, or the two of a pair; and the blocks that hold them."""
    units = []
    for name, block in blocks.items():
        if block.style == "pair_in":
            layer = name.rpartition(".")[0]
            both = [
                n for n, b in blocks.items() if n.rpartition(".")[0] == layer and b.style in ("pair_in", "pair_out")
            ]
            units.append((both, both))
        elif block.style != "pair_out":
            units.append(([f"{name}.{n}" for n, style in block.styles.items() if style in _SPLIT], [name]))
    return units


def style_name(style: Style) -> str:
    """As the plan's table and messages call it."""
    return style if isinstance(style, str) else type(style).__name__
