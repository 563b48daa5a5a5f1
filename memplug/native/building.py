"""Builds C++ libraries against the installed torch on first use, and keeps them on disk.

A build goes into torch's folder for extensions (`TORCH_EXTENSIONS_DIR`, by default `~/.cache/torch_extensions`), into a
separate folder for each version of torch, CUDA, Python and the sources. If ranks start at the same time, one of them
builds, and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from memplug.errors import NativeError, coded

log = logging.getLogger("memplug")

LOT_BYTES = 80_000  # bytes of sources that take about a minute to compile


@dataclass(frozen=True)
class Extension:
    """A Python module in C++ that is built on first use.

    Attributes:
        name: name of the Python module.
        what: the module's name in messages.
        folders: folders of the sources and headers; no file name may occur twice.
        included: folders of further headers that the sources include.
    """

    name: str
    what: str
    folders: tuple[Path, ...]
    included: tuple[Path, ...] = ()

    def load(self) -> ModuleType:
        """Return the library's Python module; the first call builds it, in a minute or two.

        Raises:
            NativeError: the library cannot be built here (no compiler, no ninja, no folder to write to) or loaded.
        """
        folder = self.build_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                if not self.is_built():
                    self._build(folder)
        except (OSError, RuntimeError) as error:
            if moved := _moved(error):
                import torch

                from memplug.torch_private import KNOWN

                raise NativeError(
                    f"torch {torch.__version__} has changed what memplug's {self.what} uses: {moved}",
                    f"Install {KNOWN}, or a newer memplug.",
                ) from error
            text = f"memplug's {self.what} cannot be built in {folder}: {_last_lines(error)}"
            raise NativeError(text, code="MP005") from error
        try:
            return self._import()
        except ImportError as error:
            raise NativeError(
                f"memplug's {self.what} in {folder} cannot be loaded: {_last_lines(error)}",
                "Delete that folder, so that it is built again.",
                code="MP005",
            ) from error

    def is_built(self) -> bool:
        """Return whether the library is built already."""
        return self._done().exists() and self.library().exists()

    def build_folder(self) -> Path:
        """Return the folder of the build for this torch; its name depends on everything that affects the build."""
        import torch
        from torch.utils.cpp_extension import get_default_build_root

        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        key = hashlib.sha256()
        versions = torch.__version__, torch.version.cuda, sysconfig.get_config_var("SOABI")
        for part in (*versions, *flags(), *libraries(), self.lots()):
            key.update(str(part).encode())
        for name, source in sorted({**_files(self.included), **self.sources()}.items()):
            key.update(name.encode() + source.read_bytes())
        return root / f"{self.name}_{key.hexdigest()[:16]}"

    def library(self) -> Path:
        """Return the path of the library that `load` builds."""
        return self.build_folder() / f"{self.name}.so"

    def sources(self) -> dict[str, Path]:
        """Return the sources and headers by name."""
        return _files(self.folders)

    def lots(self) -> list[list[str]]:
        """Return the names of the sources in lots; the sources of a lot are compiled as one file.

        Lots save time, since reading torch's headers takes longer than compiling most sources. The sizes of lots are
        similar. C++ names inside a lot must not clash.
        """
        sizes = {path.name: path.stat().st_size for path in self.sources().values() if path.suffix == ".cpp"}
        count = -(-sum(sizes.values()) // LOT_BYTES)
        lots: list[list[str]] = [[] for _ in range(count)]
        before = 0
        for name, size in sizes.items():
            lots[(before + size // 2) * count // sum(sizes.values())].append(name)
            before += size
        return [lot for lot in lots if lot]

    def _done(self) -> Path:
        return self.build_folder() / "built"

    def _build(self, folder: Path) -> None:
        import torch

        log.info("memplug: building the %s, once, in %s", self.what, folder)
        sources, known = [], self.sources()
        for names in self.lots():
            source = folder / names[0]
            source.write_text("".join(f'#include "{known[name]}"\n' for name in names))
            sources.append(str(source))
        try:
            self._compile(folder, sources, flags())
        except RuntimeError:
            if not cuda_headers():
                raise
            # raises again if the arena is not the cause
            self._compile(folder, sources, [*flags(), "-DMEMPLUG_WITHOUT_CUDA_ARENA"])
            text = (
                "memplug: torch %s has a CUDA allocator that memplug does not know: the %s is built without the arena. "
                "Install another version of torch to have it"
            )
            log.warning(coded("MP006", text), torch.__version__, self.what)
        self._done().touch()

    def _compile(self, folder: Path, sources: list[str], flags: list[str]) -> None:
        from torch.utils import cpp_extension

        (folder / "lock").unlink(missing_ok=True)  # left by a killed build: torch would wait for it forever
        cuda = cuda_headers()
        with _ninja_on_path():
            cpp_extension.load(
                self.name,
                sources,
                extra_cflags=flags,
                extra_include_paths=[str(each) for each in (*self.folders, *self.included, *cuda)],
                extra_ldflags=libraries(),
                build_directory=str(folder),
                is_python_module=False,
            )

    def _import(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.name, self.library())
        assert spec is not None and spec.loader is not None, "the path ends in .so"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def _files(folders: tuple[Path, ...]) -> dict[str, Path]:
    return {path.name: path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".cpp", ".h")}


def flags() -> list[str]:
    """Return the compiler's flags."""
    # NDEBUG is part of torch's ABI: without it, at::RecordFunction has one more member
    return ["-O2", "-std=c++20", "-DNDEBUG", *(["-DMEMPLUG_CUDA"] if cuda_headers() else [])]


