"""Finds a "memplug" block, or a misspelt one, that is not at the top level of a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher


def blocks(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of each key of a JSON value that is "memplug", or probably a misspelling of it."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        here = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        if near_memplug(key):
            yield here
        else:
            yield from blocks(child, here)


def near_memplug(key: object) -> bool:
    """Return whether a key is "memplug", or probably a misspelling of it."""
    return isinstance(key, str) and SequenceMatcher(None, plain(key), "memplug").ratio() >= 0.8


def plain(key: str) -> str:
    """Return the letters and digits of a key, in lower case."""
    return re.sub(r"[^a-z0-9]", "", key.lower())
