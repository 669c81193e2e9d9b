"""A block: what of a module runs on each rank of a tp group, and where the elements of its parameters go.

Rules (`rules`) make one, trials (`trial`) test it, styles (`styles`) carry it out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .layout import HeadLayout, Layout, Part, first_only, heads, spread


@dataclass(frozen=True)
class Units:
    """``count`` units of ``width`` elements in a row, dealt out with the query heads, the kv heads, or evenly.

    ``multiple``: a rank stores a multiple of so many units.
    """

    count: int
    width: int = 1
    by: Literal["q", "kv", "even"] = "even"
    multiple: int = 1


@dataclass(frozen=True)
class Cut:
    """A parameter's dimension ``dim`` is cut along ``units``, one run after another."""

    dim: int
    units: tuple[Units, ...]

    def layout(self, size: int, head_layout: HeadLayout | None) -> Layout:
        """Where the elements go on ``size`` ranks."""
        parts, offset = [], 0
        for units in self.units:
            parts.append(_part(units, size, head_layout).scaled(units.width, offset))
            offset += units.count * units.width
        return Layout(self.dim, tuple(parts))


def _part(units: Units, size: int, head_layout: HeadLayout | None) -> Part:
    if units.by == "even" or head_layout is None:
        return spread(units.count, size, units.multiple)
    return head_layout.q if units.by == "q" else head_layout.kv


