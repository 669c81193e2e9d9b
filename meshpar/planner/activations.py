"""What a forward of one microbatch keeps for its backward, and what either needs beside it: measured without data.

The model's own code, with the styles and the checkpointing of the mesh, runs forward and backward on the meta device,
one layer of each kind; every storage is accounted for (`ledger`), in bytes of this rank of the tp group. FSDP is left
out: parameters are whole, as it shows them to a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

from ..blocks import hidden_argument
from ..checkpointing import apply_checkpointing
from ..config import ParallelConfig, torch_dtype
from ..layout import spread
from ..loss import LazyLogits, cross_entropy_sum
from ..split import Runner, Stage
from ..stages import StageRange
from .ledger import FusedAttention, Ledger, Phase
from .skeleton import Skeleton, standing_for

_START, _EMBEDDING, _HEAD, _LOSS, _BACKWARD = "start", "embedding", "head", "loss", "backward"


@dataclass(frozen=True)
class Kept:
    """Bytes of one part of a model: ``kept`` for the backward of a microbatch, and the most that its forward and its
    backward hold above what is kept of all parts up to it. The backward's include the part's gradients, whole.
    ``with_output``: whether what it returns is among what is kept. ``between``: what is left after a backward for
    inputs alone, for the one for weights; 0 without a pipeline."""

    kept: int
    forward: int
    backward: int
    with_output: bool = False
    between: int = 0


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch: each decoder layer; the embedding; masks and positions, which every stage makes; what
    is between the last layer and the loss; the loss with the head. ``hidden``: what passes between stages."""

    layers: list[Kept]
    embedding: Kept
    shared: Kept
    head: Kept
    loss: Kept
    hidden: int

    def of_stage(self, r: StageRange) -> int:
        """Bytes that autograd keeps of a microbatch on a stage, its output included and the loss left out."""
        layers = self.layers[r.start : r.stop]
        kept = self.shared.kept + sum(layer.kept for layer in layers) + (self.embedding.kept if r.is_first else 0)
        if r.is_last:
            return kept + self.head.kept
        return kept + (0 if layers[-1].with_output else self.hidden)

    def between(self, r: StageRange) -> int:
        """Bytes that are left on a stage between the two parts of a microbatch's backward."""
        layers = self.layers[r.start : r.stop]
        left = self.shared.between + sum(layer.between for layer in layers)
        if r.is_last:
            return left + self.head.between + self.loss.between
        return left + (0 if layers[-1].with_output else self.hidden)  # torch holds a stage's output that long


def measure(
    skeleton: Skeleton,
    config: ParallelConfig,
    rows: int,
    seq_len: int,
    *,
    packed: bool = False,
    device: str = "cuda",
    lazy: bool = True,
) -> Activations:
    """Trace a microbatch of [rows, seq_len] tokens; ``skeleton`` is used up.

    ``packed``: rows hold several documents, which takes a mask. ``device``: whose attention kernels, "cuda" or "cpu".
    ``lazy``: head and loss go through a part of the tokens at a time; else logits are built whole, in float32.
    Raises ValueError where the model's code does not run on what tp leaves of it, which `parallelize_model` refuses.
    """
    apply_checkpointing(skeleton.model, skeleton.plan.anatomy, config.activation_checkpoint, skeleton.tp)
    traced = _keep_few(skeleton)
    _as_gathered(skeleton.model, config)
    if not any(p.requires_grad for p in skeleton.model.parameters()):
        raise ValueError(f"no parameter of {type(skeleton.model).__name__} trains, so there is no training step.")
    run = _Run(skeleton, traced, rows, seq_len, packed, lazy)
    with FusedAttention(device), run.ledger:
        try:
            run.forward()
        except (RuntimeError, ValueError) as error:
            label, why = type(skeleton.model).__name__, str(error).splitlines()[0]
            sp = str(skeleton.tp.sequence_parallel).lower()
            raise ValueError(f"{label} does not run at tp={config.tp}, sequence_parallel={sp}: {why}") from error
        run.backward()
        found = run.result()
        return run.with_split_backward(found) if config.pp > 1 else found


def _keep_few(skeleton: Skeleton) -> list[int]:
    """Leave of layers that are alike a few; the others pass their hidden states on. Returns which stand for which."""
    anatomy, found = skeleton.plan.anatomy, standing_for(skeleton.kinds)
    for i, first in enumerate(found):
        if i != first:
            like = skeleton.model.get_submodule(anatomy.layer(first))
            skeleton.model.set_submodule(anatomy.layer(i), _Alike(like))
    return found


