"""Which rank, microbatch and module made a step's numbers NaN or infinite: the step is run again and looked at.

Training itself checks two numbers a step. Once they are wrong, the same batch goes through the same weights with hooks
on every module, forward and backward, and what comes first is reported: by microbatch, then by stage, then by module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .batch import Batches
from .grads import local
from .model import ParallelModel
from .pipeline import StageModule
from .rng import rng_state, set_rng_state
from .schedules import splits_backward
from .split import Hole

# In this order: what is wrong before the step starts makes the rest wrong, too.
_WEIGHTS, _FORWARD, _BACKWARD, _SUMS = range(4)
_PHASES = {_WEIGHTS: "before the step", _FORWARD: "forward", _BACKWARD: "backward", _SUMS: "summed over ranks"}

Order = tuple[int, ...]


@dataclass(frozen=True)
class Culprit:
    """Where the first NaN or infinity of a step was seen; ``microbatch`` counts from 0, None where it is not known.

    ``where`` is a module, a place within one ("model.layers.1.self_attn before o_proj"), or a parameter.
    """

    rank: int
    coordinates: str
    microbatch: int | None
    where: str
    phase: str

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        return f"rank {self.rank} ({self.coordinates}){microbatch}, in {self.where} ({self.phase})"


def find_nonfinite(model: ParallelModel, batch: Batches, random: dict[str, Tensor] | None = None) -> Culprit | None:
    """Run `forward_backward` on ``batch`` and tell where its numbers first are not finite; None: nowhere. Collective.

    ``random``: the generators' state from before the step, so that dropout is the same. Gradients are dropped.
    """
    device = model._mesh.device
    after = rng_state(device)
    if random is not None:
        set_rng_state(random, device)
    watch = _Inspection(model)
    watch.check_all(_WEIGHTS, [*model.named_parameters(), *model.named_buffers()])
    model.zero_grad()
    # Where layers are compiled, hooks inside them are not seen.
    with torch.compiler.set_stance("force_eager"), watch.hooks():
        model.forward_backward(batch)
    watch.check_all(_SUMS, [(n, p.grad) for n, p in reversed(list(model.named_parameters())) if p.grad is not None])
    model.zero_grad()
    set_rng_state(after, device)
    return _first_of_all(watch.first(), model)


def _first_of_all(own: tuple[Order, int | None, str] | None, model: ParallelModel) -> Culprit | None:
    culprit = None
    if own is not None:
        order, microbatch, where = own
        place = ", ".join(f"{dim}={model._mesh.rank(dim)}" for dim in ("pp", "dp", "tp"))
        culprit = order, Culprit(dist.get_rank(), place, microbatch, where, _PHASES[order[0]])
    everyone: list[tuple[Order, Culprit] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, culprit)
    found = [seen for seen in everyone if seen is not None]
    return min(found, key=lambda seen: seen[0])[1] if found else None  # of equals, the lowest rank


class _Inspection:
    """What this rank sees in one step: of each phase, microbatch and stage the first tensor that is not finite."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.skeleton, self.head = model._runner.model, model.plan.anatomy.head
        self.names = {m: n for n, m in self.skeleton.named_modules() if not isinstance(m, Hole)}
        self.seen: dict[Order, tuple[Order, int | None, str]] = {}
        self.running: list[str] = []  # modules whose forward is under way, the innermost last
        self.passes: Counter[int] = Counter()  # forwards of each stage
        self.at = self.backward_at = (0, 0)  # microbatch and stage
        self.count = 0
        config = model.parallel_config
        self.split_backward = splits_backward(config)
        self.params: set[nn.Parameter] = set()
        self.handles: list[RemovableHandle] = []

    def first(self) -> tuple[Order, int | None, str] | None:
        """(order, microbatch, where) of the first of all."""
        return min(self.seen.values(), default=None)

    def check_all(self, phase: int, tensors: list[tuple[str, Tensor]]) -> None:
        """Check ``tensors`` by name, outside of the step."""
        for i, (name, tensor) in enumerate(tensors):
            if tensor.is_floating_point() and not _is_finite(local(tensor)):
                self.seen.setdefault((phase,), ((phase, i), None, name))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at everything that runs while the context lasts."""
        for stage in self.model._pipeline.modules:
            self.handles.append(stage.register_forward_pre_hook(self._enter_stage))
            self.handles.append(stage.register_forward_hook(self._leave_stage))
        for module in self.names:
            self.handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave))
        tp = self.model._runner.tp
        leave = tp.leave
        tp.leave = lambda x: leave(self._summand(x))
        try:
            yield
        finally:
            del tp.leave
            for handle in self.handles:
                handle.remove()

    # Forward

    def _enter_stage(self, stage: StageModule, args: tuple[Tensor]) -> None:
        index = stage.stage.range.index
        self.at = (self.passes[index], index)
        self.passes[index] += 1
        self.running = []  # a stage that is not the last leaves its modules by an exception
        if args[0].is_floating_point():
            self._check(args[0], "what it received from the stage before")

    def _leave_stage(self, stage: StageModule, args: tuple, out: Tensor) -> None:
        if stage.stage.range.is_last:
            self._check(out, f"{self.head} or the loss")

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if _in_backward():  # a checkpointed layer is computed again
            return None
        name, around = self._name(module), self.running[-1] if self.running else self._name(self.skeleton)
        self.running.append(name)
        views: dict[Tensor, Tensor] = {}

        def own(x: object) -> object:
            """A view for this module alone: its gradient is what this use of the tensor gave."""
            if not _has_gradient(x):
                return x
            if x not in views:
                self._check(x, f"{around} before {_leaf(name)}")
                views[x] = x.view_as(x)
                views[x].register_hook(partial(self._check_gradient, self.at, name))
            return views[x]

        for p in module.parameters(recurse=False):
            if p.requires_grad and p not in self.params:
                self.params.add(p)
                self.handles.append(p.register_hook(partial(self._check_weights_gradient, name)))
        return tuple(own(x) for x in args), {k: own(x) for k, x in kwargs.items()}

    def _leave(self, module: nn.Module, args: tuple, out: object) -> None:
        if _in_backward():
            return
        name = self.running.pop()
        around = self.running[-1] if self.running else self._name(self.skeleton)
        for x in tree_leaves(out):
            if type(x) is Tensor and x.is_floating_point():
                self._check(x, name)
            if _has_gradient(x):
                x.register_hook(partial(self._check_gradient, self.at, f"{around} after {_leaf(name)}"))

    def _summand(self, x: Tensor) -> Tensor:
        """This rank's part of a sum over tp, which all ranks will see in the sum."""
        if not _in_backward():
            self._check(x, self.running[-1] if self.running else self._name(self.skeleton))
        return x

    def _check(self, x: Tensor, where: str) -> None:
        self.count += 1
        if (_FORWARD, *self.at) not in self.seen and not _is_finite(x):
            self.seen[_FORWARD, *self.at] = (_FORWARD, *self.at, self.count), self.at[0], where

    # Backward, in which stages come last to first

    def _check_gradient(self, at: tuple[int, int], where: str, grad: Tensor) -> None:
        self.backward_at = at
        self._note_gradient(grad, at, at[0], where)

    def _check_weights_gradient(self, name: str, grad: Tensor) -> None:
        # A backward for weights alone comes later, and passes no other gradient that would tell its microbatch.
        at = self.backward_at
        self._note_gradient(grad, at, None if self.split_backward else at[0], name)

    def _note_gradient(self, grad: Tensor, at: tuple[int, int], microbatch: int | None, where: str) -> None:
        self.count += 1
        if (_BACKWARD, *at) not in self.seen and not _is_finite(grad):
            self.seen[_BACKWARD, *at] = (_BACKWARD, at[0], -at[1], self.count), microbatch, where

    def _name(self, module: nn.Module) -> str:
        return self.names[module] or type(module).__name__


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _has_gradient(x: object) -> bool:
    return type(x) is Tensor and x.requires_grad and torch.is_grad_enabled()


def _is_finite(x: Tensor) -> bool:
    return bool(x.detach().isfinite().all())


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
