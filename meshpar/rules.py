"""Rules: what tensor parallelism can split in a decoder layer, read off its modules' structure.

A block is a child of a decoder layer that runs on a part of its heads, features or experts on each rank: its input is
whole on every rank, its output is summed. It is recognised only if every parameter in it is accounted for; `guesses` go
by sizes alone. Both are tried out on the module's code (`trial`), but for experts. What does not pass runs whole on
every rank, which is right for any code, only not faster.

Inside a block all gradients are one rank's term of a sum, those of parameters that every rank holds whole included
(routers, latent projections, per-head norms): the sum over ranks is exact because a block's output is the sum of what
the ranks make of their own heads, features or parts of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from torch import nn

from .blocks import Q_HEADS, Block, Cut, Groups, OnFirst, Units
from .primitives import features, is_element_wise, is_product, is_rms_norm, linear


def recognise(block: nn.Module) -> Block | None:
    """The rule that accounts for every parameter of ``block``, or None."""
    for rule in (_mixture, _flat_mixture, _latent_attention, _attention, _mlp):
        found = rule(block)
        if found is not None and not _unexplained(block, found):
            return found
    return None


def _unexplained(block: nn.Module, found: Block) -> list[str]:
    """What may mix heads or features in a way the rule does not know.

    Parameters that neither are cut nor belong to a module the rule gave a style; modules without parameters that may do
    more than one element at a time, as a norm does.
    """
    known = tuple(f"{module}." for module in found.styles)
    names = [n for n, _ in block.named_parameters() if n not in found.cuts and n not in found.whole]
    names += [n for n, m in block.named_children() if next(m.parameters(), None) is None and not _is_harmless(n, m)]
    heads = found.heads[0] if found.heads else 1
    names += [n for n, b in block.named_buffers() if heads > 1 and heads in b.shape]  # slopes or decays of each head
    return [n for n in names if not f"{n}.".startswith(known)]


def _is_harmless(name: str, module: nn.Module) -> bool:
    """Element-wise, or on each head: activation functions, dropout, rotary embeddings, norms of heads."""
    return "rotary" in name or name in (*_QUERY_NORMS, *_KEY_NORMS, "qk_norm", "v_norm") or is_element_wise(module)


# Projections by what they are called; where several names are given, a block has one of them.
_QUERY = ("q_proj", "query", "Wq")
_KEY = ("k_proj", "key", "Wk")
_VALUE = ("v_proj", "value", "Wv")
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "c_attn", "qkv")
OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo")
_HEAD_GATES = ("g_proj", "gate_proj")
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
_UP = ("up_proj", "gate_proj", "fc1", "c_fc", "w1", "w3", "fc_in", "dense_h_to_4h")
_GATE_UP = ("gate_up_proj", "input_linear", "Wi")
_DOWN = ("down_proj", "fc2", "c_proj", "w2", "fc_out", "dense_4h_to_h", "output_linear", "Wo")
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "k_rope_only_layernorm")
_INDEXERS = ("indexer", "indexers_proj")  # of sparse attention: they choose keys, alike on every rank
_GROUPED_MULTIPLE = 8  # features: torch's grouped matmul wants strides of 16 bytes
_ROUTERS = ("gate", "router", "shared_expert_gate", "moe_statics")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


def _attention(block: nn.Module, gated: bool = False) -> Block | None:
    """Separate query, key, value and output projections; per-head or whole norms, gates and sinks with them.

    ``gated``: the query projection holds a gate for each head beside its query.
    """
    names = [linear(block, known) for known in (_QUERY, _KEY, _VALUE, OUT)]
    head_dim = _head_dim(block)
    if None in names or not head_dim:
        return None
    q, k, v, out = (str(name) for name in names)
    sizes = {name: features(block.get_submodule(name)) for name in (q, k, v, out)}
    kv_heads = sizes[k][0] // head_dim
    if not kv_heads or sizes[k][0] % head_dim or sizes[v][0] % kv_heads:
        return None
    v_width = sizes[v][0] // kv_heads
    q_heads = sizes[out][1] // v_width
    if sizes[out][1] % v_width or q_heads % kv_heads:
        return None
    if sizes[q][0] != (1 + gated) * q_heads * head_dim:
        return None
    found = Block(heads=(q_heads, kv_heads))
    found.colwise(block, q, Units(q_heads, sizes[q][0] // q_heads, "q"))
    found.colwise(block, k, Units(kv_heads, head_dim, "kv"))
    found.colwise(block, v, Units(kv_heads, v_width, "kv"))
    found.rowwise(block, out, Units(q_heads, v_width, "q"))
    _head_extras(block, found, q_heads, kv_heads, sizes[q][0], sizes[k][0])
    return found


def _head_extras(block: nn.Module, found: Block, q_heads: int, kv_heads: int, q_rows: int, k_rows: int) -> None:
    gate = linear(block, _HEAD_GATES)
    if gate is not None and features(block.get_submodule(gate))[0] % q_heads == 0:
        found.colwise(block, gate, Units(q_heads, features(block.get_submodule(gate))[0] // q_heads, "q"))
    for names, count, rows, by in ((_QUERY_NORMS, q_heads, q_rows, "q"), (_KEY_NORMS, kv_heads, k_rows, "kv")):
        for name in names:
            if isinstance(getattr(block, name, None), nn.Module):
                _head_norm(block, found, name, Units(count, rows // count, by))
    for name, norm in block.named_children():  # BitNet's, between the heads and the output projection
        if name not in found.styles and isinstance(getattr(norm, "weight", None), nn.Parameter):
            _wide_norm(found, name, norm, found.cuts[f"{found.out}.weight"].units)
    sinks = getattr(block, "sinks", None)
    if isinstance(sinks, nn.Parameter) and tuple(sinks.shape) == (q_heads,):
        found.cuts["sinks"] = Cut(0, (Units(q_heads, 1, "q"),))


def _head_norm(block: nn.Module, found: Block, name: str, units: Units) -> None:
    """A norm of each head (one weight for all, or one a head), or over all of them, which needs their statistics."""
    params = dict(block.get_submodule(name).named_parameters())
    shapes = {tuple(p.shape) for p in params.values()}
    if shapes <= {(units.width,), (units.width // 2,), (1,)} and params.keys() <= {"weight", "bias"}:
        found.styles[name] = "replicate"
    elif shapes == {(units.count, units.width)}:
        found.styles[name] = "by_head"
        found.cuts |= {f"{name}.{leaf}": Cut(0, (Units(units.count, 1, units.by),)) for leaf in params}
    else:
        _wide_norm(found, name, block.get_submodule(name), (units,))


def _wide_norm(found: Block, name: str, norm: nn.Module, units: tuple[Units, ...]) -> None:
    """An RMSNorm over a dimension that is cut: its mean square is summed over the ranks."""
    width = sum(u.count * u.width for u in units)
    if [(n, tuple(p.shape)) for n, p in norm.named_parameters()] == [("weight", (width,))] and is_rms_norm(norm):
        found.styles[name] = "colwise_norm"
        found.cuts[f"{name}.weight"] = Cut(0, units)


def _latent_attention(block: nn.Module) -> Block | None:
    """MLA: latent projections whole, what unfolds them by head (arXiv 2405.04434)."""
    q = next(filter(None, (linear(block, (name,)) for name in ("q_b_proj", "q_gate_proj", "q_proj"))), None)
    kv, out = linear(block, ("kv_b_proj",)), linear(block, OUT)
    q_heads = getattr(block, "num_heads", None)
    if q is None or kv is None or out is None or not isinstance(q_heads, int):
        return None
    q_rows, kv_rows = (features(block.get_submodule(name))[0] for name in (q, kv))
    out_columns = features(block.get_submodule(out))[1]
    if q_rows % q_heads or kv_rows % q_heads or out_columns % q_heads:
        return None
    found = Block(heads=(q_heads, q_heads))
    found.colwise(block, q, Units(q_heads, q_rows // q_heads, "q"))
    found.colwise(block, kv, Units(q_heads, kv_rows // q_heads, "q"))
    found.rowwise(block, out, Units(q_heads, out_columns // q_heads, "q"))
    for name in (*_LATENT, *_INDEXERS):
        if isinstance(getattr(block, name, None), nn.Module):
            found.styles[name] = "replicate"
    _head_extras(block, found, q_heads, q_heads, q_rows, q_rows)
    return found


def guesses(block: nn.Module) -> Iterator[Block]:
    """What a module may be, going by its sizes alone; only a trial (`trial`) can tell."""
    found = [*_guessed_attention(block), *_fused_attention(block), *_delta_net(block)]
    yield from found
    yield from (replace(guess, narrow=True) for guess in found)


def _guessed_attention(block: nn.Module) -> Iterator[Block]:
    """Separate projections, and more that is as long as there are heads or features of heads."""
    for found in filter(None, (_attention(block), _attention(block, gated=True))):
        q_heads, kv_heads = found.heads or (1, 1)
        head_dim = found.out_layout(1).local // q_heads
        lengths = {}
        for by, count in (("kv", kv_heads), ("q", q_heads)):
            lengths |= {count: Units(count, 1, by), count * head_dim: Units(count, head_dim, by)}
        for name, param in block.named_parameters(recurse=False):
            if param.ndim == 1 and param.shape[0] in lengths:
                found.cuts[name] = Cut(0, (lengths[param.shape[0]],))
        for name, child in block.named_children():
            if name not in found.styles and is_product(child) and features(child)[0] in lengths:
                found.colwise(block, name, lengths[features(child)[0]])
        yield found


def _fused_attention(block: nn.Module) -> Iterator[Block]:
    """One projection for query, key and value: all queries, keys, values in turn, or those of a kv head together."""
    fused, out, head_dim = linear(block, _FUSED), linear(block, OUT), _head_dim(block)
    if fused is None or out is None or head_dim is None:
        return
    rows, columns = features(block.get_submodule(fused))[0], features(block.get_submodule(out))[1]
    q_heads, kv_heads = columns // head_dim, (rows - columns) // (2 * head_dim)
    if columns % head_dim or (rows - columns) % (2 * head_dim) or not kv_heads or q_heads % kv_heads:
        return
    query, key = Units(q_heads, head_dim, "q"), Units(kv_heads, head_dim, "kv")
    for grouped in (True, False):
        found = Block(heads=(q_heads, kv_heads))
        found.colwise(block, fused, query, key, key)
        if grouped:
            found.cuts = {n: Groups(cut.dim, q_heads // kv_heads, head_dim) for n, cut in found.cuts.items()}
        found.rowwise(block, out, query)
        _head_extras(block, found, q_heads, kv_heads, q_heads * head_dim, kv_heads * head_dim)
        yield found


def _delta_net(block: nn.Module) -> Iterator[Block]:
    """A gated delta rule by heads (arXiv 2412.06464): value heads share the key heads, as queries do in attention."""
    names = ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim")
    v_heads, k_heads, v_dim, k_dim = sizes = [getattr(block, n, None) for n in names]
    out, convolution = linear(block, OUT), getattr(block, "conv1d", None)
    if (
        out is None
        or not all(isinstance(n, int) for n in sizes)
        or v_heads % k_heads
        or type(convolution) is not nn.Conv1d
    ):
        return
    found, group = Block(heads=(v_heads, k_heads)), v_heads // k_heads
    key, value, each = Units(k_heads, k_dim, "kv"), Units(v_heads, v_dim, "q"), Units(v_heads, 1, "q")
    of_projection = {
        "in_proj_qkv": (key, key, value),
        "in_proj_z": (value,),
        "in_proj_b": (each,),
        "in_proj_a": (each,),
        "in_proj_qkvz": (Units(k_heads, 2 * (k_dim + group * v_dim), "kv"),),
        "in_proj_ba": (Units(k_heads, 2 * group, "kv"),),
    }
    for name, units in of_projection.items():
        if linear(block, (name,)):
            found.colwise(block, name, *units)
    found.rowwise(block, out, value)
    found.cuts |= {f"conv1d.{n}": Cut(0, (key, key, value)) for n, _ in convolution.named_parameters()}
    found.cuts |= {n: Cut(0, (each,)) for n, p in block.named_parameters(recurse=False) if p.shape == (v_heads,)}
    found.counts = {
        "num_v_heads": (each,),
        "num_k_heads": (Units(k_heads, 1, "kv"),),
        "key_dim": (key,),
        "value_dim": (value,),
        "conv_dim": (key, key, value),
    }
    yield found


def _head_dim(block: nn.Module) -> int | None:
    known = (getattr(block, name, None) for name in ("head_dim", "head_size"))
    found = next((size for size in known if isinstance(size, int)), None)
    counts = (getattr(block, name, None) for name in Q_HEADS)
    q_heads = next((count for count in counts if isinstance(count, int)), None)
    out = linear(block, OUT)
    return found if found or not q_heads or not out else features(block.get_submodule(out))[1] // q_heads


def _mlp(block: nn.Module, style: Literal["block", "block_sum"] = "block") -> Block | None:
    """Projections up and one down; a fused pair of gate and up is two halves; element-wise scales with them."""
    down, ups = linear(block, _DOWN), [n for n in (*_UP, *_GATE_UP) if is_product(getattr(block, n, None))]
    if down is None or not ups or getattr(block, "activation_sparsity", 0):  # a threshold from all features
        return None
    hidden, width = features(block.get_submodule(down))
    found = Block(style)
    for name in ups:
        halves = 2 if name in _GATE_UP else 1
        if features(block.get_submodule(name)) != (halves * width, hidden):
            return None
        found.colwise(block, name, *[Units(width)] * halves)
    found.rowwise(block, down, Units(width))
    for name, param in block.named_parameters(recurse=False):
        if tuple(param.shape) == (width,):
            found.cuts[name] = Cut(0, (Units(width),))
    for name, child in block.named_children():
        if name not in found.styles and "norm" in name:
            _wide_norm(found, name, child, (Units(width),))
        elif name not in found.styles and {p.numel() for p in child.parameters()} == {1}:
            found.styles[name] = "replicate"  # scalars of an activation function
    return found


def pair(layer: nn.Module) -> Block | None:
    """A projection up and one down among the children of a decoder layer, whose own code runs what is between.

    Only a trial can tell whether that works on parts of the features.
    """
    up, down = linear(layer, _UP), linear(layer, _DOWN)
    if up is None or down is None or up == down:
        return None
    hidden, width = features(layer.get_submodule(down))
    if features(layer.get_submodule(up)) != (width, hidden):
        return None
    found = Block(pair=True)
    found.colwise(layer, up, Units(width))
    found.rowwise(layer, down, Units(width))
    return found


def halves(found: Block) -> Iterator[tuple[str, Block]]:
    """The two modules of a `pair`, each as a block of its own."""
    for name, style in found.styles.items():
        cuts = {n.removeprefix(f"{name}."): cut for n, cut in found.cuts.items() if n.startswith(f"{name}.")}
        yield name, Block("pair_in" if style == "colwise" else "pair_out", cuts=cuts)


def _mixture(block: nn.Module) -> Block | None:
    """Routed experts, each cut inside, with a router that every rank runs whole, and shared experts."""
    found = Block("block_sum")
    for name, child in block.named_children():
        if any(p.ndim == 3 for p in child.parameters(recurse=False)):
            cuts = _expert_cuts(child)
            if cuts is None:
                return None
            found.styles[name] = "experts"
            found.cuts |= {f"{name}.{n}": cut for n, cut in cuts.items()}
            if isinstance(getattr(child, "identity_expert", None), nn.Identity):
                found.styles[f"{name}.identity_expert"] = "identity_expert"
        elif name in _ROUTERS:
            found.styles[name] = "replicate"
        elif name == "post_mlp_layernorm" and child is [*block.children()][-1]:
            found.styles[name] = "norm_of_sum"
        elif name in _SHARED:
            shared = _mlp(child, "block_sum")
            if shared is None or _unexplained(child, shared):
                return None
            found.styles |= {f"{name}.{n}": style for n, style in shared.styles.items()}
            found.cuts |= {f"{name}.{n}": cut for n, cut in shared.cuts.items()}
    if "experts" not in found.styles.values():
        return None
    for name, param in block.named_parameters(recurse=False):
        if name in ("expert_bias", "e_score_correction_bias") and param.ndim == 1:
            found.whole.append(name)
    return found


def _flat_mixture(block: nn.Module) -> Block | None:
    """DBRX's experts: all their rows [experts * features, hidden] in three matrices, beside a router."""
    experts = getattr(block, "experts", None)
    mlp, width, count = (getattr(experts, n, None) for n in ("mlp", "ffn_hidden_size", "num_experts"))
    if not isinstance(mlp, nn.Module) or not isinstance(width, int) or not isinstance(count, int):
        return None
    params = dict(mlp.named_parameters())
    if params.keys() != {"w1", "v1", "w2"} or any(p.shape[0] != width * count for p in params.values()):
        return None
    cut, found = Cut(0, (Units(width),) * count), Block("block_sum", {"experts.mlp": "experts"})
    found.cuts |= {f"experts.mlp.{n}": cut for n in params}
    found.counts["experts.ffn_hidden_size"] = (Units(width),)
    found.styles |= {n: "replicate" for n, _ in block.named_children() if n in _ROUTERS}
    return found


