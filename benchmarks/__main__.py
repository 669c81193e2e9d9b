"""All benchmarks, one command: `make bench` writes benchmarks/RESULTS.md, a table as soon as it is there.

python -m benchmarks [TITLE ...]   # all of them, or only those named; the others' tables stay
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch

from . import checkpoint, demo_step, gpu, growth, load, loss, pipeline, plan, set_up, step

OUT = Path(__file__).parent / "RESULTS.md"
TABLES = {
    "The demo's model on meshes": demo_step.table,
    "Training step": step.tables,
    "Head and loss": loss.table,
    "Pipeline schedules": pipeline.table,
    "Loading": load.table,
    "Setting up": set_up.table,
    "Planner": plan.table,
    "Growth": growth.table,
    "Saving": checkpoint.table,
}
if torch.cuda.is_available():
    TABLES["bfloat16 on CUDA"] = gpu.table


def main(titles: list[str]) -> None:
    """Run what is named, or all, and write the report."""
    unknown = set(titles) - set(TABLES)
    if unknown:
        raise SystemExit(f"no table is called {sorted(unknown)[0]!r}; there are {', '.join(TABLES)}")
    made = dict(re.findall(r"^## (.*)\n\n([\s\S]*?)\n(?=\n## |\Z)", OUT.read_text(), re.M)) if titles else {}
    failures = 0
    for title in titles or TABLES:
        start = time.perf_counter()
        try:
            made[title] = TABLES[title]().strip()
        except (Exception, SystemExit) as error:  # a pipeline on a torch that has none, say
            made[title], failures = f"Does not run here: {str(error).strip().splitlines()[-1]}", failures + 1
        OUT.write_text(_report({t: made[t] for t in TABLES if t in made}))
        print(f"wrote {title!r} to {OUT} after {time.perf_counter() - start:.0f} s", flush=True)
    if failures:
        raise SystemExit(f"{failures} tables could not be made")


def _report(tables: dict[str, str]) -> str:
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate"))
    text = (
        "# Benchmark results\n\n"
        "`make bench` wrote this file. A table comes from runs in turn on one machine, and its ratios are of medians. "
        "Other tables may have met it busier.\n\n"
        f"{os.cpu_count()} cores of {platform.machine()} ({platform.system()}), gloo, {packages}.\n"
    )
    return text + "".join(f"\n## {title}\n\n{body}\n" for title, body in tables.items())


if __name__ == "__main__":
    main(sys.argv[1:])
