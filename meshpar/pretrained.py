"""What else a Hugging Face directory holds: its config and tokenizer, and its code, which runs only where trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from filelock import FileLock
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import HF_MODULES_CACHE

from .config import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def read_config(path: str | Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a directory or hub id. Raises ValueError, naming it, when it is missing or damaged."""
    if os.path.isdir(path) and not os.path.isfile(Path(path) / "config.json"):
        raise ValueError(f"{path} has no config.json")
    with using("config", path, trust_remote_code):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub id. Raises ValueError, naming it, when it is missing or damaged."""
    if os.path.isdir(path) and not has_tokenizer(Path(path)):
        raise ValueError(f"{path} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there")
    with using("tokenizer", path, trust_remote_code):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def has_tokenizer(directory: Path) -> bool:
    """Whether any of a tokenizer's files is there."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


@contextmanager
def using(what: str, path: str | Path, trust_remote_code: bool) -> Iterator[None]:
    """Whatever transformers makes of a bad file becomes one ValueError that names it.

    Raises ConfigError for code that would have to run and is not trusted.
    """
    with _modules_to_itself() if trust_remote_code else nullcontext():
        try:
            yield
        except Exception as error:  # transformers checks little: a bad file can make it raise anything
            if "trust_remote_code=True" in str(error):
                raise ConfigError(
                    f"the {what} of {path} needs Python code that comes with it, which is not run unless you trust "
                    "it: read that code, then set model.trust_remote_code=true (--trust-remote-code where there is no "
                    "recipe, trust_remote_code=True in Python)."
                ) from error
            raise ValueError(f"the {what} of {path} cannot be used: {_in_one_line(error)}") from error


def _modules_to_itself() -> FileLock:
    """transformers copies trusted code to its cache and imports it from there: one process of a machine at a time."""
    Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
    return FileLock(Path(HF_MODULES_CACHE) / "meshpar.lock")


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split("\n\n")[0].split())
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