def _expert_cuts(experts: nn.Module) -> dict[str, Cut | OnFirst] | None:
    """Cuts of stacked expert weights [experts, out, in], or [experts, in, out] where they are stored transposed."""
    params = dict(experts.named_parameters())
    down, up_name = params.pop("down_proj", None), "gate_up_proj" if "gate_up_proj" in params else "up_proj"
    up, gate = params.pop(up_name, None), params.pop("gate_proj", None)
    if down is None or up is None or up.ndim != 3 or down.ndim != 3 or up.shape[0] < down.shape[0]:
        return None  # LongCat stores matrices up, which nothing uses, for experts that return their input, too
    if gate is not None and (gate.shape != up.shape or up_name == "gate_up_proj"):
        return None
    if not all(_is_harmless(n, m) for n, m in experts.named_children()):
        return None
    if any(isinstance(m, nn.Identity) and n != "identity_expert" for n, m in experts.named_children()):
        return None  # it may stand for anything
    runs = 2 if up_name == "gate_up_proj" else 1
    fits = {
        transposed: (up.shape[1 + transposed], up.shape[2 - transposed])
        == (runs * down.shape[2 - transposed], down.shape[1 + transposed])
        for transposed in (False, True)
    }
    transposed = bool(getattr(experts, "is_transposed", not fits[False]))
    if not fits[transposed]:
        return None
    up_dim, down_dim = (2, 1) if transposed else (1, 2)
    width = down.shape[down_dim]
    paired = getattr(experts, "is_concatenated", True) is False  # gate and up of a feature side by side
    features = Units(width, multiple=_GROUPED_MULTIPLE)
    units = (Units(width, runs, multiple=_GROUPED_MULTIPLE),) if paired else (features,) * runs
    cuts: dict[str, Cut | OnFirst] = {up_name: Cut(up_dim, units), "down_proj": Cut(down_dim, (features,))}
    if gate is not None:
        cuts["gate_proj"] = cuts[up_name]
    if f"{up_name}_bias" in params:
        cuts[f"{up_name}_bias"] = Cut(1, units)
        del params[f"{up_name}_bias"]
    if "down_proj_bias" in params:
        cuts["down_proj_bias"] = OnFirst(params.pop("down_proj_bias").shape[0])
    return None if params else cuts
