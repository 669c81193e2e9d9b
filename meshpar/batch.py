"""One data-parallel rank's batch, as Hugging Face names it, checked and ready to be cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .loss import IGNORE, shift_labels

Batches = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]

_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass(frozen=True)
class Batch:
    """Tensors of [rows, seq_len]; ``targets`` are the labels shifted once, so that no later cut can lose one."""

    input_ids: Tensor
    targets: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]

    def model_inputs(self) -> dict[str, Tensor]:
        """What every stage needs beside its hidden states: ids, masks and positions travel with each microbatch."""
        inputs = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        return {k: v for k, v in inputs.items() if v is not None}

    def _map(self, fn) -> Batch:
        return replace(self, **{k: fn(v) for k, v in vars(self).items() if v is not None})

    def chunk(self, count: int) -> list[Batch]:
        """``count`` microbatches of equal size, in row order."""
        size = self.rows // count
        return [self._map(lambda t, i=i: t[i * size : (i + 1) * size]) for i in range(count)]

    def padded_to(self, rows: int) -> Batch:
        """Repeat the first row, without targets, until there are ``rows``: it adds nothing to loss or gradients."""
        missing = rows - self.rows
        if missing <= 0:
            return self
        whole = self._map(lambda t: torch.cat((t, t[:1].expand(missing, *t.shape[1:]))))
        whole.targets[self.rows :] = IGNORE
        return whole


def make_batch(batch: Mapping[str, Tensor], device: torch.device, vocab_size: int) -> Batch:
    """Check a batch of input_ids, labels and optionally attention_mask, position_ids, each [rows, seq_len].

    Raises ValueError naming the key for unknown or missing keys, wrong types and shapes, ids beyond the vocabulary, and
    packed rows with a padding mask.
    """
    _check_kinds(batch)
    _check_ids(batch, vocab_size)
    tensors = {k: v.to(device) for k, v in batch.items() if v is not None}
    rows, seq_len = tensors["input_ids"].shape
    if "position_ids" in tensors and tensors["position_ids"].shape == (1, seq_len):
        tensors["position_ids"] = tensors["position_ids"].expand(rows, -1)
    _check_shapes(tensors, rows, seq_len)
    if rows == 0:
        tensors = {k: v.new_zeros(1, *v.shape[1:]) for k, v in tensors.items() if k != "attention_mask"}
        tensors["labels"].fill_(IGNORE)
    mask = _mask(batch.get("attention_mask"), batch.get("position_ids"))
    mask = mask.to(device) if mask is not None and rows else None
    return Batch(tensors["input_ids"], shift_labels(tensors["labels"]), mask, tensors.get("position_ids"))


def _check_kinds(batch: Mapping[str, Tensor]) -> None:
    if not isinstance(batch, Mapping):
        raise ValueError(f"a batch is a dict of tensors {', '.join(_KEYS)}, not a {type(batch).__name__}")
    unknown = sorted(set(batch) - set(_KEYS))
    if unknown:
        raise ValueError(f"batch has the keys {', '.join(unknown)}; meshpar takes {', '.join(_KEYS)}")
    for key in ("input_ids", "labels"):
        if batch.get(key) is None:
            raise ValueError(f"batch lacks {key!r}")
    for key, value in batch.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"batch[{key!r}] is a {type(value).__name__}, not a torch tensor")
        if key in ("input_ids", "labels") and value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"batch[{key!r}] is {value.dtype}; ids are torch.int64 or torch.int32")
    shape = list(batch["input_ids"].shape)
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(f"batch['input_ids'] has shape {shape}; it must be [rows, seq], of at least one token a row")


def _check_shapes(tensors: Mapping[str, Tensor], rows: int, seq_len: int) -> None:
    for key, value in tensors.items():
        whole = key == "attention_mask" and value.ndim == 4  # [rows, 1, seq, seq], as transformers takes it, too
        shape = [*value.shape[:1], *value.shape[1 + whole :]]
        if shape != [rows, seq_len] + [seq_len] * whole:
            raise ValueError(f"batch[{key!r}] has shape {list(value.shape)}, input_ids has {[rows, seq_len]}")


def _check_ids(batch: Mapping[str, Tensor], vocab_size: int) -> None:
    """Ids beyond the vocabulary; on an accelerator an assertion of its own, so that the step stays asynchronous."""
    for key, lowest in (("input_ids", 0), ("labels", IGNORE)):
        ids = batch[key]
        if ids.device.type != "cpu":
            torch._assert_async((((ids >= 0) & (ids < vocab_size)) | (ids == lowest)).all())
        if ids.device.type == "cpu" and ids.numel() and not lowest <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"batch[{key!r}] has ids from {ids.min()} to {ids.max()}; the vocabulary has {vocab_size}")
        if key == "labels" and ids.device.type == "cpu" and ((ids < 0) & (ids != IGNORE)).any():
            raise ValueError(
                f"batch['labels'] has negative ids other than {IGNORE}, which marks tokens that do not count"
            )


def _mask(mask: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """transformers reads packed documents from restarting positions, but only when there is no mask beside them."""
    if mask is not None and mask.ndim == 2 and mask.device.type == "cpu" and (mask != 0).all():
        return None  # as transformers does, but before the mask is on an accelerator, where looking would wait for it
    if mask is None or positions is None or mask.ndim != 2:
        return mask
    both = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    packed = ((positions[:, 1:] != positions[:, :-1] + 1) & both).any()
    if not packed:
        return mask
    if (mask != 0).all():
        return None
    raise ValueError(
        "batch has position_ids that restart within a row (packed documents) and an attention_mask with zeros; "
        "leave attention_mask out and give padding its own positions and labels of -100"
    )
