"""The parts of a Hugging Face causal language model that every step names: embedding, layers, last norm, head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Anatomy:
    """Dotted module names inside the model: its decoder stack and what stands before and after it."""

    base: str
    layers: str
    num_layers: int
    embedding: str
    tail: tuple[str, ...]
    head: str
    tied: bool

    def layer(self, index: int) -> str:
        """Name of decoder layer ``index``."""
        return f"{self.layers}.{index}"

    def layer_index(self, name: str) -> int | None:
        """The decoder layer that holds module or parameter ``name``, or None."""
        prefix = self.layers + "."
        return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model``; raises ValueError naming what is missing in a model that is no decoder-only LM."""
    names = {module: name for name, module in model.named_modules()}
    label = type(model).__name__
    base = getattr(model, model.base_model_prefix, None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if base is None or embedding is None or head is None:
        raise ValueError(f"{label} is not a causal language model with an embedding, a decoder stack and a head")
    layers = _layer_list(model, base)
    if layers is None:
        raise ValueError(f"{label} has no list of {_num_layers(model)} decoder layers that meshpar could split")
    return Anatomy(
        base=names[base],
        layers=names[layers],
        num_layers=len(layers),
        embedding=names[embedding],
        tail=tuple(names[m] for m in _after(base, layers)),
        head=names[head],
        tied=getattr(head, "weight", None) is embedding.weight,
    )


def _num_layers(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_hidden_layers


def _layer_list(model: PreTrainedModel, base: nn.Module) -> nn.ModuleList | None:
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == _num_layers(model)]
    return lists[0] if len(lists) == 1 else None


def _after(base: nn.Module, layers: nn.ModuleList) -> list[nn.Module]:
    children = list(base.children())
    following = children[children.index(layers) + 1 :]
    return [m for m in following if next(m.parameters(), None) is not None]
