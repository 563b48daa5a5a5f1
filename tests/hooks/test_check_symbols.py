"""The script that searches other packages' sources for the names that memplug relies on.

The script finds existing names, reports missing ones, and checks every name; installed packages have all names.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from memplug.hooks import deepspeed, megatron, megatron_training, transformer_engine
from memplug.tokenwise.engine.hidden import EXCHANGES
from tests.support import check_symbols
from tests.support.check_symbols import GONE, MOVED, THERE, check, main, verdict
from tests.support.folders import ROOT
from tests.support.source_tree import SourceTree
from tests.support.symbols import (
    DEEPSPEED,
    FLASH_ATTN,
    MEGATRON,
    PACKAGES,
    TORCH,
    TRANSFORMER_ENGINE,
    Package,
    Text,
    Use,
)

SOURCES = {
    "pack/__init__.py": "from .engine import Engine, old as renamed\nfrom pack.star import *\nfrom torch import nn\n",
    "pack/engine.py": """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from dataclasses import dataclass
        from .base import Base
        if TYPE_CHECKING:
            from .base import Hint
        try:
            from fast import kernel
        except ImportError:
            kernel = None

        class Engine(Base):
            limit: int = 3
            first, second = 1, 2

            def __init__(self, model, *, config=None):
                self.model, self.count = model, 0

            def step(self, closure=None, **kwargs): ...
            advance = step

        @dataclass
        class Settings(Base):
            rate: float = 0.1

        def old(a, /, b, *rest, c=1): ...
        made_by = old
        """,
    "pack/base.py": "class Base:\n    size: int\n    def close(self):\n        self.closed = True\nclass Hint: ...\n",
    "pack/star.py": "def starred(): ...\n",
    "pack/folder/inner.py": "def moved_here(a): ...\nclass Worker:\n    def run(self): ...\n",
    "pack/csrc/ops.cpp": 'TORCH_LIBRARY(pack_ops, m) {\n    m.def("fwd("\n        "Tensor q) -> Tensor");\n}\n',
}


def folder_with(root: Path, files: dict[str, str]) -> Path:
    """Write these files to a folder, and return it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(inspect.cleandoc(text) + "\n")
    return root


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    return SourceTree(folder_with(tmp_path, SOURCES), "pack")


@pytest.mark.parametrize(
    "symbol",
    [
        "pack.engine",
        "pack.engine:Engine.step(closure)",
        "pack.engine:Engine(model, config)",
        "pack.engine:Engine.second",
        "pack.engine:Engine.count",  # an attribute of instances
        "pack.engine:Engine.closed",  # an attribute of instances of a base class
        "pack.engine:Engine.close",
        "pack.engine:Engine.advance(closure)",
        "pack.engine:Settings(rate, size)",
        "pack.engine:made_by(a, b, c)",
        "pack.engine:kernel",
        "pack:Engine.limit",
        "pack:renamed(b)",
        "pack:starred",
        "pack:folder.inner.Worker.run",
        "pack:nn.Module",  # a name of another package
    ],
)
def test_defined_imported_or_inherited_symbol_is_found(symbol: str, tree: SourceTree) -> None:
    assert verdict(tree, symbol).status == THERE


@pytest.mark.parametrize(
    "symbol",
    [
        "pack.missing",
        "pack.missing:anything",
        "pack.engine:Engine.fly",
        "pack.engine:Engine.step.inner",
        "pack.engine:Engine(batches)",
        "pack.engine:Settings(rate, batches)",
        "pack.engine:old(rest)",
        "pack.star:nothing",
    ],
)
def test_missing_symbol_is_reported_as_gone(symbol: str, tree: SourceTree) -> None:
    assert verdict(tree, symbol).status == GONE


@pytest.mark.parametrize(
    ("symbol", "place"),
    [
        ("pack.engine:moved_here(a)", "pack.folder.inner"),
        ("pack.nowhere:Worker.run", "pack.folder.inner"),
        ("pack.engine:Hint", "pack.base"),  # imported only for annotations
    ],
)
def test_report_on_a_moved_symbol_names_its_new_place(symbol: str, place: str, tree: SourceTree) -> None:
    found = verdict(tree, symbol)
    assert (found.status, found.note) == (MOVED, f"in {place}")


