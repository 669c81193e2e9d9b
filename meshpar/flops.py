"""What a token costs: multiply-adds of matrices, of the experts it visits, and of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_VISITS = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token", "moe_top_k")


def matrix_costs(shapes: Mapping[str, Sequence[int]], config: PreTrainedConfig) -> dict[str, float]:
    """Multiply-adds a token of each parameter that multiplies: its elements; of routed experts, those of the visited.

    ``shapes``: parameter name -> shape; vectors scale or shift and are left out.
    """
    text = config.get_text_config()
    experts, visited = _first(text, _COUNTS), _first(text, _VISITS)
    part = visited / experts if experts and visited else 1.0

    def is_routed(name: str, shape: Sequence[int]) -> bool:
        return "experts" in name.split(".") or (len(shape) == 3 and shape[0] == experts)

    matrices = {name: shape for name, shape in shapes.items() if len(shape) >= 2}
    return {n: math.prod(shape) * (part if is_routed(n, shape) else 1.0) for n, shape in matrices.items()}


def flops_per_token(shapes: Mapping[str, Sequence[int]], config: PreTrainedConfig, seq_len: int) -> int:
    """FLOPs of forward and backward a token, recomputation not counted.

    6 for each weight that multiplies (matrices, of experts those that a token visits, without the embedding's look-up),
    and 6 * layers * heads * head_dim * ``seq_len`` for causal attention, with the mean of the two head sizes of latent
    attention; a non-causal count, as some report it, has 12 there. Scans of recurrent layers count with their weights
    alone.
    """
    text = config.get_text_config()
    weights = sum(matrix_costs(shapes, config).values())
    width = setting(text, "hidden_size") or 0
    if not getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)):
        weights -= (setting(text, "vocab_size") or 0) * width
    heads = setting(text, "num_attention_heads") or 0
    head_dim = setting(text, "head_dim") or (width // heads if heads else 0)
    latent = [setting(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    qk, v = (latent[0] + latent[1], latent[2]) if None not in latent else (head_dim, head_dim)
    return round(6 * weights + 6 * (setting(text, "num_hidden_layers") or 0) * heads * (qk + v) / 2 * seq_len)


def setting(config: Any, name: str) -> int | None:
    """A whole number that a config has, or None where it has none, or one for each layer."""
    try:
        value = getattr(config, name, None)
    except Exception:  # a config with a value for each layer refuses to give one
        return None
    return value if isinstance(value, int) else None


def _first(config: Any, names: Sequence[str]) -> int | None:
    found = (setting(config, name) for name in names)
    return next((n for n in found if n), None)
