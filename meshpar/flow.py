"""What passes between decoder layers: one recorded forward of the whole model, on tensors without data.

A border between two layers can be cut where hidden states, or they and the embedding, are all that crosses it: what
lies behind is then computed from them, from the token ids and masks that every stage has, and from parameters that lie
behind too. Each tensor of the recorded forward is labelled with what it was computed from: the hidden states that left
layer i (label i), the embedding of the tokens (label -1), or what other parameters before the first layer gave (label
-2). Leaving a layer as its hidden states, a tensor gets that layer's label alone. A layer that computes with the
embedding has it carried over every border; one that computes with anything else that is older forbids the borders in
between. No table of models is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .anatomy import Anatomy
from .blocks import hidden_argument
from .comm import storage_of
from .no_data import NoData, tensors_in

_ROWS, _SEQ_LEN = 2, 16
# Labels of what lies before the first layer: the embedding, and all else with parameters; and of what is drawn at
# random outside the layers, which a later stage would draw anew.
_EMBEDDING, _START, _RANDOM = -1, -2, -3
_AFTER, _BETWEEN, _BEFORE = "after its last decoder layer", "between decoder layers", "before its first decoder layer"
_aten = torch.ops.aten
_SHAPE_ONLY = "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided"
_READS_SHAPE_ONLY = {getattr(_aten, name) for name in _SHAPE_ONLY.split(" ")}


@dataclass(frozen=True)
class Flow:
    """How a model may be cut into stages.

    ``before``, ``after``: parts with parameters that run before the first layer, and after the last. ``hidden``: which
    argument of each layer is its hidden states. ``returns``: the kind and length of what each layer returns, hidden
    states first; None where it returns one tensor.
    ``trailing``: hidden states are [batch, seq, *trailing]. ``uncut``: layers that must follow the one before them on
    the same stage -> why. ``behind``: parts with parameters, beside the layers, that run only once the first layer has.
    ``mixed``: what runs, or is read, both before the first layer and later. ``carried``: whether stages pass on, beside
    the hidden states, what the embedding gave. ``straight``: whether what the embedding gives goes to the first layer
    as it is, and nothing else computes with it.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    hidden: tuple[int | str, ...] = ()
    returns: tuple[tuple[type, int] | None, ...] = ()
    trailing: tuple[int, ...] = ()
    uncut: Mapping[int, str] = field(default_factory=dict)
    behind: frozenset[str] = frozenset()
    mixed: tuple[str, ...] = ()
    carried: bool = False
    straight: bool = False


def follow(model: PreTrainedModel, anatomy: Anatomy, dtype: torch.dtype, wanted_by: str) -> Flow:
    """Record a forward of ``model`` (parameters on any device; they are not read) computing in ``dtype``.

    Raises ValueError where the forward depends on values, which tensors without data do not have; ``wanted_by`` is the
    setting that must go then.
    """
    label = type(model).__name__
    probe = _without_data(model, dtype)
    recorder = _Recorder(probe, anatomy)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), recorder.hooks(), recorder:
            logits = probe(input_ids=_ids(), use_cache=False).logits
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{label}'s forward could not be followed without data ({type(error).__name__}: {reason}), which "
            f"{wanted_by} needs"
        ) from error
    recorder.finish(logits)
    before, after = recorder.parts()
    return Flow(
        tuple(before),
        tuple(after),
        tuple(recorder.hidden[1:2] + recorder.hidden[1:]),
        tuple(recorder.returns),
        tuple(recorder.shapes[0][2:]) if recorder.shapes else (),
        {i: f"{label} {why}" for i, why in sorted(recorder.uncut.items())},
        recorder.on_shards(),
        tuple(recorder.mixed()),
        recorder.carried,
        recorder.straight,
    )


