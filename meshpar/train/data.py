"""Training data: documents to rows of tokens, and each data-parallel rank's part of every global batch.

read_rows -> make_documents (both in formats.py) -> pack or truncate -> GlobalBatches. Every rank does all of
it and gets the same list of rows; which of them are its own is decided by its data-parallel coordinate alone.
"""

import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .formats import IGNORE, Document, make_documents, read_rows

log = logging.getLogger(__name__)

WIDTH_MULTIPLE = 64  # unpacked batches come in few widths, so pipelines and kernels see few shapes


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of a batch, int32 [tokens] each. Without `position_ids` it is one document, not packed."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None


def load_rows(
    path: str, format: str, tokenizer: PreTrainedTokenizerBase, seq_len: int, pack: bool, split: str = "train"
) -> list[Row]:
    """Everything from a recipe's `data` section to rows of at most (packed: exactly) `seq_len` tokens.

    Raises ValueError, one sentence, for data that cannot be read or is not of the format.
    """
    documents = _reported(make_documents(read_rows(path, split), format, tokenizer, str(path)), seq_len, format, pack)
    if pack:
        rows = pack_documents(documents, seq_len, pad_token_id(tokenizer), cut=format == "text")
    else:
        rows = truncate_documents(documents, seq_len)
    return rows


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills rows: the tokenizer's pad token, else its eos, else 0; it never counts in a loss."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((i for i in ids if i is not None), 0)


def pack_documents(documents: Iterable[Document], seq_len: int, pad_id: int, cut: bool) -> list[Row]:
    """Put documents one after another into rows of exactly `seq_len` tokens, in order.

    With `cut` a document goes on in the next row where it is cut; without, it starts a new row if it does not
    fit in the rest of this one, and is truncated to `seq_len`. `position_ids` restart at every document and
    at the padding. No attention mask: transformers keeps packed documents apart only when there is none.
    """
    rows: list[Row] = []
    pieces: list[Document] = []
    room = seq_len
    for document in documents:
        for piece in _pieces(document, room if cut else seq_len, seq_len, cut):
            if len(piece.input_ids) > room:
                rows.append(_packed_row(pieces, seq_len, pad_id))
                pieces, room = [], seq_len
            pieces.append(piece)
            room -= len(piece.input_ids)
    if pieces:
        rows.append(_packed_row(pieces, seq_len, pad_id))
    return rows


def _pieces(document: Document, first: int, seq_len: int, cut: bool) -> Iterator[Document]:
    """The document's parts: at most `first` tokens, then `seq_len` each; only the first part unless `cut`."""
    start, end = 0, first or seq_len
    while start < len(document.input_ids):
        labels = document.labels[start:end].copy()
        labels[0] = IGNORE
        yield Document(document.input_ids[start:end], labels)
        start, end = (end, end + seq_len) if cut else (len(document.input_ids), end)


def _packed_row(pieces: list[Document], seq_len: int, pad_id: int) -> Row:
    missing = seq_len - sum(len(piece.input_ids) for piece in pieces)
    padding = Document(np.full(missing, pad_id, np.int32), np.full(missing, IGNORE, np.int32))
    pieces = [*pieces, padding]
    return Row(
        np.concatenate([piece.input_ids for piece in pieces]),
        np.concatenate([piece.labels for piece in pieces]),
        np.concatenate([np.arange(len(piece.input_ids), dtype=np.int32) for piece in pieces]),
    )


def truncate_documents(documents: Iterable[Document], seq_len: int) -> list[Row]:
    """One row a document, its first `seq_len` tokens; rows are padded when they meet in a batch."""
    return [Row(document.input_ids[:seq_len], document.labels[:seq_len]) for document in documents]


def _reported(documents: Iterable[Document], seq_len: int, format: str, pack: bool) -> Iterator[Document]:
    """Passes documents on, then logs how many there were, were cut short, and have nothing that counts."""
    total = too_long = silent = 0
    for document in documents:
        total += 1
        too_long += len(document.input_ids) > seq_len and not (pack and format == "text")
        silent += not (document.labels[:seq_len] != IGNORE).any()
        yield document
    log.info("data: %d documents", total)
    if too_long:
        log.warning("data: %d of %d documents are longer than seq_len %d; cut to it", too_long, total, seq_len)
    if silent:
        log.warning("data: %d of %d documents have no token that counts in the loss", silent, total)


def check_vocabulary(rows: Sequence[Row], vocab_size: int) -> None:
    """Raises ValueError naming the first row (from 1) and token id outside [0, vocab_size)."""
    for number, row in enumerate(rows, 1):
        bad = row.input_ids[(row.input_ids < 0) | (row.input_ids >= vocab_size)]
        if len(bad):
            raise ValueError(
                f"row {number} of the tokenised data has token id {bad[0]}, but the model's vocabulary ends "
                f"at {vocab_size - 1}: tokenizer and model do not belong together."
            )


