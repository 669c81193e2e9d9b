"""Modules that compute one known function: a product with a matrix, an element-wise function, an RMS norm.

A class says little, as models bring their own; so a module is told by what a copy of it makes of a few numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear(block: nn.Module, names: tuple[str, ...]) -> str | None:
    """The one child of that name that is a plain product with a matrix."""
    found = [name for name in names if is_product(getattr(block, name, None))]
    return found[0] if len(found) == 1 else None


def features(module: nn.Module) -> tuple[int, int]:
    """Output and input features of a product with a matrix."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D) else (rows, columns)


def is_product(module: Any) -> bool:
    """nn.Linear, transformers' Conv1D, or a subclass of nn.Linear that does no more than multiply: tried out."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    return isinstance(module, nn.Linear) and not hasattr(module, "parametrizations") and _only_multiplies(module)


def _only_multiplies(module: nn.Linear) -> bool:
    generator, twin = torch.Generator().manual_seed(0), copy.copy(module)
    twin._parameters = dict.fromkeys(module._parameters)
    if twin._parameters.keys() != {"weight", "bias"} or next(twin.buffers(), None) is not None:
        return False
    twin.in_features, twin.out_features = 4, 3
    x, weight = (torch.randn(n, 4, generator=generator) for n in (2, 3))
    bias = None if module.bias is None else torch.randn(3, generator=generator)
    twin.weight, twin.bias = (None if p is None else nn.Parameter(p, requires_grad=False) for p in (weight, bias))
    want = F.linear(x, weight, bias)[None]
    try:
        return all(torch.allclose(twin.train(mode)(x[None]), want, rtol=1e-5, atol=1e-6) for mode in (True, False))
    except Exception:  # whatever a class of its own raises on other sizes
        return False


def is_element_wise(module: nn.Module) -> bool:
    """Whether parts of a vector, or of two, give parts of the result: tried out on a copy, in double precision."""
    if isinstance(module, nn.Identity | nn.modules.dropout._DropoutNd):
        return True
    generator, twin = torch.Generator().manual_seed(0), copy.deepcopy(module).eval()
    given = torch.randn(2, 2, 3, 6, dtype=torch.float64, generator=generator)
    return any(_is_element_wise_in(twin, *given[:count]) for count in (1, 2))


def _is_element_wise_in(module: nn.Module, *given: Tensor) -> bool:
    try:
        whole = module(*given)
        parts = torch.cat([module(*part) for part in zip(*(x.split((4, 2), dim=-1) for x in given), strict=True)], -1)
    except Exception:  # whatever a module that is no function of so many tensors raises
        return False
    return isinstance(whole, Tensor) and whole.shape == given[0].shape and torch.allclose(whole, parts)


def is_rms_norm(norm: nn.Module) -> bool:
    """Whether it computes weight * x / sqrt(mean(x^2) + eps), and not (1 + weight) * ... or a LayerNorm: tried out."""
    generator, twin = torch.Generator().manual_seed(0), copy.deepcopy(norm)
    weight, x = torch.randn(2, norm.weight.shape[0], generator=generator)
    twin.weight = nn.Parameter(weight, requires_grad=False)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if not isinstance(eps, float):
        return False
    try:
        y = twin(x)
    except Exception:  # no norm at all: whatever an unknown module raises on one vector
        return False
    expected = weight * x * torch.rsqrt(x.pow(2).mean() + eps)
    return isinstance(y, torch.Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-5)