def test_symbol_is_found_if_one_of_its_alternatives_exists(tree: SourceTree) -> None:
    assert verdict(tree, ("pack.engine:Engine.fly", "pack.engine:Engine.step")).symbol == "pack.engine:Engine.step"
    assert verdict(tree, ("pack.engine:Engine.fly", "pack.engine:moved_here")).status == MOVED
    assert verdict(tree, ("pack.engine:Engine.fly", "pack.engine:Engine.swim")).status == GONE


def test_report_notes_a_parameter_that_only_kwargs_accepts(tree: SourceTree) -> None:
    assert verdict(tree, "pack.engine:Engine.step(closure)").note == ""
    assert verdict(tree, "pack.engine:Engine.step(closure, scale)").note == "scale by **kwargs"


def test_text_is_found_across_line_breaks_and_in_other_files(tree: SourceTree) -> None:
    assert verdict(tree, Text('m.def("fwd(" "Tensor q)', "pack/csrc/ops.cpp")).status == THERE
    assert verdict(tree, Text("TORCH_LIBRARY(pack_ops,")).status == THERE
    moved = verdict(tree, Text("TORCH_LIBRARY(pack_ops,", "pack/engine.py"))
    assert moved.status == MOVED and "pack/csrc/ops.cpp" in moved.note
    assert verdict(tree, Text("TORCH_LIBRARY(other_ops,")).status == GONE


def test_report_names_a_file_that_does_not_parse(tmp_path: Path) -> None:
    broken = SourceTree(folder_with(tmp_path, {"pack/__init__.py": "def step(:\n"}), "pack")
    found = verdict(broken, "pack:step")
    assert found.status == GONE and "cannot parse" in found.note and "__init__.py" in found.note