@dataclass(frozen=True)
class Groups:
    """Rows of a fused projection: a kv head's queries, then its key, then its value, one kv head after another."""

    dim: int
    group: int  # queries of a kv head
    head_dim: int

    def layout(self, size: int, head_layout: HeadLayout) -> Layout:
        """Where the elements go on ``size`` ranks."""
        q, kv, rows = head_layout.q, head_layout.kv, self.group + 2
        if q.local == kv.local * self.group:  # whole groups
            return Layout(self.dim, (kv.scaled(rows * self.head_dim),))
        queries = Part(tuple((a + 2 * (a // self.group), b + 2 * (a // self.group)) for a, b in q.spans), q.local)
        others = (
            Part(tuple((a * rows + at, a * rows + at + 1) for a, _ in kv.spans), 1) for at in (rows - 2, rows - 1)
        )
        return Layout(self.dim, tuple(part.scaled(self.head_dim) for part in (queries, *others)))


@dataclass(frozen=True)
class OnFirst:
    """A bias of a partial sum: only the first rank has its ``total`` rows, the others hold zeros."""

    total: int

    def layout(self, size: int, head_layout: HeadLayout | None) -> Layout:
        """Where the elements go on ``size`` ranks."""
        return first_only(self.total, size)


def hidden_argument(args: tuple, kwargs: dict) -> int | str:
    """Which argument of a decoder module is its hidden states."""
    return 0 if args else "hidden_states"


# What attention modules call their numbers of heads.
Q_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass
class Block:
    """A recognised block; names of modules and parameters are relative to it, and "" is the block itself.

    ``style``: where the ranks' partial results are summed, at its rowwise projection ("block") or at the block's output
    ("block_sum"); or which half of a pair of projections in a layer's own code it is. ``by_head``: arguments that hold
    something of each query head -> the dimension. ``inside``: arguments beside the hidden states that each head is
    computed from. ``narrow``: attributes that count the features of all heads are made to count this rank's.
    """

    style: Literal["block", "block_sum", "pair_in", "pair_out"] = "block"
    styles: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, Cut | Groups | OnFirst] = field(default_factory=dict)
    heads: tuple[int, int] | None = None  # query heads and kv heads
    out: str = ""  # its rowwise projection
    whole: list[str] = field(default_factory=list)  # the block's own parameters that every rank holds whole
    by_head: dict[int | str, int] = field(default_factory=dict)
    inside: tuple[int | str, ...] = ()
    pair: bool = False  # two projections in a layer's own code
    narrow: bool = False
    counts: dict[str, tuple[Units, ...]] = field(default_factory=dict)  # attributes that count what is cut

    def head_layout(self, size: int) -> HeadLayout | None:
        """How the block's heads lie on ``size`` ranks."""
        return heads(*self.heads, size) if self.heads else None

    def out_layout(self, size: int) -> Layout:
        """How what enters the output projection lies on ``size`` ranks."""
        return self.cuts[f"{self.out}.weight"].layout(size, self.head_layout(size))

    def colwise(self, block: nn.Module, name: str, *units: Units) -> None:
        """A projection whose output features are cut."""
        self.styles[name] = "colwise"
        module = block.get_submodule(name)
        for leaf, p in module.named_parameters(recurse=False):
            self.cuts[f"{name}.{leaf}"] = Cut(p.ndim - 1 if isinstance(module, Conv1D) else 0, units)

    def rowwise(self, block: nn.Module, name: str, *units: Units) -> None:
        """A projection whose input features are cut; its bias is added once."""
        self.styles[name], self.out = "rowwise", name
        module = block.get_submodule(name)
        self.cuts[f"{name}.weight"] = Cut(0 if isinstance(module, Conv1D) else 1, units)
        bias = getattr(module, "bias", None)
        if bias is not None and self.style == "block_sum":
            self.cuts[f"{name}.bias"] = OnFirst(bias.shape[0])

    def localize(self, block: nn.Module, size: int) -> None:
        """Make the block's code, which counts heads, count those of one of ``size`` ranks."""
        own = self.head_layout(size)
        for name, units in self.counts.items():
            owner, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(owner), leaf, Cut(0, units).layout(size, own).local)
        if own is None or self.heads is None:
            return
        q_heads, kv_heads = self.heads
        counts = dict.fromkeys(Q_HEADS, (q_heads, own.q.local)) | dict.fromkeys(_KV_HEADS, (kv_heads, own.kv.local))
        counts["num_key_value_groups"] = (q_heads // kv_heads, own.q.local // own.kv.local)
        holders = [block]
        if hasattr(block, "config"):
            block.config = copy.copy(block.config)
            holders.append(block.config)
        for holder in holders:
            for name, (whole, local) in counts.items():
                if getattr(holder, name, None) == whole:
                    setattr(holder, name, local)
        if self.narrow:
            widths = {w: n for w, n in self._widths(own, size) if w not in counts}
            for name, value in vars(block).items():
                if type(value) is int and value in widths and name != "head_dim":
                    setattr(block, name, widths[value])

    def _widths(self, own: HeadLayout, size: int) -> Iterator[tuple[int, int]]:
        """(features of all heads, of one rank's)."""
        q_heads, kv_heads = self.heads
        head_dim = self.out_layout(size).local // own.q.local
        yield kv_heads * head_dim, own.kv.local * head_dim
        yield q_heads * head_dim, own.q.local * head_dim

    def own_arguments(self, args: tuple, kwargs: dict, size: int, rank: int) -> tuple[tuple, dict]:
        """The block's arguments with ``rank``'s heads of those that hold something of each head."""
        if not self.by_head:  # in every forward of every block
            return args, kwargs
        own = self.head_layout(size)
        args = tuple(self._own_argument(i, x, own, rank) for i, x in enumerate(args))
        return args, {k: self._own_argument(k, x, own, rank) for k, x in kwargs.items()}

    def _own_argument(self, key: int | str, value: Any, own: HeadLayout, rank: int) -> Any:
        if key not in self.by_head or not isinstance(value, Tensor):
            return value
        dim, (start, stop) = self.by_head[key], own.q.spans[rank]
        one = value.unflatten(dim, (-1, self.heads[0])).narrow(dim + 1, start, stop - start)
        if stop - start < own.q.local:
            padding = one.new_zeros(*one.shape[: dim + 1], own.q.local - (stop - start), *one.shape[dim + 2 :])
            one = torch.cat((one, padding), dim + 1)
        return one.flatten(dim, dim + 1)
