"""YAML as recipes use it: 2e-5 is a number, a key given twice is an error, and `key.path=value` lays over it."""

from __future__ import annotations

import re
from typing import Any

import yaml

# YAML 1.1 wants a dot and a signed exponent in a float, and reads 2e-5 as text.
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
_LARGEST = 2**63 - 1


class YamlProblem(ValueError):
    """Text that is no YAML mapping, or an override that does not fit it."""


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError):  # of a 13th month, an int of 5000 digits
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(None, None, f"this is no {kind}", node.start_mark) from None
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise yaml.constructor.ConstructorError(None, None, "this number is too large", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for position, (key, (key_node, _)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[:position]:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def parse(text: str | bytes, source: str = "recipe") -> dict[str, Any]:
    """The mapping that `text` holds, in UTF-8 where it is bytes; `source` names it in messages."""
    try:
        raw = _load(text if isinstance(text, str) else text.decode("utf-8-sig"), source)
    except UnicodeDecodeError as error:
        raise YamlProblem(f"{source} is not text in UTF-8: {error.reason} at byte {error.start + 1}.") from None
    if not isinstance(raw, dict):
        raise YamlProblem(
            f"{source}: a recipe is a mapping of sections: model, parallel, data, batch, optim, train ..."
        )
    return raw


def dump(raw: dict[str, Any]) -> str:
    """YAML text that `parse` reads back to an equal mapping, keys in the order they have."""
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False)


def override(raw: dict[str, Any], assignment: str) -> None:
    """Set `key.path=value` in place; the value is YAML."""
    path, equals, value = assignment.partition("=")
    if not equals or not path:
        raise YamlProblem(f"{assignment} is not of the form key.path=value.")
    *sections, key = path.split(".")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise YamlProblem(f"{assignment} does not fit: {section} is a value, not a section.")
    raw[key] = _load(value, assignment)


def _load(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark and mark.line else ""
        problem = getattr(error, "problem", None) or error
        raise YamlProblem(f"{source}{where}: {' '.join(str(problem).split())}") from None
    except RecursionError:
        raise YamlProblem(f"{source}: sections are nested too deeply") from None
