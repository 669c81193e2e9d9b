"""Plan: module name -> style, from the structure of the model's decoder layers, and a caller's overrides.

Every child of a decoder layer is one of three things over the tp group: a block, which runs on a part of its heads,
features or experts on each rank (`rules` recognises them); whole, which every rank runs alike on the whole sequence;
or, under sequence parallelism, a norm or scale on a shard of the sequence.

    style                on                     what it does over the tp group
    embedding_rowwise    embedding              rows of the vocabulary; the looked-up rows are summed
    block                attention, MLP         input whole on every rank and its gradient summed; sums at `rowwise`
    block_sum            mixture of experts     the same, but all that it returns is summed once, at its output
    whole                anything else          the same on every rank, on the whole sequence
    colwise              linear                 output features split, by heads where they are heads
    rowwise              linear                 input features split, output summed
    pair_in, pair_out    linear                 the same two in a layer's own code, with the block's entry and exit
    experts              stacked experts        every expert split inside
    identity_expert      one that returns x     one part in tp of x on each rank
    norm_of_sum          norm at a block's end  the ranks' partial results are summed before it
    colwise_norm         RMSNorm over all heads weight split with the heads, mean square summed
    by_head              a weight a head        split with the heads
    replicate            anything               whole on every rank
    sequence_parallel    norms outside blocks   whole weight, used on a shard of the sequence
    vocab_head           lm_head                rows of the vocabulary; logits stay split for the loss
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .anatomy import Anatomy, dissect
from .blocks import Block
from .config import ParallelConfig, torch_dtype
from .flow import Flow, follow, refuse_layerdrop
from .overrides import Style, apply_overrides, style_name
from .rules import guesses, halves, pair, recognise
from .trial import kind, position_wise, try_out


class Plan(dict[str, Style]):
    """Module name -> style, for every module with parameters of its own and every block; prints as a table.

    ``roles``: what each module is in the model, before overrides. ``blocks``: the recognised blocks by name.
    ``flow``: what runs before, in and after the decoder layers. ``children``: what each layer calls.
    """

    def __init__(
        self,
        entries: Mapping[str, Style],
        anatomy: Anatomy,
        roles: Mapping[str, Style],
        blocks: Mapping[str, Block],
        flow: Flow,
        children: Collection[str],
        shapes: Mapping[str, str],
    ) -> None:
        super().__init__(entries)
        self.anatomy, self.roles, self.blocks, self.flow, self.children = anatomy, roles, blocks, flow, children
        self._shapes = shapes

    def block_of(self, name: str) -> str | None:
        """The block that module or parameter ``name`` is in, itself included."""
        parts = name.split(".")
        found = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return next((n for n in found if n in self.blocks), None)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[int]] = {}
        for name, style in self.items():
            index = self.anatomy.layer_index(name)
            key = name if index is None else name.replace(f".{index}", ".*", 1)
            rows.setdefault((key, style_name(style), self._shapes.get(name, "")), []).append(
                -1 if index is None else index
            )
        table = [("module", "style", "parameters", "layers")]
        table += [(key, style, shapes, _ranges(indices)) for (key, style, shapes), indices in rows.items()]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        return "\n".join(
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])).rstrip() for row in table
        )


def _ranges(indices: list[int]) -> str:
    if indices == [-1]:
        return ""
    contiguous = indices == list(range(indices[0], indices[-1] + 1))
    return f"{indices[0]}-{indices[-1]}" if contiguous and len(indices) > 1 else ",".join(map(str, indices))


def make_plan(
    model: PreTrainedModel,
    config: ParallelConfig,
    overrides: str | Mapping[str, Style] = "auto",
    once: Callable[[Callable], Any] = lambda find: find(),
    flow: Flow | None = None,
) -> Plan:
    """Resolve the plan of ``model`` (any device, meta included) for ``config``.

    ``overrides`` maps module-name patterns (`model.layers.*.mlp.up_proj`; `*` matches anything) to a style's name or a
    torch `ParallelStyle`, laid over the model's own. ``once``: gives what the slow part returns, which other ranks may
    have found already. ``flow``: what `follow` found of the model before. Raises ValueError when a style or module is
    not understood, when a pattern matches no module, or when a block would be split by half.
    """
    anatomy = dissect(model)
    refuse_layerdrop(model)
    flow, opened, blocks = once(partial(_examine, model, anatomy, config, flow))
    children = dict(layer_children(model, anatomy, opened))
    _check_router_loss(model, children, blocks, config)
    roles = _roles(model, anatomy, children, blocks, flow, config)
    entries = dict(roles)
    if overrides != "auto":
        apply_overrides(entries, blocks, model, overrides, config.tp)
    if config.tp > 1:
        _check_head(model, anatomy)
    order = {n: i for i, (n, _) in enumerate(model.named_modules())}
    entries = dict(sorted(entries.items(), key=lambda item: order[item[0]]))
    return Plan(
        entries, anatomy, roles, blocks, flow, list(children), {n: _own_shapes(model.get_submodule(n)) for n in entries}
    )


def _examine(
    model: PreTrainedModel, anatomy: Anatomy, config: ParallelConfig, known: Flow | None = None
) -> tuple[Flow, set[str], dict[str, Block]]:
    """What running the model's code shows, which takes a while: the flow, the opened wrappers, the blocks."""
    flow = _follow(model, anatomy, config, known)
    _check_mixed(model, flow, config)
    if config.tp == 1:
        return flow, set(), {}
    opened = _open_wrappers(model, anatomy, config)
    return flow, opened, _blocks(model, anatomy, dict(layer_children(model, anatomy, opened)), config.tp)


