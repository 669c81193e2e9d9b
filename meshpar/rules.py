"""Rules: what tensor parallelism can split in a decoder layer, read off its modules' structure.

A block is a child of a decoder layer that runs on a part of its heads, features or experts on each rank: its input is
whole on every rank, its output is summed. It is recognised only if every parameter in it is accounted for. What is not
recognised runs whole on every rank, which is right for any code, only not faster.

Inside a block all gradients are one rank's term of a sum, those of parameters that every rank holds whole included
(routers, latent projections, per-head norms): the sum over ranks is exact because a block's output is the sum of what
the ranks make of their own heads, features or parts of experts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from .layout import HeadLayout, Layout, Part, first_only, heads, spread


@dataclass(frozen=True)
class Units:
    """``count`` units of ``width`` elements in a row, dealt out with the query heads, the kv heads, or evenly.

    ``multiple``: a rank stores a multiple of so many units.
    """

    count: int
    width: int = 1
    by: Literal["q", "kv", "even"] = "even"
    multiple: int = 1


@dataclass(frozen=True)
class Cut:
    """A parameter's dimension ``dim`` is cut along ``units``, one run after another."""

    dim: int
    units: tuple[Units, ...]

    def layout(self, size: int, head_layout: HeadLayout | None) -> Layout:
        """Where the elements go on ``size`` ranks."""
        parts, offset = [], 0
        for units in self.units:
            parts.append(_part(units, size, head_layout).scaled(units.width, offset))
            offset += units.count * units.width
        return Layout(self.dim, tuple(parts))


def _part(units: Units, size: int, head_layout: HeadLayout | None) -> Part:
    if units.by == "even" or head_layout is None:
        return spread(units.count, size, units.multiple)
    return head_layout.q if units.by == "q" else head_layout.kv


@dataclass(frozen=True)
class OnFirst:
    """A bias of a partial sum: only the first rank has its ``total`` rows, the others hold zeros."""

    total: int

    def layout(self, size: int, head_layout: HeadLayout | None) -> Layout:
        """Where the elements go on ``size`` ranks."""
        return first_only(self.total, size)


Exit = Literal["rowwise", "output"]


@dataclass
class Block:
    """A recognised block; names of modules and parameters are relative to it, and "" is the block itself.

    ``exit``: where the ranks' partial results are summed, at its rowwise projection or at the block's output.
    """

    exit: Exit = "rowwise"
    styles: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, Cut | OnFirst] = field(default_factory=dict)
    heads: tuple[int, int] | None = None  # query heads and kv heads
    out: str = ""  # its rowwise projection
    whole: set[str] = field(default_factory=set)  # the block's own parameters that every rank holds whole

    def head_layout(self, size: int) -> HeadLayout | None:
        """How the block's heads lie on ``size`` ranks."""
        return heads(*self.heads, size) if self.heads else None

    def colwise(self, block: nn.Module, name: str, *units: Units) -> None:
        """A projection whose output features are cut."""
        self.styles[name] = "colwise"
        for leaf, _ in block.get_submodule(name).named_parameters(recurse=False):
            self.cuts[f"{name}.{leaf}"] = Cut(0, units)

    def rowwise(self, block: nn.Module, name: str, *units: Units) -> None:
        """A projection whose input features are cut; its bias is added once."""
        self.styles[name], self.out = "rowwise", name
        self.cuts[f"{name}.weight"] = Cut(1, units)
        bias = getattr(block.get_submodule(name), "bias", None)
        if bias is not None and self.exit == "output":
            self.cuts[f"{name}.bias"] = OnFirst(bias.shape[0])


def recognise(block: nn.Module, declared: Mapping[str, str]) -> Block | None:
    """The rule that accounts for every parameter of ``block``, or None.

    ``declared``: what the model's own plan says of modules in it, in transformers' words.
    """
    for rule in (_mixture, _latent_attention, _attention, _fused_attention, _mlp):
        found = rule(block, declared)
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
    where = type(module).__module__
    if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Softmax2d | nn.GLU | nn.MultiheadAttention):
        return False
    if where.endswith((".activation", ".activations", ".dropout")) or isinstance(module, nn.Identity):
        return True
    return "rotary" in name or "act" in name.split("_") or name in (*_QUERY_NORMS, *_KEY_NORMS, "qk_norm", "v_norm")


