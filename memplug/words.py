"""Amounts in words, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memplug.sizes import GIB, KIB, MIB

_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))


def axis_unit(most_bytes: float) -> tuple[str, int]:
    """Return the unit for an axis that reaches to `most_bytes`: its name and its size in bytes."""
    return next((unit for unit in _UNITS if most_bytes >= unit[1]), _UNITS[-1])


def size(nbytes: int) -> str:
    """Return a number of bytes in the binary unit that fits, for example "27.31 GiB"."""
    unit, unit_bytes = axis_unit(abs(nbytes))
    return f"{nbytes / unit_bytes:.2f} {unit}" if abs(nbytes) >= unit_bytes else f"{nbytes:,} bytes"


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 request", "2,048 requests"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration in seconds or milliseconds, for example "1.250 s", "3.57 ms"."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def known(amount: float | None, words: Callable[[Any], str]) -> str:
    """Return an amount in words, or "unknown" for None."""
    return "unknown" if amount is None else words(amount)
