"""How much of a decoder layer's arithmetic tensor parallelism divides, by meshpar's plan and by transformers' own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from .blocks import OnFirst
from .flops import matrix_costs
from .primitives import features, linear
from .rules import OUT
from .tp_plan import Plan

# transformers' styles whose matrix products are divided; those that gather or split replicate what lies between.
_DIVIDED = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "colwise_rep",
    "rowwise_rep",
}


@dataclass(frozen=True)
class Share:
    """Parts of all decoder layers' multiply-adds, 0 to 1: divided by meshpar's plan and by transformers' own."""

    meshpar: float
    transformers: float


def divided_share(model: PreTrainedModel, plan: Plan, seq_len: int = 4096) -> Share:
    """The share of the decoder layers' multiply-adds a token that tp divides, attention over ``seq_len`` included.

    A matrix counts with its elements, stacked experts with the part of them that a token visits. Scans and
    convolutions of recurrent layers count with their weights alone.
    """
    work = list(_work(model, plan, seq_len))
    total = sum(flops for flops, _, _ in work)
    ours, theirs = (sum(flops for flops, *by in work if by[i]) for i in range(2))
    return Share(ours / total, theirs / total) if total else Share(0.0, 0.0)


def _declared_styles(model: PreTrainedModel) -> dict[str, str]:
    """The model's own tensor-parallel declaration: full module pattern -> transformers' style string."""
    declared = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    return {f"{model.base_model_prefix}.{pattern}": style for pattern, style in declared.items()}


def _declared_style(declared: Mapping[str, str], name: str) -> str | None:
    """What a declaration says of a module or parameter: `*` is a layer's index, a pattern names it in full."""
    matches = (s for pattern, s in declared.items() if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name))
    return next(matches, None)


def _work(model: PreTrainedModel, plan: Plan, seq_len: int) -> Iterator[tuple[float, bool, bool]]:
    """(multiply-adds a token, divided by meshpar, divided by transformers) of each matrix and attention."""
    declared = _declared_styles(model)
    costs = matrix_costs({n: p.shape for n, p in model.named_parameters()}, model.config)
    for name, cost in costs.items():
        if plan.anatomy.layer_index(name) is None:
            continue
        block = plan.block_of(name)
        cut = plan.blocks[block].cuts.get(name.removeprefix(f"{block}.")) if block else None
        style = _declared_style(declared, name) or _declared_style(declared, name.rpartition(".")[0])
        yield cost, cut is not None and not isinstance(cut, OnFirst), style in _DIVIDED
    for name in plan.children:
        module = model.get_submodule(name)
        out = linear(module, OUT)
        if out is not None and _has_heads(module):
            by_heads = name in plan.blocks and plan.blocks[name].heads is not None
            width = features(module.get_submodule(out))[1]
            yield seq_len * width, by_heads, _declared_style(declared, f"{name}.{out}") in ("rowwise", "rowwise_rep")


def _has_heads(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in ("head_dim", "head_size", "num_heads", "num_attention_heads"))
