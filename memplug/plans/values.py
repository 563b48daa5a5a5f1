"""JSON values of a plan: writes dataclasses as text, and reads them with every type and name checked."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

Value = TypeVar("Value")

_MOST_LINES_DEEP = 4  # nesting depth from which a container is written on one line


class _Read(BaseModel, Generic[Value]):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    value: Value


def read(kind: type[Value], values: dict[str, Any]) -> Value:
    """Return a dataclass made from JSON values, which must have every field, even those with a default.

    Args:
        kind: the dataclass.
        values: the values by name of the field.

    Raises:
        ValueError: a field is missing or unknown, has the wrong type, or is not finite.
    """
    if missing := {field.name for field in fields(kind)} - values.keys():
        raise ValueError(f"the field {min(missing)} is missing")
    return _Read[kind].model_validate_json(_line({"value": values})).value


def text_of(value: Any, depth: int = 0) -> str:
    """Return JSON that is also easy to read: a container of containers has one line for each member."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if depth == _MOST_LINES_DEEP or not any(isinstance(each, dict | list | tuple) for each in members):
        return _line(value)
    lines = [text_of(each, depth + 1) for each in members]
    if isinstance(value, dict):
        lines = [f"{json.dumps(str(name))}: {line}" for name, line in zip(value, lines, strict=True)]
    indent = "\n" + "  " * depth
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}{indent}  {f',{indent}  '.join(lines)}{indent}{closing}"


def _line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, default=_plain, separators=(",", ": "))


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: numpy's numbers to Python's, sets to sorted lists."""
    return sorted(value) if isinstance(value, frozenset) else value.item()
