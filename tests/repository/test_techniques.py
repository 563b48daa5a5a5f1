"""A technique is a room with entries in several places; a new technique that lacks one fails here."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest

from memplug.block import TECHNIQUES, MemplugConfig
from memplug.native import CORE
from memplug.session.techniques import AGREED, FOLLOWING
from tests.support.folders import ROOT

PACKAGE = ROOT / "memplug"


def contract(name: str) -> configparser.SectionProxy:
    """Return a contract of the import linter."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup[f"importlinter:contract:{name}"]


def test_every_technique_room_has_a_config_section_and_an_entry() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/technique.py")} - {"session"}  # the interface's room
    assert sorted(rooms) == sorted(TECHNIQUES)
    assert sorted(technique.name for technique in (AGREED, *FOLLOWING)) == sorted(TECHNIQUES)


def test_every_technique_is_switched_by_its_own_config_section() -> None:
    everything = MemplugConfig(enabled=True, **{name: {"enabled": True} for name in TECHNIQUES})
    for technique in (AGREED, *FOLLOWING):
        assert technique.is_wanted(everything.with_only(technique.name))
        assert not technique.is_wanted(everything.with_only(*set(TECHNIQUES) - {technique.name}))
    assert not everything.with_only().active


@pytest.mark.parametrize("name", TECHNIQUES)
def test_linter_contracts_name_every_technique(name: str) -> None:
    room = f"memplug.{name}"
    assert room in contract("wings")["modules"].split()
    assert room in contract("interface")["source_modules"].split()
    assert room in contract("stages")["forbidden_modules"].split()
    layers = contract("layers")["layers"].split()
    assert f"{room}.technique" in layers
    assert f"{room}.plan" in layers or not (PACKAGE / name / "plan").is_dir()


def test_native_core_has_every_cpp_folder_except_separate_libraries() -> None:
    folders = {file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("*.cpp")}
    apart = {Path("arena/native/packing"), Path("tokenwise/native/rules"), Path("predict/virtual/native")}
    assert {folder.relative_to(PACKAGE) for folder in CORE.folders} == folders - apart


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_read_only_their_own_config_section(name: str) -> None:
    """Facts about other techniques come through `memplug.session.given`."""
    for file in (PACKAGE / name).rglob("*.py"):
        read = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        of_block = {node.attr for node in read if re.search(r"\b_?(config|block)$", ast.unparse(node.value))}
        assert not of_block & {"asks_for", *TECHNIQUES} - {name}, file
