"""The native core is built once, by the first process, and says what to do if it cannot be built."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memplug import native
from memplug.errors import NativeError
from memplug.native.building import Extension
from memplug.torch_private import KNOWN
from tests.support.recording import run_python, start_python

SMALL = """
from pathlib import Path
from memplug.errors import NativeError
from memplug.native.building import Extension

small = Extension("memplug_small", "small library", (Path(os.environ["SOURCES"]),))
"""
FAILS = f"""{SMALL}
try:
    small.load()
except NativeError as error:
    print(error)
    print("built:", small.is_built())
else:
    sys.exit("it was built")
"""
BUILDS = f"""{SMALL}
import logging
logging.basicConfig(level=logging.INFO)
print("built before:", small.is_built())
assert small.load().answer() == 42
print("works")
"""
ANSWER = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(memplug_small, module) { module.def("answer", [] { return 42; }); }
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty folder for built extensions, for this process and those that it starts."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path / "extensions"


@pytest.fixture
def refusal(root: Path) -> Callable[[], str]:
    """Return a function that loads the core again in this process and returns its error."""

    def refused() -> str:
        with pytest.raises(NativeError) as error:
            native.load.__wrapped__()
        assert not native.CORE.is_built() or "cannot be loaded" in str(error.value)
        return str(error.value)

    return refused


def test_missing_compiler_is_reported_with_advice(refusal: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    said = refusal()
    assert "What to do: Install a C++ compiler" in said and "/nonexistent" in said


@pytest.mark.long  # it starts six processes; workers of tests that start together build the core once too
def test_concurrent_processes_build_a_library_once_after_failed_builds(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "small.cpp").write_text(ANSWER)
    monkeypatch.setenv("SOURCES", str(sources))
    small = Extension("memplug_small", "small library", (sources,))
    folder = small.build_folder()
    assert folder.parent == root and not small.is_built()
    failed = run_python(FAILS, env={"CXX": "/nonexistent/c++"})
    assert "built: False" in failed and "What to do: Install a C++ compiler" in failed and "/nonexistent" in failed
    (folder / "lock").touch()  # a killed build leaves this lock, on which torch would wait forever
    small.library().write_bytes(b"cut off")
    assert not small.is_built()
    processes = [start_python(BUILDS) for _ in range(3)]
    try:
        outputs = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert all("works" in output for output in outputs)
    assert sum("building the small library" in output for output in outputs) == 1, outputs
    assert small.is_built() and len(list(folder.glob("*.so"))) == 1
    (folder / "lock").touch()
    built_ns = small.library().stat().st_mtime_ns
    again = run_python(BUILDS)
    assert "built before: True" in again and "building" not in again
    assert small.library().stat().st_mtime_ns == built_ns


def test_folder_that_cannot_be_created_is_reported_with_advice(root: Path, refusal: Callable[[], str]) -> None:
    root.write_text("a file")
    output = refusal()
    assert "What to do:" in output and str(root) in output and "Not a directory" in output


def test_unwritable_folder_is_reported_with_advice(root: Path, refusal: Callable[[], str]) -> None:
    folder = native.CORE.build_folder()
    (folder / "build.lock").mkdir(parents=True)  # not even root can write a file there
    output = refusal()
    assert "What to do:" in output and str(folder) in output and "Is a directory" in output


def test_broken_library_is_reported_with_advice(root: Path, refusal: Callable[[], str]) -> None:
    folder = native.CORE.build_folder()
    folder.mkdir(parents=True)
    (folder / f"{native.CORE.name}.so").write_bytes(b"cut off")
    (folder / "built").touch()
    output = refusal()
    assert "cannot be loaded" in output and str(folder) in output and "What to do: Delete that folder" in output
    (folder / f"{native.CORE.name}.so").unlink()
    assert not native.CORE.is_built()


def test_extensions_share_torchs_libstdcxx_despite_a_static_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two C++ runtimes, a number in a message ends the process: one formats it with the other's locale."""
    compiler = shutil.which("g++") or pytest.skip("there is no g++")
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" -static-libstdc++\n')
    wrapper.chmod(0o755)
    (tmp_path / "tiny.cpp").write_text(
        "#include <sstream>\n"
        'extern "C" void* PyInit_tiny() { std::ostringstream out; out << 1L; return new std::string(out.str()); }\n'
    )
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    tiny = Extension("tiny", "test", (tmp_path,))
    folder = tiny.build_folder()
    folder.mkdir(parents=True)
    tiny._build(folder)
    assert b"libstdc++.so" in tiny.library().read_bytes()


