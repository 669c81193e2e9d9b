"""Tiny random models, batches, and what the unmodified Hugging Face model makes of them in one process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

# Large initial weights on purpose: with small ones the loss is ln(vocabulary) whatever the model does.
_COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.2,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
    attn_implementation="sdpa",
)
_OF_FAMILY = {
    "granite": dict(logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.3),
    "qwen3": dict(head_dim=8),
    "mistral": dict(sliding_window=8),
}


def tiny_config(family: str = "llama", **changes):
    """A 4-layer config of hidden size 32 with 4 heads on 2 kv heads."""
    return AutoConfig.for_model(family, **{**_COMMON, **_OF_FAMILY.get(family, {}), **changes})


def tiny_model(family: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    """A model of `tiny_config` with weights from ``seed``; norms are moved off 1, where a lost scale would not show."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def make_batch(rows: int = 8, seq: int = 16, vocab: int = 96, seed: int = 1, kind: str = "full") -> dict:
    """A batch of [rows, seq]: "full", "ragged" (right padding, uneven token counts), "left" padding, or "packed"."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, seq), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("ragged", "left"):
        mask = torch.ones_like(ids)
        for row in range(rows):
            length = seq - (row * 3) % (seq // 2)
            cut = slice(length, None) if kind == "ragged" else slice(0, seq - length)
            mask[row, cut] = 0
            batch["labels"][row, cut] = -100
        batch["labels"][0, : seq // 2] = -100
        batch["attention_mask"] = mask
    if kind == "packed":
        positions = torch.arange(seq).repeat(rows, 1)
        for row in range(rows):
            cut = 3 + row % (seq - 6)
            positions[row, cut:] -= cut
            batch["labels"][row, cut] = -100
        batch["position_ids"] = positions
    return batch


def reference_loss(model: PreTrainedModel, batch: dict) -> torch.Tensor:
    """Sum of token losses over the number of counted tokens, of the unmodified model on the whole batch."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    targets = batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)


def reference(model: PreTrainedModel, *batches: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of ``batches`` and every parameter's gradient, accumulated over them."""
    model.zero_grad()
    losses = []
    for batch in batches:
        loss = reference_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad.clone() for n, p in model.named_parameters()}


def global_norm(grads: dict[str, torch.Tensor]) -> float:
    """2-norm over all gradients."""
    return torch.stack([g.double().norm() for g in grads.values()]).norm().item()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of ``a`` from ``b``; where ``b`` is zero, the norm of ``a``."""
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)).item()
