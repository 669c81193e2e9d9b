"""What to say about a name that is not in a table."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The nearest of ``known``, where one is near, and all of them: the end of a sentence."""
    names = list(known)
    begin = sorted((n for n in names if n.startswith(name.lower())), key=len)
    near = begin or get_close_matches(name.lower(), names, 1)
    return (f"did you mean {near[0]}? Known are: " if near else "known are: ") + ", ".join(names)
