"""The sweep over every causal model type: `python -m tests.sweep [--check] [TYPE ...]`, or `make families`.

Each type runs as a tiny random model on meshes of 2, 4 and, one type in three, 8 processes; loss and every gradient are
compared with the unmodified model. What came out is written to meshpar/families.json, which `meshpar families` prints,
and to docs/families.md.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshpar import ParallelConfig
from meshpar.families import FILE, Family, as_markdown, read_families, write_families
from meshpar.load import skeleton_from_config
from meshpar.share import divided_share
from meshpar.tp_plan import make_plan
from tests import jobs_families
from tests.pool import JobFailed, WorkerPool
from tests.tiny_families import causal_types, tiny_config

DOC = Path(__file__).parent.parent / "docs" / "families.md"
TP, PP, BOTH, ALL = (1, 1, 2), (2, 1, 1), (2, 1, 2), (2, 2, 2)
_NO_SEQUENCE_SHARDS = "set sequence_parallel to false"


def config_of(mesh: tuple[int, int, int], sequence_parallel: bool = True) -> dict:
    """Settings of a pp x dp x tp mesh, two microbatches where there is a pipeline."""
    pp, dp, tp = mesh
    return dict(pp=pp, dp_shard=dp, tp=tp, sequence_parallel=sequence_parallel, microbatches=2 if pp > 1 else None)


def run(pool: WorkerPool, model_type: str, mesh: tuple[int, int, int], sequence_parallel: bool) -> str:
    """ "ok", "refused: ..." with the message, or "wrong: ..." with how far off or what was raised."""
    world = mesh[0] * mesh[1] * mesh[2]
    try:
        found = pool.run(world, jobs_families.outcome, model_type, config_of(mesh, sequence_parallel))[0]
    except JobFailed as failure:
        lines = [line for line in str(failure).splitlines() if line and not line.startswith(" ")]
        return f"wrong: {lines[-1][:300]}"
    if "refused" in found:
        return f"refused: {found['refused']}"
    return "ok" if found["ok"] else f"wrong: loss {found['loss']:.0e}, {found['worst']} {found['gradient']:.0e}"


def examine(pool: WorkerPool, model_type: str, with_all: bool) -> Family:
    """Everything the table says of one type."""
    label = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    failure = jobs_families.reference_failure(model_type)
    if failure is not None:
        return Family(model_type, label, unrunnable=failure)
    results: dict[str, str] = {}
    sequence = run(pool, model_type, TP, True)
    if _NO_SEQUENCE_SHARDS in sequence:
        results["1x1x2"] = run(pool, model_type, TP, False)
    else:
        results["1x1x2"] = sequence
    shards = sequence == "ok"
    for mesh in (PP, BOTH, *([ALL] if with_all else [])):
        results["x".join(map(str, mesh))] = run(pool, model_type, mesh, shards)
    ours, theirs = shares(model_type)
    return Family(model_type, label, results, sequence, ours, theirs)


def shares(model_type: str) -> tuple[float | None, float | None]:
    """Shares of the layers' arithmetic that tp=2 divides, by meshpar's plan and by transformers' own.

    Of the size that the config class has by default, which is that of a published model; of the tiny one, where the
    default cannot be built.
    """
    for config_of_type in (AutoConfig.for_model, tiny_config):
        try:
            model = skeleton_from_config(config_of_type(model_type))
            plan = make_plan(model, ParallelConfig(dp_shard=1, tp=2, sequence_parallel=False))
        except Exception:  # whatever a config that was never meant to be built raises
            continue
        share = divided_share(model, plan)
        return round(share.meshpar, 3), round(share.transformers, 3)
    return None, None


def main(arguments: list[str]) -> int:
    """Run the sweep; returns 1 if anything was wrong or, with --check, which writes nothing, not as the table says."""
    logging.disable(logging.WARNING)
    check, types = "--check" in arguments, [a for a in arguments if a != "--check"]
    every, pool = causal_types(), WorkerPool(8)
    table = read_families() if FILE.exists() else {}
    failures = 0
    for name in types or every:
        start = time.perf_counter()
        before, found = table.get(name), examine(pool, name, every.index(name) % 3 == 0)
        failures += found.is_wrong or (check and found != before)
        print(f"{name:26} {time.perf_counter() - start:5.1f} s  {found.summary}", flush=True)
        if check and found != before:
            print(f"  the table has {before}\n  now it is {found}", flush=True)
        if not check:
            table[name] = found
            write_families({name: table[name] for name in every if name in table})
    if not check:
        DOC.write_text(as_markdown(table), encoding="utf-8")
    pool.close()
    print(f"{failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
