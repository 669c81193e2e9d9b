"""Splitting a model into pipeline stages: one skeleton that runs as any of this rank's stages.

A rank keeps one Hugging Face model. Layers of other ranks become holes that return their hidden states unchanged, so
layer indices, parameter names and `config.layer_types[i]` stay what they are. To run as one of its stages the model
swaps in a layer list with holes around that stage's layers and calls its own unmodified forward on the token ids. What
has parameters before the first layer gives blanks on later stages, or, where layers use the embedding, what was sent of
it; the forward ends at the hole after a stage's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .flow import Flow
from .load import meta_copy
from .loss import lazy_head
from .no_data import NoData
from .stages import StageRange
from .styles import map_hidden
from .tensor_parallel import TensorParallel


class Hole(nn.Module):
    """Stands for a module of another stage and shows its plain attributes; for a layer, returns its hidden states."""

    def __init__(self, stands_for: nn.Module, hidden: int | str = 0, returns: tuple[type, int] | None = None) -> None:
        super().__init__()
        self._stands_for = (stands_for,)  # in a tuple: no submodule, its parameters are not this rank's
        self._hidden, self._returns = hidden, returns

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"][0], name)

    def forward(self, *args, **kwargs):
        return self._give(args[self._hidden] if isinstance(self._hidden, int) else kwargs[self._hidden])

    def _give(self, hidden: Tensor) -> Tensor | tuple | list:
        if self._returns is None:
            return hidden
        kind, length = self._returns
        return kind((hidden, *(None,) * (length - 1)))


class Injection(Hole):
    """The hole before a stage's first layer: returns what the previous stage sent instead of its own input."""

    received: Tensor | None = None

    def forward(self, *args, **kwargs):
        hidden, self.received = self.received, None
        return self._give(hidden)


class End(Hole):
    """The hole after a stage's last layer: nothing behind it is this stage's."""

    def forward(self, *args, **kwargs):
        raise StageEnd


class StageEnd(BaseException):
    """Leaves the model's forward; no error, and so nothing that catches errors should catch it."""


class Blank(Hole):
    """Stands on later stages for a part before the first layer: zeros in the shapes of what that part returns.

    Code between it and the layers reads shapes and types, from which masks and positions are made. Values computed
    from it end at the injection.
    """

    dtype, device = torch.float32, torch.device("meta")

    def __getattr__(self, name: str):
        return self._zeros(super().__getattr__(name), Tensor.expand)  # of a weight, its device or type is read

    def forward(self, *args, **kwargs):
        args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
        with torch.no_grad(), NoData():
            return tree_map(self._zeros, self._stands_for[0](*args, **kwargs))

    def _zeros(self, value, spread: Callable[[Tensor, torch.Size], Tensor] = Tensor.new_zeros):
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        dtype = self.dtype if value.is_floating_point() else value.dtype
        return spread(torch.zeros((), dtype=dtype, device=self.device), value.shape)


class Carried(Blank):
    """Stands on later stages for the embedding where layers use it beside their hidden states: what was sent of it."""

    received: Tensor | None = None

    def forward(self, *args, **kwargs):
        return self.received


