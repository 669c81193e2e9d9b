"""The loss of one step: what each microbatch's part of it is, and its sum over the ranks.

All that a part is divided by is counted over the global batch before the first forward, so that the parts' gradients
are those of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from .batch import Batch, Batches, make_batch
from .comm import scale_grad
from .config import ParallelConfig
from .layout import spread
from .loss import count_targets, cross_entropy_sum
from .mesh import Mesh
from .schedules import choose_microbatches
from .split import Runner


class StepLoss:
    """Called with a microbatch's logits and targets, gives its part of the loss of the step that `prepare` began."""

    def __init__(self, runner: Runner, mesh: Mesh, config: ParallelConfig, vocab_size: int) -> None:
        self._runner, self._mesh, self._config, self._vocab_size = runner, mesh, config, vocab_size
        vocab = spread(vocab_size, mesh.size("tp"))
        self._vocab_start, self._vocab_real = vocab.spans[mesh.rank("tp")][0], vocab.real(mesh.rank("tp"))
        self._divisor = torch.ones((), dtype=torch.float64)
        self._router_weight, self._router_part = float(getattr(runner.model, "router_aux_loss_coef", 0.0)), 0.0

    def prepare(self, batch: Batches) -> list[tuple[Batch, int]]:
        """Count the tokens of all dp ranks' batches; returns this rank's, each with its number of microbatches."""
        given = [batch] if isinstance(batch, Mapping) else list(batch)
        if not given:
            raise ValueError("the list of batches is empty; give at least one batch, of no rows if need be")
        batches = [make_batch(b, self._mesh.device, self._vocab_size) for b in given]
        targets = self._agree(sum(count_targets(b.targets) for b in batches), len(batches))
        cut = []
        for one, rows in zip(batches, self._rows_to_cut(batches), strict=True):
            count = choose_microbatches(self._config, rows)
            cut.append((one.padded_to(-(-one.rows // count) * count), count))
        if self._has_router_loss:
            added = any(b["input_ids"].shape[0] != piece.rows for b, (piece, _) in zip(given, cut, strict=True))
            self._router_part = self._part_of_a_piece(sum(count for _, count in cut), added, targets)
        self._divisor = targets.clamp(min=1)
        return cut

    def join_pieces(self, count: int) -> None:
        """What was prepared as ``count`` microbatches runs as one."""
        self._router_part *= count

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        total = cross_entropy_sum(logits, targets, self._vocab_start, self._vocab_real, self._mesh.group("tp"))
        return total / self._divisor + self._router_loss()

    def everywhere(self, loss: Tensor) -> Tensor:
        """Sum over dp and pp, in float64 until the end; tp ranks hold the same value already."""
        loss = loss.detach().double()
        for dim in ("dp", "pp"):
            if self._mesh.size(dim) > 1:
                dist.all_reduce(loss, group=self._mesh.group(dim))
        return loss.float()

    def _rows_to_cut(self, batches: list[Batch]) -> list[int]:
        """Rows that decide the number of microbatches: where each gathers the weights anew, as many on all dp ranks."""
        rows, config = [one.rows for one in batches], self._config
        if config.microbatches is None and config.pp > 1 and config.reshards and config.dp > 1:
            most = torch.tensor(rows, device=self._mesh.device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._mesh.group("dp"))
            rows = most.tolist()
        return rows

    def _agree(self, counted: Tensor, batches: int) -> Tensor:
        """The count over dp; the same all-reduce shows whether all dp ranks gave the same number of batches."""
        if self._mesh.size("dp") == 1:
            return counted
        sums = torch.stack((counted, counted.new_tensor(batches), counted.new_tensor(batches**2)))
        dist.all_reduce(sums, group=self._mesh.group("dp"))
        if batches > 1 or self._mesh.device.type == "cpu":
            total, squares = sums[1].item(), sums[2].item()
            if squares * self._mesh.size("dp") != total**2:
                raise ValueError(
                    f"this dp rank gave {batches} batches and others gave another number; all must give the same"
                )
        return sums[0]

    def _router_loss(self) -> Tensor | float:
        """This microbatch's part of the mean of the routers' balance losses over all microbatches of all dp ranks.

        Every tp rank computes it whole, and the blocks around the routers sum their gradients: each gives its part.
        """
        balance = self._runner.router_loss
        if balance is None:
            return 0.0
        return scale_grad(balance, 1 / self._mesh.size("tp")) * (self._router_weight * self._router_part)

    @property
    def _has_router_loss(self) -> bool:
        return bool(getattr(self._runner.model.config.get_text_config(), "output_router_logits", False))

    def _part_of_a_piece(self, pieces: int, added_rows: bool, targets: Tensor) -> float:
        """One over the number of microbatches of all dp ranks; 0 where nothing counts."""
        sums = torch.tensor([pieces, int(added_rows)], device=self._mesh.device)
        dist.all_reduce(sums, group=self._mesh.group("dp"))
        if sums[1] > 0:
            raise ValueError(
                "the routers' balance loss would see rows that fill a batch up: give every dp rank rows that its "
                "number of microbatches divides, or set output_router_logits to false in the model's config"
            )
        return 1 / int(sums[0]) if targets > 0 else 0.0