def _follow(model: PreTrainedModel, anatomy: Anatomy, config: ParallelConfig, known: Flow | None) -> Flow:
    """What runs where, as far as this mesh needs to know."""
    if not needs_flow(config):
        return Flow()
    if known is not None:
        return known
    wanted_by = f"pp={config.pp}" if config.pp > 1 else "sequence_parallel"
    return follow(model, anatomy, torch_dtype(config.compute_dtype), wanted_by)


def needs_flow(config: ParallelConfig) -> bool:
    """Whether a mesh depends on what runs where in a model."""
    return config.pp > 1 or (config.tp > 1 and config.sequence_parallel)


def _check_mixed(model: PreTrainedModel, flow: Flow, config: ParallelConfig) -> None:
    if flow.mixed and config.tp > 1 and config.sequence_parallel:
        raise ValueError(
            f"{type(model).__name__} uses {flow.mixed[0]} on the whole sequence and on shards of it; set "
            "sequence_parallel to false"
        )


def _check_router_loss(
    model: PreTrainedModel, children: Mapping[str, nn.Module], blocks: Mapping[str, Block], config: ParallelConfig
) -> None:
    """The routers' balance loss, where the model's config asks for it, is one product over all layers' routers."""
    settings, label = model.config.get_text_config(), type(model).__name__
    if getattr(settings, "z_loss_coefficient", 0):
        raise ValueError(f"{label}'s config asks for a z-loss, which meshpar does not add; set z_loss_coefficient to 0")
    if not getattr(settings, "output_router_logits", False):
        return
    if not hasattr(model, "router_aux_loss_coef"):
        raise ValueError(
            f"{label}'s config asks for the routers' balance loss (output_router_logits), whose coefficient meshpar "
            "does not find; set output_router_logits to false in the model's config"
        )
    whole = [n for n, m in children.items() if n not in blocks and _may_route(model, m)]
    setting = "pp" if config.pp > 1 else "tp" if config.tp > 1 and whole else None
    if setting:
        raise ValueError(
            f"{label}'s config asks for the routers' balance loss (output_router_logits), which needs {setting}=1 "
            f"here; set {setting} to 1, or output_router_logits to false in the model's config"
        )


