"""Finds the line of each key of a JSON, or of an Hjson, which DeepSpeed also reads (comments, unquoted strings)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

# The pattern must end with this repetition: backtracking into it would take exponential time.
_BLANK = re.compile(r"(?:\s+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)+", re.S)
_QUOTED = r'"(?:[^"\\]|\\.)*"' + "|" + r"'(?:[^'\\]|\\.)*'"
_KEY = re.compile(rf"{_QUOTED}|[^\s:{{}}\[\],]+", re.S)
_BLOCK = re.compile(r"'''.*?'''", re.S)
_STRING = re.compile(_QUOTED, re.S)
_LITERAL = re.compile(r"(?:true|false|null|NaN|-?Infinity|-?[0-9][-+.0-9eE]*)(?=[ \t]*(?:[,}\]#\r\n]|//|/\*|\Z))")
_TO_THE_END = re.compile(r"[^\r\n]*")


class KeyPlace(NamedTuple):
    """A key of an object.

    Attributes:
        path: path from the top, as in "zero_optimization.stage" or "groups[1].lr".
        line: line number, from 1.
    """

    path: str
    line: int


@dataclass(slots=True)
class _Open:
    """An object or an array that a `_Walk` has entered and not left.

    Attributes:
        path: path from the top.
        is_object: True for an object, False for an array.
        number: number of the object or array, in the order of the text.
        count: number of the array's values so far.
    """

    path: str
    is_object: bool
    number: int
    count: int = 0


def repeated(text: str) -> list[tuple[str, list[int]]]:
    """Return the path of each key that an object has more than once, with all of its lines."""
    lines: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, place in _Walk(text).keys():
        lines[number, place.path].append(place.line)
    return [(path, found) for (_, path), found in lines.items() if len(found) > 1]


def line_of(text: str, path: str) -> int | None:
    """Return the line of the last key with this path; None if there is no such key."""
    return next((place.line for _, place in reversed(_Walk(text).keys()) if place.path == path), None)


class _Walk:
    """Walks through a text from key to key, and stops where the text is neither JSON nor Hjson."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._objects = text.removeprefix("\ufeff"), 0, 0

    def keys(self) -> list[tuple[int, KeyPlace]]:
        """Return every key in the order of the text, with the number of its object (`_Open.number`)."""
        found: list[tuple[int, KeyPlace]] = []
        line, counted = 1, 0
        self._skip(_BLANK)
        # The outermost object may lack its braces.
        inside = [] if self._text[self._at : self._at + 1] in ("{", "[") else [_Open("", True, 0)]
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "}]":
                self._at += 1
                if inside:
                    inside.pop()
            elif character == ",":
                self._at += 1
            elif inside and inside[-1].is_object:
                key = _KEY.match(self._text, self._at)
                if key is None:
                    break
                path = f"{inside[-1].path}.{_plain(key[0])}".lstrip(".")
                line, counted = line + self._text.count("\n", counted, self._at), self._at
                found.append((inside[-1].number, KeyPlace(path, line)))
                self._at = key.end()
                self._skip(_BLANK)
                if not self._text.startswith(":", self._at):
                    break
                self._at += 1
                self._skip(_BLANK)
                self._value(path, inside)
            else:
                path = f"{inside[-1].path}[{inside[-1].count}]" if inside else ""
                if inside:
                    inside[-1].count += 1
                self._value(path, inside)
            self._skip(_BLANK)
        return found

    def _value(self, path: str, inside: list[_Open]) -> None:
        """Enter an object or an array; skip any other value."""
        character = self._text[self._at : self._at + 1]
        if character in ("{", "["):
            self._objects += 1
            inside.append(_Open(path, character == "{", self._objects))
            self._at += 1
        elif not any(map(self._skip, (_BLOCK, _STRING, _LITERAL))):
            self._skip(_TO_THE_END)

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return bool(found)


def _plain(key: str) -> str:
    if not key.startswith('"'):
        return key.strip("'")
    try:
        return json.loads(key)
    except ValueError:
        return key.strip('"')
