"""In C++, only calls.h names attributes of memplug's Python classes, so that they are checked in one place."""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest

from tests.support.folders import ROOT

CALLS = "calls.h"
# names of torch and of Python; those of torch that may change are constants in torch_private.h instead
OTHERS = {"OutOfMemoryError", "__enter__", "__exit__", "as_subclass"}
BY_NAME = re.compile(
    r"(?:\b(?:get|set|has)attr\(|AttrString\(|\bPyObject_CallMethod\w*\()[^;]*?\"(\w+)\"|\.attr\(([^)]*)\)"
)
MODULE = re.compile(r"\bimport\(\s*\"(memplug[\w.]*)\"|PyImport_\w+\(\s*\"(memplug[\w.]*)\"")


def names_of_python(text: str, constants: AbstractSet[str] = frozenset()) -> set[str]:
    """Return the attributes and the modules of memplug that C++ text asks Python for by name."""
    found = {first or second.strip('"') for first, second in BY_NAME.findall(text)}
    return found - OTHERS - constants | {first or second for first, second in MODULE.findall(text)}


def sources() -> list[Path]:
    """Return the C++ files of the package."""
    return [file for file in sorted((ROOT / "memplug").rglob("*")) if file.suffix in (".cpp", ".h")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('executor.attr("restore")(frame);', {"restore"}),
        ('executor\n    .attr("restore")\n    .attr("__exit__")();', {"restore"}),
        ("module.attr(name)();", {"name"}),
        ("module.attr(STANCE)();", set()),
        ('PyObject_GetAttrString(executor.ptr(), "restore");', {"restore"}),
        ('PyObject_CallMethod(executor.ptr(), "restore", nullptr);', {"restore"}),
        ('py::getattr(executor, "restore");', {"restore"}),
        ('py::module_::import("memplug.errors");', {"memplug.errors"}),
        ('PyImport_ImportModule("memplug.errors");', {"memplug.errors"}),
        ('module.def("restore", &restore);', set()),
    ],
)
def test_python_names_that_cpp_asks_for_are_found(text: str, names: set[str]) -> None:
    assert names_of_python(text, {"STANCE"}) == names


def test_only_calls_h_names_attributes_of_memplugs_python() -> None:
    private = (ROOT / "memplug/native/torch_private.h").read_text()
    constants = set(re.findall(r"\bconst char\* (\w+) =", private))
    found = {file.name: names_of_python(file.read_text(), constants) for file in sources() if file.name != CALLS}
    assert constants and len(found) > 100
    assert not {name: names for name, names in found.items() if names}
