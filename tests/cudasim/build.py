"""Builds the simulator for the installed torch: once, in torch's folder for extensions."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
RUNTIME = sorted((FOLDER / "runtime").glob("*.cpp"))
OPERATORS = [*sorted((FOLDER / "operators").glob("*.cpp")), FOLDER / "runtime/settings.cpp"]
MANAGEMENT = FOLDER / "nvml/nvml.cpp"
HEADERS = sorted(FOLDER.glob("*/*.h"))


class NotBuilt(Exception):
    """Raised if the simulator cannot be built here; the text says why."""


def build() -> Path:
    """Return the folder with `libcudasim.so` and the libraries that it loads.

    Raises:
        NotBuilt: There is no CUDA build of torch, no CUDA headers, or no compiler; or the compiler failed, and the
            message ends with its output.
    """
    torch, cuda = _torch(), cuda_headers()
    key = hashlib.sha256(importlib.metadata.version("torch").encode())
    for file in (*RUNTIME, *OPERATORS, MANAGEMENT, *HEADERS):
        key.update(file.name.encode() + file.read_bytes())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions")
    folder = root / f"cudasim_{key.hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process of this machine at a time
        if not (folder / "built").exists():
            _build(folder, torch, cuda)
            (folder / "built").touch()
    return folder


def _build(folder: Path, torch: Path, cuda: Path) -> None:
    includes = [cuda, torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    common = ["-fPIC", "-DNDEBUG", *(f"-I{path}" for path in includes)]
    runtime = [*common, "-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
    operators = [*common, "-std=c++20", "-O1", "-g0"]
    jobs = [(file, folder / f"runtime_{file.stem}.o", runtime) for file in RUNTIME]
    jobs += [(file, folder / f"operators_{file.stem}.o", operators) for file in OPERATORS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: _run(["-c", job[0], "-o", job[1], *job[2]]), jobs))
    made = {name: sorted(folder.glob(f"{name}_*.o")) for name in ("runtime", "operators")}
    _run(["-shared", *made["runtime"], "-Wl,-soname,libcuda.so.1", "-o", folder / "libcudasim.so", "-ldl", "-lpthread"])
    soname = "libnvidia-ml.so.1"  # the name that torch looks for
    _run(["-shared", "-fPIC", MANAGEMENT, f"-Wl,-soname,{soname}", "-o", folder / soname])
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", "-ltorch"]
    _run(["-shared", *made["operators"], "-o", folder / "libcudasim_operators.so", *libraries])


def _run(arguments: list[str | Path]) -> None:
    command = [os.environ.get("CXX", "c++"), *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotBuilt(f"no C++ compiler: {error}") from None
    if done.returncode != 0:
        raise NotBuilt(f"{' '.join(command)}\n{done.stderr[-4000:]}")


def _torch() -> Path:
    """Return the folder of torch, without importing it: the simulated runtime has to be loaded first."""
    version = importlib.metadata.version("torch")
    folder = Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    if not (folder / "lib/libtorch_cuda.so").exists():
        raise NotBuilt(f"torch {version} in {sys.prefix} is not built with CUDA")
    return folder


def cuda_headers() -> Path:
    """Return the folder of CUDA's headers: a toolkit's, or those of the packages that torch's wheels depend on."""
    packages = Path(sysconfig.get_paths()["purelib"])
    candidates = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "include"]
    candidates += [*packages.glob("nvidia/cu*/include"), packages / "triton/backends/nvidia/include"]
    for folder in candidates:
        if all((folder / header).exists() for header in ("cuda.h", "cuda_runtime_api.h", "crt/host_config.h")):
            return folder
    raise NotBuilt("no headers of CUDA: neither in CUDA_HOME nor in NVIDIA's or Triton's packages")