# Projections by what they are called; where several names are given, a block has one of them.
_QUERY = ("q_proj", "query")
_KEY = ("k_proj", "key")
_VALUE = ("v_proj", "value")
OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
_HEAD_GATES = ("g_proj", "gate_proj")
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_layernorm")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
_UP = ("up_proj", "gate_proj", "fc1", "c_fc", "w1", "w3", "fc_in", "dense_h_to_4h")
_GATE_UP = ("gate_up_proj", "input_linear")
_DOWN = ("down_proj", "fc2", "c_proj", "w2", "fc_out", "dense_4h_to_h", "output_linear")
_LATENT = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "k_rope_only_layernorm")
_INDEXERS = ("indexer", "indexers_proj")  # of sparse attention: they choose keys, alike on every rank
_GROUPED_MULTIPLE = 8  # features: torch's grouped matmul wants strides of 16 bytes
_ROUTERS = ("gate", "router", "shared_expert_gate", "moe_statics")
_SHARED = ("shared_experts", "shared_expert", "shared_mlp")


def _linear(block: nn.Module, names: tuple[str, ...]) -> str | None:
    """The one plain Linear child of that name: a subclass may do more than multiply."""
    found = [name for name in names if type(getattr(block, name, None)) is nn.Linear]
    return found[0] if len(found) == 1 else None


