"""The parts of a Hugging Face causal language model that every step names: embedding, decoder layers, head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from .config import num_layers


@dataclass(frozen=True)
class Anatomy:
    """Dotted module names inside the model: its decoder layers, the embedding, what follows the layers, the head."""

    base: str
    layers: str
    num_layers: int
    embedding: str
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
    embedding, head, layers = _embedding(model), model.get_output_embeddings(), _layer_list(model)
    if layers is None or not all(isinstance(getattr(m, "weight", None), nn.Parameter) for m in (embedding, head)):
        raise ValueError(
            f"{label} is not a causal language model with an embedding, a list of decoder layers and a head"
        )
    return Anatomy(
        base=names[layers].rpartition(".")[0].partition(".")[0],
        layers=names[layers],
        num_layers=len(layers),
        embedding=names[embedding],
        head=names[head],
        tied=head.weight is embedding.weight,
    )


def _embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list as long as the config says, or of any length where none is; of several the least deep, then the largest.

    Others of that length are experts in a layer, towers for images, or norms that a model keeps beside its layers.
    """
    wanted = num_layers(model.config.get_text_config())
    decoder = model.get_decoder()
    lists = list(_outermost_lists(decoder if isinstance(decoder, nn.Module) else model)) or list(
        _outermost_lists(model)
    )
    right = [(d, m) for d, m in lists if len(m) == wanted] or lists
    return max(right, key=lambda x: (-x[0], sum(p.numel() for p in x[1].parameters())), default=(0, None))[1]


def _outermost_lists(module: nn.Module, depth: int = 0) -> Iterator[tuple[int, nn.ModuleList]]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child):
            yield depth, child
        else:
            yield from _outermost_lists(child, depth + 1)
