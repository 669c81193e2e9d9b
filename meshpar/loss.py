"""Token-exact cross entropy on logits whose vocabulary is split over the tp group, and chunked with the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .comm import all_reduce

IGNORE = -100
_CHUNK_BYTES = 64 << 20  # of float32 logits at a time, or
_CHUNKS = 32  # so many parts: the head's gradient is gone through once for each


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
    `LazyLogits` are never built whole.
    """
    flat = targets.reshape(-1)
    if isinstance(logits, LazyLogits) and logits.whole is None:
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        wants_grad = torch.is_grad_enabled()
        args = (hidden, logits.weight, logits.bias, flat, logits.apply_steps, start, real, group, wants_grad)
        return _HeadCrossEntropySum.apply(*args)
    logits = logits.build() if isinstance(logits, LazyLogits) else logits
    return _CrossEntropySum.apply(logits.reshape(-1, logits.shape[-1]), flat, start, real, group)


def _chunks(rows: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_BYTES // (4 * max(width, 1)))
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]


class _Softmax:
    """The normalizer of each row of a vocabulary that is split over ``group``, and each row's own target."""

    def __init__(self, targets: Tensor, start: int, real: int) -> None:
        self.real = real
        self.counted = targets != IGNORE
        self.own = (targets >= start) & (targets < start + real)
        self.index = (targets - start).masked_fill(~self.own, 0)

    def losses(self, logits: Tensor, rows: list[slice], group: dist.ProcessGroup) -> Tensor:
        """Token losses [rows], 0 where nothing counts; ``rows`` are gone through one slice after another."""
        peak = logits.new_full((logits.shape[0],), -torch.inf, dtype=torch.float32)
        for c in rows if self.real else ():
            peak[c] = logits[c, : self.real].amax(-1).float()
        peak = all_reduce(peak, group, "max")
        sums = logits.new_zeros((2, logits.shape[0]), dtype=torch.float32)
        for c in rows if self.real else ():
            shifted = logits[c, : self.real].float() - peak[c, None]
            sums[1, c] = shifted.gather(1, self.index[c, None]).squeeze(1).masked_fill(~self.own[c], 0)
            sums[0, c] = shifted.exp_().sum(-1)
        sums = all_reduce(sums, group)
        log_sum = sums[0].log()
        self.log_total = peak + log_sum
        return (log_sum - sums[1]).masked_fill(~self.counted, 0)

    def gradient(self, logits: Tensor, c: slice) -> Tensor:
        """Of the sum of the losses, for the rows ``c``, whose logits are given, and the vocabulary's own entries."""
        prob = (logits[:, : self.real].float() - self.log_total[c, None]).exp_()
        prob.scatter_add_(1, self.index[c, None], -self.own[c, None].float())
        return prob.mul_(self.counted[c, None])


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, start, real, group):
        softmax = _Softmax(targets, start, real)
        losses = softmax.losses(logits, _chunks(logits.shape[0], real), group)
        ctx.save_for_backward(logits)
        ctx.softmax = softmax
        return losses.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        out = torch.zeros_like(logits)
        real = ctx.softmax.real
        for c in _chunks(logits.shape[0], real) if real else ():
            out[c, :real] = ctx.softmax.gradient(logits[c], c).mul_(grad.float())
        return out, None, None, None, None


