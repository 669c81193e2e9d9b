"""Parity: the same weights and batch through the unmodified Hugging Face model in one process, and through the mesh."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .batch import make_batch
from .config import ParallelConfig
from .dropout import dropout_names
from .grads import local
from .loss import IGNORE, shift_labels
from .mesh import init_distributed
from .model import ParallelModel, parallelize_model
from .overrides import Style
from .pretrained import read_config, using
from .recipe import Recipe
from .trace import comparable, first_difference, gather_outputs, record_outputs, run_order

LOSS_BAR = 1e-6
GRADIENT_BAR = 1e-5
LOGITS_BAR = 1e-4  # of the largest logit
# One process in float32 has rounding errors of its own, which grow with depth and width. Another order of the same sums
# may be off by as much again; 4 leaves room for the largest of many parameters.
ROUNDING_ROOM = 4.0
_LOGIT_BYTES = 256 << 20


@dataclass
class GradientError:
    """How far one parameter's gradient is from one process's, and the bar for its relative L2."""

    max_abs: float
    relative_l2: float
    bar: float = GRADIENT_BAR

    @property
    def ok(self) -> bool:
        return self.relative_l2 <= self.bar


@dataclass
class VerifyReport:
    """Outcome of `verify`: pairs are (mesh, one process). `first_wrong` names a module, or None when all agrees."""

    mesh: str
    loss: tuple[float, float]
    norm: tuple[float, float]
    logits_max_abs: float
    gradients: dict[str, GradientError] = field(default_factory=dict)
    logits_bar: float = 0.0
    loss_bar: float = LOSS_BAR
    norm_bar: float = GRADIENT_BAR
    first_wrong: str | None = None
    reason: str = ""

    @property
    def worst(self) -> str:
        """The parameter whose gradient is furthest off, measured against its bar."""
        return max(self.gradients, key=lambda n: self.gradients[n].relative_l2 / self.gradients[n].bar)

    @property
    def loss_ok(self) -> bool:
        return abs(self.loss[0] - self.loss[1]) <= self.loss_bar

    @property
    def norm_ok(self) -> bool:
        return abs(self.norm[0] - self.norm[1]) <= self.norm_bar * abs(self.norm[1])

    @property
    def ok(self) -> bool:
        """Whether the logits, the loss, the gradient norm and every parameter's gradient are within their bars."""
        numbers_ok = self.loss_ok and self.norm_ok and self.logits_max_abs <= self.logits_bar
        return numbers_ok and all(g.ok for g in self.gradients.values())

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = self.gradients[self.worst]
        wrong = [n for n, g in self.gradients.items() if not g.ok]
        lines = [
            f"{'equal to one process' if self.ok else 'DIFFERS from one process'}: {self.mesh}",
            f"  loss            {self.loss[0]:.7f}  one process {self.loss[1]:.7f}  "
            f"difference {abs(self.loss[0] - self.loss[1]):.1e} (bar {self.loss_bar:.0e})",
            f"  gradient norm   {self.norm[0]:.6f}  one process {self.norm[1]:.6f}",
            f"  logits          largest difference {self.logits_max_abs:.1e} (bar {self.logits_bar:.0e})",
            f"  gradients       {len(self.gradients) - len(wrong)} of {len(self.gradients)} within the bar",
            f"  worst gradient  {self.worst}: relative L2 {worst.relative_l2:.1e} (bar {worst.bar:.0e}), "
            f"largest difference {worst.max_abs:.1e}",
        ]
        if self.first_wrong:
            lines.append(f"  first wrong     {self.first_wrong}: {self.reason}")
        return "\n".join(lines)