def test_exit_status_is_1_if_a_symbol_is_gone_or_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = Package("pack", {"memplug/a.py": ("pack:Engine",)}, imitated=("pack:Imitated",))
    monkeypatch.setattr(check_symbols, "PACKAGES", {"pack": package})
    below = folder_with(tmp_path / "pack-1.0", SOURCES)
    assert main(["pack", "--source", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == ["pack: 1 of 1 there", "  there  pack:Engine  (memplug/a.py)"]
    assert main(["--source", str(below), "--stand-ins"]) == 1
    assert "1 of 2 there, 1 gone" in capsys.readouterr().out
    moved = Package("pack", {"memplug/a.py": ("pack.engine:moved_here",)})
    monkeypatch.setattr(check_symbols, "PACKAGES", {"pack": moved})
    assert main(["pack", "--source", str(tmp_path)]) == 1, "memplug looks only in the old place"
    assert "0 of 1 there, 1 moved" in capsys.readouterr().out


def test_sources_are_downloaded_from_the_package_index_and_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    files = {
        "setup.py": f"open({str(ran)!r}, 'w')\n",
        "flash_attn/flash_attn_interface.py": '"flash_attn::_flash_attn_forward", mutates_args=()',
    }
    for version in ("1.0", "2.0"):
        with tarfile.open(tmp_path / f"flash_attn-{version}.tar.gz", "w:gz") as archive:
            archive.add(folder_with(tmp_path / version, files), f"flash_attn-{version}")

    def run(*arguments: str) -> tuple[int, list[str]]:
        # in a separate process, since pip brings its own distutils
        command = [sys.executable, "-m", "tests.support.check_symbols", *arguments]
        index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **index}, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines()

    status, lines = run("flash-attn")
    assert (status, lines[0], len(lines)) == (1, "flash-attn 2.0: 1 of 4 there, 3 gone", 6)
    unchecked = [f"{name} (not given)" for name in PACKAGES if name != "flash-attn"]
    assert lines[-1] == f"not checked: {', '.join(unchecked)}"
    assert run("flash-attn==1.0")[1][0].startswith("flash-attn 1.0: 1 of 4 there")
    missing = "could not get the sources: the package index has no flash-attn 3.0, or cannot be reached"
    status, lines = run("flash-attn==3.0")
    assert (status, lines[:-1]) == (0, [f"flash-attn 3.0: {missing}"])
    assert lines[-1].startswith("not checked: ") and "flash-attn (no sources)" in lines[-1]
    assert not ran.exists()


def test_package_missing_from_the_index_is_reported_without_failing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flash-attn-3"]) == 0
    assert "could not get the sources" in capsys.readouterr().out


def names_of(*packages: Package) -> set[str]:
    """Return all symbols of packages, without parameters."""

    def each(use: Use) -> Iterator[str]:
        for one in use if isinstance(use, tuple) else (use,):
            yield one.text if isinstance(one, Text) else one.partition("(")[0]

    return {name for package in packages for its in package.uses.values() for use in its for name in each(use)}


@pytest.mark.parametrize(
    ("hooks", "title"),
    [(deepspeed, "patched"), (megatron, "patched"), (megatron_training, "patched"), (transformer_engine, "patched")]
    + [(transformer_engine, "class")],
)
def test_every_symbol_in_docstring_tables_of_hooks_is_checked(hooks: ModuleType, title: str) -> None:
    table = (hooks.__doc__ or "").partition(f"| {title} |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    told = [name.rpartition(".")[2] for cell in cells for name in re.findall("`([^`]+)`", cell)]
    assert len(told) >= 2
    known = " ".join(names_of(*PACKAGES.values()))
    # a table writes "`pre_` and `post_sub_module_forward_function`" for two names with one ending
    patterns = {name: rf"[.:]{name}" if name.endswith("_") else rf"[.:]{name}\b" for name in told}
    missing = [name for name, pattern in patterns.items() if not re.search(pattern, known)]
    assert not missing


def test_every_import_from_framework_packages_is_checked() -> None:
    known = names_of(*PACKAGES.values())
    # not torch, most of whose names are public
    folders = tuple(f"{package.folder.partition('/')[0]}." for package in PACKAGES.values() if package is not TORCH)
    imported = {
        f"{node.module}:{alias.name}"
        for path in (ROOT / "memplug").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and f"{node.module}.".startswith(folders)
        for alias in node.names
    }
    assert imported
    asked = {*known, *(name.replace(":", ".") for name in known)}
    prefixes = {
        name[:end] for name in asked for end in (*(found.start() for found in re.finditer("[.:]", name)), len(name))
    }
    missing = {name for name in imported if name not in prefixes and name.replace(":", ".") not in prefixes}
    assert not missing


def test_every_symbol_in_constants_of_hooks_is_checked() -> None:
    config = "megatron.core.transformer.transformer_config:TransformerConfig."
    known = names_of(MEGATRON, TRANSFORMER_ENGINE)
    assert {f"{config}{key}" for key in megatron._CONFLICTS} <= known
    assert {":".join(name.rsplit(".", 1)) for name in EXCHANGES} <= known
    classes = {name.rpartition(":")[2].partition(".")[0] for name in known}
    assert {*transformer_engine._KINDS, megatron.LAYER_CLASS.rpartition(".")[2]} <= classes


def test_every_private_torch_name_is_checked() -> None:
    known = " ".join(names_of(TORCH))
    text = (ROOT / "memplug/torch_private.py").read_text()
    named = {name.rpartition(".")[2] for name in re.findall(r'"torch(?:\.\w+)*\.(\w+)"', text)} - {"_distributed_c10d"}
    assert len(named) > 30
    public = {"flex_attention"}
    assert {name for name in named - public if not re.search(rf"\b{name}\b", known)} == set()


@pytest.mark.long
@pytest.mark.parametrize(("name", "package"), [("megatron.core", MEGATRON), ("deepspeed", DEEPSPEED), ("torch", TORCH)])
def test_installed_package_has_all_names_that_memplug_uses(name: str, package: Package) -> None:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    spec = importlib.util.find_spec(name.partition(".")[0])
    root = Path(next(iter(spec.submodule_search_locations))).parent
    found = check(root, package)
    assert [str(each) for _, each in found if each.status != THERE] == []
    tree = SourceTree(root, package.folder)  # the script would report each name if it were missing
    for symbol in (name for name in names_of(package) if ":" in name and "(" not in name):
        assert tree.find(*f"{symbol}_is_not_there".split(":")) is None, symbol


@pytest.mark.parametrize("package", [TRANSFORMER_ENGINE, FLASH_ATTN], ids=lambda package: package.folder)
def test_stand_ins_have_all_names_that_memplug_uses(package: Package) -> None:
    found = check(ROOT / "tests/support/stand_ins", package, stand_ins=True)
    lacking = [each.symbol for _, each in found if each.status != THERE]
    # the class's metaclass supplies `quantization_state`, depending on the version that the stand-in reports
    assert [symbol for symbol in lacking if not symbol.endswith("FP8GlobalStateManager.quantization_state")] == []