def _attention(block: nn.Module, declared: Mapping[str, str]) -> Block | None:
    """Separate query, key, value and output projections; per-head or whole norms, gates and sinks with them."""
    names = [_linear(block, known) for known in (_QUERY, _KEY, _VALUE, OUT)]
    head_dim = getattr(block, "head_dim", None)
    if None in names or not isinstance(head_dim, int):
        return None
    q, k, v, out = (str(name) for name in names)
    sizes = {name: block.get_submodule(name).weight.shape for name in (q, k, v, out)}
    kv_heads = sizes[k][0] // head_dim
    if not kv_heads or sizes[k][0] % head_dim or sizes[v][0] % kv_heads:
        return None
    v_width = sizes[v][0] // kv_heads
    q_heads = sizes[out][1] // v_width
    if sizes[out][1] % v_width or q_heads % kv_heads:
        return None
    gated = sizes[q][0] == 2 * q_heads * head_dim and declared.get(q) == "colwise"  # each head's gate beside its query
    if sizes[q][0] != q_heads * head_dim and not gated:
        return None
    found = Block(heads=(q_heads, kv_heads))
    found.colwise(block, q, Units(q_heads, sizes[q][0] // q_heads, "q"))
    found.colwise(block, k, Units(kv_heads, head_dim, "kv"))
    found.colwise(block, v, Units(kv_heads, v_width, "kv"))
    found.rowwise(block, out, Units(q_heads, v_width, "q"))
    _head_extras(block, found, q_heads, kv_heads, sizes[q][0], sizes[k][0])
    return found


def _head_extras(block: nn.Module, found: Block, q_heads: int, kv_heads: int, q_rows: int, k_rows: int) -> None:
    gate = _linear(block, _HEAD_GATES)
    if gate is not None and block.get_submodule(gate).out_features % q_heads == 0:
        found.colwise(block, gate, Units(q_heads, block.get_submodule(gate).out_features // q_heads, "q"))
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
    if [(n, tuple(p.shape)) for n, p in norm.named_parameters()] == [("weight", (width,))] and _is_rms_norm(norm):
        found.styles[name] = "colwise_norm"
        found.cuts[f"{name}.weight"] = Cut(0, units)


def _is_rms_norm(norm: nn.Module) -> bool:
    """Whether it computes weight * x / sqrt(mean(x^2) + eps), and not (1 + weight) * ... or a LayerNorm: tried out."""
    generator, twin = torch.Generator().manual_seed(0), copy.deepcopy(norm)
    weight, x = torch.randn(2, norm.weight.shape[0], generator=generator)
    twin.weight = nn.Parameter(weight, requires_grad=False)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if not isinstance(eps, float):
        return False
    try:
        y = twin(x)
    except Exception:  # no norm at all: whatever an unknown module raises on one vector
        return False
    expected = weight * x * torch.rsqrt(x.pow(2).mean() + eps)
    return isinstance(y, torch.Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-4, atol=1e-5)


def _latent_attention(block: nn.Module, declared: Mapping[str, str]) -> Block | None:
    """MLA: latent projections whole, what unfolds them by head (arXiv 2405.04434)."""
    q = _linear(block, ("q_b_proj",)) or _linear(block, ("q_proj",))
    kv, out = _linear(block, ("kv_b_proj",)), _linear(block, OUT)
    q_heads = getattr(block, "num_heads", None)
    if q is None or kv is None or out is None or not isinstance(q_heads, int):
        return None
    q_rows, kv_rows = (block.get_submodule(name).out_features for name in (q, kv))
    out_columns = block.get_submodule(out).in_features
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


def _fused_attention(block: nn.Module, declared: Mapping[str, str]) -> Block | None:
    """One projection for query, key and value: one after another, or all three of a head together.

    Only the model's code knows which. Its plan tells: rows cut anywhere ("colwise") must lie head by head.
    """
    fused, out, head_dim = _linear(block, ("qkv_proj", "query_key_value")), _linear(block, OUT), _head_dim(block)
    layout_of = {("query_key_value", "colwise"): True, ("qkv_proj", "colwise_gather_output"): False}
    by_head = layout_of.get((fused or "", declared.get(fused or "", "")))
    if fused is None or by_head is None or out is None or head_dim is None:
        return None
    rows, columns = block.get_submodule(fused).out_features, block.get_submodule(out).in_features
    q_heads, rest = columns // head_dim, rows - columns
    if columns % head_dim or rest % (2 * head_dim):
        return None
    kv_heads = q_heads if by_head else rest // (2 * head_dim)
    if not kv_heads or q_heads % kv_heads or (by_head and rows != 3 * columns):
        return None
    found, key = Block(heads=(q_heads, kv_heads)), Units(kv_heads, head_dim, "kv")
    units = (Units(q_heads, 3 * head_dim, "q"),) if by_head else (Units(q_heads, head_dim, "q"), key, key)
    found.colwise(block, fused, *units)
    found.rowwise(block, out, Units(q_heads, head_dim, "q"))
    return found


def _head_dim(block: nn.Module) -> int | None:
    known = (getattr(block, name, None) for name in ("head_dim", "head_size"))
    return next((size for size in known if isinstance(size, int)), None)


def _mlp(block: nn.Module, declared: Mapping[str, str], exit: Exit = "rowwise") -> Block | None:
    """Projections up and one down; a fused pair of gate and up is two halves; element-wise scales with them."""
    down, ups = _linear(block, _DOWN), [n for n in (*_UP, *_GATE_UP) if type(getattr(block, n, None)) is nn.Linear]
    if down is None or not ups or getattr(block, "activation_sparsity", 0):  # a threshold from all features
        return None
    hidden, width = block.get_submodule(down).weight.shape
    found = Block(exit)
    for name in ups:
        halves = 2 if name in _GATE_UP else 1
        if tuple(block.get_submodule(name).weight.shape) != (halves * width, hidden):
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


def _mixture(block: nn.Module, declared: Mapping[str, str]) -> Block | None:
    """Routed experts, each cut inside, with a router that every rank runs whole, and shared experts."""
    experts = [n for n, m in block.named_children() if any(p.ndim == 3 for p in m.parameters(recurse=False))]
    cuts = _expert_cuts(block.get_submodule(experts[0])) if len(experts) == 1 else None
    if cuts is None:
        return None
    found = Block("output", {f"{experts[0]}": "experts"}, {f"{experts[0]}.{n}": cut for n, cut in cuts.items()})
    for name, child in block.named_children():
        if name in _ROUTERS:
            found.styles[name] = "replicate"
        elif name in _SHARED:
            shared = _mlp(child, declared, "output")
            if shared is None or _unexplained(child, shared):
                return None
            found.styles |= {f"{name}.{n}": style for n, style in shared.styles.items()}
            found.cuts |= {f"{name}.{n}": cut for n, cut in shared.cuts.items()}
    for name, param in block.named_parameters(recurse=False):
        if name in ("expert_bias", "e_score_correction_bias") and param.ndim == 1:
            found.whole.add(name)
    return found


def _expert_cuts(experts: nn.Module) -> dict[str, Cut | OnFirst] | None:
    """Cuts of stacked expert weights [experts, out, in], or [experts, in, out] where they are stored transposed."""
    params = dict(experts.named_parameters())
    down, up_name = params.pop("down_proj", None), "gate_up_proj" if "gate_up_proj" in params else "up_proj"
    up = params.pop(up_name, None)
    if down is None or up is None or up.ndim != 3 or down.ndim != 3 or up.shape[0] != down.shape[0]:
        return None
    if any(isinstance(m, nn.Identity) or not _is_harmless(n, m) for n, m in experts.named_children()):
        return None  # LongCat's experts that return their input would be summed once a rank
    transposed = bool(getattr(experts, "is_transposed", False))
    up_dim, down_dim = (2, 1) if transposed else (1, 2)
    width, runs = down.shape[down_dim], up.shape[up_dim] // down.shape[down_dim]
    if up.shape[up_dim] != (2 if up_name == "gate_up_proj" else 1) * width:
        return None
    paired = getattr(experts, "is_concatenated", True) is False  # gate and up of a feature side by side
    features = Units(width, multiple=_GROUPED_MULTIPLE)
    units = (Units(width, runs, multiple=_GROUPED_MULTIPLE),) if paired else (features,) * runs
    cuts: dict[str, Cut | OnFirst] = {up_name: Cut(up_dim, units), "down_proj": Cut(down_dim, (features,))}
    if f"{up_name}_bias" in params:
        cuts[f"{up_name}_bias"] = Cut(1, units)
        del params[f"{up_name}_bias"]
    if "down_proj_bias" in params:
        cuts["down_proj_bias"] = OnFirst(params.pop("down_proj_bias").shape[0])
    return None if params else cuts
