"""Operations on tensors without data, with an account of the bytes that they would hold."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..no_data import NoData

_SMALL = 2**20  # elements of whole numbers or flags that are computed: positions and masks, which decide what code runs
_aten = torch.ops.aten
Phase = Hashable


class Ledger(NoData):
    """Counts the storages that operations make and let go of, by the phase in which each was made.

    Floating point tensors have no data; small tensors of whole numbers and flags do where they follow from shapes
    alone, as positions and most masks: a model's code asks whether a mask is needed at all.
    """

    def __init__(self, phase: Phase) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak: Counter[Phase] = Counter()  # of ``live``, in each phase
        self.began: dict[Phase, int] = {}  # ``live`` when it first began
        self._owned: dict[int, tuple[Phase, int, weakref.ref[torch.UntypedStorage]]] = {}
        self.enter(phase)

    def enter(self, phase: Phase) -> None:
        """What is made from now on belongs to ``phase``."""
        self.phase = phase
        self.began.setdefault(phase, self.live)
        self.peak[phase] = max(self.peak[phase], self.live)

    def kept(self) -> Counter[Phase]:
        """Bytes alive now, by the phase that made them."""
        found: Counter[Phase] = Counter()
        for phase, size, _ in self._owned.values():
            found[phase] += size
        return found

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """What is there before: it counts nowhere."""
        for tensor in tensors:
            self._note(tensor, 0)

    def assign(self, tensor: Tensor, phase: Phase) -> None:
        """Count the memory of ``tensor`` to ``phase``, whenever it was made."""
        key = tensor.untyped_storage()._cdata
        if key in self._owned:
            _, size, ref = self._owned[key]
            self._owned[key] = phase, size, ref

    def watch(self, tensor: Tensor) -> Callable[[], bool]:
        """Tells whether the memory of ``tensor`` is still there."""
        ref = weakref.ref(tensor.untyped_storage())
        return lambda: ref() is not None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._run(func, types, args, kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor, tensor.untyped_storage().nbytes())
        self.peak[self.phase] = max(self.peak[self.phase], self.live)
        return out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten.embedding.default:
            _check_positions(*args[:2])
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.is_meta for t in given):
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func is not _aten._local_scalar_dense.default:
            shaped = func(*_on_meta(args), **{**_on_meta(kwargs), **_device(kwargs, "meta")})
            if any(t.is_floating_point() or t.numel() > _SMALL for t in tree_leaves(shaped) if isinstance(t, Tensor)):
                return shaped
        return func(*args, **{**kwargs, **_device(kwargs, "cpu")})

    def _note(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._owned:
            self._owned[key] = self.phase, size, weakref.ref(storage, lambda _: self._drop(key))
            self.live += size

    def _drop(self, key: int) -> None:
        self.live -= self._owned.pop(key)[1]


def _check_positions(table: Tensor, wanted: Tensor) -> None:
    """Of what is looked up, only positions are computed; on the meta device a table has no end."""
    if not wanted.is_meta and wanted.max() >= len(table):
        raise ValueError(
            f"the model has an embedding of {len(table)} positions, and a row asks for number {wanted.max()}; give a "
            "smaller data.seq_len."
        )


def _on_meta(tree: Any) -> Any:
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, tree)


def _device(kwargs: dict[str, Any], device: str) -> dict[str, torch.device]:
    return {"device": torch.device(device)} if "device" in kwargs else {}


class FusedAttention(TorchFunctionMode):
    """Attention keeps what the kernel of a device would: queries, keys, values, output and a number a query.

    On CUDA that is flash attention in bfloat16 without a mask, else the memory-efficient kernel, whose mask is kept
    in the queries' dtype. What has no such kernel keeps its scores.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.kernel = {"cuda": _on_cuda, "cpu": _on_cpu}[device]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            out = self.kernel(*args, **kwargs)
            return func(*args, **kwargs) if out is None else out
        return func(*args, **kwargs)


def _on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if attn_mask is None and q.dtype == torch.bfloat16 and q.shape[-1] == v.shape[-1] <= 256:
        flash: Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return flash
    if enable_gqa and q.shape[1] != k.shape[1]:
        return None
    bias = None if attn_mask is None else _bias(attn_mask, q).expand(*q.shape[:3], k.shape[2])
    kernel = _aten._scaled_dot_product_efficient_attention
    efficient: Tensor = kernel(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
    return efficient


def _on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if dropout_p or q.shape[-1] != v.shape[-1]:
        return None
    bias = None if attn_mask is None else _bias(attn_mask, q)
    flash = _aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(q, k, v, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]
    return out


def _bias(mask: Tensor, q: Tensor) -> Tensor:
    """What torch adds to the scores for a mask of flags."""
    return torch.zeros(mask.shape, dtype=q.dtype, device="meta") if mask.dtype == torch.bool else mask.to(q.dtype)