class _HeadCrossEntropySum(torch.autograd.Function):
    """Head and loss together, a part of the rows at a time.

    A part's gradients are made right after its logits, or they would have to be computed twice; the backward only
    scales them. The weight's are added up in float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, steps, start, real, group, wants_grad):
        rows, total = hidden.shape[0], hidden.new_zeros((), dtype=torch.float64)
        wants = [wants_grad and need for need in ctx.needs_input_grad[:3]]
        d_hidden = torch.empty_like(hidden) if wants[0] else None
        d_weight = d_bias = None
        step = max(1, _CHUNK_BYTES // (4 * weight.shape[0]), -(-rows // _CHUNKS))
        for i in range(0, rows, step):
            c = slice(i, min(i + step, rows))
            raw, softmax = F.linear(hidden[c], weight, bias), _Softmax(targets[c], start, real)
            with torch.enable_grad():
                logits = steps(raw.requires_grad_()) if any(wants) else steps(raw)
            every = slice(0, raw.shape[0])
            total += softmax.losses(logits.detach(), [every], group).sum(dtype=torch.float64)
            if not any(wants):
                continue
            d_logits = logits.detach() if logits is raw else torch.empty_like(logits)  # logits are not needed again
            if real:
                d_logits[:, :real] = softmax.gradient(logits.detach(), every)
            d_logits[:, real:] = 0
            d_raw = d_logits if logits is raw else torch.autograd.grad(logits, raw, d_logits)[0]
            if d_hidden is not None:
                torch.mm(d_raw, weight, out=d_hidden[c])
            if wants[1]:
                d_weight = _add_product(d_weight, d_raw.t(), hidden[c])
            if wants[2]:
                part = d_raw.sum(0, dtype=torch.float32)
                d_bias = part if d_bias is None else d_bias.add_(part)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)  # let go of in the backward, as an attribute would not be
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return total

    @staticmethod
    def backward(ctx, grad):
        scaled = (None if g is None else (g * grad).to(d) for g, d in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total`` (None: nothing yet) + a @ b, in float32."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)


# Element-wise functions that models put between head and logits: scaling, soft-capping, a change of dtype.
_STEPS = {"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "tanh", "float", "to"}
_IN_PLACE = {"mul_": "mul", "__imul__": "mul", "div_": "div", "__itruediv__": "div", "tanh_": "tanh"}


class LazyLogits(Tensor):
    """What a head returns while the loss is to be computed with it: logits [b, s, vocabulary] that are not built.

    Element-wise steps are noted; any other use builds the logits and goes on with them.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Callable[[Tensor], Tensor], ...]
    whole: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        """The logits of ``hidden`` [..., features] after ``steps``, which make them ``dtype``."""
        shape = (*hidden.shape[:-1], weight.shape[0])
        made = Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype or hidden.dtype, device=hidden.device)
        made.hidden, made.weight, made.bias, made.steps, made.whole = hidden, weight, bias, steps, None
        return made

    def apply_steps(self, logits: Tensor) -> Tensor:
        """What the model does to logits that the head gave."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def build(self) -> Tensor:
        """The logits as a plain tensor, part of the autograd graph."""
        if self.whole is None:
            self.whole = self.apply_steps(F.linear(self.hidden, self.weight, self.bias))
        return self.whole

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # shape, dtype, device
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        lazy = args[0] if args and isinstance(args[0], LazyLogits) else None
        constant = not any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values()))
        if lazy is not None and lazy.whole is None and constant:
            if name in _STEPS:
                return lazy._after(func, args[1:], kwargs)
            if name in _IN_PLACE:
                lazy.steps = lazy._after(getattr(Tensor, _IN_PLACE[name]), args[1:], kwargs).steps
                return lazy
        return func(*_built(args), **{k: _built((v,))[0] for k, v in kwargs.items()})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*_built(args), **{k: _built((v,))[0] for k, v in (kwargs or {}).items()})

    def _after(self, func: Callable, args: tuple, kwargs: dict) -> LazyLogits:
        def step(logits: Tensor) -> Tensor:
            return func(logits, *args, **kwargs)

        dtype = step(torch.empty(0, dtype=self.dtype)).dtype
        return LazyLogits.of(self.hidden, self.weight, self.bias, (*self.steps, step), dtype)


def _built(values: tuple) -> tuple:
    return tuple(x.build() if isinstance(x, LazyLogits) else x for x in values)


@contextmanager
def lazy_head(head: nn.Module) -> Iterator[None]:
    """While it is active, ``head`` returns `LazyLogits`; a head that is more than a matrix stays as it is."""
    if type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        yield
        return
    head.forward = lambda hidden: LazyLogits.of(hidden, head.weight, head.bias)
    try:
        yield
    finally:
        del head.forward