def libraries() -> list[str]:
    """Return the linker's flags for libraries that torch does not add itself.

    The C++ runtime is among them: the one that torch has loaded, even if the compiler links its own (as wrappers of
    compilers do, with `-static-libstdc++`). With two runtimes, the process dies when a stream of one meets a locale of
    the other.
    """
    runtime = next(iter(sorted(set(_loaded("libstdc++.so")))), None)
    return [*(["-lc10_cuda"] if cuda_headers() else []), *([runtime] if runtime else [])]


def _loaded(name: str) -> Iterator[str]:
    """Yield the paths of this process's libraries whose name begins with `name`; none if the system lists none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
            *_, path = line.split(maxsplit=5)
            if Path(path).name.startswith(name) and Path(path).exists():
                yield path


@functools.cache
def cuda_headers() -> tuple[Path, ...]:
    """Return folders that together hold the headers of CUDA's runtime.

    The folders belong to a toolkit, to NVIDIA's packages, or to Triton's package, which torch's wheels depend on.
    NVIDIA's runtime package alone is not enough: the folder `crt` is in the compiler's package (CUDA 12), or in a
    package of its own (CUDA 13).

    Returns:
        The folders; empty if torch is built without CUDA, or the headers are not installed.
    """
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None:
        return ()

    major = torch.version.cuda.split(".")[0]
    candidates = [(Path(CUDA_HOME) / "include",)] if CUDA_HOME else []
    for packages in _package_folders("nvidia"):
        candidates.append((packages / f"cu{major}" / "include",))
        candidates.append((packages / "cuda_runtime" / "include", packages / "cuda_nvcc" / "include"))
    candidates += [(triton / "backends" / "nvidia" / "include",) for triton in _package_folders("triton")]
    return next(filter(_complete, candidates), ())


def _complete(folders: tuple[Path, ...]) -> bool:
    needed = ("cuda_runtime_api.h", "crt/host_config.h")
    return all(any((folder / header).exists() for folder in folders) for header in needed)


def _package_folders(name: str) -> list[Path]:
    """Return the folders of an installed package without importing it; a namespace such as nvidia's has several."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process of this machine build at a time; if the process is killed, its lock ends too."""
    with open(folder / "build.lock", "w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: torch's own lock has to suffice
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Put ninja's folder on the path: ninja is beside Python, whose environment may not be activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([before, str(Path(sys.executable).parent)])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _moved(error: BaseException) -> str | None:
    """Return the compiler's first error in native/torch_private*.h, where torch's changes show; None without one."""
    found = re.search(r"torch_private\w*\.h:\d+(?::\d+)?: (?:fatal )?error: (.*)", str(error))
    return found[1].removeprefix("static assertion failed: ") if found else None


def _last_lines(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or type(error).__name__
