"""The pictures of the techniques in this memplug, found by the technique's name."""

from __future__ import annotations

from importlib import import_module

from memplug.block import TECHNIQUES, has_technique
from memplug.figures.technique_picture import TechniquePicture


def pictures() -> dict[str, TechniquePicture]:
    """Return the pictures by name, in the order in which the techniques take effect."""
    return {name: import_module(f"memplug.{name}.picture").PICTURE for name in TECHNIQUES if has_technique(name)}


def in_place() -> list[TechniquePicture]:
    """Return the pictures by `place`: the order of their rows from the top, and of their columns from the left."""
    return sorted(pictures().values(), key=lambda each: each.place)
