"""What the workers run for the tests of dropout over tp."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshpar.grads import local
from tests.jobs import make, rows_of_rank


def _seed_by_dp_rank(model, seed: int = 0) -> None:
    torch.manual_seed(seed + model.mesh["dp"].get_local_rank())


def steps(config: dict, folder: str, batch: dict, count: int) -> dict:
    """SGD steps with dropout, seeded by dp rank, then an evaluation without it."""
    model = make(config, source=folder)
    own = rows_of_rank(batch, model.mesh)
    _seed_by_dp_rank(model)
    with torch.no_grad():
        logits = model(own["input_ids"]).logits
    local_loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), own["labels"][:, 1:].flatten()).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norm_weights = [], []
    for _ in range(count):
        losses.append(model.forward_backward(own).item())
        optimizer.step()
        optimizer.zero_grad()
        norm_weights.append({n: local(p).detach().clone() for n, p in model.named_parameters() if "norm" in n})
    return {
        "local_loss": local_loss,
        "losses": losses,
        "norm_weights": norm_weights,
        "eval": model.eval_loss(own).item(),
        "params": dict(model.full_tensors("param")),
    }


def attention_outputs_of_equal_heads(config: dict, folder: str, ids: torch.Tensor) -> dict:
    """Input of the first o_proj on this rank when every head has the first one's weights, in training and not."""
    model = make(config, source=folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if any(f"layers.0.self_attn.{x}_proj" in name for x in "qkv"):
                head = local(p)[:8].contiguous()
                dist.broadcast(head, src=0)
                local(p).copy_(head.repeat(local(p).shape[0] // 8, 1))
    seen = []
    o_proj = model._runner.model.get_submodule("model.layers.0.self_attn.o_proj")
    o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    _seed_by_dp_rank(model)
    with torch.no_grad():
        model(ids)
        model.eval()
        model(ids)
    return dict(zip(("train", "eval"), seen, strict=True))


def residual_masks(config: dict, folder: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """Which elements of each attention's and MLP's output dropout cleared on this rank."""
    model = make(config, source=folder)
    masks = []
    for name, module in model._runner.model.named_modules():
        if name.endswith((".self_attn", ".mlp")):
            module.register_forward_hook(
                lambda _, args, out: masks.append((out[0] if isinstance(out, tuple) else out).detach() == 0)
            )
    _seed_by_dp_rank(model)
    with torch.no_grad():
        model(ids)
    return masks


def router_logits(config: dict, folder: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """What each layer's router makes of the tokens on this rank, in training."""
    model, seen = make(config, source=folder), []
    for name, module in model._runner.model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(lambda _, args, out: seen.append(out[0].detach()))
    _seed_by_dp_rank(model)
    with torch.no_grad():
        model(ids)
    return seen


def slope(config: dict, folder: str, batch: dict, step: float = 1e-3) -> dict:
    """Gradients, their norm, and the loss's slope along them by central differences, always from the same seed."""
    model = make(config, source=folder)
    own = rows_of_rank(batch, model.mesh)
    _seed_by_dp_rank(model)
    model.forward_backward(own)
    grads, norm = dict(model.full_tensors("grad")), model.grad_norm().item()
    direction = [(local(p), local(p.grad).clone() / norm) for p in model.parameters()]
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            for p, g in direction:
                p.add_(g, alpha=sign * step)
        _seed_by_dp_rank(model)
        losses.append(model.forward_backward(own).item())
    return {"grads": grads, "norm": norm, "slope": (losses[0] - losses[1]) / (2 * step)}


def seeded_by_rank(config: dict, folder: str, batch: dict) -> str:
    """What a step says after each rank was seeded with its own rank."""
    model = make(config, source=folder)
    torch.manual_seed(dist.get_rank())
    try:
        model.forward_backward(batch)
    except RuntimeError as error:
        return str(error)
    return "no error"


def draws(config: dict, folder: str, batch: dict) -> dict:
    """Whether a training step and an evaluation move the default generator."""
    model = make(config, source=folder)
    moved = {}
    for what, run in (("train", model.forward_backward), ("eval", model.eval_loss)):
        before = torch.get_rng_state()
        run(batch)
        moved[what] = not torch.equal(before, torch.get_rng_state())
    return moved


def states_after_a_failed_forward(config: dict, folder: str, batch: dict) -> torch.Tensor:
    """The default generator's next numbers after both tp peers failed inside the first attention."""

    def fail(module, args, kwargs):
        raise ArithmeticError("planted")

    model = make(config, source=folder)
    _seed_by_dp_rank(model)
    model._runner.model.get_submodule("model.layers.0.self_attn.k_proj").register_forward_pre_hook(
        fail, with_kwargs=True
    )
    try:
        model.forward_backward(batch)
    except ArithmeticError:
        return torch.rand(4)
    raise AssertionError("the planted failure did not happen")
