"""An optimizer seen by Hugging Face parameter name: what a checkpoint keeps of it, and how that comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .mesh import Mesh
from .pieces import Piece, parameter_piece, whole_piece
from .styles import ParamSpec
from .weights_files import listed

State = Mapping[Tensor, Mapping[str, Any]]


class NamedOptimizer:
    """An optimizer over (some of) the parameters of one rank of a model.

    ``params``: this rank's parameters by name; ``specs``: how each is laid out. Raises ValueError when the optimizer
    holds parameters that are not among them.
    """

    def __init__(
        self, optimizer: Optimizer, params: Mapping[str, Tensor], specs: Mapping[str, ParamSpec], mesh: Mesh
    ) -> None:
        self.optimizer, self.specs, self.mesh = optimizer, specs, mesh
        self.names = {param: name for name, param in params.items()}
        strangers = [tuple(p.shape) for _, p in self._params() if p not in self.names]
        if strangers:
            raise ValueError(f"the optimizer has parameters that are not the model's, of the shapes {strangers}")

    def _params(self) -> Iterator[tuple[int, Tensor]]:
        """(index of its group, parameter) in the optimizer's order."""
        return ((index, p) for index, group in enumerate(self.optimizer.param_groups) for p in group["params"])

    def pieces(self, state: State) -> dict[str, Piece]:
        """``state`` (the optimizer's, or `empty_state`) as pieces named optim.<parameter>.<key>."""
        pieces = {}
        for param, values in state.items():
            spec = self.specs[self.names[param]]
            for key, value in values.items():
                name = f"optim.{self.names[param]}.{key}"
                if isinstance(value, Tensor) and value.ndim == 0:
                    pieces[name] = whole_piece(value)
                elif isinstance(value, Tensor) and value.shape == param.shape:
                    pieces[name] = parameter_piece(value, spec, self.mesh)
                elif value is not None:
                    raise ValueError(f"{name} is neither a number in a tensor nor shaped like its parameter")
        return pieces

    def groups(self) -> dict[str, Any]:
        """Each group's settings, and parameter name -> index of its group over all stages; collective over pp."""
        own = {self.names[param]: index for index, param in self._params()}
        stages: list[Any] = [None] * self.mesh.size("pp")
        dist.all_gather_object(stages, own, group=self.mesh.group("pp"))
        settings = [{k: _plain(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"settings": settings, "group_of": {name: index for stage in stages for name, index in stage.items()}}

    def difference(self, groups: Mapping[str, Any]) -> str | None:
        """How this rank's parameter groups differ from saved ``groups``, None where they do not."""
        saved, here = len(groups["settings"]), len(self.optimizer.param_groups)
        if saved != here:
            return f"{saved} parameter groups there, {here} in the optimizer"
        moved = [self.names[p] for index, p in self._params() if groups["group_of"].get(self.names[p]) != index]
        return f"in another parameter group there, or in none: {listed(moved)}" if moved else None

    def empty_state(self, stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> State:
        """Zeros of the ``stored`` shapes and dtypes, for this rank's parameters."""
        keys: dict[str, list[str]] = {}
        for name in stored:
            if name.startswith("optim."):
                owner, _, key = name.removeprefix("optim.").rpartition(".")
                keys.setdefault(owner, []).append(key)
        state: dict[Tensor, dict[str, Any]] = {}
        for _, param in self._params():
            for key in keys.get(self.names[param], ()):
                shape, dtype = stored[f"optim.{self.names[param]}.{key}"]
                zeros = torch.zeros_like(param, dtype=dtype) if len(shape) else torch.zeros((), dtype=dtype)
                state.setdefault(param, {})[key] = zeros
        return state

    def load(self, state: State, groups: Mapping[str, Any]) -> None:
        """Continue from ``state`` and the saved settings, also those a fresh optimizer has not (initial_lr)."""
        numbered = {index: state[param] for index, (_, param) in enumerate(self._params()) if param in state}
        packed = self.optimizer.state_dict()["param_groups"]
        for group, settings in zip(packed, groups["settings"], strict=True):
            group.update({key: _like(value, group.get(key)) for key, value in settings.items()})
        self.optimizer.load_state_dict({"state": numbered, "param_groups": packed})


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value


def _like(value: object, now: object) -> object:
    """A setting read from JSON, in the type that the optimizer has it in."""
    if isinstance(now, Tensor):
        return torch.as_tensor(value, dtype=now.dtype, device=now.device)
    return tuple(value) if isinstance(value, list) else value
