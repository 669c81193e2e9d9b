"""Dropout over the tp group: one mask where tp peers hold the same activations, their own where each has a part.

torch's default generator runs alike on tp peers (`rng.seed_rank` seeds it so): that is the common stream, right for
dropout on replicated activations. Where activations are split (by heads inside a block; by positions under sequence
parallelism) a rank leaves it for a stream of its own and comes back at the end. Each own stream starts from a number
drawn from the common one, so activation checkpointing, which restores that one, replays the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .plan import Plan

if TYPE_CHECKING:
    from .styles import TensorParallel

# Drop attention weights, which are split by heads on every mesh.
_OF_HEADS = {"attention_dropout", "attn_pdrop"}


def dropout_names(model: PreTrainedModel) -> set[str]:
    """The config's settings and the modules of ``model`` that drop with a probability above zero."""
    settings = model.config.get_text_config().to_dict().items()
    named = {k for k, v in settings if "drop" in k and isinstance(v, int | float) and v > 0}
    return named | {n for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0}


def apply_dropout(model: PreTrainedModel, plan: Plan, tp: TensorParallel) -> None:
    """Give each rank its own masks where activations are split; a model without dropout stays as it is."""
    names = dropout_names(model)
    if not names:
        return
    for start, end in _split_regions(model, plan, tp.sequence_parallel):
        stream = _OwnStream(tp.mesh.device_type, tp.rank)
        start.register_forward_pre_hook(stream.enter)
        for module in dict.fromkeys((start, end)):  # the start, too: an exception may never reach the end
            module.register_forward_hook(stream.leave, always_call=True)
    if names - _OF_HEADS:
        _check_once(model.get_submodule(plan.anatomy.base), tp)


def _split_regions(model: nn.Module, plan: Plan, sequence_parallel: bool) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(where it starts, where it ends): decoder layers, or blocks up to their rowwise sum, which replicates again."""
    if sequence_parallel:
        for i in range(plan.anatomy.num_layers):
            layer = model.get_submodule(plan.anatomy.layer(i))
            yield layer, layer
        return
    for name, role in plan.roles.items():
        block = name.rpartition(".")[0]
        if role == "rowwise" and plan.get(block) == "block":
            yield model.get_submodule(block), model.get_submodule(name)


class _OwnStream:
    """Switches the device's default generator between the common stream and this rank's own."""

    def __init__(self, device_type: str, rank: int) -> None:
        self.device_type, self.rank = device_type, rank
        self.common: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple) -> None:
        if not module.training:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = _generator(self.device_type)
        self.common = generator.get_state()
        generator.manual_seed(seed + self.rank)

    def leave(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        if module.training and self.common is not None:
            _generator(self.device_type).set_state(self.common)
            self.common = None


def _generator(device_type: str) -> torch.Generator:
    return (
        torch.default_generator if device_type == "cpu" else torch.cuda.default_generators[torch.cuda.current_device()]
    )


def _check_once(base: nn.Module, tp: TensorParallel) -> None:
    """Before the first training forward: RuntimeError if tp peers would drop different elements of what both hold."""

    def check(module: nn.Module, args: tuple) -> None:
        if not module.training:
            return
        handle.remove()
        states = torch.cat((torch.get_rng_state(), _generator(tp.mesh.device_type).get_state()))
        digest = int.from_bytes(hashlib.sha256(states.numpy().tobytes()).digest()[:7], "little")
        own = torch.tensor([digest], device=tp.mesh.device_type)
        peers = [torch.empty_like(own) for _ in range(tp.size)]
        dist.all_gather(peers, own, group=tp.group)
        if any(int(peer) != digest for peer in peers):
            raise RuntimeError(
                "tp peers have different random states, so their dropout masks for the same activations would differ; "
                'seed them alike: torch.manual_seed(seed + model.mesh["dp"].get_local_rank())'
            )

    handle = base.register_forward_pre_hook(check)
