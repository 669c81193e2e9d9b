"""Plan: module name -> style, from the model's own tensor-parallel declaration, rules, and the user's overrides.

transformers declares, per architecture, which projections split by columns and which by rows. That declaration is read
here as data; nothing of transformers' own sharding code runs. Rules add what it leaves out: the tensor-parallel blocks
(where activations are gathered and reduced), norms, the vocabulary-parallel head.

    style                on                     what it does over the tp group
    embedding_rowwise    embedding              rows of the vocabulary; the looked-up rows are summed
    block                attention, MLP         its input enters whole on every rank, its input gradient is summed
    colwise              linear                 output features split
    rowwise              linear                 input features split, output summed
    colwise_norm         RMSNorm over all heads weight split with the heads, mean square summed
    replicate            anything               whole on every rank
    sequence_parallel    norms outside blocks   whole weight, used on a shard of the sequence
    vocab_head           lm_head                rows of the vocabulary; logits stay split for the loss
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel
from transformers import PreTrainedModel

from .anatomy import Anatomy, dissect
from .config import ParallelConfig

Style = str | ParallelStyle
STYLES = (
    "embedding_rowwise",
    "block",
    "colwise",
    "rowwise",
    "colwise_norm",
    "replicate",
    "sequence_parallel",
    "vocab_head",
)
# What transformers' words mean here. Its *_gather_output and *_split_input pairs keep a projection's weight sharded but
# replicate what lies between them; between them meshpar stays sharded, so they become the plain pair.
_FROM_TRANSFORMERS = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise",
    "colwise_rep": "colwise",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "rowwise_rep": "rowwise",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "replicate",
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class Plan(dict[str, Style]):
    """Module name -> style, for every module with parameters of its own and every block; prints as a table."""

    def __init__(
        self, entries: Mapping[str, Style], anatomy: Anatomy, roles: Mapping[str, Style], shapes: Mapping[str, str]
    ) -> None:
        super().__init__(entries)
        self.anatomy = anatomy
        self.roles = roles
        self._shapes = shapes

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[int]] = {}
        for name, style in self.items():
            index = self.anatomy.layer_index(name)
            key = name if index is None else name.replace(f".{index}", ".*", 1)
            rows.setdefault((key, _style_name(style), self._shapes.get(name, "")), []).append(
                -1 if index is None else index
            )
        table = [("module", "style", "parameters", "layers")]
        table += [(key, style, shapes, _ranges(indices)) for (key, style, shapes), indices in rows.items()]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        return "\n".join(
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])).rstrip() for row in table
        )


def _style_name(style: Style) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _ranges(indices: list[int]) -> str:
    if indices == [-1]:
        return ""
    contiguous = indices == list(range(indices[0], indices[-1] + 1))
    return f"{indices[0]}-{indices[-1]}" if contiguous and len(indices) > 1 else ",".join(map(str, indices))


def make_plan(model: PreTrainedModel, config: ParallelConfig, overrides: str | Mapping[str, Style] = "auto") -> Plan:
    """Resolve the plan of ``model`` (any device, meta included) for ``config``.

    ``overrides`` maps module-name patterns (`model.layers.*.mlp.up_proj`; `*` matches anything) to a style's name or a
    torch `ParallelStyle`, laid over the model's own. Raises ValueError when tp > 1 and the model declares nothing, when
    a style or module is not understood, when a pattern matches no module, or when a block would be split by half.
    """
    anatomy = dissect(model)
    _refuse_experts(model)
    roles = _leaf_styles(model, anatomy, _declared_styles(model) if config.tp > 1 else {})
    leaves = dict(roles)
    if overrides != "auto":
        _lay_over(leaves, model, overrides, config.tp)
    blocks = _blocks(roles, leaves, config)
    entries = _outside_styles(model, leaves, blocks, config) | dict.fromkeys(blocks, "block")
    if config.tp > 1:
        _check_modules(model, anatomy, entries)
        _check_sequence_shards(model, anatomy, entries)
    order = {n: i for i, (n, _) in enumerate(model.named_modules())}
    entries = dict(sorted(entries.items(), key=lambda item: order[item[0]]))
    return Plan(entries, anatomy, roles, {n: _own_shapes(model.get_submodule(n)) for n in entries})


def _refuse_experts(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    for name in _EXPERT_COUNTS:
        if (getattr(config, name, None) or 0) > 1:
            raise ValueError(
                f"{type(model).__name__} has {getattr(config, name)} experts ({name}); mixtures of experts are not "
                "supported yet"
            )


def _declared_styles(model: PreTrainedModel) -> dict[str, str]:
    """The model's own declaration: full module pattern -> transformers' style string."""
    base_plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not base_plan:
        raise ValueError(
            f"{type(model).__name__} declares no tensor-parallel plan (base_model_tp_plan), so tp must be 1; "
            "pp, dp_shard and dp_replicate work"
        )
    return {f"{model.base_model_prefix}.{pattern}": style for pattern, style in base_plan.items()}


def _own_shapes(module: nn.Module) -> str:
    return ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))


def _leaf_styles(model: PreTrainedModel, anatomy: Anatomy, declared: dict[str, str]) -> dict[str, Style]:
    """Every module with parameters of its own -> what the model declares for it, else "replicate"."""
    owners = [n for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    return {name: _one(model, anatomy, name, declared) for name in owners}


def _blocks(roles: dict[str, Style], leaves: dict[str, Style], config: ParallelConfig) -> list[str]:
    """Modules that close with a rowwise projection: where activations are whole at the entry and summed at the exit."""
    blocks = []
    for block in dict.fromkeys(n.rpartition(".")[0] for n, role in roles.items() if role == "rowwise"):
        inside = {
            n: leaves[n] for n, role in roles.items() if n.startswith(block + ".") and role in ("colwise", "rowwise")
        }
        whole = [n for n, style in inside.items() if style in ("replicate", "sequence_parallel")]
        if not whole:
            blocks.append(block)
        elif len(whole) < len(inside):
            split = next(n for n in inside if n not in whole)
            raise ValueError(
                f"plan keeps {whole[0]} whole but splits {split}; a block's projections split together or not at all"
            )
        elif config.sequence_parallel:
            raise ValueError(
                f"plan keeps all of {block} whole, but under sequence parallelism it would see one shard of the "
                "sequence; set sequence_parallel to false"
            )
    return blocks


def _outside_styles(
    model: PreTrainedModel, leaves: dict[str, Style], blocks: list[str], config: ParallelConfig
) -> dict[str, Style]:
    """Refine "replicate": norms over split heads inside blocks, sequence shards outside them."""
    entries = dict(leaves)
    for name, style in leaves.items():
        inside = any(name.startswith(b + ".") for b in blocks)
        if style == "replicate" and inside and _spans_colwise(model, name, leaves):
            entries[name] = "colwise_norm"
        elif style == "replicate" and not inside and config.tp > 1 and config.sequence_parallel:
            entries[name] = "sequence_parallel"
    return entries


def _one(model: PreTrainedModel, anatomy: Anatomy, name: str, declared: dict[str, str]) -> Style:
    if not declared:
        return "replicate"
    if name == anatomy.embedding:
        return "embedding_rowwise"
    if name == anatomy.head:
        return "vocab_head"
    found = [style for pattern, style in declared.items() if _matches(pattern, name)]
    if not found:
        return "replicate"
    if found[0] not in _FROM_TRANSFORMERS:
        raise ValueError(
            f"{type(model).__name__}'s plan gives {name} the style {found[0]!r}, which meshpar does not support yet "
            f"(supported: {', '.join(sorted(_FROM_TRANSFORMERS))}); tp must be 1 for this model"
        )
    return _FROM_TRANSFORMERS[found[0]]


def _matches(pattern: str, name: str) -> bool:
    """transformers' patterns: `*` is a layer index; the pattern names the module itself."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _spans_colwise(model: PreTrainedModel, name: str, entries: dict[str, Style]) -> bool:
    """Whether a vector-shaped module is as long as a split projection beside it (a norm over all heads)."""
    shapes = [tuple(p.shape) for p in model.get_submodule(name).parameters(recurse=False)]
    prefix = name.rpartition(".")[0] + "."
    siblings = [model.get_submodule(n) for n, s in entries.items() if s == "colwise" and n.startswith(prefix)]
    head_dim = getattr(model.get_submodule(prefix[:-1]), "head_dim", None)
    widths = {s.out_features for s in siblings if isinstance(s, nn.Linear)}
    return len(shapes) == 1 and len(shapes[0]) == 1 and shapes[0][0] in widths and shapes[0][0] != head_dim


