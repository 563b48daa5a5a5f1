"""The techniques of this memplug, each with what it says and draws; found by name, as their parts in plans are."""

from __future__ import annotations

from importlib import import_module

from memplug.block import TECHNIQUES, has_technique
from memplug.figures.technique_picture import TechniquePicture


def pictures() -> dict[str, TechniquePicture]:
    """Returns them by name, in the order in which the techniques take effect."""
    return {name: import_module(f"memplug.{name}.picture").Picture() for name in TECHNIQUES if has_technique(name)}


def in_place() -> list[TechniquePicture]:
    """Returns them from the top row, and the column on the left, on."""
    return sorted(pictures().values(), key=lambda each: each.place)
