"""C++ files include what they use.

The build does not notice a missing include: it compiles several sources as one (`Extension.lots`), so a source sees the
includes of those before it. Here they are compiled in the reverse order. To compile each file by itself would take a
quarter of an hour.
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
    "stand-ins": Extension("stand_ins", "stand-ins", (ROOT / "tests/support/stand_ins/kernels",)),
}
CUDA_ALONE = {"hands_on.h"}  # only these have contents even without CUDA
FIRST_INCLUDED = re.compile(r'\A(?://.*\n|\s*\n)*#include "([\w./]+)"').match


def reversed_lots(extension: Extension) -> list[list[Path]]:
    """Return the extension's sources by lot, and its headers as one more lot, each in reverse order.

    A header that a source begins with is left out, since it compiles if the source does.
    """
    sources = extension.sources()
    begun = {
        found[1] for file in sources.values() if file.suffix == ".cpp" and (found := FIRST_INCLUDED(file.read_text()))
    }
    left_out = begun if cuda_headers() else begun | CUDA_ALONE
    headers = [name for name, file in sources.items() if file.suffix != ".cpp" and name not in left_out]
    return [[sources[name] for name in reversed(lot)] for lot in (*extension.lots(), headers) if lot]


def complaint(extension: Extension, files: list[Path]) -> str:
    """Return the compiler's errors on files that are compiled as one with the flags of the build; "" for none."""
    ours = *extension.folders, *extension.included, *cuda_headers()
    theirs = *include_paths(), sysconfig.get_paths()["include"]
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-fsyntax-only", "-w", *flags()]
    command += [f"-DTORCH_EXTENSION_NAME={extension.name}", *(f"-I{folder}" for folder in ours)]
    for folder in theirs:
        command += ["-isystem", folder]
    source = "".join(f'#include "{file}"\n' for file in files)
    done = subprocess.run([*command, "-x", "c++", "-"], input=source, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or "the compiler failed"


@pytest.mark.parametrize(("text", "compiles"), [("#include <vector>\n", True), ("", False)])
def test_missing_include_is_detected(text: str, compiles: bool, tmp_path: Path) -> None:
    file = tmp_path / "list.h"
    file.write_text(f"{text}inline bool is_empty(const std::vector<int>& list) {{ return list.empty(); }}\n")
    assert (complaint(Extension("alone", "test", (tmp_path,)), [file]) == "") == compiles


def test_missing_include_is_detected_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("#include <vector>\ninline std::vector<int> first;\n")
    (tmp_path / "b.cpp").write_text("inline std::vector<int> second;\n")
    extension = Extension("alone", "test", (tmp_path,))
    ((later, earlier),) = reversed_lots(extension)
    assert (later.name, earlier.name) == ("b.cpp", "a.cpp")
    assert complaint(extension, [earlier, later]) == "" != complaint(extension, [later, earlier])


@pytest.mark.long
@pytest.mark.parametrize("name", EXTENSIONS)
def test_files_compile_in_the_reverse_order(name: str) -> None:
    extension = EXTENSIONS[name]
    lots = reversed_lots(extension)
    assert lots
    with ThreadPoolExecutor(2) as pool:
        complaints = list(pool.map(lambda lot: complaint(extension, lot), lots))
    assert not any(complaints), "\n".join(filter(None, complaints))
