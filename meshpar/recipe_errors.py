"""What is wrong with a recipe, in lines a person can act on: pydantic's findings put in the recipe's own words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import BaseModel, ValidationError

from .config import ConfigError


class RecipeError(ConfigError):
    """A recipe that cannot run. `problems` holds one line each: the key's path, its value, and what would work."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


# What other trainers call our keys, so that a recipe written from memory gets an answer.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "warmup": "optim.warmup_steps",
    "lr_scheduler_type": "optim.schedule",
    "clip_grad": "optim.max_grad_norm",
    "num_epochs": "train.steps",
    "epochs": "train.steps",
    "max_steps": "train.steps",
    "batch_size": "batch.global_size",
    "per_device_train_batch_size": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size",
    "max_length": "data.seq_len",
    "dataset": "data.path",
    "model_name_or_path": "model.path",
    "gradient_checkpointing": "parallel.activation_checkpoint",
    "torch_compile": "parallel.compile",
    "tensor_parallel_size": "parallel.tp",
    "pipeline_parallel_size": "parallel.pp",
    "dp": "parallel.dp_shard",
    "bf16": "parallel.compute_dtype",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "check_for_nan_in_loss_and_grad": "guard.on_nonfinite",
    "logging_steps": "log.every",
    "report_to": "log.trackers",
    "eval_steps": "train.eval_every",
}

_EXPERT_PARALLEL = {"ep", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"}

# pydantic's name for a problem -> the end of the sentence "key=value must be ...".
_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_long": "a list of at most {max_length}",
    "model_type": "a section, with keys of its own",
    "literal_error": "one of {expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def problem_lines(error: ValidationError, schema: type[BaseModel]) -> list[str]:
    """One line for each problem pydantic found: the key's path, its value, and what would work."""
    return [line for problem in error.errors() for line in _lines(problem, schema)]


def recipe_keys(schema: type[BaseModel]) -> dict[str, list[str]]:
    """The keys of each section of the schema, in order; "" holds the top level."""
    keys = {"": list(schema.model_fields)}
    for name in schema.model_fields:
        if section := _section(schema, name):
            keys[name] = [field.alias or key for key, field in section.model_fields.items()]
    return keys


def _section(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = schema.model_fields[name].annotation if name in schema.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _lines(problem: Any, schema: type[BaseModel]) -> list[str]:
    path = ".".join(_name(part) for part in problem["loc"])
    kind, value = problem["type"], problem["input"]
    if kind == "value_error":
        error = problem["ctx"]["error"]
        return error.problems if isinstance(error, RecipeError) else [f"{path}.{error}"]
    if kind == "missing":
        return [f"{path} is missing{_needed_keys(path, schema)}."]
    if kind == "extra_forbidden":
        return [f"{path}={_show(value)} is not a key; {_suggestion(path, recipe_keys(schema))}"]
    if kind not in _MUST_BE:
        return [f"{path}={_show(value)}: {problem['msg']}."]
    must_be = _MUST_BE[kind].format(**problem.get("ctx", {})).replace("'", "")
    return [f"{path}={_show(value)} must be {must_be}."]


def _show(value: object) -> str:
    # Piece by piece: a YAML file of a few lines can name a value that is endless when written out.
    text = ""
    for piece in json.JSONEncoder(default=str, skipkeys=True, check_circular=False).iterencode(value):
        text += piece
        if len(text) > 60:
            return text[:57] + "..."
    return text


def _name(key: str | int) -> str:
    return key if isinstance(key, str) and key.isprintable() and len(key) <= 60 else _show(key)


def _needed_keys(path: str, schema: type[BaseModel]) -> str:
    section = _section(schema, path)
    if section is None:
        return ""
    return "; it needs " + ", ".join(key for key, field in section.model_fields.items() if field.is_required())


def _suggestion(path: str, keys: dict[str, list[str]]) -> str:
    section, _, name = path.rpartition(".")
    name = name.lower().replace("-", "_")
    if name in _EXPERT_PARALLEL:
        return "experts are not spread over ranks (expert parallelism); parallel.tp splits each of them inside."
    known = [(key, f"{part}.{key}".lstrip(".")) for part in keys for key in keys[part] if part or not section]
    scores: dict[str, float] = {}
    for key, full in [*known, *_ELSEWHERE.items()]:
        alike = SequenceMatcher(None, name, key).ratio()
        if alike >= 0.6:
            # Among equally close names, one of the same section wins, then one that starts alike.
            closeness = alike + 0.05 * full.startswith(f"{section}.") + 0.02 * (name[:1] == key[:1])
            scores[full] = max(scores.get(full, 0), closeness)
    if not scores:
        return f"the keys {'of ' + section if section else 'at the top'} are {', '.join(keys.get(section, keys['']))}."
    best = [full for full, score in scores.items() if score == max(scores.values())]
    return f"did you mean {' or '.join(best)}?"
