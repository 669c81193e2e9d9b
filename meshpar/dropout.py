"""Dropout over the tp group: one mask where tp peers hold the same activations, their own where each has a part.

torch's default generator runs alike on tp peers (`rng.seed_rank` seeds it so): that is the common stream, right for
dropout on replicated activations. Where activations are split (by heads inside a block; by positions under sequence
parallelism) a rank leaves it for a stream of its own and comes back at the end. Each own stream starts from a number
drawn from the common one, so activation checkpointing, which restores that one, replays the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from .tensor_parallel import TensorParallel
from .tp_plan import Plan

# Drop attention weights, which in a block are split by heads on every mesh.
_OF_HEADS = {"attention_dropout", "attn_pdrop"}
# Of heads that a causal language model has not.
_OTHER_HEADS = ("summary", "classifier")


def dropout_names(model: PreTrainedModel) -> set[str]:
    """The config's settings and the modules of ``model`` that drop, or jitter, with a strength above zero."""
    settings = model.config.get_text_config().to_dict().items()
    named = {
        k
        for k, v in settings
        if ("drop" in k or "jitter" in k) and isinstance(v, int | float) and v > 0 and not k.startswith(_OTHER_HEADS)
    }
    return named | {n for n, m in model.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0}


def apply_dropout(model: PreTrainedModel, plan: Plan, tp: TensorParallel) -> None:
    """Give each rank its own masks where activations are split; a model without dropout stays as it is."""
    names = dropout_names(model)
    if not names:
        return
    streams = _Streams(tp.mesh.device_type, tp.rank)
    if tp.sequence_parallel:
        for i in range(plan.anatomy.num_layers):
            _run_in(streams.own, model.get_submodule(plan.anatomy.layer(i)))
        # Routers must jitter alike, and the same mask on each rank's part of a sum is that mask on the sum.
        for name, style in plan.items():
            if style in ("whole", "block_sum"):
                _run_in(streams.common, model.get_submodule(name))
    else:
        for start, end, around in _blocks(model, plan):
            start.register_forward_pre_hook(lambda module, _: streams.enter() if module.training else None)
            for module in (end, around):  # an exception may never reach the end
                module.register_forward_hook(lambda *_: streams.leave(), always_call=True)
    alike = any(style in ("whole", "block_sum") for style in plan.values())
    if names - _OF_HEADS or alike:
        _check_once(model.get_submodule(plan.anatomy.base), tp)


def _blocks(model: nn.Module, plan: Plan) -> Iterator[tuple[nn.Module, nn.Module, nn.Module]]:
    """(block, its rowwise projection, what holds both): what lies between is split, what comes after the sum is not."""
    for name, role in plan.roles.items():
        around = name.rpartition(".")[0]
        start = around if role == "rowwise" and plan.get(around) == "block" else None
        if role == "pair_out":
            start = next(n for n, r in plan.roles.items() if r == "pair_in" and n.rpartition(".")[0] == around)
        if start is not None:
            yield model.get_submodule(start), model.get_submodule(name), model.get_submodule(around)


def _run_in(stream: Callable[[], AbstractContextManager[None]], module: nn.Module) -> None:
    """Inside the module's forward, so that what computes it again switches again."""
    inner = module.forward

    def forward(*args, **kwargs):
        with stream() if module.training else nullcontext():
            return inner(*args, **kwargs)

    module.forward = forward


class _Streams:
    """Switches the device's default generator between the common stream and this rank's own."""

    def __init__(self, device_type: str, rank: int) -> None:
        self.device_type, self.rank = device_type, rank
        self._common: Tensor | None = None  # the common stream's state, while this rank is on its own

    @torch.compiler.disable
    def enter(self) -> None:
        """Leave the common stream for one that starts from a number drawn from it."""
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = _generator(self.device_type)
        self._common = generator.get_state()
        generator.manual_seed(seed + self.rank)

    @torch.compiler.disable
    def leave(self) -> None:
        """Back to the common stream, if this rank had left it."""
        if self._common is not None:
            _generator(self.device_type).set_state(self._common)
            self._common = None

    @contextmanager
    def own(self) -> Iterator[None]:
        """This rank's own stream."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def common(self) -> Iterator[None]:
        """The common stream, within `own`."""
        generator = _generator(self.device_type)
        own, common = generator.get_state(), self._common
        generator.set_state(common)
        try:
            yield
            self._common = generator.get_state()
        finally:
            generator.set_state(own)


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
