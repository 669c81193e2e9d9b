"""Published formulas for the memory of a model's state and of a layer's activations, to hold measurements against.

Bytes; s positions, b rows, h hidden size, a query heads, k kv heads, d head size, f FFN width, t tensor-parallel ranks.
"""

from __future__ import annotations


def megatron_state_bytes(parameters: float, shards: int, zero: int) -> float:
    """Of ``parameters`` on a rank, with bfloat16 weights, float32 gradients, and AdamW with a float32 copy.

    ``zero``: what is split over ``shards`` ranks: nothing (0), optimizer states (1), gradients too (2), and weights
    too (3). Megatron-Core's table for its distributed optimizer has 18 bytes a parameter, and 6 + 12 / shards.
    """
    weights, gradients, optimizer = 2.0, 4.0, 12.0
    optimizer /= shards if zero >= 1 else 1
    gradients /= shards if zero >= 2 else 1
    weights /= shards if zero >= 3 else 1
    return parameters * (weights + gradients + optimizer)


def gpt_layer_bytes(
    s: int, b: int, h: int, a: int, t: int = 1, sequence_parallel: bool = False, checkpoint: str = "none"
) -> float:
    """What a GPT layer with dropout and attention scores in 16 bits keeps (arXiv 2205.05198, table 2).

    ``checkpoint``: "selective" keeps no scores; "full" keeps the layer's input, on every rank whole.
    """
    if checkpoint == "full":
        return 2 * s * b * h
    split_anyway = 24 + (5 * a * s / h if checkpoint == "none" else 0)
    return s * b * h * (10 / (t if sequence_parallel else 1) + split_anyway / t)


def llama_layer_bytes(
    h: int, a: int, k: int, d: int, f: int, t: int = 1, sequence_parallel: bool = False, gathered: bool = False
) -> float:
    """What a Llama layer with fused norms and attention keeps for a token in 16 bits.

    Both norms' inputs and outputs; queries, keys, values, attention's output and its float32 log-sum a head; gate, up,
    what the activation makes of gate, and the product. ``gathered``: projections keep their input whole, as DTensor
    does under sequence parallelism, not the shard of it.
    """
    full = t if sequence_parallel else 1
    norms = 2 * 2 * h / full + 2 * 2 * h / (1 if gathered else full)
    return norms + (2 * (a + 2 * k) * d + 2 * a * d + 4 * a) / t + 2 * 4 * f / t