class GlobalBatches:
    """An endless walk over `rows` in global batches of `global_size` rows.

    The order of rows is a function of (number of rows, seed, epoch) alone, whatever the mesh. An epoch's last
    batch is filled up from the next epoch's order, so that every epoch has each row exactly once.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        global_size: int,
        seed: int,
        shuffle: bool = True,
        *,
        pad_id: int,
        seq_len: int,
    ):
        if len(rows) == 0:
            raise ValueError("there are no rows to train on.")
        self.rows, self.global_size, self.seed, self.shuffle = rows, global_size, seed, shuffle
        self.pad_id, self.seq_len = pad_id, seq_len
        self.epoch = self.position = 0  # position: rows of this epoch that were handed out
        self._order_of = (-1, np.empty(0, dtype=np.int64))
        self._fingerprint = {"rows": len(rows), "checksum": _checksum(rows), "seed": seed, "shuffle": shuffle}

    @property
    def rows_seen(self) -> int:
        """Rows handed out since the start, over all epochs and all ranks."""
        return self.epoch * len(self.rows) + self.position

    def next(self, dp_rank: int = 0, dp_size: int = 1) -> dict[str, torch.Tensor]:
        """Rank `dp_rank`'s rows of the next global batch: int64 [global_size / dp_size, seq] each.

        `input_ids` and `labels`, with `position_ids` for packed rows, else `attention_mask`; seq is the same
        on all ranks. Every rank must call it once a step. Raises ValueError if `global_size` does not divide
        by `dp_size`.
        """
        _check_division(self.global_size, dp_size)
        batch = [self.rows[i] for i in self._take(self.global_size)]
        return _rank_part(batch, dp_rank, dp_size, self.pad_id, self.seq_len)

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            part = self._order()[self.position : self.position + count - len(taken)]
            taken.extend(part.tolist())
            self.position += len(part)
            if self.position == len(self.rows):
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def _order(self) -> np.ndarray:
        if self._order_of[0] != self.epoch:
            self._order_of = (self.epoch, _permutation(len(self.rows), self.seed, self.epoch, self.shuffle))
        return self._order_of[1]

    def state_dict(self) -> dict:
        """Where the walk is, counted in rows: it fits any dp size and any global batch size."""
        place = {"epoch": self.epoch, "position": self.position, "rows_seen": self.rows_seen}
        return {**place, "fingerprint": dict(self._fingerprint)}

    def load_state_dict(self, state: dict) -> None:
        """Continue where `state` was taken; ValueError if that was over other rows or in another order."""
        saved = state["fingerprint"]
        changed = [f"{k} {saved.get(k)} there, {v} here" for k, v in self._fingerprint.items() if saved.get(k) != v]
        if changed:
            raise ValueError(
                f"the checkpoint's place is in other data ({'; '.join(changed)}): resume with the data, "
                "format, seq_len and seed it was made with, or start a new run."
            )
        if not 0 <= state["position"] < len(self.rows) or state["epoch"] < 0:
            raise ValueError(f"the checkpoint's place, epoch {state['epoch']} row {state['position']}, does not exist.")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])


def _permutation(count: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(count)
    # numpy promises the raw stream of PCG64 for ever; its shuffles may change from release to release.
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(count), kind="stable")


def _checksum(rows: Sequence[Row]) -> int:
    value = 0
    for row in rows:
        value = zlib.crc32(row.labels.tobytes(), zlib.crc32(row.input_ids.tobytes(), value))
    return value


def eval_batches(
    rows: Sequence[Row], global_size: int, dp_rank: int, dp_size: int, pad_id: int, seq_len: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Every row once, in order, in global batches of `global_size` rows: this rank's part of each, as
    `GlobalBatches.next` gives it.

    All ranks get the same number of batches of the same shapes: the last batch is filled up with rows that
    have no counted token. Raises ValueError if `global_size` does not divide by `dp_size`.
    """
    _check_division(global_size, dp_size)
    for start in range(0, len(rows), global_size):
        batch = list(rows[start : start + global_size])
        batch += [_uncounted(batch[0])] * (global_size - len(batch))
        yield _rank_part(batch, dp_rank, dp_size, pad_id, seq_len)


def _uncounted(row: Row) -> Row:
    """A copy no label of which counts; its mask stays, since attention over nothing divides zero by zero."""
    return Row(row.input_ids, np.full_like(row.labels, IGNORE), row.position_ids)


def _check_division(global_size: int, dp_size: int) -> None:
    if global_size % dp_size:
        nearest = max(global_size // dp_size, 1) * dp_size
        raise ValueError(
            f"batch.global_size {global_size} does not divide by the data-parallel size {dp_size}; "
            f"{nearest} or {nearest + dp_size} would."
        )


def _rank_part(batch: list[Row], dp_rank: int, dp_size: int, pad_id: int, seq_len: int) -> dict[str, torch.Tensor]:
    longest = max(len(row.input_ids) for row in batch)
    width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len)
    size = len(batch) // dp_size
    part = batch[dp_rank * size : (dp_rank + 1) * size]
    tensors = {
        "input_ids": _padded([row.input_ids for row in part], width, pad_id),
        "labels": _padded([row.labels for row in part], width, IGNORE),
    }
    positions = [row.position_ids for row in part if row.position_ids is not None]
    if positions:
        return {**tensors, "position_ids": _padded(positions, width, 0)}
    ones = [np.ones(len(row.input_ids), np.int32) for row in part]
    return {**tensors, "attention_mask": _padded(ones, width, 0)}


def _padded(arrays: list[np.ndarray], width: int, fill: int) -> torch.Tensor:
    tensor = torch.full((len(arrays), width), fill, dtype=torch.int64)
    for row, array in zip(tensor, arrays, strict=True):
        row[: len(array)] = torch.from_numpy(array)
    return tensor
