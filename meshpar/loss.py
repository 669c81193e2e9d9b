"""Token-exact cross entropy on logits whose vocabulary is split over the tp group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import all_reduce

IGNORE = -100
_CHUNK_BYTES = 64 << 20  # of float32 logits at a time


def shift_labels(labels: Tensor) -> Tensor:
    """Hugging Face's labels [b, s] -> targets [b, s]: position i predicts label i + 1, the last position nothing."""
    return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORE)), dim=1)


def count_targets(targets: Tensor) -> Tensor:
    """Number of ``targets`` that count in the loss, as float64 (exact up to 2**53 tokens)."""
    return (targets != IGNORE).sum().double()


def cross_entropy_sum(logits: Tensor, targets: Tensor, start: int, real: int, group: dist.ProcessGroup) -> Tensor:
    """Sum of the token losses, a float64 scalar equal on every rank of ``group``.

    ``logits`` [b, s, local vocabulary] holds the vocabulary's entries ``start`` to ``start + real``; what lies beyond
    is padding. ``targets`` [b, s] are global ids, `IGNORE` where nothing counts. The gradient is this rank's part.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return _CrossEntropySum.apply(flat, targets.reshape(-1), start, real, group)


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_BYTES // (4 * max(width, 1)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, start, real, group):
        rows, chunks = logits.shape[0], _chunks(logits.shape[0], real)
        peak = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        if real:
            for c in chunks:
                peak[c] = logits[c, :real].amax(-1).float()
        peak = all_reduce(peak, group, "max")
        own = (targets >= start) & (targets < start + real)
        index = (targets - start).masked_fill(~own, 0)
        sums = logits.new_zeros((2, rows), dtype=torch.float32)
        if real:
            for c in chunks:
                shifted = logits[c, :real].float() - peak[c, None]
                sums[1, c] = shifted.gather(1, index[c, None]).squeeze(1).masked_fill(~own[c], 0)
                sums[0, c] = shifted.exp_().sum(-1)
        sums = all_reduce(sums, group)
        counted = targets != IGNORE
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, peak + log_sum, index, own, counted)
        ctx.real = real
        return (log_sum - sums[1]).masked_fill(~counted, 0).sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx, grad):
        logits, log_total, index, own, counted = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for c in _chunks(logits.shape[0], ctx.real) if ctx.real else ():
            prob = (logits[c, : ctx.real].float() - log_total[c, None]).exp_()
            prob.scatter_add_(1, index[c, None], -own[c, None].float())
            out[c, : ctx.real] = prob.mul_((counted[c] * grad.float())[:, None])
        return out, None, None, None, None
