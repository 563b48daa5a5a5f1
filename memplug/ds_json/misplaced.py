"""Where a file has a "memplug" block, or a key that was meant to be one, in another place than at its top level."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher


def blocks(value: object, path: str = "") -> Iterator[str]:
    """Yields paths of what looks like a block anywhere in a value of a JSON."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        here = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        if near_memplug(key):
            yield here
        else:
            yield from blocks(child, here)


def near_memplug(key: object) -> bool:
    """Returns whether a key is "memplug", or was meant to be."""
    return isinstance(key, str) and SequenceMatcher(None, plain(key), "memplug").ratio() >= 0.8


def plain(key: str) -> str:
    """Returns the small letters and digits of a key."""
    return re.sub(r"[^a-z0-9]", "", key.lower())