def _lay_over(leaves: dict[str, Style], model: PreTrainedModel, overrides: str | Mapping[str, Style], tp: int) -> None:
    if isinstance(overrides, str):
        raise ValueError(f'plan is {overrides!r}; it must be "auto" or a dict from module-name pattern to style')
    for pattern, style in overrides.items():
        if isinstance(style, str) and style not in STYLES:
            raise ValueError(
                f"plan[{pattern!r}] is {style!r}; the styles are {', '.join(STYLES)}, or a torch ParallelStyle"
            )
        if isinstance(style, SequenceParallel):
            raise ValueError(
                f"plan[{pattern!r}] is torch's SequenceParallel, which needs DTensors around it; meshpar runs on plain "
                "tensors there: set sequence_parallel in the config instead"
            )
        matched = fnmatch.filter(leaves, pattern)
        if not matched:
            raise ValueError(f"plan[{pattern!r}] matches no module of {type(model).__name__} that holds parameters")
        for name in matched if tp > 1 else ():
            _check_override(name, leaves[name], style)
            leaves[name] = style


def _check_override(name: str, role: Style, style: Style) -> None:
    """What a module does in its block is the model's own doing; a caller may keep it whole or split it another way."""
    allowed = ("replicate", "sequence_parallel") if role == "replicate" else ("replicate", role)
    if role in ("embedding_rowwise", "vocab_head"):
        allowed = (role,)
    elif isinstance(style, ParallelStyle):
        return
    if style not in allowed:
        raise ValueError(
            f"plan gives {name} the style {_style_name(style)!r}, but it can only be {' or '.join(map(repr, allowed))}"
            + ("" if role in ("embedding_rowwise", "vocab_head") else " or a torch ParallelStyle")
        )