def refuse_layerdrop(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that skips layers at random: each rank would skip others, and wait for its peers."""
    for name, module in model.named_modules():
        drop = getattr(module, "layerdrop", 0)
        if isinstance(drop, float) and drop > 0:
            raise ValueError(
                f"{type(model).__name__} leaves out whole layers at random ({name}.layerdrop is {drop}), which ranks "
                "cannot do alike; set layerdrop to 0 in its config"
            )


def _without_data(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy on the meta device, in training mode; parameters that are shared stay shared."""
    memo = {
        id(p): nn.Parameter(p.to("meta", dtype if p.is_floating_point() else None), False) for p in model.parameters()
    }
    return copy.deepcopy(model, memo=dict(memo)).to("meta").train()


def _ids() -> Tensor:
    return torch.zeros((_ROWS, _SEQ_LEN), dtype=torch.int64, device="meta")


class _Recorder(NoData):
    """Labels tensors by what they were computed from, and notes which parameters run where."""

    def __init__(self, probe: PreTrainedModel, anatomy: Anatomy) -> None:
        super().__init__()
        self.probe, self.anatomy = probe, anatomy
        self.hidden: list[int | str] = []
        self.returns: list[tuple[type, int] | None] = []
        self.shapes: list[torch.Size] = []
        self.uncut: dict[int, str] = {}
        self.carried = self.straight = False
        self._late: dict[int, str] = {}  # borders behind which the embedding is used once more -> by what
        self._phase: int | str = _BEFORE
        self._output: Tensor | None = None
        self._embedded: list[Tensor] = []
        self._changed = False  # what the embedding gave, in place
        self._computed_with = False  # what the embedding gave, outside of the first layer
        self._labels: dict[int, frozenset[int]] = {}
        self._alive: list = []  # a storage's address names it only while it lives
        self._spare: dict[int, int] = {}  # what a layer returned beside its hidden states
        self._running: list[str] = []
        self._calls: dict[str, set[str]] = {}
        self._direct: list[tuple[str, list[str]]] = []
        self._names: dict[int, list[str]] = {}
        for name, param in probe.named_parameters(remove_duplicate=False):
            self._names.setdefault(storage_of(param), []).append(name)

    # Operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = list(tensors_in((args, kwargs)))
        if func._schema.is_mutable:
            self._check_in_place(func, args)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        reads = func.overloadpacket not in _READS_SHAPE_ONLY
        labels = frozenset().union(*(self._read(t) for t in given)) if reads else frozenset()
        if isinstance(self._phase, str) and torch.Tag.nondeterministic_seeded in func.tags:
            labels |= {_RANDOM}
        if isinstance(self._phase, int):
            self._consume(labels, self._phase, self.anatomy.layer(self._phase))
        for tensor in tensors_in(out):
            self._add(tensor, labels)
        return out

    def _check_in_place(self, func, args: tuple) -> None:
        """What a stage sends must still be what a layer or the embedding returned when its forward ends."""
        index = len(self.returns)
        slots = zip(args, func._schema.arguments, strict=False)
        places = [a for a, slot in slots if slot.alias_info is not None and slot.alias_info.is_write]
        written = {storage_of(t) for t in tensors_in(places)}
        if self._output is not None and storage_of(self._output) in written and index < self.anatomy.num_layers:
            self._forbid([index], f"changes what {self.anatomy.layer(index - 1)} returned in place")
        self._changed = self._changed or not written.isdisjoint(map(storage_of, self._embedded))

    def _read(self, tensor: Tensor) -> frozenset[int]:
        key = storage_of(tensor)
        if self._phase != 0 and key in map(storage_of, self._embedded):
            self._computed_with = True
        if key in self._names:
            return self._read_parameter(self._names[key])
        if key in self._spare and isinstance(self._phase, str):  # on a later stage a hole gives None
            index = self._spare[key]
            why = f"uses what {self.anatomy.layer(index)} returns beside its hidden states"
            self._forbid(range(index + 1, self.anatomy.num_layers), why)
        return self._labels.get(key, frozenset())

    def _read_parameter(self, names: list[str]) -> frozenset[int]:
        layers = {self.anatomy.layer_index(n) for n in names}
        if self._phase in layers:
            return frozenset()
        outside = [n for n in names if self.anatomy.layer_index(n) is None]
        where = self._phase if isinstance(self._phase, str) else f"in {self.anatomy.layer(self._phase)}"
        if not outside or where not in (_BEFORE, _AFTER):
            self._forbid(self._all(), f"uses {names[0]} {where}, so that several stages would need it")
        elif not any(self._is_running(n) for n in outside):
            self._direct.append((self._phase, outside))
        return frozenset({_START}) if self._phase == _BEFORE else frozenset()

    def _is_running(self, parameter: str) -> bool:
        return any(parameter.startswith(f"{name}.") for name in self._running)

    def _consume(self, labels: Iterable[int], layer: int, user: str) -> None:
        """What has label l at ``layer`` lies on one stage with it: a border after layer l + 1 would hold it back."""
        labels = frozenset(labels)
        if labels >= {_EMBEDDING, _RANDOM}:
            labels = labels - {_EMBEDDING} | {_START}
        for label in labels - {_RANDOM}:
            origin = "the embeddings" if label < 0 else f"the output of {self.anatomy.layer(label)}"
            why = f"cannot be cut there: besides its hidden states, {user} uses a value computed from {origin}"
            borders = range(max(label, -1) + 2, layer + 1)
            if label == _EMBEDDING:
                self._late |= dict.fromkeys(borders, why)
            else:
                self._forbid(borders, why)

    def _forbid(self, borders: Iterable[int], why: str) -> None:
        for border in borders:
            self.uncut.setdefault(border, why)

    def _all(self) -> range:
        return range(1, self.anatomy.num_layers)

    def _add(self, tensor: Tensor, labels: frozenset[int]) -> None:
        key = storage_of(tensor)
        if key not in self._labels:
            self._alive.append(tensor.untyped_storage())
        self._labels[key] = self._labels.get(key, frozenset()) | labels

    # Modules

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        for i in range(self.anatomy.num_layers):
            layer = self.probe.get_submodule(self.anatomy.layer(i))
            handles.append(layer.register_forward_pre_hook(partial(self._enter_layer, i), with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(self._leave_layer, i)))
        for name, module in self.probe.named_modules():
            if self._has_place(name) and next(module.parameters(), None) is not None:
                handles.append(module.register_forward_pre_hook(partial(self._enter_part, name)))
                handles.append(module.register_forward_hook(partial(self._leave_part, name)))
        yield
        for handle in handles:
            handle.remove()

    def _has_place(self, name: str) -> bool:
        """Whether a module is beside the list of layers: neither in it nor around it."""
        return bool(name) and not f"{name}.".startswith(f"{self.anatomy.layers}.") and not self._is_around(name)

    def _is_around(self, name: str) -> bool:
        return f"{self.anatomy.layers}.".startswith(f"{name}.") if name else True

    def _enter_layer(self, index: int, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        if index != len(self.returns) or isinstance(self._phase, int):
            self._forbid(self._all(), "does not run its decoder layers one after the other")
        self._phase = index
        if index == 0:
            hidden = args[0] if args else kwargs.get(hidden_argument(args, kwargs))
            self.straight = len(self._embedded) == 1 and hidden is self._embedded[0]
        given = {**dict(enumerate(args)), **kwargs}
        tensors = [k for k, v in given.items() if isinstance(v, Tensor)]
        same = [k for k in tensors if given[k] is self._output]
        self.hidden += (same or tensors or [0])[:1]

    def _leave_layer(self, index: int, layer: nn.Module, args: tuple, out) -> None:
        several = type(out) in (tuple, list)
        first, *others = out if several else (out,)
        if not isinstance(first, Tensor) or first.shape[:2] != (_ROWS, _SEQ_LEN):
            shape = [*getattr(first, "shape", ())]
            why = (
                f"has layers that return {shape} for ids of {[_ROWS, _SEQ_LEN]}; stages exchange [batch, seq, ...] only"
            )
            self._forbid(self._all(), why)
            first = torch.empty((_ROWS, _SEQ_LEN), device="meta")
        self.returns.append((type(out), len(out)) if several else None)
        self.shapes.append(first.shape)
        if first.shape != self.shapes[0]:
            self._forbid(self._all(), f"has hidden states of {list(self.shapes[0])} and of {list(first.shape)}")
        for tensor in tensors_in(others):
            self._add(tensor, frozenset())
            self._spare[storage_of(tensor)] = index
        if self._spare.pop(storage_of(first), None) == index:
            self._forbid(
                self._all(), f"returns its hidden states and more in one tensor from {self.anatomy.layer(index)}"
            )
        self._add(first, frozenset())
        self._labels[storage_of(first)] = frozenset({index})
        self._output = first
        self._phase = _AFTER if index == self.anatomy.num_layers - 1 else _BETWEEN

    def _enter_part(self, name: str, module: nn.Module, args: tuple) -> None:
        self._running.append(name)
        self._calls.setdefault(name, set()).add(self._phase if isinstance(self._phase, str) else _BETWEEN)

    def _leave_part(self, name: str, module: nn.Module, args: tuple, out) -> None:
        self._running.remove(name)
        if self._phase == _BEFORE:  # later stages run without it, whatever it gives
            for tensor in tensors_in(out):
                self._add(tensor, frozenset({_START}))
        if name == self.anatomy.embedding and isinstance(out, Tensor):
            self._embedded.append(out)
            self._labels[storage_of(out)] = frozenset({_EMBEDDING})

    # The end

    def finish(self, logits: Tensor) -> None:
        """What only the whole forward tells."""
        count = self.anatomy.num_layers
        self.straight = self.straight and not self._computed_with
        if len(self.returns) != count:
            self.uncut = dict.fromkeys(self._all(), f"runs {len(self.returns)} of its {count} decoder layers")
        self._consume(self._labels.get(storage_of(logits), ()), count - 1, "what follows the last layer")
        before, after = self.parts()
        if self._late and self._may_be_carried(before):
            self.carried = True
        else:
            for border, why in self._late.items():
                self._forbid([border], why)
        for phase, names in self._direct:
            blank = phase == _BEFORE and any(n.rpartition(".")[0] in before for n in names)  # a blank shows zeros
            whole = phase == _AFTER and all(_inside(n, after) for n in names)
            if not blank and not whole:
                self._forbid(self._all(), f"reads {names[0]} outside the module that holds it")
        for names in self._names.values():
            self._check_shared(names, before, after)

    def _may_be_carried(self, before: list[str]) -> bool:
        """Whether the embedding is a part of its own that gives one tensor, wide as hidden states are."""
        shapes = [t.shape for t in self._embedded]
        return self.anatomy.embedding in before and not self._changed and shapes == self.shapes[:1]

    def _check_shared(self, names: list[str], before: list[str], after: list[str]) -> None:
        layers = sorted({i for i in map(self.anatomy.layer_index, names) if i is not None})
        outside = [n for n in names if self.anatomy.layer_index(n) is None]
        if layers and outside:
            self._forbid(self._all(), f"shares {names[0]} between decoder layers and what is around them")
        ends = [[n for n in outside if _inside(n, parts)] for parts in (before, after)]
        tied = [[f"{self.anatomy.embedding}.weight"], [f"{self.anatomy.head}.weight"]]
        if all(ends) and ends != tied:
            self._forbid(self._all(), f"shares {ends[0][0]} with {ends[1][0]}, on its first and its last stage")

    def parts(self) -> tuple[list[str], list[str]]:
        """Parts with parameters beside the layers: those that run before them (or never), and those that run after."""
        before: list[str] = []
        after: list[str] = []
        for name in self._beside(""):
            phases = self._calls.get(name, set())
            (after if _AFTER in phases else before).append(name)
            if len(phases) > 1:
                self._forbid(self._all(), f"runs {name} {' and '.join(sorted(phases))}")
        return before, after

    def on_shards(self) -> frozenset[str]:
        """Parts beside the layers that never run before the first of them."""
        return frozenset(n for n in self._beside("") if (phases := self._calls.get(n)) and _BEFORE not in phases)

    def mixed(self) -> Iterator[str]:
        """Parts that run before the first layer and later, and parameters read later that no running part holds."""
        yield from (n for n in self._beside("") if _BEFORE in (phases := self._calls.get(n, set())) and len(phases) > 1)
        yield from (names[0] for phase, names in self._direct if phase != _BEFORE)

    def _beside(self, name: str) -> Iterator[str]:
        """The largest modules beside the list of layers that are called as modules; a mere container is opened."""
        for child, module in self.probe.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if path == self.anatomy.layers or next(module.parameters(), None) is None:
                continue
            closed = path in self._calls or not any(called.startswith(f"{path}.") for called in self._calls)
            if self._is_around(path) or not closed:
                yield from self._beside(path)
            else:
                yield path


def _inside(name: str, parts: Iterable[str]) -> bool:
    return any(name.startswith(f"{part}.") for part in parts)
