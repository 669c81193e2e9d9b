"""The documentation: every key is in the reference, every link leads somewhere, and what it shows runs as shown."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM

from meshpar import ParallelConfig
from meshpar.load import meta_copy
from meshpar.recipe import Recipe
from meshpar.tp_plan import make_plan
from tests import jobs_families, models, sweep
from tests.test_families import cut_in_two
from tests.tiny_families import tiny_model

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def reference() -> dict[str, str]:
    """Key -> default, as the tables of docs/recipes.md have them."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)` \| .+? \| (.+?) \| .+ \|$", text, re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a key has two rows"
    return {key: default.strip("`") for key, default in rows}


def schema() -> dict[str, object]:
    """Key -> default of every key of a recipe, in order; "required" where there is none."""
    defaults = {}
    for name, part in Recipe.model_fields.items():
        section = isinstance(part.annotation, type) and issubclass(part.annotation, BaseModel)
        fields = part.annotation.model_fields if section else {name: part}
        for key, field in fields.items():
            path = f"{name}.{field.alias or key}" if section else name
            defaults[path] = "required" if field.is_required() else field.default
    return defaults


def test_reference_has_every_key_of_the_recipe_in_order():
    assert list(reference()) == list(schema())


def test_reference_has_the_defaults_of_the_schema():
    words = {True: "true", False: "false", None: "null"}
    for key, default in schema().items():
        shown = reference()[key]
        if isinstance(default, bool) or default is None:
            assert shown == words[default], key
        elif isinstance(default, tuple | list):
            assert shown == "[" + ", ".join(map(str, default)) + "]", key
        elif isinstance(default, float):
            assert float(shown) == default, key
        else:
            assert shown == str(default), key


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in (link for link in links if not re.match(r"[a-z]+:", link)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


TRAIN_LOOP = "docs/train_loop.py"


def test_train_loop_runs_as_it_stands(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", TRAIN_LOOP]
    command += ["--pp", "2", "--tp", "2", "--steps", "5", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    check_train_loop(done.stdout, tmp_path)


def test_train_loop_on_another_mesh(pool, tmp_path):
    arguments = ["--pp", "1", "--tp", "2", "--steps", "5", "--output", str(tmp_path)]
    check_train_loop(pool.run(4, run_script, str(ROOT / TRAIN_LOOP), arguments)[0], tmp_path)


def check_train_loop(printed: str, saved: Path) -> None:
    first, *training, last = losses(printed)
    assert len(training) == 5
    assert training[-1] < training[0] - 0.5
    assert last < first - 0.5
    shown = next(text for text in blocks(ROOT / "docs" / "quickstart.md", "console") if "train_loop.py" in text)
    assert losses(shown) == pytest.approx([first, *training, last] * 2, abs=2e-3)
    trained = AutoModelForCausalLM.from_pretrained(saved)
    assert trained.config.num_hidden_layers == 4


def run_script(path: str, arguments: list[str]) -> str:
    """Run a script on one rank, but for the end of its process group, which is the worker's; what it printed."""
    printed = io.StringIO()
    with (
        mock.patch("sys.argv", [path, *arguments]),
        mock.patch("torch.distributed.destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


def test_example_of_the_readme_runs(pool, tmp_path):
    (code,) = blocks(ROOT / "README.md", "python")
    start, out = tmp_path / "start", tmp_path / "out"
    before = models.tiny_model()
    before.save_pretrained(start)
    for shown, used in (('"path/or/hub-id"', repr(str(start))), ('"out/"', repr(str(out)))):
        assert code.count(shown) == 1
        code = code.replace(shown, used)
    pool.run(4, run_example, code, {"loader": [models.make_batch(seed=seed) for seed in (1, 2)]})
    after = AutoModelForCausalLM.from_pretrained(out)
    assert list(after.state_dict()) == list(before.state_dict())
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)


def test_worked_example_prints_what_is_shown(pool):
    page = ROOT / "docs" / "how-it-works.md"
    (code,), (shown,) = blocks(page, "python"), blocks(page, "text")
    assert pool.run(4, run_example, code)[0] == shown


def test_plan_examples_come_to_the_verdict_that_is_shown(pool):
    page = ROOT / "docs" / "adding-a-plan.md"
    shown = [text for text in blocks(page, "text") if "one process" in text]
    for code, text in zip(blocks(page, "python"), shown, strict=True):
        printed = pool.run(2, run_example, code)[0]
        assert verdict(printed) == verdict(text), printed


def verdict(report: str) -> tuple[str, list[str]]:
    """A printed `VerifyReport` without its measured numbers: its first line, and the module it blames."""
    return report.splitlines()[0], re.findall(r"first wrong +([\w.]+)", report)


def run_example(code: str, names: dict | None = None) -> str:
    """Run a page's code on one rank with ``names`` defined; what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "__main__", **(names or {})})
    return printed.getvalue()


def refused_by(build) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        build()
    return str(refused.value)


def plan_with(model, overrides="auto", **sizes):
    return make_plan(meta_copy(model), ParallelConfig(**{"dp_shard": 1, "tp": 2, **sizes}), overrides)


def test_the_refusals_of_a_plan_read_as_documented(pool):
    lines = next(text for text in blocks(ROOT / "docs" / "adding-a-plan.md", "text") if "matches no module" in text)
    documented = [line.removeprefix("ValueError: ") for line in lines.splitlines()]
    llama, balanced = models.tiny_model(), tiny_model("mixtral", output_router_logits=True)
    assert documented == [
        refused_by(lambda: plan_with(llama, {"model.layer.*.mlp.up_proj": "replicate"})),
        refused_by(lambda: plan_with(llama, {"model.layers.0.mlp.up_proj": "replicate"})),
        pool.run(2, jobs_families.outcome, "gpt2", sweep.config_of(sweep.TP))[0]["refused"],
        refused_by(lambda: plan_with(balanced, pp=2, tp=1)),
        refused_by(lambda: cut_in_two(meta_copy(tiny_model("dory")))),
    ]