class _Alike(nn.Module):
    """Stands for a layer that is like one before it: shows its attributes, and returns its own hidden states."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self._like = (like,)
        self._output: Callable[[Tensor], Any] | None = None
        like.register_forward_hook(self._note)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_like"][0], name)

    def _note(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kind = type(output)
        self._output = None if isinstance(output, Tensor) else partial(_with_hidden, kind, output[1:])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[str(hidden_argument(args, kwargs))]
        return self._output(hidden) if self._output else hidden


def _with_hidden(kind: type, others: Sequence[Any], hidden: Tensor) -> Any:
    return kind((hidden, *(None if isinstance(x, Tensor) else x for x in others)))


def _as_gathered(model: nn.Module, config: ParallelConfig) -> None:
    """Parameters in the dtype that FSDP gathers them in, and buffers without data."""
    dtype = torch_dtype(config.compute_dtype)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                data = torch.empty(param.shape, dtype=dtype, device="meta")
                made.setdefault(param, nn.Parameter(data, param.requires_grad))
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


class _Run:
    """One forward and backward of a model, in phases."""

    def __init__(
        self, skeleton: Skeleton, standing_for: list[int], rows: int, seq_len: int, packed: bool, lazy: bool
    ) -> None:
        self.skeleton, self.standing_for, self.seq_len, self.lazy = skeleton, standing_for, seq_len, lazy
        anatomy, model = skeleton.plan.anatomy, skeleton.model.train()
        self.traced = sorted(set(standing_for))
        self.runner = Runner(model, anatomy, [Stage(StageRange(0, 1, 0, anatomy.num_layers))], skeleton.tp)
        self.ledger = Ledger(_START)
        self.hidden = 0
        self.splitting = False  # a stage's input needs a gradient, whether or not the embedding does
        self.entered: Tensor
        self.outputs: dict[int, Callable[[], bool]] = {}
        self.inputs = {"input_ids": torch.empty((rows, seq_len), dtype=torch.int64, device="meta")}
        if packed:
            self.inputs["position_ids"] = (torch.arange(seq_len) % -(-seq_len // 2)).expand(rows, -1)
        self.targets = torch.empty((rows, seq_len), dtype=torch.int64, device="meta")
        self.ledger.ignore([*model.parameters(), *model.buffers(), *self.inputs.values(), self.targets])
        self._hook_parts()

    def _hook_parts(self) -> None:
        model, anatomy = self.skeleton.model, self.skeleton.plan.anatomy
        for name in self.skeleton.plan.flow.before:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_: self.ledger.enter(_EMBEDDING), prepend=True)
            module.register_forward_hook(lambda *_: self.ledger.enter(_START))
        for i in self.traced:
            layer = model.get_submodule(anatomy.layer(i))
            layer.register_forward_pre_hook(partial(self._enter_layer, i), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave_layer, i))

    def _enter_layer(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs[str(hidden_argument(args, kwargs))]
        if index == 0:
            self.ledger.assign(hidden, _EMBEDDING)
            self.hidden = hidden.nbytes
            if self.splitting:
                self.entered = hidden.requires_grad_()
            self._on_gradient(hidden, (_BACKWARD, _EMBEDDING))
        self.ledger.enter(index)

    def _leave_layer(self, index: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        self._on_gradient(hidden, (_BACKWARD, index))
        self.outputs[index] = self.ledger.watch(hidden)
        if index == self.traced[-1]:
            self.ledger.enter(_HEAD)

    def _on_gradient(self, tensor: Tensor, phase: Phase) -> None:
        def enter(_: Tensor) -> None:
            for param in self.skeleton.model.parameters():  # a part's gradients leave with it
                param.grad = None
            self.ledger.enter(phase)

        if tensor.requires_grad:
            tensor.register_hook(enter)

    def forward(self) -> None:
        self.loss = self.runner(0, self.inputs["input_ids"], self.seq_len, self._loss, **self.inputs)
        self.kept = self.ledger.kept()
        self.kept_outputs = {i for i, alive in self.outputs.items() if alive()}

    def _loss(self, logits: Tensor) -> Tensor:
        self.ledger.enter(_LOSS)
        tp, head = self.skeleton.tp, self.skeleton.specs[f"{self.skeleton.plan.anatomy.head}.weight"]
        real = spread(head.shape[0], tp.size).real(0)
        if not self.lazy and isinstance(logits, LazyLogits):
            logits = logits.build().float()
        return cross_entropy_sum(logits, self.targets, 0, real, tp.group)

    def backward(self, inputs: tuple[Tensor, ...] = ()) -> None:
        """For everything, or for ``inputs`` alone; then the graph stays."""
        self.ledger.enter((_BACKWARD, _LOSS))
        # Not `loss.backward()`: what that runs, a mode that replaces functions does not see.
        one, some = torch.ones_like(self.loss), bool(inputs)
        Variable._execution_engine.run_backward((self.loss,), (one,), some, False, inputs, True, not some)

    def with_split_backward(self, found: Activations) -> Activations:
        """``found`` with what another forward leaves after its backward for inputs alone."""
        self.splitting = True
        self.forward()
        weights = [get_gradient_edge(p).node for p in self.skeleton.model.parameters() if p.requires_grad]
        ends = [get_gradient_edge(t).node for t in (self.loss, self.entered)]
        groups = get_param_groups([ends[1]], weights, construct_reverse_graph([ends[0]]))
        for_weights = [node for group in groups for node in group["intermediates"]]
        gradients: list[tuple[Tensor | None, ...]] = []
        for node in for_weights:
            node.register_prehook(gradients.append)
        self.backward((self.entered,))
        del self.loss, groups, ends
        left = self.ledger.kept()
        between = {phase: left[phase] + left[_BACKWARD, phase] for phase in (_START, *self.traced, _HEAD, _LOSS)}
        return replace(
            found,
            layers=[replace(found.layers[i], between=between[i]) for i in self.standing_for],
            shared=replace(found.shared, between=between[_START]),
            head=replace(found.head, between=between[_HEAD]),
            loss=replace(found.loss, between=between[_LOSS]),
        )

    def result(self) -> Activations:
        """From what was alive between forward and backward, by the phase that made it."""
        ledger, kept, below = self.ledger, self.kept, 0
        found: dict[Phase, Kept] = {}
        for phase in (_START, _EMBEDDING, *self.traced, _HEAD, _LOSS):
            below += kept[phase]
            forward = ledger.peak[phase] - ledger.began.get(phase, 0)
            backward = ledger.peak[_BACKWARD, phase] - below
            with_output = phase in self.kept_outputs
            found[phase] = Kept(kept[phase], forward, max(backward, 0), with_output)
        return Activations(
            layers=[found[i] for i in self.standing_for],
            embedding=found[_EMBEDDING],
            shared=found[_START],
            head=found[_HEAD],
            loss=found[_LOSS],
            hidden=self.hidden,
        )
