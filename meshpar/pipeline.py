"""Drive microbatches through this rank's stages: torch's pipelining schedules, or a plain loop where pp is 1."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils.checkpoint import GraphExecGroup

from .actions import timed
from .batch import Batch
from .config import ParallelConfig, torch_dtype
from .flow import Flow
from .fsdp import Sharded, reshards
from .mesh import Mesh
from .progress import mark
from .split import Runner, Stage
from .stages import stage_ranks

LossFn = Callable[[Tensor, Tensor], Tensor]
_KEPT_SCHEDULES = 4  # a schedule holds receive buffers for one shape of batch


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """FSDP keeps the tensors it gathers into: made in inference mode, no later step could be trained with them."""
    wants_grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(wants_grad):
        yield


class StageModule(nn.Module):
    """What torch's `PipelineStage` calls: one stage of the runner, ending in the loss where it is the last.

    The runner is kept out of the module tree: torch clears the gradients of every FSDP module it finds below a stage
    when a batch has a new shape, which would drop what earlier backwards accumulated.
    """

    def __init__(self, runner: Runner, stage: Stage, loss_fn: LossFn, flow: Flow, dtype: torch.dtype) -> None:
        super().__init__()
        self._runner = [runner]
        self.stage, self.loss_fn, self.flow, self.dtype = stage, loss_fn, flow, dtype

    def forward(self, x: Tensor, *, targets: Tensor, **inputs) -> Tensor:
        """Hidden states for the next stage, or on the last stage this microbatch's loss, shape [1]."""
        loss = partial(self.loss_fn, targets=targets) if self.stage.range.is_last else None
        out = self._runner[0](self.stage.range.index, x, targets.shape[1], loss, **inputs)
        return torch.stack((out,)) if loss else out.to(self.dtype)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This stage's own parameters (zero-bubble schedules differentiate them apart from the inputs)."""
        runner, r = self._runner[0], self.stage.range
        names = [runner.anatomy.layer(i) for i in range(r.start, r.stop)]
        names += self.flow.before if r.is_first else ()
        names += self.flow.after if r.is_last else ()
        seen = {id(p): p for name in names for p in runner.model.get_submodule(name).parameters()}
        return iter(seen.values())


