"""What is known of every causal model type of transformers: the outcome of the sweep that the tests run.

The sweep builds a tiny random model of each type and compares loss and every gradient on meshes of 2, 4 and 8 processes
with the unmodified model in one process. `make families` runs it and writes families.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = Path(__file__).parent / "families.json"
_REFUSED = "refused: "


@dataclass(frozen=True)
class Family:
    """Outcomes of one model type.

    ``results``: mesh as "pp x dp x tp" -> "ok", "refused: why" or "wrong: how". ``sequence``: the same with sequence
    parallelism at tp=2. ``share``, ``transformers_share``: parts of the decoder layers' arithmetic that tp divides, by
    meshpar's plan and by transformers' own. ``unrunnable``: why transformers itself cannot run the type alone.
    """

    model_type: str
    architecture: str
    results: Mapping[str, str] = field(default_factory=dict)
    sequence: str = ""
    share: float | None = None
    transformers_share: float | None = None
    unrunnable: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether any mesh gave other numbers than one process, or an error that construction should have found."""
        return any(r.startswith("wrong") for r in (*self.results.values(), self.sequence))

    @property
    def summary(self) -> str:
        """One line: yes, no or wrong for tp, sequence parallelism and pp, and why not."""
        if self.unrunnable:
            return f"not runnable alone: {self.unrunnable}"
        return f"tp {self.tp}, sequence parallel {self.sp}, pp {self.pp}" + (f"; {self.why}" if self.why else "")

    @property
    def tp(self) -> str:
        return _word(self.results.get("1x1x2", ""))

    @property
    def sp(self) -> str:
        return _word(self.sequence)

    @property
    def pp(self) -> str:
        return _word(self.results.get("2x1x1", ""))

    @property
    def why(self) -> str:
        """The reasons of what is refused or wrong, each once."""
        if self.unrunnable:
            return f"transformers cannot run it alone ({self.unrunnable})"
        bad = [r.removeprefix(_REFUSED) for r in (self.sequence, *self.results.values()) if r and r != "ok"]
        return " ".join(dict.fromkeys(bad))


def _word(outcome: str) -> str:
    return "yes" if outcome == "ok" else "no" if outcome.startswith(_REFUSED) or not outcome else "WRONG"


def read_families() -> dict[str, Family]:
    """The table that ships, by model type."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {row["model_type"]: Family(**row) for row in rows}


def write_families(table: Mapping[str, Family]) -> None:
    """Write the table that ships."""
    FILE.write_text(json.dumps([asdict(f) for f in table.values()], indent=1) + "\n", encoding="utf-8")


def as_text(table: Mapping[str, Family]) -> str:
    """The table for a terminal."""
    head = ("type", "architecture", "tp", "sp", "pp", "divided", "why not")
    rows = [head, *(_cells(f) for f in table.values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    return "\n".join(
        "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1])).rstrip() for row in rows
    )


def _cells(family: Family) -> tuple[str, ...]:
    share = "" if family.share is None else f"{family.share:.2f}"
    runs = (family.tp, family.sp, family.pp) if not family.unrunnable else ("-", "-", "-")
    return (family.model_type, family.architecture, *runs, share, family.why)


def as_markdown(table: Mapping[str, Family]) -> str:
    """docs/families.md."""
    runnable = [f for f in table.values() if not f.unrunnable]
    passed = {mesh: sum(f.results.get(mesh) == "ok" for f in runnable) for mesh in ("1x1x2", "2x1x1", "2x1x2", "2x2x2")}
    tried = sum("2x2x2" in f.results for f in runnable)
    lines = [
        "# Model families",
        "",
        f"Every causal model type of transformers 5.24 ({len(table)}), as `make families` found it: a tiny random "
        "model of each, in float32 with gloo, on pp x dp x tp meshes.",
        "",
        "- Yes: the loss is within 1e-6 and every gradient within 1e-5 (relative L2) of the unmodified model in one "
        "process. Where float32 itself leaves more open, the bar is 4 times what it leaves: the distance of that one "
        "process from float64, or how far it moves when every weight moves by its last bit.",
        "- No: construction refuses it, with the sentence in the last column.",
        "",
        f"Passed: {passed['1x1x2']} at 1x1x2, {passed['2x1x1']} at 2x1x1, {passed['2x1x2']} at 2x1x2, "
        f"{passed['2x2x2']} of {tried} tried at 2x2x2. Wrong results: {sum(f.is_wrong for f in runnable)}.",
        "",
        '"Divided" is the share of the decoder layers\' multiply-adds that tp divides, "transformers" the same by the '
        "model's own plan in transformers, at the config class's default size with attention over 4096 tokens.",
        "",
        "| type | architecture | tp | sequence parallel | pp | 2x1x2 | divided | transformers | why not |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in table.values():
        share, theirs = ("" if s is None else f"{s:.2f}" for s in (f.share, f.transformers_share))
        both = _word(f.results.get("2x1x2", "")) if not f.unrunnable else "-"
        name, label, tp, sp, pp, _, why = _cells(f)
        lines.append(
            f"| {name} | {label} | {tp} | {sp} | {pp} | {both} | {share} | {theirs} | {why.replace('|', '/')} |"
        )
    return "\n".join([*lines, ""])