def _may_route(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether ``module`` has a router whose logits transformers records; if it names none, any parameter may be one."""
    decoder = model.get_decoder()
    recorded = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", ())
    recorders = recorded if isinstance(recorded, list | tuple) else [recorded]
    routers = tuple(getattr(r, "target_class", r) for r in recorders)
    if not routers or not all(isinstance(r, type) for r in routers):
        return next(module.parameters(), None) is not None
    return any(isinstance(m, routers) for m in module.modules())


def layer_children(
    model: PreTrainedModel, anatomy: Anatomy, opened: Collection[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Full name and module of what each decoder layer calls: children, those of lists and of ``opened`` one by one."""
    for index in range(anatomy.num_layers):
        pending = list(reversed([*_named_children(model, anatomy.layer(index))]))
        while pending:
            name, module = pending.pop()
            if isinstance(module, nn.ModuleList) or name in opened:
                pending += reversed([*_named_children(model, name)])
            else:
                yield name, module


def _open_wrappers(model: PreTrainedModel, anatomy: Anatomy, config: ParallelConfig) -> set[str]:
    """Modules that are more of a layer's own code, around one child with matrices.

    Under sequence parallelism such code, and a layer's own, runs on shards: it must not mix positions.
    """
    opened: set[str] = set()
    while more := {n for n, m in layer_children(model, anatomy, opened) if _is_wrapper(m)}:
        opened |= more
    if not config.sequence_parallel:
        return opened
    layers = [anatomy.layer(i) for i in range(anatomy.num_layers)]
    alike: dict[Hashable, list[str]] = {}
    for name in (*sorted(opened), *layers):
        alike.setdefault(kind(model.get_submodule(name)), []).append(name)
    right = position_wise(model, [names[0] for names in alike.values()])
    mixing = {name for names in alike.values() if names[0] not in right for name in names}
    of_layers = next((name for name in layers if name in mixing), None)
    if of_layers is not None:
        raise ValueError(
            f"{type(model).__name__}'s {of_layers} mixes positions outside its blocks; set sequence_parallel to false"
        )
    return {n for n in opened if not any(f"{n}.".startswith(f"{m}.") for m in mixing)}


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module has no parameters of its own and one child with matrices, which is no matrix itself."""
    if next(module.parameters(recurse=False), None) is not None:
        return False
    inside = [child for child in module.children() if any(p.ndim > 1 for p in child.parameters())]
    return len(inside) == 1 and bool([*inside[0].children()])


def _named_children(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{name}.{n}", m) for n, m in model.get_submodule(name).named_children())


def _blocks(model: PreTrainedModel, anatomy: Anatomy, children: Mapping[str, nn.Module], size: int) -> dict[str, Block]:
    """What tp can split: children of decoder layers, and pairs of projections in a layer's own code.

    What a rule recognises or guesses is tried out, but for mixtures of experts, which are too large to draw.
    """
    layers = [anatomy.layer(i) for i in range(anatomy.num_layers)]
    alike: dict[Hashable, list[str]] = {}
    for name in (*children, *layers):
        alike.setdefault(kind(model.get_submodule(name)), []).append(name)
    blocks: dict[str, Block] = {}
    trusted: dict[str, Block] = {}
    candidates: dict[str, list[Block]] = {}
    for first, *_ in alike.values():
        module = model.get_submodule(first)
        found = None if first in layers else recognise(module)
        if found is not None and found.style == "block_sum":
            blocks[first] = found
        elif found is not None:
            trusted[first], candidates[first] = found, [found, replace(found, narrow=True)]
        elif first not in layers:
            candidates[first] = list(guesses(module))
        elif (of_layer := pair(module)) is not None:
            candidates[first] = [of_layer]
    blocks |= try_out(model, size, candidates, trusted)
    found_by_name = {name: blocks[names[0]] for names in alike.values() if names[0] in blocks for name in names}
    for layer in (n for n in layers if n in found_by_name):
        found_by_name |= {f"{layer}.{name}": half for name, half in halves(found_by_name.pop(layer))}
    return found_by_name


def _own_shapes(module: nn.Module) -> str:
    return ", ".join(f"{n} {list(p.shape)}" for n, p in module.named_parameters(recurse=False))


def _roles(
    model: PreTrainedModel,
    anatomy: Anatomy,
    children: Mapping[str, nn.Module],
    blocks: Mapping[str, Block],
    flow: Flow,
    config: ParallelConfig,
) -> dict[str, Style]:
    """The style of every module with parameters of its own, of every block and of what runs whole."""
    owners = [n for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    roles: dict[str, Style] = dict.fromkeys(owners, "replicate")
    if config.tp == 1:
        return roles
    if config.sequence_parallel:
        behind = tuple(f"{n}." for n in flow.behind)
        sharded = (n for n in owners if anatomy.layer_index(n) is not None or f"{n}.".startswith(behind))
        roles |= dict.fromkeys(sharded, "sequence_parallel")
    for name, module in children.items():
        if name in blocks:
            roles |= dict.fromkeys((n for n in owners if n.startswith(f"{name}.")), "replicate")
            roles |= {f"{name}.{n}": style for n, style in blocks[name].styles.items()}
            roles[name] = blocks[name].style
        elif any(p.ndim > 1 for p in module.parameters()):
            roles |= dict.fromkeys((n for n in owners if n.startswith(f"{name}.")), "replicate")
            roles[name] = "whole"
    embedding = "embedding_rowwise" if _is_lookup(model.get_submodule(anatomy.embedding)) else "replicate"
    return roles | {anatomy.embedding: embedding, anatomy.head: "vocab_head"}


def _is_lookup(embedding: nn.Module) -> bool:
    """Whether the embedding is one table and nothing that must see the rows summed over the ranks."""
    return isinstance(embedding, nn.Embedding) and [n for n, _ in embedding.named_parameters()] == ["weight"]


def _check_head(model: PreTrainedModel, anatomy: Anatomy) -> None:
    head = model.get_submodule(anatomy.head)
    if anatomy.tied and not _is_lookup(model.get_submodule(anatomy.embedding)):
        raise ValueError(
            f"{type(model).__name__}'s embedding {anatomy.embedding} is more than a table and tied to the head, which "
            "tensor parallelism splits; tp must be 1 for this model"
        )
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(model).__name__}'s head {anatomy.head} is a {type(head).__name__}; tensor parallelism splits the "
            "vocabulary of a torch.nn.Linear only, so tp must be 1 for this model"
        )
