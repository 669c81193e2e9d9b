"""All benchmarks, one command: `make bench` writes benchmarks/RESULTS.md, a table as soon as it is there."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from . import demo_step, growth, loss, step

OUT = Path(__file__).parent / "RESULTS.md"


def main() -> None:
    """Run all and write the report."""
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "accelerate"))
    text = (
        "# Benchmark results\n\n"
        "`make bench` wrote this file. A table comes from runs in turn on one machine, and its ratios are of medians. "
        "Other tables may have met it busier.\n\n"
        f"{os.cpu_count()} cores of {platform.machine()} ({platform.system()}), gloo, {packages}.\n"
    )
    for title, table in (
        ("The demo's model on meshes", demo_step.table),
        ("Training step", step.tables),
        ("Head and loss", loss.table),
        ("Growth", growth.table),
    ):
        text += f"\n## {title}\n\n{table().strip()}\n"
        OUT.write_text(text)
        print(f"wrote {title!r} to {OUT}", flush=True)


if __name__ == "__main__":
    main()
