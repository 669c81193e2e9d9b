"""`parallelize_model` and what it returns."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .batch import Batch, Batches, make_batch
from .checkpointing import apply_checkpointing
from .compiling import apply_compile
from .config import ParallelConfig, check_model
from .fsdp import apply_fsdp, materialize
from .full import FullTensors
from .grads import GradientSums, clip_, global_norm, pieces
from .load import Reader, load_buffers, meta_copy, open_model
from .mesh import Mesh, adopt_mesh, build_mesh, config_for_mesh, default_device, init_distributed, on_first_rank
from .overrides import Style
from .pipeline import Pipeline, no_inference_mode
from .probe import check_shapes
from .split import Runner, split_model
from .stages import stage_ranges, stage_ranks, stages_of_rank
from .step_loss import StepLoss
from .styles import apply_styles
from .tensor_parallel import TensorParallel
from .tp_plan import Plan, make_plan
from .weights_convert import original_layout, pin_layout
from .weights_out import own_code, write_pretrained

log = logging.getLogger("meshpar")


@no_inference_mode()
def parallelize_model(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    config: ParallelConfig | ParallelismConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    plan: str | Mapping[str, Style] = "auto",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> ParallelModel:
    """Put a Hugging Face causal language model on a pp x dp x tp mesh; every rank calls it.

    ``model``: a directory or hub id (each rank reads its own slices of the safetensors files), a config (random
    weights, a function of ``seed`` and each parameter's name), or a built model (left as it is; its weights are copied,
    or drawn at random if it is on the meta device). ``config``: the mesh sizes and how to run; default all ranks in
    dp_shard. ``mesh``: an existing mesh with the dimensions pp, dp (or dp_replicate, dp_shard), tp. ``plan``: "auto",
    or a dict from module-name pattern to style laid over it. ``dtype``: what parameters are stored in,
    `config.param_dtype` unless given. ``device``: this rank's device; CUDA where there is one; "meta" for names, shapes
    and placements without values. ``trust_remote_code``: run Python code that comes with the directory or hub id, as
    transformers does; without it a model that needs such code is refused.

    Raises ValueError, before weights are read, for sizes or models that cannot work.
    """
    device = init_distributed(device if device is not None or mesh is None else _device_of(mesh))
    config = _resolve_config(config, mesh, dtype)
    # To a device they go as they are: it takes less time, and it can widen them itself.
    widen = device.type == "cpu" and config.param_dtype == "float32"
    opened = open_model(model, seed, widen, trust_remote_code)
    skeleton = opened.skeleton
    check_model(config, skeleton.config)
    the_mesh = adopt_mesh(mesh, device) if mesh is not None else build_mesh(config, device)
    _check_alike(skeleton, config, plan)
    the_plan = make_plan(skeleton, config, plan, on_first_rank)
    reader = Reader(skeleton, opened.source, the_mesh)
    full = FullTensors.describe(skeleton, the_mesh, the_plan.flow)
    pin_layout(skeleton)

    ranges = stage_ranges(skeleton, the_plan.anatomy, config, the_plan.flow)
    tp = TensorParallel(
        the_mesh.device_mesh["tp"],
        config.sequence_parallel,
        # Under activation checkpointing what is gathered is not kept at all.
        keep_shards=config.activation_checkpoint == "none",
        # An embedding of a class of its own is looked up whole on every rank, and there is nothing to sum.
        sum_at_layers=the_plan.flow.straight and the_plan[the_plan.anatomy.embedding] == "embedding_rowwise",
        compiled=config.compile,
    )
    unmodified = meta_copy(skeleton) if tp.size > 1 else skeleton
    specs = apply_styles(skeleton, the_plan, tp, config)
    on_first_rank(partial(check_shapes, skeleton, unmodified, the_plan, tp))
    apply_checkpointing(skeleton, the_plan.anatomy, config.activation_checkpoint, tp)
    own = [ranges[i] for i in stages_of_rank(config, the_mesh.rank("pp"))]
    stages = split_model(skeleton, unmodified, the_plan.anatomy, own, the_plan.flow)
    runner = Runner(skeleton, the_plan.anatomy, stages, tp)
    apply_compile(runner.own_layers(), tp, config)
    head = skeleton.get_submodule(the_plan.anatomy.head)
    apply_fsdp(runner, runner.own_layers(), head, the_mesh, config)
    materialize(skeleton, specs, the_mesh, reader)
    load_buffers(skeleton, reader, device)
    log.info(
        "%s on pp=%d x dp=%d x tp=%d: %d parameters, layers per stage %s, %d bytes read",
        type(skeleton).__name__, config.pp, config.dp, config.tp, full.numel, [r.stop - r.start for r in ranges],
        opened.source.bytes_read,
    )  # fmt: skip
    full.specs, full.ranges, full.stage_ranks = specs, ranges, stage_ranks(config)
    return ParallelModel(runner, the_mesh, config, the_plan, full, opened.origin, trust_remote_code).train()


def _check_alike(skeleton: PreTrainedModel, config: ParallelConfig, plan: str | Mapping[str, Style]) -> None:
    """Rank 0's plan is every rank's, so all must have been given the same."""
    shapes = [(n, tuple(p.shape)) for n, p in skeleton.named_parameters()]
    styles = (
        plan if isinstance(plan, str) else [(n, s if isinstance(s, str) else type(s).__name__) for n, s in plan.items()]
    )
    own = hashlib.sha256(f"{shapes}\n{config}\n{styles}".encode()).hexdigest()
    everyone = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if len(set(everyone)) > 1:
        odd = next(rank for rank, digest in enumerate(everyone) if digest != everyone[0])
        raise RuntimeError(
            f"rank {odd} was given another model, config or plan than rank 0; all must be given the same"
        )


def _device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cpu") if mesh.device_type == "cpu" else default_device()


def _resolve_config(
    config: ParallelConfig | ParallelismConfig | None, mesh: DeviceMesh | None, dtype: torch.dtype | str | None
) -> ParallelConfig:
    if config is None:
        config = ParallelConfig()
    elif isinstance(config, ParallelismConfig):
        config = ParallelConfig.from_accelerate(config)
    elif not isinstance(config, ParallelConfig):
        raise TypeError(
            f"config is a {type(config).__name__}; pass a ParallelConfig or an accelerate.ParallelismConfig"
        )
    if dtype is not None:
        config = replace(config, param_dtype=str(dtype).removeprefix("torch."))
    if mesh is not None:
        config = config_for_mesh(config, mesh)
    return config.resolve(dist.get_world_size())


class ParallelModel(nn.Module):
    """A Hugging Face model on a mesh: this rank's parameters, under their Hugging Face names, as DTensors.

    Train it with `forward_backward`, on any mesh; where pp is 1 it is also called like the model it came from.
    """

    def __init__(
        self,
        runner: Runner,
        mesh: Mesh,
        config: ParallelConfig,
        plan: Plan,
        full: FullTensors,
        origin: str | None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__()
        self._runner = runner
        self.config = runner.model.config
        self.parallel_config = config
        self.plan = plan
        self._mesh, self._full, self._origin, self._trust_remote_code = mesh, full, origin, trust_remote_code
        self._own_code = own_code(self.config, runner.model)
        self._loss = StepLoss(runner, mesh, config, full.vocab_size)
        self._pipeline = Pipeline(runner, mesh, config, self._loss, full.flow)
        params = dict(self.named_parameters())
        holders = {n: full.holders(n) for n in params}
        self._sums = GradientSums(params, full.specs, mesh, holders)
        self._counted = {n for n in params if holders[n][0] == mesh.rank("pp")}
        self._last_backward = -1

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh: pp, dp (or dp_replicate and dp_shard), tp."""
        return self._mesh.device_mesh

    def __reduce_ex__(self, protocol):
        """Not supported: raises RuntimeError with what to do instead of a copy or pickle."""
        raise RuntimeError(
            "a ParallelModel holds process groups, which cannot be copied or pickled; save_pretrained(directory), or "
            "save each rank's state_dict()"
        )

    # Names: the skeleton is a Hugging Face model, so its own names are the right ones.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by Hugging Face name; values are DTensors on the dp x tp mesh."""
        self._pipeline.sharded.reshard()  # between a forward and its backward FSDP shows whole tensors instead
        return self._runner.model.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers by Hugging Face name."""
        return self._runner.model.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args, **kwargs):
        """This rank's parameters and persistent buffers by Hugging Face name."""
        return self._runner.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False):
        """Load what `state_dict` gave, on the same mesh; values are copied, and ``assign`` is refused."""
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would put other parameters in place of those whose gradients are summed "
                "over the mesh; leave assign out, and values are copied into them"
            )
        return self._runner.model.load_state_dict(state_dict, strict)

    # Training

    def forward_backward(self, batch: Batches) -> Tensor:
        """Loss and gradients of one global batch, of which ``batch`` is this data-parallel rank's part.

        ``batch``: input_ids, labels and optionally attention_mask, position_ids, each [batch, seq]; the same on all pp
        and tp ranks of a dp rank. A list of batches (the same number on every rank) is accumulated as one. Documents
        are kept apart where position_ids restart, also beside a mask of ones, where transformers would join them.

        Returns the sum of token losses divided by the number of counted tokens, both over the global batch: a float32
        scalar, equal on every rank. Gradients of that same value are added to ``.grad``.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward makes gradients, and torch.no_grad() or torch.inference_mode() is active; "
                "eval_loss(batch) gives the loss alone"
            )
        batches = self._prepare(batch)
        try:
            self._sums.set_aside()
            loss = self._pipeline.train_step(batches)
            self._sums.finish()
        except BaseException:
            self._sums.discard()
            self._pipeline.sharded.discard_step()
            raise
        return self._loss.everywhere(loss)

    def eval_loss(self, batch: Batches) -> Tensor:
        """The loss `forward_backward` would return, without gradients or dropout; batches may have any shape."""
        batches = self._prepare(batch)
        training = [module for module in self.modules() if module.training]
        self.eval()
        try:
            return self._loss.everywhere(self._pipeline.eval_step(batches))
        finally:
            for module in training:
                module.training = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **inputs: Tensor) -> CausalLMOutput:
        """pp=1 only: the loss of the global batch, differentiable, or without ``labels`` the logits [b, s, vocabulary].

        With ``labels`` the logits stay split over tp and are not returned. Logits carry no gradient: FSDP sums over dp
        here, where a loss of one's own would most likely mean, and they are split over tp.
        """
        if self.parallel_config.pp > 1:
            raise RuntimeError(
                "a model on a pipeline (pp > 1) cannot be called: one rank holds only some of its layers; "
                "use forward_backward(batch) to train and eval_loss(batch) to evaluate"
            )
        if labels is None:
            self._refuse_autocast()
            batch = make_batch(
                {"input_ids": input_ids, "labels": input_ids, **inputs}, self._mesh.device, self._full.vocab_size
            )
            return CausalLMOutput(logits=self._whole_logits(self._pipeline.logits(batch).detach()))
        [(batch, count)] = self._prepare({"input_ids": input_ids, "labels": labels, **inputs})
        self._loss.join_pieces(count)
        own = self._pipeline.loss(batch).float()
        loss = own + (self._loss.everywhere(own.detach()) - own).detach()
        if loss.requires_grad:
            loss.register_hook(self._when_backward_starts)
        return CausalLMOutput(loss=loss)

    def generate(self, *args, **kwargs):
        """Not supported: raises RuntimeError with what to do instead."""
        raise RuntimeError(
            "meshpar does not generate text; save_pretrained(directory), then generate with transformers or an "
            "inference engine"
        )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip all gradients to a global 2-norm of ``max_norm``; returns the norm before, equal on every rank.

        The norm is over pp, dp and tp, every parameter counted once.
        """
        norm = self.grad_norm()
        clip_((p.grad for p in self.parameters() if p.grad is not None), norm, max_norm)
        return norm

    def grad_norm(self) -> Tensor:
        """The global 2-norm of the gradients, a float32 scalar equal on every rank; nothing is clipped."""
        grads = (
            (piece, counts and name in self._counted)
            for name, p in self.named_parameters()
            if p.grad is not None
            for piece, counts in pieces(p.grad, self._full.specs[name], self._mesh)
        )
        return global_norm(grads, self._mesh)

    # Whole tensors

    def full_tensors(self, what: str = "param") -> Iterator[tuple[str, Tensor | None]]:
        """(name, tensor) of the whole model's parameters ("param") or gradients ("grad"), in Hugging Face's shapes.

        One tensor at a time, in one order, on the CPU of rank 0; None on the other ranks. Collective: every rank must
        iterate to the end. Parameters that need no gradient are left out of "grad".
        """
        if what not in ("param", "grad"):
            raise ValueError(f'full_tensors takes "param" or "grad", not {what!r}')
        self._check_values()
        return self._full.gather(dict(self.named_parameters()), what)

    def save_pretrained(
        self, directory: str | Path, dtype: torch.dtype | None = None, max_shard_size: str = "1GB"
    ) -> None:
        """Write a directory that `AutoModelForCausalLM.from_pretrained` opens, tokenizer included; collective.

        Names and shapes on disk are those of the directory the model came from, else those that transformers' own
        ``save_pretrained`` writes. Tensors are gathered one at a time; rank 0 holds at most one file of
        ``max_shard_size`` in memory, and what belongs to one tensor. ``dtype``: what to write, the parameters' own
        unless given; buffers keep theirs.
        """
        dtype = dtype or next(self.parameters()).dtype
        full, buffers = self._full, dict(self.named_buffers())
        entries = [(name, shape, dtype) for name, shape in full.shapes.items()]
        entries += [(name, *described) for name, described in full.buffers.items()]
        params = ((n, None if t is None else t.to(dtype)) for n, t in self.full_tensors("param"))
        write_pretrained(
            directory,
            *original_layout(self._runner.model, entries, chain(params, full.gather_buffers(buffers))),
            config=self.config,
            generation_config=getattr(self._runner.model, "generation_config", None),
            tokenizer_source=self._origin,
            max_shard_size=max_shard_size,
            is_writer=dist.get_rank() == 0,
            trust_remote_code=self._trust_remote_code,
            with_code_of=(self.config, self._runner.model),
        )

    # Internals

    def _prepare(self, batch: Batches) -> list[tuple[Batch, int]]:
        self._check_values()
        self._refuse_autocast()
        self._sums.refuse_hooks()
        return self._loss.prepare(batch)

    def _check_values(self) -> None:
        if self._mesh.device.type == "meta":
            raise RuntimeError('a model on device="meta" has names, shapes and placements, but no values')

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self._mesh.device.type):
            raise RuntimeError(
                "torch.autocast is active; ParallelConfig's compute_dtype says what forward and backward compute in: "
                f"leave autocast out, it is {self.parallel_config.compute_dtype} here"
            )

    def _whole_logits(self, logits: Tensor) -> Tensor:
        if self._mesh.size("tp") == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(self._mesh.size("tp"))]
        dist.all_gather(parts, logits.contiguous(), group=self._mesh.group("tp"))
        return torch.cat(parts, dim=-1)[..., : self._full.vocab_size]

    def _when_backward_starts(self, grad: Tensor) -> None:
        """Sums over tp must follow FSDP's own end of the backward: a callback that queues a callback runs after it.

        Several losses may be summed into one backward, which is one task of the autograd engine: it counts once.
        """
        task = torch._C._current_graph_task_id()
        if task == self._last_backward:
            return
        self._last_backward = task
        self._sums.set_aside()
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._sums.finish))
