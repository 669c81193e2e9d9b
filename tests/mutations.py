"""Damage to files: what a disk, a broken copy, an editor or an enemy makes of them, drawn by hypothesis."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def examples(count: int) -> settings:
    """The same ``count`` examples on every run."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=slow)


INSERTED = [
    b"\0",
    b"\n",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xe2\x80\xa8",
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"9" * 5_000,
    b"1e999",
    b"NaN",
    b"-1",
    b"4611686018427387904",
    b'{"a": 1, "a": 2}',
    b"null",
    b": ",
    b"'",
]


@st.composite
def damaged(draw: st.DrawFn, data: bytes, until: int | None = None) -> bytes:
    """``data`` after up to three accidents in its first ``until`` bytes."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, min(until or len(result), len(result)) - 1)))
        length = draw(st.sampled_from([1, 2, 8, 60]))
        match draw(st.sampled_from(["flip", "set", "cut", "remove", "repeat", "insert"])):
            case "flip" if result:
                result[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if result:
                result[at] = draw(st.integers(0, 255))
            case "cut":
                del result[at:]
            case "remove":
                del result[at : at + length]
            case "repeat":
                result[at:at] = result[at : at + length]
            case "insert":
                result[at:at] = draw(st.sampled_from(INSERTED))
    return bytes(result)


@st.composite
def damaged_lines(draw: st.DrawFn, text: str) -> bytes:
    """Lines of ``text`` left out, twice, swapped or indented otherwise."""
    lines = text.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        other = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(["remove", "repeat", "swap", "indent", "replace"])):
            case "remove" if len(lines) > 1:
                del lines[at]
            case "repeat":
                lines.insert(at, lines[at])
            case "swap":
                lines[at], lines[other] = lines[other], lines[at]
            case "indent":
                lines[at] = draw(st.sampled_from(["  ", "\t", "- ", "# ", "? ", "&a ", "*a "])) + lines[at]
            case "replace":
                lines[at] = draw(st.text(max_size=12)) + "\n"
    return "".join(lines).encode("utf-8", "surrogatepass")


ODD_VALUES = st.one_of(
    st.sampled_from([None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e308, math.nan, math.inf]),
    st.sampled_from(["", "a\nb", "\0", "\ud800", "é", "../x", "/etc/passwd", "null", "1e5", "F64", "9" * 5000]),
    st.sampled_from([[], {}, [[]], [None], [-1, 0], [2**62, 2**62], {"": None}, [1] * 50]),
    st.text(max_size=5),
)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with up to three keys or items, at any depth, given another value, left out, renamed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        places = [(holder, key) for holder in _holders(value) for key in _keys(holder)]
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        match draw(st.sampled_from(["replace", "replace", "remove", "rename", "nudge"])):
            case "replace":
                holder[key] = deepcopy(draw(ODD_VALUES))
            case "remove":
                del holder[key]
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=5)) + key[1:]] = holder.pop(key)
            case "nudge" if type(holder[key]) is int:
                holder[key] += draw(st.sampled_from([-1, 1, 8, 10**12]))
    return value


def _holders(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(holder for item in inner for holder in _holders(item))]


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def as_json(value: Any) -> bytes:
    """JSON as Python writes it, whatever it holds."""
    return json.dumps(value).encode()
