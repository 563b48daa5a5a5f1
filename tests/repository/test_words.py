"""Docstrings are sentences from their first word on, and class names are unique."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.folders import ROOT

FRAGMENTS = ("As", "By", "Its", "Nothing", "Of", "That", "What", "Who", "Whoever", "Whose")
FOLDERS = ("configs", "examples", "launch", "memplug", "tests")
MIRRORED = set("Arena Decision Features Form InForce Record Region Setting Span Tape VirtualDevice".split())
"""Classes of the native core that a class of Python stands for, by the same name."""
FRAMEWORKS_OWN = {"MemplugCallback"}  # a class of this name for each framework with callbacks


def sources(suffixes: tuple[str, ...], *folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                yield path


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def test_docstrings_do_not_begin_with_fragments() -> None:
    read, fragments = 0, []
    for path in sources((".py",), *FOLDERS):
        for line, text in docstrings(path):
            read += 1
            if re.match(rf"\W*({'|'.join(FRAGMENTS)})\b", text):
                fragments.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert read > 4000
    assert fragments == []


def classes() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return where each class name is defined, in Python and in C++."""
    python, native = defaultdict(list), defaultdict(list)
    for path in sources((".py",), "memplug"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                python[node.name].append(str(path.relative_to(ROOT)))
    defined = re.compile(r"^\s*(?:class|struct|enum class)\s+(\w+)\s*(?:final)?\s*(?::[^:;{]*)?\{", re.M)
    for path in sources((".h", ".cpp"), "memplug"):
        for name in defined.findall(path.read_text(encoding="utf-8")):
            native[name].append(str(path.relative_to(ROOT)))
    return python, native


def test_class_names_are_unique() -> None:
    python, native = classes()
    assert len(python) > 250 and len(native) > 150
    twice = {name: files for names in (python, native) for name, files in names.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in FRAMEWORKS_OWN} == {}
    assert python.keys() & native.keys() == MIRRORED
