"""memplug's CUDA allocator can be compiled without a GPU, and forwards every call of the interface to torch's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from memplug import native

HEADER = Path(torch.__file__).parent / "include/c10/cuda/CUDACachingAllocator.h"
COMPILER = shutil.which("c++") or shutil.which("g++")

CONCRETE = """
#include "cuda_front.cpp"
namespace memplug { namespace {
static_assert(!std::is_abstract_v<InFront<Native>>, "every call is known");
InFront<Native>* const made = new InFront<Native>(nullptr, 0);
}}
"""


@pytest.fixture
def includes(tmp_path: Path) -> list[str]:
    """Return the include flags, with a stand-in for the header that torch's CPU builds lack."""
    candidates = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    toolkits = [folder for folder in candidates if folder and Path(folder, "include/cuda_runtime_api.h").exists()]
    if not toolkits:
        pytest.skip("needs the headers of CUDA's toolkit")
    macros = tmp_path / "c10" / "cuda" / "impl"
    macros.mkdir(parents=True)
    (macros / "cuda_cmake_macros.h").write_text("#define C10_CUDA_BUILD_SHARED_LIBS\n")
    folders = [*include_paths(), f"{toolkits[0]}/include", sysconfig.get_path("include"), str(tmp_path)]
    return [f"-isystem{folder}" for folder in folders] + [f"-I{folder}" for folder in native.CORE.folders]


def compiled(includes: list[str], source: str, *flags: str) -> str:
    """Check a program's syntax and types by the compiler, and return its warnings; fail on errors."""
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-DMEMPLUG_CUDA", "-DNDEBUG", "-DTORCH_EXTENSION_NAME=m"]
    done = subprocess.run(
        [*command, *flags, *includes, "-x", "c++", "-"], input=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long  # long, since the next test already compiles the allocator's interface
@pytest.mark.parametrize("source", ["cuda_allocator.cpp", "cuda_device.cpp", "arena_module.cpp"])
def test_cuda_sources_compile_without_warnings(includes: list[str], source: str) -> None:
    assert "warning" not in compiled(includes, f'#include "{source}"\n', "-Wall")


def test_every_call_of_the_allocator_interface_is_forwarded(includes: list[str]) -> None:
    """Find overriding functions by their `override` in the sources, or by the compiler's suggestions to add it."""
    answer = compiled(includes, CONCRETE, "-Wsuggest-override")
    handed_on = set(re.findall(r"(?:InFront|HandsOn)<.*?>::(\w+)\(.*can be marked override", answer))
    for source in ("cuda_front.cpp", "hands_on.h"):
        handed_on |= set(re.findall(r"(\w+)\([^;{}]*\)[^;{}]*override \{", native.CORE.sources()[source].read_text()))
    interface = HEADER.read_text().split("class CUDAAllocator")[1].split("\n};")[0]
    calls = set(re.findall(r"virtual [^;{}]*?(\w+)\(", interface))
    assert len(calls) > 35 and calls <= handed_on, calls - handed_on
