"""What the workers run for the sweep over every causal model type."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

import meshpar
from meshpar.load import meta_copy
from meshpar.tp_plan import make_plan
from tests import models
from tests.jobs import rows_of_rank
from tests.tiny_families import tiny_model

LOSS_BAR, GRADIENT_BAR = 1e-6, 1e-5


def family_batch(rows: int = 4, seq: int = 16) -> dict:
    """Whole rows, of which uneven numbers of tokens count."""
    batch = models.make_batch(rows, seq)
    for row in range(rows):
        batch["labels"][row, : 2 + 3 * row] = -100
    return batch


def outcome(model_type: str, config: dict, **changes) -> dict:
    """How far the mesh is from one process on rank 0 ({} elsewhere), or why construction refused."""
    source, batch = tiny_model(model_type, **changes), family_batch()
    try:
        model = meshpar.parallelize_model(source, meshpar.ParallelConfig(**config, compute_dtype="float32"))
    except ValueError as error:
        return {"refused": str(error)}
    loss = model.forward_backward(rows_of_rank(batch, model.mesh)).item()
    grads, norm = dict(model.full_tensors("grad")), model.grad_norm().item()
    if dist.get_rank() > 0:
        return {}
    source.zero_grad()
    expected = models.reference_loss(source, batch)
    expected.backward()
    wanted = _gradients(source)
    off = {n: models.relative(grads[n], g) for n, g in wanted.items()}
    loss_off = abs(loss - expected.item())
    if loss_off > LOSS_BAR or max(off.values()) > GRADIENT_BAR:
        bars = _rounding(source, batch, expected.item(), wanted)
    else:
        bars = {}
    over = {n: o / max(GRADIENT_BAR, 4 * bars.get(n, 0.0)) for n, o in off.items()}
    worst = max(over, key=over.__getitem__)
    return {
        "ok": over[worst] <= 1 and loss_off <= max(LOSS_BAR, 4 * bars.get("loss", 0.0)),
        "loss": loss_off,
        "gradient": off[worst],
        "worst": worst,
        "norm": abs(norm / models.global_norm(wanted) - 1),
    }


ADAMW = dict(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-5)


def after_adamw(model_type: str, config: dict, **changes) -> dict[str, float]:
    """Relative distances of all parameters from one process after three clipped AdamW steps, over their bars (rank 0).

    AdamW divides by the size of a gradient, so elements that are nearly zero turn rounding into a step: the bar is
    1e-5, or 4 times as far as one process moves when every weight starts off by its last bit.
    """
    source = tiny_model(model_type, **changes)
    model = meshpar.parallelize_model(source, meshpar.ParallelConfig(**config, compute_dtype="float32"))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    batches = [models.make_batch(4, 16, seed=seed) for seed in range(3)]
    for batch in batches:
        model.forward_backward(rows_of_rank(batch, model.mesh))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    params = dict(model.full_tensors("param"))
    if dist.get_rank() > 0:
        return {}
    moved = _trained(_last_bits_moved(source), batches)
    wanted = _trained(source, batches)
    bars = {n: max(GRADIENT_BAR, 4 * models.relative(moved[n], p)) for n, p in wanted.items()}
    return {n: models.relative(params[n], p) / bars[n] for n, p in wanted.items()}


def _trained(model, batches: list[dict]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for batch in batches:
        models.reference_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def _gradients(model) -> dict[str, torch.Tensor]:
    return {
        n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad
    }


def _rounding(source, batch: dict, loss: float, wanted: dict) -> dict[str, float]:
    """What float32 leaves open: where that is more than a bar, the mesh, which sums in another order, cannot be held
    to the bar. The larger of two measures: how far one process in float32 is from one in float64 (where the model's
    code runs in it), and how far it moves when every weight moves by its last bit."""
    others = [_last_bits_moved(source), copy.deepcopy(source).double()]
    others[1].set_experts_implementation("eager")  # grouped matmuls have no float64
    off = dict.fromkeys((*wanted, "loss"), 0.0)
    for other in others:
        try:
            value, grads = _loss_and_gradients(other, batch)
        except RuntimeError:
            continue
        off["loss"] = max(off["loss"], abs(value - loss))
        for name, grad in wanted.items():
            off[name] = max(off[name], models.relative(grad.double(), grads[name].double()))
    return off


def _loss_and_gradients(model, batch: dict) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = models.reference_loss(model, batch)
    loss.backward()
    return loss.item(), _gradients(model)


@torch.no_grad()
def _last_bits_moved(source):
    moved, generator = copy.deepcopy(source), torch.Generator().manual_seed(0)
    for p in moved.parameters():
        signs = torch.randint(0, 2, p.shape, generator=generator) * 2 - 1
        p.mul_(1 + signs * torch.finfo(torch.float32).eps)
    return moved


def reference_failure(model_type: str) -> str | None:
    """What the unmodified model raises in one process, if it cannot run alone."""
    try:
        models.reference_loss(tiny_model(model_type), family_batch()).backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return None


def unplanned(types: list[str]) -> dict[str, list[str]]:
    """This rank's part of ``types``: the parameters whose module is not in the plan for tp=2."""
    config, missing = meshpar.ParallelConfig(dp_shard=1, tp=2, sequence_parallel=False), {}
    for model_type in types[dist.get_rank() :: dist.get_world_size()]:
        model = meta_copy(tiny_model(model_type))
        plan = make_plan(model, config)
        names = (n for n, _ in model.named_parameters(remove_duplicate=False))
        missing[model_type] = [n for n in names if n.rpartition(".")[0] not in plan]
    return missing


ROUTED = dict(output_router_logits=True, router_aux_loss_coef=0.5)


def balance(model_type: str, config: dict, batch: dict) -> dict:
    """Loss and whole gradients of a mixture of experts with its routers' balance loss."""
    model = _routed(model_type, config)
    loss = model.forward_backward(rows_of_rank(batch, model.mesh)).item()
    return {"loss": loss, "grads": dict(model.full_tensors("grad"))}


def balance_refused(model_type: str, config: dict, batch: dict) -> str:
    """What `forward_backward` says of ``batch``."""
    model = _routed(model_type, config)
    try:
        model.forward_backward(rows_of_rank(batch, model.mesh))
    except ValueError as error:
        return str(error)
    return "no error"


def _routed(model_type: str, config: dict):
    config = meshpar.ParallelConfig(**config, compute_dtype="float32")
    return meshpar.parallelize_model(tiny_model(model_type, **ROUTED), config)
