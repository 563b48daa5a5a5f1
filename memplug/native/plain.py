"""Compiles plain C++ libraries with a C interface, for planners, which import no torch.

Each is compiled on first use, in some seconds, and kept in the user's cache folder or in `TORCH_EXTENSIONS_DIR`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import secrets
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memplug.errors import NativeError

_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread")


@dataclass(frozen=True)
class PlainLibrary:
    """A plain C++ library that is compiled on first use.

    Attributes:
        name: name of the library's file.
        what: the library's name in messages.
        sources: the sources to compile.
        headers: memplug's headers that the sources include.
    """

    name: str
    what: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...] = ()

    def load(self) -> ctypes.CDLL:
        """Return the library; the first call compiles it.

        Raises:
            NativeError: there is no compiler or no folder to write to, or the library cannot be loaded.
        """
        library = self._file()
        try:
            if not library.exists():
                self._compile(library)
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            text = f"the {self.what} cannot be compiled into {library}: {output.strip()[-400:]}"
            raise NativeError(text, code="MP005") from error

    def _file(self) -> Path:
        root = (
            os.environ.get("TORCH_EXTENSIONS_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        )
        key = hashlib.sha256(" ".join((platform.machine(), *_command(), *_FLAGS)).encode())
        for source in (*self.sources, *self.headers):
            key.update(source.read_bytes())
        return Path(root) / f"{self.name}_{key.hexdigest()[:16]}" / f"{self.name}.so"

    def _compile(self, library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Processes that start at the same time may each compile the library, to files of their own; the last one
        # remains.
        partial = library.parent / f".{secrets.token_hex(8)}.partial"
        try:
            command = [*_command(), *_FLAGS, *map(str, self.sources), "-o", str(partial)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            os.replace(partial, library)
        finally:
            partial.unlink(missing_ok=True)


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Return the address of an array's first element, to pass to a library."""
    return array.ctypes.data_as(ctypes.c_void_p)


def _command() -> list[str]:
    return shlex.split(os.environ.get("CXX") or "c++")
