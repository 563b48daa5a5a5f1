"""The native core of the arena by itself, on simulated streams, under the sanitizers: tests/native."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.recording import ROOT

PROGRAMS = ("arena_test", "arena_plans_test")
SOURCES = ["memplug/native/arena.cpp", "memplug/native/arena_plan.cpp"]
COMPILER = shutil.which("c++") or shutil.which("g++")


def built(folder: Path, inputs: Sequence[str], *flags: str, source: str = "") -> subprocess.CompletedProcess[str]:
    """Builds a program of these files, or from its text."""
    command = [COMPILER, "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *flags, *inputs, "-pthread"]
    command += ["-o", str(folder / "program")]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_that_must_hold_of_the_core_holds_and_no_sanitizer_finds_anything(
    program: str, sanitizers: str, tmp_path: Path
) -> None:
    flags = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    if built(tmp_path, ["-x", "c++", "-"], *flags, source="int main() {}").returncode != 0:
        pytest.skip(f"the compiler has no libraries for -fsanitize={sanitizers}")
    compiled = built(tmp_path, [f"tests/native/{program}.cpp", *SOURCES], *flags)
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all hold\n", "")
