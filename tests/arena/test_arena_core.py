"""The programs in tests/native run the arena's C++ alone, on simulated streams, under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.folders import ROOT

RANDOM_SEEDS = "300"  # number of seeds for random requests
PROGRAMS = ("arena_test", "arena_plans_test", "free_bytes_test", "request_sizes_test")
NAMES = ("arena", "arena_plan", "holes", "leftovers", "pending_uses", "planned_blocks", "resized", "reusing")
SOURCES = (*(f"memplug/arena/native/{name}.cpp" for name in NAMES), "memplug/profile/native/input_sizes.cpp")
INCLUDED = ("-Imemplug/native", "-Imemplug/profile/native")  # for blocks.h and input_sizes.h
COMPILER = shutil.which("c++") or shutil.which("g++")


def compiler(arguments: Sequence[str], *flags: str, source: str = "") -> subprocess.CompletedProcess[str]:
    """Run the compiler with these arguments; `source` is its standard input."""
    command = [COMPILER, "-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", *INCLUDED, *flags, *arguments]
    return subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, timeout=300)


@pytest.mark.long
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_native_arena_programs_pass_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    flags = ("-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    if compiler(["-x", "c++", "-", "-o", f"{tmp_path}/any"], *flags, source="int main() {}").returncode != 0:
        pytest.skip(f"the compiler has no libraries for -fsanitize={sanitizers}")
    objects = {source: f"{tmp_path}/{Path(source).stem}.o" for source in SOURCES}
    for source, compiled in objects.items():
        done = compiler(["-c", source, "-o", compiled], *flags)
        assert done.returncode == 0, done.stderr
    for program in PROGRAMS:
        binary = f"{tmp_path}/{program}"
        done = compiler([f"tests/native/{program}.cpp", *objects.values(), "-o", binary], *flags)
        assert done.returncode == 0, done.stderr
        done = subprocess.run([binary, RANDOM_SEEDS], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout, done.stderr) == (0, "all hold\n", ""), program
