"""`meshpar show`: the resolved plan of a model, how much of it tp divides, and which stage has which layers."""

from __future__ import annotations

from .config import ParallelConfig, check_model
from .load import skeleton_from_config
from .pretrained import read_config
from .share import divided_share
from .stages import stage_ranges, stage_ranks
from .tp_plan import make_plan


def show(model: str, config: ParallelConfig | None = None, trust_remote_code: bool = False) -> str:
    """The resolved plan of a model directory or hub id as a table; reads its config only, no weights."""
    config = config or ParallelConfig(tp=2)
    hf_config = read_config(model, trust_remote_code)
    check_model(config, hf_config)
    skeleton = skeleton_from_config(hf_config, trust_remote_code)
    plan = make_plan(skeleton, config)
    lines = [str(plan)]
    if config.tp > 1:
        share = divided_share(skeleton, plan)
        lines.append(
            f"tp divides {share.meshpar:.2f} of the decoder layers' multiply-adds "
            f"(transformers' own plan: {share.transformers:.2f})"
        )
    if config.pp > 1:
        ranges = stage_ranges(skeleton, plan.anatomy, config, plan.flow)
        stages = zip(stage_ranks(config), ranges, strict=True)
        lines += [f"stage {r.index} on pp rank {rank}: layers {r.start}-{r.stop - 1}" for rank, r in stages]
    return "\n".join(lines)
