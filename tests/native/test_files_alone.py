"""Each C++ file includes what it uses.

The build does not notice a missing include: it compiles several sources as one (`Extension.lots`), so a source sees the
includes of those before it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from memplug import native
from memplug.native.building import Extension, cuda_headers, flags
from memplug.predict.virtual.native import VIRTUAL
from tests.support.extension import EXTENSION
from tests.support.folders import ROOT

EXTENSIONS = {
    "core": native.CORE,
    "virtual device": VIRTUAL,
    "tests' extension": EXTENSION,
    "tests of the arena": Extension("arena_tests", "tests", (ROOT / "tests/native",), native.CORE.folders),
    "stand-ins": Extension("stand_ins", "stand-ins", (ROOT / "tests/support/stand_ins/kernels",)),
}
CUDA_ALONE = {"hands_on.h"}  # only these have contents even without CUDA
FIRST_INCLUDED = re.compile(r'\A(?://.*\n|\s*\n)*#include "([\w./]+)"').match


def files_of(extension: Extension) -> list[Path]:
    """Return the extension's files that must compile by themselves.

    A header that a source begins with is left out, since it compiles if the source does.
    """
    sources = extension.sources()
    begun = {
        found[1] for file in sources.values() if file.suffix == ".cpp" and (found := FIRST_INCLUDED(file.read_text()))
    }
    left_out = begun if cuda_headers() else begun | CUDA_ALONE
    return [file for name, file in sources.items() if name not in left_out]


def complaint(extension: Extension, file: Path) -> str:
    """Return the compiler's errors on a file that is compiled by itself with the flags of the build; "" for none."""
    ours = *extension.folders, *extension.included, *cuda_headers()
    theirs = *include_paths(), sysconfig.get_paths()["include"]
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-fsyntax-only", "-w", *flags()]
    command += [f"-DTORCH_EXTENSION_NAME={extension.name}", *(f"-I{folder}" for folder in ours)]
    for folder in theirs:
        command += ["-isystem", folder]
    source = f'#include "{file}"\n'  # a header by itself is not a source
    done = subprocess.run([*command, "-x", "c++", "-"], input=source, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or "the compiler failed"


@pytest.mark.parametrize(("text", "compiles"), [("#include <vector>\n", True), ("", False)])
def test_missing_include_is_detected(text: str, compiles: bool, tmp_path: Path) -> None:
    file = tmp_path / "list.h"
    file.write_text(f"{text}inline bool is_empty(const std::vector<int>& list) {{ return list.empty(); }}\n")
    assert (complaint(Extension("alone", "test", (tmp_path,)), file) == "") == compiles


@pytest.mark.long
@pytest.mark.parametrize("name", EXTENSIONS)
def test_each_file_compiles_by_itself(name: str) -> None:
    extension = EXTENSIONS[name]
    files = files_of(extension)
    assert files
    with ThreadPoolExecutor(2) as pool:
        complaints = list(pool.map(lambda file: complaint(extension, file), files))
    assert not any(complaints), "\n".join(filter(None, complaints))