def verify(
    model: str | Path | PreTrainedConfig | PreTrainedModel,
    config: ParallelConfig | ParallelismConfig | None = None,
    batch: Mapping[str, Tensor] | None = None,
    *,
    plan: str | Mapping[str, Style] = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> VerifyReport:
    """Compare the mesh of ``config`` with one process, in float32; every rank calls it and gets the report.

    ``batch`` is the whole global batch, the same on every rank ([rows, seq] each); random tokens unless given. Compared
    are the loss (within 1e-6), the logits, the global gradient norm, and every parameter's gradient (relative L2 within
    1e-5, or, for models too large for that in float32, within 4 times the distance of one process in float32 from
    float64). On failure `first_wrong` names the first module in forward order whose output differs; if all outputs
    agree, the last module in forward order whose gradient is wrong: the backward went wrong there.
    """
    parallel = parallelize_model(model, _in_float32(config), plan=plan, seed=seed, trust_remote_code=trust_remote_code)
    if getattr(parallel.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "verify compares the loss of tokens alone; set output_router_logits to false in the model's config, and "
            "the rest is as it will be in training"
        )
    batch = random_batch(parallel) if batch is None else dict(batch)
    if make_batch(batch, torch.device("cpu"), parallel._full.vocab_size).attention_mask is None:
        batch.pop("attention_mask", None)  # beside a mask of ones one process would not look for packed documents
    parallel.train(not dropout_names(parallel._runner.model))
    reference = _reference(model, parallel)
    own = _rows_of_rank(batch, parallel)
    with record_outputs(parallel, [parallel.plan.anatomy.head]) as recorded:
        loss = parallel.forward_backward(own).item()
    logits = gather_outputs(parallel, recorded, len(batch["input_ids"]))
    norm, contributions = parallel.grad_norm().item(), _contributions(parallel)
    grads = dict(parallel.full_tensors("grad"))
    report = None
    if reference is not None:
        report = _compare(reference, batch, loss, norm, grads, logits[parallel.plan.anatomy.head])
        report.mesh = _describe(parallel)
    report = _broadcast(report)
    if not report.ok:
        _locate(report, parallel, reference, batch, own, grads, contributions)
        report = _broadcast(report)
    return report


def run_recipe(recipe: Recipe) -> bool:
    """`meshpar verify`: the recipe's model, mesh and first global batch; prints the report on rank 0."""
    from .train.loop import first_batch

    init_distributed(timeout=recipe.distributed.timeout_seconds)
    recipe.check(dist.get_world_size())
    path, trusted = recipe.model.path, recipe.model.trust_remote_code
    source = read_config(path, trusted) if recipe.model.init == "random" else path
    config = recipe.parallel_config(dist.get_world_size())
    report = verify(source, config, first_batch(recipe), seed=recipe.train.seed, trust_remote_code=trusted)
    if dist.get_rank() == 0:
        print(report, flush=True)
    return report.ok


def random_batch(parallel: ParallelModel, seq_len: int = 32, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens [rows, seq_len], with uneven right padding: rows enough for every dp rank and microbatch."""
    config = parallel.parallel_config
    rows = config.dp * max(2, config.microbatches or (config.num_stages if config.pp > 1 else 1))
    generator = torch.Generator().manual_seed(seed)
    vocab = parallel.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    lengths = torch.randint(seq_len // 2, seq_len + 1, (rows, 1), generator=generator)
    mask = (torch.arange(seq_len) < lengths).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, IGNORE), "attention_mask": mask}


def _in_float32(config: ParallelConfig | ParallelismConfig | None) -> ParallelConfig:
    if isinstance(config, ParallelismConfig):
        config = ParallelConfig.from_accelerate(config)
    return replace(config or ParallelConfig(), param_dtype="float32", compute_dtype="float32", reduce_dtype="float32")


def _reference(model, parallel: ParallelModel) -> PreTrainedModel | None:
    """The unmodified model in float32 on rank 0, from its own source; random weights come from the mesh."""
    random = isinstance(model, PreTrainedConfig) or (
        isinstance(model, PreTrainedModel) and any(p.is_meta for p in model.parameters())
    )
    weights = dict(parallel.full_tensors("param")) if random else {}
    if dist.get_rank() != 0:
        return None
    if random:
        hf_config = model if isinstance(model, PreTrainedConfig) else model.config
        reference = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, trust_remote_code=parallel._trust_remote_code
        )
        with torch.no_grad():
            for name, param in reference.named_parameters():
                param.copy_(weights[name])
    elif isinstance(model, PreTrainedModel):
        reference = copy.deepcopy(model).float()
    else:
        trusted = parallel._trust_remote_code
        with using("model", model, trusted):
            reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=trusted)
    return reference.to(parallel._mesh.device).train(parallel.training)


def _rows_of_rank(batch: Mapping[str, Tensor], parallel: ParallelModel) -> dict[str, Tensor]:
    size, rank = parallel._mesh.size("dp"), parallel._mesh.rank("dp")
    rows = batch["input_ids"].shape[0]
    if rows % size:
        raise ValueError(f"batch has {rows} rows; the mesh has dp={size}, so give a multiple of {size}")
    return {k: v[rank * rows // size : (rank + 1) * rows // size] for k, v in batch.items()}


def run_reference(reference: PreTrainedModel, batch: Mapping[str, Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss, the head's output [rows, seq, vocabulary] (on the CPU) and gradients of the unmodified model.

    Rows go through a few at a time: only their sum is needed, and the logits of a whole batch may not fit.
    """
    param = next(reference.parameters())
    rows, seq_len = batch["input_ids"].shape
    vocab = reference.config.get_text_config().vocab_size
    step = max(1, _LOGIT_BYTES // (seq_len * vocab * param.element_size()))
    count = (batch["labels"][:, 1:] != IGNORE).sum().clamp(min=1).item()
    total, logits = 0.0, []
    head = reference.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, out: logits.append(out.detach().cpu()))
    reference.zero_grad()
    for start in range(0, rows, step):
        part = {k: v[start : start + step].to(param.device) for k, v in batch.items()}
        targets = shift_labels(part.pop("labels"))
        out = reference(**part, use_cache=False).logits
        losses = F.cross_entropy(out.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        (losses.sum() / count).backward()
        total += losses.double().sum().item() / count
    handle.remove()
    grads = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    return total, torch.cat(logits), {n: g if g is not None else torch.zeros(()) for n, g in grads.items()}


def _compare(reference, batch, loss: float, norm: float, grads: dict[str, Tensor], logits: Tensor) -> VerifyReport:
    want_loss, want_logits, want = run_reference(reference, batch)
    want = {n: g.cpu().clone() for n, g in want.items()}
    want_norm = torch.stack([g.double().norm() for g in want.values()]).norm().item()
    report = VerifyReport("", (loss, want_loss), (norm, want_norm), (logits - want_logits).abs().max().item())
    report.logits_bar = LOGITS_BAR * want_logits.abs().max().item()
    report.gradients = {n: GradientError(*_distance(grads[n], want[n])) for n in want}
    if not report.ok:
        _widen_bars(report, reference, batch, want, want_logits)
    return report


def _distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    difference = got.double() - want.double()
    scale = want.double().norm().item()
    relative = difference.norm().item() / scale if scale else float(difference.norm() > 0)
    return difference.abs().max().item(), relative


def _widen_bars(
    report: VerifyReport, reference: PreTrainedModel, batch, single: dict[str, Tensor], logits: Tensor
) -> None:
    """Hold the mesh to what float32 can do: the distance of one process in float32 from one in float64."""
    exact_loss, exact_logits, exact = run_reference(reference.double(), batch)
    for name, error in report.gradients.items():
        error.bar = max(GRADIENT_BAR, ROUNDING_ROOM * _distance(single[name], exact[name].cpu())[1])
    report.logits_bar = max(report.logits_bar, ROUNDING_ROOM * (logits - exact_logits).abs().max().item())
    report.loss_bar = max(LOSS_BAR, ROUNDING_ROOM * abs(report.loss[1] - exact_loss))
    reference.float()


def _contributions(parallel: ParallelModel) -> dict[str, float]:
    """Each parameter's share of the squared gradient norm, as the mesh counts it."""
    names = list(parallel._full.shapes)
    squares = torch.zeros(len(names), dtype=torch.float64, device=parallel._mesh.device)
    for name, param in parallel.named_parameters():
        if name in parallel._counted and param.grad is not None:
            squares[names.index(name)] = local(param.grad).double().pow(2).sum()
    dist.all_reduce(squares)
    return dict(zip(names, squares.tolist(), strict=True))


def _locate(report: VerifyReport, parallel, reference, batch, own, grads, contributions) -> None:
    """Name the first wrong module: by outputs, else by gradients, else by what the norm counts."""
    parallel.eval()
    with torch.compiler.set_stance("force_eager"), record_outputs(parallel, comparable(parallel)) as recorded:
        parallel.eval_loss(own)
    outputs = gather_outputs(parallel, recorded, len(batch["input_ids"]))
    if reference is None:
        return
    expected = run_order(reference.eval(), batch, [*parallel.plan, *outputs])
    found = first_difference(expected, outputs)
    wrong = [n for n, error in report.gradients.items() if not error.ok]
    miscounted = [
        n
        for n, g in grads.items()
        if abs(contributions[n] - g.double().norm().item() ** 2) > 1e-6 * report.norm[1] ** 2
    ]
    if found is not None:
        report.first_wrong, distance = found
        report.reason = f"its output is {distance:.1e} off (relative L2); every module that finishes before it agrees"
    elif wrong:
        order = {n: i for i, n in enumerate(expected)}
        owner = max((n.rpartition(".")[0] for n in wrong), key=lambda n: order.get(n, -1))
        report.first_wrong = owner
        report.reason = (
            "all outputs agree, but its gradient and those before it are wrong: the backward fails at or just after it"
        )
    elif miscounted:
        report.first_wrong = miscounted[0].rpartition(".")[0]
        times = contributions[miscounted[0]] / grads[miscounted[0]].double().norm().item() ** 2
        report.reason = f"all gradients agree, but the norm counts {miscounted[0]} {times:.3g} times"


def _describe(parallel: ParallelModel) -> str:
    c = parallel.parallel_config
    schedule = f", {c.schedule}" if c.pp > 1 else ""
    sp = ", sequence parallel" if c.tp > 1 and c.sequence_parallel else ""
    return f"{type(parallel._runner.model).__name__} on pp={c.pp} x dp={c.dp} x tp={c.tp}{schedule}{sp}"


def _broadcast(report: VerifyReport | None) -> VerifyReport:
    box = [report]
    dist.broadcast_object_list(box, src=0)
    return box[0]
