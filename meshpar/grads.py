"""What is left to do to gradients once FSDP has reduced them over dp: sums over tp, copies over pp, the norm.

Accumulation is the trap here. A sum over tp or pp must cover what this backward added and nothing that an earlier one
already summed, so earlier gradients are set aside first and added back last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .fsdp import fsdp_rows
from .layout import Stored
from .mesh import Mesh
from .styles import ParamSpec


class GradientSums:
    """The tp and pp sums of one rank's parameters, run once a step: `set_aside` before the backward, `finish` after."""

    def __init__(
        self, params: dict[str, nn.Parameter], specs: dict[str, ParamSpec], mesh: Mesh, holders: dict[str, list[int]]
    ) -> None:
        self.mesh, self.params = mesh, params
        self.copied = [(p, holders[n]) for n, p in params.items() if len(holders[n]) > 1]
        self.partial = [(p, specs[n]) for n, p in params.items() if specs[n].partial]
        self.padded = [(p, specs[n]) for n, p in params.items() if specs[n].hold_zero]
        self.rank = mesh.rank("tp")
        self._earlier: list[tuple[nn.Parameter, Tensor]] = []

    def refuse_hooks(self) -> None:
        """FSDP never runs a hook on a gradient, or before the sums here and once for each microbatch."""
        for name, p in self.params.items():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise RuntimeError(
                    f"{name} has a hook on its gradient, which would not see the sum over the mesh; remove it and use "
                    ".grad after forward_backward or backward"
                )

    def set_aside(self) -> None:
        """Take earlier backwards' gradients of the parameters that `finish` sums out of its way."""
        touched = [p for p, _ in self.partial]
        known = {id(p) for p in touched}
        touched += [p for p, _ in self.copied if id(p) not in known]
        self._earlier += [(p, p.grad) for p in touched if p.grad is not None]
        for p, _ in self._earlier:
            p.grad = None

    def finish(self) -> None:
        """Sum over tp and over the stages that share a parameter, clear padding, add earlier gradients back."""
        self._sum_over_tp()
        for p, ranks in self.copied:
            if p.requires_grad:
                self._sum_copies(p, ranks)
        for p, spec in self.padded:
            for grad, s in _stored(p.grad, spec, self.mesh):
                grad.narrow(spec.layout.dim, s.real, s.stop - s.real).zero_()
        for p, grad in self._earlier:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        self._earlier = []

    def discard(self) -> None:
        """Forget a step that failed."""
        self._earlier = []

    def _sum_over_tp(self) -> None:
        """One all-reduce for all: each part gets a row of slots, and a rank adds to the slot its span has."""
        chosen = [
            (grad.narrow(spec.layout.dim or 0, s.start, s.stop - s.start), s.part)
            for p, spec in self.partial
            for grad, s in _stored(p.grad, spec, self.mesh)
            if s.part.copies
        ]
        if not chosen:
            return
        buffer = torch.zeros(
            sum(g.numel() * part.slots for g, part in chosen), device=self.mesh.device, dtype=torch.float32
        )
        views, at = [], 0
        for grad, part in chosen:
            size = grad.numel()
            views.append(buffer[at + part.slot(self.rank) * size :][:size].view_as(grad))
            views[-1].copy_(grad)
            at += size * part.slots
        dist.all_reduce(buffer, group=self.mesh.group("tp"))
        for (grad, _), view in zip(chosen, views, strict=True):
            grad.copy_(view)

    def _sum_copies(self, p: nn.Parameter, ranks: list[int]) -> None:
        """Each of these pp ranks has the parameter and a part of its gradient: all get the sum."""
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        own, group, here = local(p.grad), self.mesh.group("pp"), self.mesh.rank("pp")
        parts = {rank: own.clone() if rank == here else torch.empty_like(own) for rank in ranks}
        messages = []
        for rank in ranks:
            if rank != here:
                peer = dist.get_global_rank(group, rank)
                messages.append(dist.P2POp(dist.isend, parts[here], peer, group))
                messages.append(dist.P2POp(dist.irecv, parts[rank], peer, group))
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        own.zero_()
        for rank in ranks:  # in one order: the copies stay equal to the last bit
            own.add_(parts[rank])


def _stored(tensor: Tensor | None, spec: ParamSpec, mesh: Mesh) -> Iterator[tuple[Tensor, Stored]]:
    """The local part of a gradient (None has no parts) with each of its parts' place in it."""
    if tensor is not None:
        for s in spec.layout.stored(mesh.rank("tp"), fsdp_rows(mesh, spec.local_shape[0])):
            yield local(tensor), s


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or the tensor itself; shares memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def pieces(grad: Tensor, spec: ParamSpec, mesh: Mesh) -> Iterator[tuple[Tensor, bool]]:
    """This rank's gradient in pieces that do or do not count in sums over the mesh: of each element, one copy does."""
    stored = list(_stored(grad, spec, mesh))
    first = [s.part.is_first_copy(mesh.rank("tp")) for _, s in stored]
    replica = "dp_replicate" in mesh.dp_dims and mesh.rank("dp_replicate") > 0
    if replica or all(first):
        yield local(grad), not replica
        return
    for (own, s), counts in zip(stored, first, strict=True):
        yield own.narrow(spec.layout.dim or 0, s.start, s.stop - s.start), counts


def global_norm(grads: Iterable[tuple[Tensor, bool]], mesh: Mesh) -> Tensor:
    """2-norm over the whole mesh of the gradients that count; float32, the same on every rank.

    ``grads``: this rank's, and whether each counts. NaN or infinity in one that does not makes the norm NaN, too.
    """
    grads = list(grads)
    # torch's float32 norm of a CPU tensor of 28 million elements is already off by parts in a thousand.
    norms = torch._foreach_norm([g for g, _ in grads], 2, dtype=torch.float64) if grads else []
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for norm, (_, counts) in zip(norms, grads, strict=True):
        total += norm**2 * counts  # 0 x NaN and 0 x infinity are NaN
    for dim in (*reversed(mesh.dp_dims), "tp", "pp"):
        dist.all_reduce(total, group=mesh.group(dim))
    return total.sqrt().float()


def clip_(grads: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale ``grads`` in place by max_norm / norm where that is below 1, as `torch.nn.utils.clip_grad_norm_` does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [local(g) for g in grads]
    if grads:
        torch._foreach_mul_(grads, scale.to(grads[0].device))
