"""What a tp rank computes of each decoder layer and of the head for one token, read off the shapes of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..anatomy import Anatomy, dissect
from ..config import ParallelConfig
from ..flops import flops_per_token, matrix_costs, setting
from .communication import Parameter

Shapes = Mapping[str, Sequence[int]]

# Bytes that element-wise operations of a Llama layer move, in eager transformers: of each element of a norm's weight
# (its input goes to float32 and back) and of each output of a matrix (residual sums, rotation, activation and gate).
# Counted over every operation of the layer; compiled, most of them are one kernel.
_POINTWISE = {"bfloat16": (36, 7), "float32": (28, 14)}
_FUSED = 0.3
_OPERATIONS = 4  # a parameter, in a forward
_LOGIT_BYTES = 40  # of each logit, in the loss and its gradient


@dataclass(frozen=True)
class Work:
    """A decoder layer, or the head, on one tp rank.

    ``products``: multiply-adds a token in matrices, of experts those it visits. ``attention``: multiply-adds a token
    and position that it looks at. ``pointwise``: bytes a token moved by everything else. ``weights``: elements of the
    matrices. ``stored``: rows and elements a row of each parameter. ``operations``: started in a forward.
    """

    products: float
    attention: float
    pointwise: float
    weights: float
    stored: tuple[Parameter, ...]
    operations: int


@dataclass(frozen=True)
class ModelWork:
    """All layers, and the head with the loss; ``rest``: parameters outside both. A ``tied`` head is the embedding."""

    hidden: int
    layers: tuple[Work, ...]
    head: Work
    tied: bool
    rest: tuple[Parameter, ...]
    parameters: int
    flops_per_token: int


def model_work(model: PreTrainedModel, config: ParallelConfig, seq_len: int, stored: Shapes | None = None) -> ModelWork:
    """The work of a skeleton.

    ``model`` has its whole shapes. ``stored``: parameter name -> shape of what a tp rank stores of it (a plan's
    `ParamSpec.local_shape`); None divides every matrix by tp.
    """
    anatomy = dissect(model)
    full = {name: tuple(p.shape) for name, p in model.named_parameters()}
    local = {name: tuple(stored[name]) if stored else _divided(shape, config.tp) for name, shape in full.items()}
    costs = matrix_costs(full, model.config)
    costs = {name: cost * _part(local[name], full[name]) for name, cost in costs.items()}
    heads = _Heads.of(model.config.get_text_config(), config.tp)
    groups: dict[int | str, list[str]] = {}
    for name in full:
        groups.setdefault(_place(anatomy, name), []).append(name)
    alike: dict[Work, Work] = {}  # one object for layers that are alike
    each = (_layer(groups[i], local, costs, heads, config) for i in range(anatomy.num_layers))
    layers = tuple(alike.setdefault(layer, layer) for layer in each)
    weight = model.get_parameter(f"{anatomy.head}.weight")
    shared = [name for name, p in model.named_parameters() if p is weight and _place(anatomy, name) != "head"]
    return ModelWork(
        hidden=weight.shape[-1],
        layers=layers,
        head=_head(groups.get("head", []) + shared, local, costs),
        tied=bool(shared),
        rest=tuple(_rows(local[name]) for name in groups.get("rest", [])),
        parameters=sum(math.prod(shape) for shape in full.values()),
        flops_per_token=flops_per_token(full, model.config, seq_len),
    )


def _place(anatomy: Anatomy, name: str) -> int | str:
    index = anatomy.layer_index(name)
    if index is not None:
        return index
    return "head" if name.startswith(f"{anatomy.head}.") else "rest"


def _layer(
    names: Sequence[str], local: Shapes, costs: Mapping[str, float], heads: _Heads, config: ParallelConfig
) -> Work:
    matrices = [name for name in names if name in costs]
    norms = sum(heads.times(local[name]) for name in names if name not in costs and not name.endswith("bias"))
    norm_bytes, output_bytes = _POINTWISE[config.compute_dtype]
    # Norms between the blocks are on shards of the sequence, those of heads on the heads of this rank.
    pointwise = norm_bytes * norms / (config.tp if config.sequence_parallel else 1)
    pointwise += output_bytes * sum(costs[name] / local[name][-1] for name in matrices)
    return Work(
        products=sum(costs[name] for name in matrices),
        attention=heads.count * heads.width,
        pointwise=pointwise * (_FUSED if config.compile else 1.0),
        weights=sum(math.prod(local[name]) for name in matrices),
        stored=tuple(_rows(local[name]) for name in names),
        operations=math.ceil(_OPERATIONS * len(names) * (_FUSED if config.compile else 1.0)),
    )


def _head(names: Sequence[str], local: Shapes, costs: Mapping[str, float]) -> Work:
    matrices = [name for name in names if name in costs]
    return Work(
        products=sum(costs[name] for name in matrices),
        attention=0.0,
        pointwise=_LOGIT_BYTES * sum(local[name][0] for name in matrices),
        weights=sum(math.prod(local[name]) for name in matrices),
        stored=tuple(_rows(local[name]) for name in names),
        operations=10,
    )


@dataclass(frozen=True)
class _Heads:
    """Query heads of a tp rank, and the mean number of elements in a head's key and value, times two."""

    count: int
    width: int
    all: float  # query and key-value heads of a tp rank, halved
    size: int

    @classmethod
    def of(cls, text: Any, tp: int) -> _Heads:
        def number(name: str, default: int = 0) -> int:
            return setting(text, name) or default

        heads = number("num_attention_heads")
        size = number("head_dim") or (number("hidden_size") // heads if heads else 0)
        qk, v = number("qk_nope_head_dim") + number("qk_rope_head_dim"), number("v_head_dim")
        width = qk + v if qk and v else 2 * size
        count = -(-heads // tp)
        return cls(count, width, (count + max(1, number("num_key_value_heads", heads) // tp)) / 2, size)

    def times(self, shape: Sequence[int]) -> float:
        """Elements that a norm's weight of ``shape`` is laid over: one of a head is laid over each of them."""
        elements = math.prod(shape)
        return elements * self.all if elements == self.size else elements


def _divided(shape: Sequence[int], tp: int) -> tuple[int, ...]:
    """A tp rank's part of a matrix at least."""
    return (max(1, shape[0] // tp), *shape[1:]) if len(shape) > 1 else tuple(shape)


def _part(local: Sequence[int], full: Sequence[int]) -> float:
    return math.prod(local) / math.prod(full)


def _rows(shape: Sequence[int]) -> Parameter:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
