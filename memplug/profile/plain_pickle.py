"""Reads a pickle of plain data: numbers, text, bytes, lists, tuples and dicts; imports nothing and calls nothing.

A `pickle.Unpickler` that refuses every global is not safe enough: numbers in a damaged or hostile file can make it
allocate any amount of memory. This reader allocates no more than a small multiple of the file's size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pickle import (
    APPEND,
    APPENDS,
    BINBYTES,
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPERSID,
    BINPUT,
    BINUNICODE,
    BINUNICODE8,
    BUILD,
    DICT,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    EXT1,
    EXT2,
    EXT4,
    FRAME,
    GLOBAL,
    INST,
    LIST,
    LONG1,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    MEMOIZE,
    NEWFALSE,
    NEWOBJ,
    NEWOBJ_EX,
    NEWTRUE,
    NONE,
    OBJ,
    PERSID,
    PROTO,
    REDUCE,
    SETITEM,
    SETITEMS,
    SHORT_BINBYTES,
    SHORT_BINUNICODE,
    STACK_GLOBAL,
    STOP,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
)
from typing import Any

_CODE = (
    *(GLOBAL, STACK_GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, NEWOBJ_EX),
    *(EXT1, EXT2, EXT4, PERSID, BINPERSID),
)
_NEWEST = 5  # the newest pickle protocol


class NotPlainError(ValueError):
    """The pickle would import or call something."""


def is_pickle(beginning: bytes) -> bool:
    """Return whether a file's first bytes are those of a pickle of protocol 2 or newer."""
    return len(beginning) >= 2 and beginning[:1] == PROTO and 2 <= beginning[1] <= _NEWEST


def loads(content: bytes) -> Any:
    """Return the value of a pickle of protocol 2 or newer.

    Args:
        content: the whole pickle.

    Raises:
        NotPlainError: the pickle contains more than plain data.
        ValueError: the pickle is damaged, or cut short.
    """
    reader = _Reader(content)
    try:
        return reader.read()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"damaged or cut short at byte {reader.at:,} of {len(content):,}") from error


class _Reader:
    """The stack machine of a pickle."""

    def __init__(self, content: bytes) -> None:
        self.at = 0
        self._content = content
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []  # for each open MARK, the stack below it
        self._memo: dict[int, Any] = {}

    def read(self) -> Any:
        """Run the machine up to the STOP opcode, and return the value on top of the stack."""
        content, stop = self._content, STOP[0]
        table: list[Callable[[], None] | None] = [None] * 256
        for opcode, does in self._opcodes().items():
            table[opcode[0]] = does
        code = {opcode[0] for opcode in _CODE}
        while (opcode := content[self.at]) != stop:
            does = table[opcode]
            if does is None:
                if opcode in code:
                    raise NotPlainError("it asks to import or to call something, and only data is read here")
                raise IndexError("no such opcode")
            self.at += 1
            does()
        return self._stack.pop()

    def _opcodes(self) -> dict[bytes, Callable[[], None]]:
        push = self._push
        return {
            PROTO: lambda: self._skip(1),
            FRAME: lambda: self._skip(8),
            MARK: self._mark,
            MEMOIZE: lambda: self._put(len(self._memo)),
            BINPUT: lambda: self._put(self._number("<B", 1)),
            LONG_BINPUT: lambda: self._put(self._number("<I", 4)),
            BINGET: lambda: push(self._memo[self._number("<B", 1)]),
            LONG_BINGET: lambda: push(self._memo[self._number("<I", 4)]),
            NONE: lambda: push(None),
            NEWTRUE: lambda: push(True),
            NEWFALSE: lambda: push(False),
            BININT: lambda: push(self._number("<i", 4)),
            BININT1: lambda: push(self._number("<B", 1)),
            BININT2: lambda: push(self._number("<H", 2)),
            LONG1: lambda: push(int.from_bytes(self._bytes("<B", 1), "little", signed=True)),
            BINFLOAT: lambda: push(self._number(">d", 8)),
            SHORT_BINUNICODE: lambda: push(self._text("<B", 1)),
            BINUNICODE: lambda: push(self._text("<I", 4)),
            BINUNICODE8: lambda: push(self._text("<Q", 8)),
            SHORT_BINBYTES: lambda: push(self._bytes("<B", 1)),
            BINBYTES: lambda: push(self._bytes("<I", 4)),
            EMPTY_LIST: lambda: push([]),
            EMPTY_DICT: lambda: push({}),
            EMPTY_TUPLE: lambda: push(()),
            APPEND: lambda: self._extend(self._last(1)),
            APPENDS: lambda: self._extend(self._marked()),
            SETITEM: lambda: self._update(self._last(2)),
            SETITEMS: lambda: self._update(self._marked()),
            TUPLE1: lambda: push(tuple(self._last(1))),
            TUPLE2: lambda: push(tuple(self._last(2))),
            TUPLE3: lambda: push(tuple(self._last(3))),
            TUPLE: lambda: push(tuple(self._marked())),
            LIST: lambda: push(self._marked()),
            DICT: self._dict,
        }

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _skip(self, count: int) -> None:
        self.at += count

    def _number(self, kind: str, size: int) -> Any:
        (value,) = struct.unpack_from(kind, self._content, self.at)
        self.at += size
        return value

    def _bytes(self, kind: str, size: int) -> bytes:
        end = self.at + size + struct.unpack_from(kind, self._content, self.at)[0]
        if end > len(self._content):
            raise IndexError("beyond the end")
        found = self._content[self.at + size : end]
        self.at = end
        return found

    def _text(self, kind: str, size: int) -> str:
        return self._bytes(kind, size).decode("utf-8", "surrogatepass")

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._outer.pop()
        return found

    def _last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("an empty stack")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise TypeError("items for a value that is no list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not dict or len(values) % 2:
            raise TypeError("items for a value that is no dict")
        self._stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def _dict(self) -> None:
        values = self._marked()
        self._push({})
        self._update(values)