@dataclass
class Stage:
    """One pipeline stage of a skeleton: its range and what to swap in to run it."""

    range: StageRange
    swaps: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    injection: Injection | None = None
    blanks: Collection[Blank] = ()
    embedding: nn.Module | None = None  # where what it gives is passed on: itself, or what stands for it
    last: nn.Module | None = None  # layer, where another stage goes on from what it gives
    captured: Tensor | None = None
    embedded: Tensor | None = None

    def receive(self, x: Tensor, seq_len: int) -> None:
        """Have the next forward go on from ``x``: hidden states, and behind them seq_len positions of the embedding."""
        if self.embedding is not None:  # contiguous, as models view both as rows
            parts = x.split((x.shape[1] - seq_len, seq_len), 1)
            x, self.embedding.received = (part.contiguous() for part in parts)
        self.injection.received = x
        for blank in self.blanks:
            blank.dtype, blank.device = x.dtype, x.device

    def result(self) -> Tensor:
        """What the next stage receives."""
        return self.captured if self.embedded is None else torch.cat((self.captured, self.embedded), 1)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The skeleton shows only this stage's layers while the context lasts; what the next stage needs is kept."""
        before = [parent._modules[name] for parent, name, _ in self.swaps]
        for parent, name, module in self.swaps:
            parent._modules[name] = module
        # Registered for each run anew, they run behind a caller's own hooks, which may change what is kept.
        kept = ((self.last, self._capture), (self.embedding, self._embed))
        handles = [module.register_forward_hook(keep) for module, keep in kept if module is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for (parent, name, _), module in zip(self.swaps, before, strict=True):
                parent._modules[name] = module
            self.captured = self.embedded = None
            if self.injection is not None:
                self.injection.received = None
            if isinstance(self.embedding, Carried):
                self.embedding.received = None

    def _capture(self, _: nn.Module, args: tuple, output: Tensor | tuple | list) -> None:
        self.captured = output if isinstance(output, Tensor) else output[0]

    def _embed(self, _: nn.Module, args: tuple, output: Tensor) -> None:
        self.embedded = output


def split_model(
    model: PreTrainedModel, unmodified: PreTrainedModel, anatomy: Anatomy, own: list[StageRange], flow: Flow
) -> list[Stage]:
    """Cut ``model`` in place down to the stages ``own`` and return them; parts of other ranks become holes.

    ``unmodified``: the model before styles were applied, on the meta device, or the same one where none were.
    """
    if own[0].count == 1:
        return [Stage(own[0])]
    shared = shared_names(model)
    layers = model.get_submodule(anatomy.layers)
    whole = list(layers)
    kept = {i for r in own for i in range(r.start, r.stop)}
    for i in range(anatomy.num_layers):
        if i not in kept:
            layers[i] = Hole(whole[i], flow.hidden[i], flow.returns[i])
    blanks = {name: Blank(meta_copy(unmodified.get_submodule(name)).to("meta")) for name in flow.before}
    has_first, has_last = any(r.is_first for r in own), any(r.is_last for r in own)
    for name in () if has_last else flow.after:
        _replace(model, name, Hole(model.get_submodule(name)))
    for name in () if has_first else flow.before:
        _replace(model, name, blanks[name])
    _keep_shared(model, shared)
    return [_make_stage(model, anatomy, r, whole, blanks, flow) for r in own]


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    setattr(*_place(model, name), module)


def shared_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _keep_shared(model: nn.Module, shared: list[list[str]]) -> None:
    """A stage that has a shared parameter has it under all of its names, also inside what is a hole there."""
    params = dict(model.named_parameters(remove_duplicate=False))
    for names in shared:
        held = next((params[n] for n in names if n in params), None)
        for name in names if held is not None else ():
            owner, _, leaf = name.rpartition(".")
            module = model
            for part in owner.split("."):
                module = module._modules.setdefault(part, nn.Module())
            module._parameters[leaf] = held


def _make_stage(
    model: PreTrainedModel,
    anatomy: Anatomy,
    r: StageRange,
    whole: list[nn.Module],
    blanks: dict[str, Blank],
    flow: Flow,
) -> Stage:
    def hole(i: int, cls: type[Hole] = Hole) -> Hole:
        return cls(whole[i], flow.hidden[i], flow.returns[i])

    stage = Stage(r)
    shown: list[nn.Module] = [whole[i] if r.start <= i < r.stop else hole(i) for i in range(anatomy.num_layers)]
    if not r.is_first:
        stage.injection = shown[r.start - 1] = hole(r.start - 1, Injection)
        if flow.carried:
            stage.embedding = Carried(blanks[anatomy.embedding]._stands_for[0])
            blanks = {**blanks, anatomy.embedding: stage.embedding}
        stage.blanks = blanks.values()
        stage.swaps += [(*_place(model, name), blank) for name, blank in blanks.items()]
    if not r.is_last:
        shown[r.stop] = hole(r.stop, End)
        stage.last = whole[r.stop - 1]
    if r.is_first and flow.carried:
        stage.embedding = model.get_submodule(anatomy.embedding)
    stage.swaps.append((*_place(model, anatomy.layers), nn.ModuleList(shown)))
    return stage


class Runner(nn.Module):
    """The FSDP root: runs the skeleton as one of its stages."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, stages: list[Stage], tp: TensorParallel) -> None:
        super().__init__()
        self.model = model
        self.anatomy, self.stages, self.tp = anatomy, stages, tp
        self.router_loss: Tensor | None = None  # of the last forward, where the model's config asks for it
        first = next((s for s in stages if s.range.is_first), None)
        if first is not None and tp.sequence_parallel:
            layer = model.get_submodule(anatomy.layer(0))
            layer.register_forward_pre_hook(lambda _, a, k: map_hidden(a, k, tp.enter_layers), with_kwargs=True)

    def own_layers(self) -> list[nn.Module]:
        """The decoder layers this rank holds, in order."""
        ranges = sorted((s.range.start, s.range.stop) for s in self.stages)
        return [self.model.get_submodule(self.anatomy.layer(i)) for a, b in ranges for i in range(a, b)]

    def forward(
        self, index: int, x: Tensor, seq_len: int, loss: Callable[[Tensor], Tensor] | None = None, **inputs
    ) -> Tensor:
        """Run stage ``index`` on ``inputs`` (input_ids [b, s], masks, positions), and ``x`` from the stage before it.

        Returns hidden states for the next stage ([b, s, h], or this rank's sequence shard of them; a carried embedding
        [b, s, h] behind them), or on the last stage the logits [b, s, local vocabulary] or what ``loss`` makes of them.
        """
        stage = next(s for s in self.stages if s.range.index == index)
        self.tp.rows, self.tp.seq_len = inputs["input_ids"].shape[0], seq_len
        with stage.active():
            if stage.injection is not None:
                stage.receive(x, seq_len)
            output = self._run(inputs, loss)
            if (output is None) == stage.range.is_last or (stage.injection and stage.injection.received is not None):
                raise RuntimeError(f"the forward of {type(self.model).__name__} left out a decoder layer")
            return output if output is not None else _differentiable(stage.result())

    def _run(self, inputs: dict[str, Tensor], loss: Callable[[Tensor], Tensor] | None) -> Tensor | None:
        """The model's logits, or what ``loss`` makes of them; None where the stage ends before them."""
        head = lazy_head(self.model.get_submodule(self.anatomy.head)) if loss else nullcontext()
        try:
            with head:
                output = self.model(**inputs, use_cache=False)
        except StageEnd:
            return None
        self.router_loss = getattr(output, "aux_loss", None)
        return loss(output.logits) if loss else output.logits


def _differentiable(hidden: Tensor) -> Tensor:
    """Fit to be sent: a stage whose parameters are all frozen still gets a gradient back, and needs a place for it.

    A schedule detaches what it has sent in place, which torch refuses for a view.
    """
    if hidden._is_view():
        hidden = hidden.clone()
    return hidden if hidden.requires_grad or not torch.is_grad_enabled() else hidden.detach().requires_grad_()
