"""Where the elements of one parameter live inside the tp group.

Hugging Face's tensor is the truth; a rank stores one contiguous span of it along one dimension, padded with zeros so
that every rank stores the same amount. That one rule covers even shards, vocabularies and FFN widths that do not
divide, kv heads that several ranks share, and zero heads that fill up a count.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Rank ``r`` of the tp group stores ``spans[r]`` of dimension ``dim``, padded with zeros to ``local`` elements.

    ``dim`` None means every rank stores the whole tensor. Equal spans are copies of each other.
    """

    dim: int | None
    spans: tuple[tuple[int, int], ...]
    local: int

    @property
    def copies(self) -> bool:
        """Whether some elements are stored on more than one rank."""
        real = [(a, b) for a, b in self.spans if a < b]
        return len(set(real)) < len(real)

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

    def local_shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape stored on each rank for a tensor of shape ``full`` in Hugging Face's file."""
        if self.dim is None:
            return tuple(full)
        return (*full[: self.dim], self.local, *full[self.dim + 1 :])

    def along(self, dim: int) -> Layout:
        """The same spans on another dimension."""
        return Layout(dim, self.spans, self.local)


def replicated(size: int) -> Layout:
    """Every rank stores everything."""
    return Layout(None, ((0, 1),) * size, 1)


def even(total: int, size: int, dim: int = 0) -> Layout:
    """``total`` elements in ``size`` equal spans, the last ones short or empty where it does not divide."""
    local = -(-total // size)
    spans = tuple((min(r * local, total), min((r + 1) * local, total)) for r in range(size))
    return Layout(dim, spans, local)


@dataclass(frozen=True)
class HeadLayout:
    """How attention heads lie on ``size`` ranks: ``q`` and ``kv`` heads a rank, and each rank's span of heads."""

    q_local: int
    kv_local: int
    q_spans: tuple[tuple[int, int], ...]
    kv_spans: tuple[tuple[int, int], ...]

    def q(self, head_dim: int) -> Layout:
        """Layout of the query projection's rows."""
        return _in_rows(self.q_spans, self.q_local, head_dim)

    def kv(self, head_dim: int) -> Layout:
        """Layout of the key and value projections' rows."""
        return _in_rows(self.kv_spans, self.kv_local, head_dim)


def _in_rows(spans: tuple[tuple[int, int], ...], local: int, head_dim: int) -> Layout:
    return Layout(0, tuple((a * head_dim, b * head_dim) for a, b in spans), local * head_dim)


def heads(q_heads: int, kv_heads: int, size: int) -> HeadLayout:
    """Lay ``q_heads`` query heads over ``kv_heads`` kv heads on ``size`` ranks, the busiest rank as light as possible.

    Either whole kv groups are dealt out (zero groups fill the last ranks up), or, where ``size`` is a multiple of
    ``kv_heads``, each kv head is stored on ``size / kv_heads`` ranks, which share its queries (zero queries fill the
    last of them up). Both give the same attention output: a zero query or kv head meets zero columns in ``o_proj``.
    """
    group = q_heads // kv_heads
    whole = even(kv_heads, size)
    if size % kv_heads == 0 and -(-group // (size // kv_heads)) < whole.local * group:
        return _shared_kv_heads(kv_heads, group, size)
    q_spans = tuple((a * group, b * group) for a, b in whole.spans)
    return HeadLayout(whole.local * group, whole.local, q_spans, whole.spans)


def _shared_kv_heads(kv_heads: int, group: int, size: int) -> HeadLayout:
    inner = even(group, size // kv_heads)
    q_spans = tuple((k * group + a, k * group + b) for k in range(kv_heads) for a, b in inner.spans)
    kv_spans = tuple((k, k + 1) for k in range(kv_heads) for _ in inner.spans)
    return HeadLayout(inner.local, 1, q_spans, kv_spans)