def test_every_source_is_compiled_once() -> None:
    assert sorted(name for names in native.CORE.lots() for name in names) == sorted(
        source.name for folder in native.CORE.folders for source in folder.glob("*.cpp")
    )


ROOMS_BELOW = {
    "native": set(),
    "device": {"native"},
    "profile": {"native", "device"},
    "arena": {"native", "device", "profile"},
    "swap": {"native", "device", "profile"},
    "tokenwise": {"native", "device", "profile"},
}


def test_sources_include_only_lower_rooms() -> None:
    """If so, the core builds without the folder of any technique."""
    package = Path(native.__file__).parent.parent
    room_of = {name: path.relative_to(package).parts[0] for name, path in native.CORE.sources().items()}
    seen = Counter[str]()
    for name, path in native.CORE.sources().items():
        room = room_of[name]
        included = {room_of[header] for header in re.findall(r'#include "(\S+)"', path.read_text())}
        assert included <= {room} | ROOMS_BELOW[room], path
        seen[room] += len(included)
    assert set(seen) == set(ROOMS_BELOW) and all(seen.values()), seen


def test_build_folder_depends_on_every_source_flag_and_version(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tuple(tmp_path / str(number) for number in range(len(native.CORE.folders)))
    for folder, copy in zip(native.CORE.folders, copies, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    folders = [native.CORE.build_folder()]
    monkeypatch.setattr(native, "CORE", replace(native.CORE, folders=copies))
    assert native.CORE.build_folder() == folders[0], "the folder depends on sources, not on their place"
    sources = native.CORE.sources()
    assert len(sources) > 100
    for source in sorted(sources.values()):
        source.write_text(source.read_text() + "\n")
        folders.append(native.CORE.build_folder())
    sources["module.cpp"].rename(sources["module.cpp"].with_name("renamed.cpp"))
    folders.append(native.CORE.build_folder())
    monkeypatch.setattr("memplug.native.building.flags", lambda: ["-O3"])
    folders.append(native.CORE.build_folder())
    monkeypatch.setattr("torch.__version__", "0.0.1")
    folders.append(native.CORE.build_folder())
    monkeypatch.setattr("torch.version.cuda", "0.1")
    folders.append(native.CORE.build_folder())
    assert len(set(folders)) == len(folders) > 12
    assert {folder.parent for folder in folders} == {root}


def test_build_folder_is_in_torchs_extension_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert native.CORE.build_folder().parent == Path(get_default_build_root())


COMPILERS_WORDS = """Error building extension 'memplug_native': [1/8] c++ -c a.cpp
In file included from /x/clock.cpp:7:
/x/memplug/native/torch_private.h:55:{}
{}
ninja: build stopped: subcommand failed.
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("14: error: 'peek' is not a member of 'at::sequence_number'", "'peek' is not a member"),
        (" error: static assertion failed: backwards have no numbers", "uses: backwards have no numbers"),
        ("10: fatal error: ATen/SequenceNumber.h: No such file or directory", "ATen/SequenceNumber.h: No such file"),
    ],
)
def test_moved_torch_name_is_reported_with_supported_versions(
    error: str, said: str, refusal: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError(COMPILERS_WORDS.format(error, "a.cpp:1:1: error: and then others"))

    monkeypatch.setattr(Extension, "_compile", fail)
    refused = refusal()
    assert f"torch {torch.__version__} has changed what memplug's native core uses" in refused and said in refused
    assert f"Install {KNOWN}, or a newer memplug." in refused


def test_python_without_gil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(NativeError, match="runs without the GIL"):
        native.load.__wrapped__()
