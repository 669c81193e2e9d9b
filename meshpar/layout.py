"""Where the elements of one parameter live inside the tp group.

Hugging Face's tensor is the truth. Along one dimension a rank stores spans of it one after another, each padded with
zeros so that every rank stores the same amount. That one rule covers even shards, vocabularies and FFN widths that do
not divide, kv heads that several ranks share, zero heads that fill up a count, and projections that one matrix fuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Rank ``r`` stores ``spans[r]`` of a dimension, padded with zeros to ``local``; equal spans are copies."""

    spans: tuple[tuple[int, int], ...]
    local: int

    @property
    def copies(self) -> bool:
        """Whether some elements are stored on more than one rank."""
        real = [(a, b) for a, b in self.spans if a < b]
        return len(set(real)) < len(real)

    @property
    def padded(self) -> bool:
        """Whether some rank stores more than its span."""
        return any(b - a < self.local for a, b in self.spans)

    @property
    def slots(self) -> int:
        """Number of distinct spans."""
        return len(set(self.spans))

    def slot(self, rank: int) -> int:
        """Index of this rank's span among the distinct ones, in order of appearance."""
        return list(dict.fromkeys(self.spans)).index(self.spans[rank])

    def is_first_copy(self, rank: int) -> bool:
        """Whether no lower rank stores the same span: the rank that counts for norms and exports."""
        return self.spans[rank] not in self.spans[:rank]

    def real(self, rank: int) -> int:
        """How many of the ``local`` elements are the parameter's own, the rest being zero padding."""
        start, stop = self.spans[rank]
        return stop - start

    def scaled(self, width: int, offset: int = 0) -> Part:
        """The same for units of ``width`` elements each, the first of them at ``offset``."""
        spans = tuple((offset + a * width, offset + b * width) for a, b in self.spans)
        return Part(spans, self.local * width)


@dataclass(frozen=True)
class Stored:
    """A part as it lies in a stored tensor: at ``start`` to ``stop`` of the split dimension, its own elements up to
    ``real``, which are those of Hugging Face's tensor from ``origin`` on."""

    part: Part
    start: int
    real: int
    stop: int
    origin: int


@dataclass(frozen=True)
class Layout:
    """A rank stores ``parts`` one after another along dimension ``dim``; None: every rank stores the whole tensor."""

    dim: int | None
    parts: tuple[Part, ...]

    @property
    def local(self) -> int:
        """Elements every rank stores along ``dim``."""
        return sum(part.local for part in self.parts)

    @property
    def copies(self) -> bool:
        """Whether some elements are stored on more than one rank."""
        return any(part.copies for part in self.parts)

    @property
    def padded(self) -> bool:
        """Whether some rank stores zeros that are not the parameter's own."""
        return self.dim is not None and any(part.padded for part in self.parts)

    @property
    def only(self) -> Part:
        """The part of a layout that has one."""
        (part,) = self.parts
        return part

    def local_shape(self, full: Sequence[int]) -> tuple[int, ...]:
        """Shape stored on each rank for a tensor of shape ``full`` in Hugging Face's file."""
        if self.dim is None:
            return tuple(full)
        return (*full[: self.dim], self.local, *full[self.dim + 1 :])

    def along(self, dim: int) -> Layout:
        """The same parts on another dimension."""
        return Layout(dim, self.parts)

    def stored(self, rank: int, rows: tuple[int, int]) -> Iterator[Stored]:
        """Each part's place in rows ``rows`` of what ``rank`` stores, along ``dim``, or the rows where it is None."""
        if self.dim is None:
            yield Stored(self.only, 0, rows[1] - rows[0], rows[1] - rows[0], rows[0])
            return
        at = 0
        for part in self.parts:
            first, last = (max(at, rows[0]), min(at + part.local, rows[1])) if self.dim == 0 else (at, at + part.local)
            if first < last:
                shift = rows[0] if self.dim == 0 else 0
                real = min(max(at + part.real(rank), first), last)
                yield Stored(part, first - shift, real - shift, last - shift, part.spans[rank][0] + first - at)
            at += part.local


def replicated(size: int) -> Layout:
    """Every rank stores everything."""
    return Layout(None, (Part(((0, 1),) * size, 1),))


def first_only(total: int, size: int) -> Layout:
    """The first rank stores ``total`` rows, the others zeros: a bias that a sum over ranks must add once."""
    return Layout(0, (Part(((0, total), *((total, total),) * (size - 1)), total),))


def spread(total: int, size: int, multiple: int = 1) -> Part:
    """``total`` units in ``size`` equal spans of a multiple of ``multiple``, the last ones short or empty."""
    local = -(-total // (size * multiple)) * multiple
    return Part(tuple((min(r * local, total), min((r + 1) * local, total)) for r in range(size)), local)


def even(total: int, size: int, dim: int = 0) -> Layout:
    """``total`` elements spread over the ranks along ``dim``."""
    return Layout(dim, (spread(total, size),))


@dataclass(frozen=True)
class HeadLayout:
    """How attention heads lie on the ranks of a tp group, in units of one head."""

    q: Part
    kv: Part


def heads(q_heads: int, kv_heads: int, size: int) -> HeadLayout:
    """Lay ``q_heads`` query heads over ``kv_heads`` kv heads on ``size`` ranks, the busiest rank as light as possible.

    Either whole kv groups are dealt out (zero groups fill the last ranks up), or, where ``size`` is a multiple of
    ``kv_heads``, each kv head is stored on ``size / kv_heads`` ranks, which share its queries (zero queries fill the
    last of them up). Both give the same attention output: a zero query or kv head meets zero columns in ``o_proj``.
    """
    group = q_heads // kv_heads
    whole = spread(kv_heads, size)
    if size % kv_heads == 0 and -(-group // (size // kv_heads)) < whole.local * group:
        return _shared_kv_heads(kv_heads, group, size)
    return HeadLayout(whole.scaled(group), whole)


def _shared_kv_heads(kv_heads: int, group: int, size: int) -> HeadLayout:
    inner = spread(group, size // kv_heads)
    q_spans = tuple((k * group + a, k * group + b) for k in range(kv_heads) for a, b in inner.spans)
    kv_spans = tuple((k, k + 1) for k in range(kv_heads) for _ in inner.spans)
    return HeadLayout(Part(q_spans, inner.local), Part(kv_spans, 1))
