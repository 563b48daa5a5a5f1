"""Every message that memplug logs or raises, read from its source: the fixed parts, with … for what is filled in."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memplug import errors
from tests.support.folders import ROOT

FILLED = "…"

_LOGGERS = {"log", "_log"}
_LEVELS = {"info": 0, "warning": 0, "error": 0, "exception": 0, "critical": 0, "log": 1}
# Functions that log what they are given: where among their arguments the text is. `Diverged` becomes part of an error.
_TELLERS = {"tell": 0, "_tell": 0, "_note": 1, "add_note": 1, "Diverged": 0}
_ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
_DEEPEST = 4  # functions and names that a text is followed through


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        text: one line, with … in place of each value, without backticks.
        where: file and line.
        kind: of the call, such as "warning", or the error's class.
    """

    text: str
    where: str
    kind: str


class Source:
    """The package, and what its messages can be: one for each branch of a conditional text.

    A text is followed through local names, attributes, functions that return a `str`, and `str.join`; a part that leads
    to no literal is a value.
    """

    def __init__(self, package: Path = ROOT / "memplug"):
        self._root = package.parent
        self._trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
        self._functions: dict[str, list[ast.FunctionDef]] = defaultdict(list)
        self._attributes: dict[str, list[ast.expr]] = defaultdict(list)
        self._homes: dict[ast.AST, Path] = {}
        for path, tree in self._trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    self._homes[node] = path
                    self._functions[node.name].append(node)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute):
                            self._attributes[target.attr].append(node.value)

    def messages(self) -> Iterator[Message]:
        for path, tree in self._trees.items():
            for function, node in _with_function(tree):
                said = _said(node)
                if said and said[0] == "super" and path.name != "errors.py":
                    continue  # no sentence that a class of errors adds
                for text in self._texts(said[1], function, 0) if said else ():
                    yield Message(_tidy(text), f"{path.relative_to(self._root)}:{node.lineno}", said[0])

    def _texts(self, expression: ast.expr, function: ast.AST | None, depth: int) -> list[str]:
        if depth > _DEEPEST:
            return [FILLED]
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return _product("", [self._texts(part, function, depth) for part in parts])
            case ast.FormattedValue(value=value):
                return self._value(value, function, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _product("", [self._texts(left, function, depth), self._texts(right, function, depth)])
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._texts(body, function, depth), *self._texts(orelse, function, depth)]
            case ast.BoolOp(values=values):
                return [text for value in values for text in self._texts(value, function, depth)]
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [text for element in elements for text in self._texts(element, function, depth)]
        return self._value(expression, function, depth)

    def _value(self, value: ast.expr, function: ast.AST | None, depth: int) -> list[str]:
        """What a name, an attribute or a call stands for, where that has fixed parts."""
        match value:
            case ast.Name(id=name):
                found = _assigned(name, function)
            case ast.Attribute(attr=name):
                found = self._attributes.get(name, [])
            case ast.Call(func=ast.Attribute(attr="join", value=ast.Constant(value=str(between))), args=[parts]):
                return self._joined(between, parts, function, depth)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                defined = self._functions.get(name, [])
                near = [each for each in defined if self._homes.get(each) == self._homes.get(function)]
                if len(defined) > 1:
                    defined = near or [each for each in defined if _returned(each)]  # not abstract ones
                function = defined[0] if len(defined) == 1 else None
                found = _returned(function) if function is not None else []
            case ast.IfExp() | ast.JoinedStr():
                return self._texts(value, function, depth)
            case _:
                found = []
        texts = [text for each in found for text in self._texts(each, function, depth + 1)]
        return texts if any(re.search(r"\w{3}", text.replace(FILLED, "")) for text in texts) else [FILLED]

    def _joined(self, between: str, parts: ast.expr, function: ast.AST | None, depth: int) -> list[str]:
        """Lines of one text belong together; what is only listed, part after part, is a message each."""
        if isinstance(parts, ast.Call) and isinstance(parts.func, ast.Name) and parts.func.id == "filter":
            parts = parts.args[1]
        elements = _elements(parts.id, function) if isinstance(parts, ast.Name) else getattr(parts, "elts", [])
        choices = [self._texts(each, function, depth + 1) for each in elements]
        if "\n" in between:
            return _product(between, choices)
        return [text for choice in choices for text in choice if text not in ("", FILLED)] or [FILLED]


def _with_function(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST | None, ast.AST]]:
    """Every node, with the function around it."""
    for child in ast.iter_child_nodes(tree):
        inside = child if isinstance(child, ast.FunctionDef) else function
        yield inside, child
        yield from _with_function(child, inside)


def _said(node: ast.AST) -> tuple[str, ast.expr] | None:
    """What a node logs or raises, if it does."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=level), args=args) if name in _LOGGERS:
            return (level, args[_LEVELS[level]]) if level in _LEVELS else None
        case ast.Call(func=ast.Name(id="PatchError")):
            return None  # its arguments are a symbol and versions; the sentence around them is the class's
        case ast.Call(func=ast.Name(id="error") | ast.Name(id="kind"), args=[first, *_]):
            return "MemplugError", first  # a class that the caller gave
        case ast.Call(func=ast.Attribute(value=ast.Name(id="problems"), attr="append"), args=[first]):
            return "ConfigError", first
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))), args=[first, *_]):
            return "super", first
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
            if name in _ERRORS and args:
                return name, args[0]
            if len(args) > _TELLERS.get(name, len(args)):
                return name, args[_TELLERS[name]]
    return None


def _assigned(name: str, function: ast.AST | None) -> list[ast.expr]:
    nodes = ast.walk(function) if function is not None else ()
    return [
        node.value
        for node in nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and node.value is not None
        and any(
            isinstance(target, ast.Name) and target.id == name
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
    ]


def _elements(name: str, function: ast.AST | None) -> list[ast.expr]:
    """What a list of that name is made of, and what is added to it."""
    found = [each for value in _assigned(name, function) for each in getattr(value, "elts", [])]
    for node in ast.walk(function) if function is not None else ():
        match node:
            case ast.AugAssign(target=ast.Name(id=target), value=ast.List(elts=added)) if target == name:
                found += added
            case ast.Call(func=ast.Attribute(value=ast.Name(id=target), attr="append"), args=[added]) if target == name:
                found.append(added)
    return found


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    """What a function that returns text returns."""
    if not isinstance(function.returns, ast.Name) or function.returns.id != "str":
        return []
    return [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value is not None]


def _product(between: str, choices: list[list[str]]) -> list[str]:
    return [between.join(choice) for choice in itertools.product(*choices)]


def _tidy(text: str) -> str:
    text = re.sub(r"%[-+ #0]*\d*(?:\.\d+)?[sdrfg]", FILLED, text).replace("%%", "%").replace("`", "")
    return re.sub(rf"{FILLED}+", FILLED, " ".join(text.split()))