class _Stage(PipelineStage):
    """Marks and times what it does: between its chunks a schedule sends and receives.

    Computes a checkpointed layer again once for all of its weights, which a zero-bubble schedule takes in turn.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        mark("forward")
        with timed("F", self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        mark("p2p")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args, full_backward: bool = True, **kwargs) -> None:
        mark("backward")
        with timed("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        mark("p2p")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        mark("backward")
        with timed("W", self.stage_index, bwd_chunk_id), GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        mark("p2p")


@dataclass
class Pipeline:
    """Runs the steps of a model's stages on this rank."""

    runner: Runner
    mesh: Mesh
    config: ParallelConfig
    loss_fn: LossFn
    flow: Flow

    def __post_init__(self) -> None:
        self.dtype = torch_dtype(self.config.compute_dtype)
        self.modules = [StageModule(self.runner, s, self.loss_fn, self.flow, self.dtype) for s in self.runner.stages]
        self.stage_ranks = stage_ranks(self.config)
        layers = self.runner.own_layers()
        self.sharded, self.reshards = Sharded(self.runner, layers), reshards(layers, self.config)
        self._schedules: OrderedDict[tuple, object] = OrderedDict()

    def train_step(self, batches: list[tuple[Batch, int]]) -> Tensor:
        """Forward and backward of ``batches``, each cut into its number of microbatches; the sum of their losses.

        Gradients are reduced over dp when it returns. Ranks without the last stage return 0.
        """
        self.sharded.reshard()  # a forward alone leaves weights whole, which optimizer steps do not reach
        if self.config.pp == 1:
            return self._loop([piece for batch, count in batches for piece in batch.chunk(count)])
        self.sharded.hold_gradients()
        self.sharded.reshard_layers(self.reshards)
        total = sum((self._scheduled(batch, count) for batch, count in batches), self._zero())
        mark("backward")
        self.sharded.reduce_gradients()
        return total

    @no_inference_mode()
    @torch.no_grad()
    def eval_step(self, batches: list[tuple[Batch, int]]) -> Tensor:
        """Forward alone; the sum of the losses, 0 on ranks without the last stage."""
        self.sharded.reshard()
        total = self._forward_only([piece for batch, count in batches for piece in batch.chunk(count)])
        self.sharded.reshard()
        return total

    @no_inference_mode()
    def loss(self, batch: Batch) -> Tensor:
        """pp=1: the loss of one batch, differentiable."""
        self.sharded.reshard()
        loss = partial(self.loss_fn, targets=batch.targets)
        return self.runner(0, batch.input_ids, batch.seq_len, loss, **batch.model_inputs())

    @no_inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """pp=1: the logits [b, s, local vocabulary] of one batch, differentiable."""
        self.sharded.reshard()
        return self.runner(0, batch.input_ids, batch.seq_len, **batch.model_inputs())

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def _forward(self, piece: Batch) -> Tensor:
        return self.modules[0](piece.input_ids, targets=piece.targets, **piece.model_inputs())

    def _loop(self, pieces: list[Batch]) -> Tensor:
        """Gradients are scattered after each microbatch, or every rank would hold all of them whole.

        Where there is nothing to scatter, FSDP's copies of several microbatches are saved.
        """
        scatter = self.mesh.fsdp.size() > 1 or (len(pieces) == 1 and self.reshards)
        if not scatter:
            self.sharded.hold_gradients()
        self.sharded.reshard_layers(scatter and self.reshards)
        total = self._zero()
        for i, piece in enumerate(pieces):
            if scatter:
                self.sharded.begin_piece(i == len(pieces) - 1, self.reshards)
            mark("forward")
            with timed("F", 0, i):
                loss = self._forward(piece)
            mark("backward")
            with timed("B", 0, i):
                loss.backward()
            total += loss.detach().sum()
        if not scatter:
            self.sharded.reduce_gradients()
        return total

    def _scheduled(self, batch: Batch, count: int) -> Tensor:
        schedule = self._schedule(batch.rows // count, batch.seq_len, count)
        losses: list[Tensor] = []
        args = (batch.input_ids,) if any(s.range.is_first for s in self.runner.stages) else ()
        kwargs = {"targets": batch.targets, **batch.model_inputs()}
        target = {"target": batch.targets, "losses": losses} if any(s.range.is_last for s in self.runner.stages) else {}
        mark("p2p")
        schedule.step(*args, **kwargs, **target, return_outputs=False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero()

    def _forward_only(self, pieces: list[Batch]) -> Tensor:
        """Each stage of this rank in turn, all microbatches through it (torch's V schedules have no evaluation).

        NCCL may run a group's sends and receives in the order they are issued. So that no rank's receive waits behind
        its own send in a circle, sends back to a lower rank, or to where a stage receives from, wait for its end.
        """
        total, sends = self._zero(), []
        handed_on: list[Tensor] = []
        for module in self.modules:
            r, previous, following = module.stage.range, self._neighbour(module, -1), self._neighbour(module, 1)
            received, handed_on = handed_on, []
            for i, piece in enumerate(pieces):
                x = (
                    piece.input_ids
                    if r.is_first
                    else received[i]
                    if previous is None
                    else self._receive(piece, previous)
                )
                out = module(x, targets=piece.targets, **piece.model_inputs())
                if r.is_last:
                    total = total + out.sum()
                    continue
                if following is None or following == previous or following < self.mesh.rank("pp"):
                    handed_on.append(out)
                else:
                    sends.append(self._send(out, following))
            if following is not None:
                sends += [self._send(out, following) for out in handed_on]
        for work, _ in sends:
            work.wait()
        return total

    def _neighbour(self, module: StageModule, step: int) -> int | None:
        """pp rank of the stage before or after, None where there is none or it is on this rank."""
        index = module.stage.range.index + step
        if not 0 <= index < len(self.stage_ranks) or self.stage_ranks[index] == self.mesh.rank("pp"):
            return None
        return self.stage_ranks[index]

    def _receive(self, piece: Batch, source: int) -> Tensor:
        hidden = torch.empty(self._hidden_shape(piece.rows, piece.seq_len), dtype=self.dtype, device=self.mesh.device)
        dist.recv(hidden, group=self.mesh.group("pp"), group_src=source)
        return hidden

    def _send(self, hidden: Tensor, target: int) -> tuple[dist.Work, Tensor]:
        hidden = hidden.contiguous()  # kept beside the work: it must live until the send is done
        return dist.isend(hidden, group=self.mesh.group("pp"), group_dst=target), hidden

    def _hidden_shape(self, rows: int, seq_len: int) -> tuple[int, ...]:
        embedded = seq_len if self.flow.carried else 0
        return rows, self.runner.tp.local_seq_len(seq_len) + embedded, *self.flow.trailing

    def _schedule(self, rows: int, seq_len: int, count: int):
        key = (rows, seq_len, count)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(rows, seq_len, count)
            if len(self._schedules) > _KEPT_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, rows: int, seq_len: int, count: int):
        shape = self._hidden_shape(rows, seq_len)
        hidden = torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)
        ids = torch.empty((rows, seq_len), dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
        stages = [
            _Stage(
                module,
                module.stage.range.index,
                module.stage.range.count,
                self.mesh.device,
                input_args=(ids if module.stage.range.is_first else hidden,),
                output_args=(loss if module.stage.range.is_last else hidden,),
                group=self.mesh.group("pp"),
            )
            for module in self.modules
        ]
        cls = get_schedule_class(self.config.schedule)
        single = issubclass(cls, PipelineScheduleSingle)
        # The last stage returns its loss already, divided by the whole step's token count: nothing to compute or scale.
        return cls(stages[0] if single else stages, count, loss_fn=lambda out, _: out, scale_grads=False)