def _check_sequence_shards(model: PreTrainedModel, anatomy: Anatomy, entries: dict[str, Style]) -> None:
    """Under sequence parallelism what lies outside blocks sees one shard of the sequence: only norms may."""
    for name, style in entries.items():
        matrices = [n for n, p in model.get_submodule(name).named_parameters(recurse=False) if p.ndim > 1]
        if style == "sequence_parallel" and matrices and anatomy.layer_index(name) is not None:
            raise ValueError(
                f"{type(model).__name__}'s {name} lies outside its tensor-parallel blocks and may mix positions; "
                "set sequence_parallel to false"
            )


def _check_modules(model: PreTrainedModel, anatomy: Anatomy, entries: dict[str, Style]) -> None:
    """Refuse what the styles cannot run: split modules that are no plain Linear, attention that is not q, k, v, o."""
    for name, style in entries.items():
        module = model.get_submodule(name)
        if style in ("colwise", "rowwise", "vocab_head") and not isinstance(module, nn.Linear):
            raise ValueError(f"{name} is a {type(module).__name__}; the style {style!r} splits torch.nn.Linear only")
    for index in range(anatomy.num_layers):
        prefix = anatomy.layer(index) + "."
        inside = {n[len(prefix) :] for n, s in entries.items() if n.startswith(prefix) and s == "colwise"}
        fused = sorted(n for n in inside if re.search(r"qkv|query_key_value|gate_up|W_pack|c_attn", n))
        if fused:
            raise ValueError(
                f"{type(model).__name__} fuses projections in {prefix}{fused[0]}; splitting fused projections over tp "
                "is not supported yet, so tp must be 1 for this model"
            )


def show(model: str, config: ParallelConfig | None = None) -> str:
    """The resolved plan of a model directory or hub id as a table; reads its config only, no weights."""
    from transformers import AutoConfig

    from .config import check_model
    from .load import skeleton_from_config

    config = config or ParallelConfig(tp=2)
    hf_config = AutoConfig.from_pretrained(model)
    check_model(config, hf_config)
    return str(make_plan(skeleton_from_config(hf_config), config))
