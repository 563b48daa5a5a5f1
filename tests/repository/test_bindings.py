"""Everything that memplug's C++ binds is used by memplug's own Python, except a few names for tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.folders import ROOT

BINDING = re.compile(r'(?:\.|\bmodule\.)def(?:_readwrite|_readonly|_property|_property_readonly|_static)?\(\s*"(\w+)"')
CALLED_BY_CPP = re.compile(r'attr\("(\w+)"\)')

FOR_TESTS = {
    # frames: tests run a forward and its recompute pass step by step
    *("actions", "finish", "followed", "replay_with", "restored"),
    # copies: tests start and end each of them
    *(
        "acquire",
        "before_write",
        "drain",
        "give",
        "leave_now",
        "release_leaving",
        "resident_bytes",
        "slab",
        "turn_back",
    ),
    # values that tests compare
    *("arena_owns", "cpu_bytes", "paused", "requested_peak", "running_operator", "tracked_bytes"),
}


def bindings() -> set[str]:
    """Return the names that are bound, except those such as `__enter__`, which Python calls by itself."""
    sources = [path.read_text() for path in (ROOT / "memplug").rglob("*module.cpp")]
    return {name for source in sources for name in BINDING.findall(source) if not name.startswith("__")}


def names_in(folder: Path) -> Iterator[str]:
    """Yield the attributes and strings of a folder's Python, but for this file, and the names that its C++ calls."""
    for path in folder.rglob("*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in folder.rglob("*.cpp"):
        yield from CALLED_BY_CPP.findall(path.read_text())


def test_every_binding_is_used() -> None:
    bound, used = bindings(), set(names_in(ROOT / "memplug"))
    assert len(bound) > 200
    by_device = {name for name in bound if name.startswith("stand_before_")}  # arena.py appends the device
    assert bound - used - by_device == FOR_TESTS


def test_bindings_kept_for_tests_are_used_by_tests() -> None:
    assert FOR_TESTS <= {node for node in names_in(ROOT / "tests")}
