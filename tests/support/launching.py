"""Runs scripts on several processes of this machine, as a user would start them, and ends all of them afterwards."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil

from tests.support.folders import ROOT

Launcher = Literal["torchrun", "deepspeed", "python"]


def launch(
    arguments: Sequence[str | Path],
    *,
    launcher: Launcher = "torchrun",
    processes: int = 2,
    module: bool = False,
    time_limit_s: float = 300,
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a script under a launcher until it ends.

    Args:
        arguments: the script and its arguments.
        launcher: starts the processes; "python" starts one.
        processes: number of ranks.
        module: the first argument is the name of a module, not a file.
        time_limit_s: all processes are killed after this time.
        env: environment variables to set on top of the usual ones.
        check: whether to raise if the exit status is not 0.

    Returns:
        The exit status, and in `stdout` the output of all processes, stdout and stderr.

    Raises:
        TimeoutError: the time limit passed; the message ends with the output.
        RuntimeError: the exit status was not 0; the message ends with the output.
    """
    with started(arguments, launcher=launcher, processes=processes, module=module, env=env) as (process, read_output):
        try:
            process.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            kill_tree(process)
            raise TimeoutError(f"not done in {time_limit_s} s: {process.args}\n{read_output()}") from None
        if check and process.returncode != 0:
            raise RuntimeError(f"exit status {process.returncode}: {process.args}\n{read_output()}")
        return subprocess.CompletedProcess(process.args, process.returncode, stdout=read_output())


@contextlib.contextmanager
def started(
    arguments: Sequence[str | Path],
    *,
    launcher: Launcher = "torchrun",
    processes: int = 2,
    module: bool = False,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen, Callable[[], str]]]:
    """Start a script under a launcher; at the end of the `with`, kill the processes that still run.

    The arguments are those of `launch`.

    Yields:
        The launcher's process, and a function that returns the output so far.
    """
    # Output goes to a file, not to a pipe: processes would block on a full pipe, and the test would wait for orphans
    # that keep the pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            _command(arguments, launcher, processes, module),
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def read_output() -> str:
            return Path(f"/proc/self/fd/{output.fileno()}").read_text(errors="replace")

        try:
            yield process, read_output
        finally:
            kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a launcher and all processes that it started, at once and without a chance to clean up.

    A signal to the launcher's process group would miss the ranks: torchrun gives each of them a session of its own.
    """
    tree = []
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        parent.suspend()  # so that it starts no more processes while its children are listed
        tree = [*parent.children(recursive=True), parent]
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
    psutil.wait_procs(tree, timeout=30)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, time_limit_s: float = 300) -> bool:
    """Wait until `condition` holds; return whether it did before the process ended or the time was over."""
    end = time.monotonic() + time_limit_s
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            return condition()
        time.sleep(0.005)
    return True


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _command(arguments: Sequence[str | Path], launcher: Launcher, processes: int, module: bool) -> list[str]:
    if launcher == "torchrun":
        options = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}"]
    elif launcher == "deepspeed":
        options = ["-m", "deepspeed.launcher.runner", f"--num_accelerators={processes}", f"--master_port={free_port()}"]
    else:
        return [sys.executable, *(["-m"] if module else []), *map(str, arguments)]
    return [sys.executable, *options, *(["--module"] if module else []), *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with the variables that a script on the CPU needs, and `extra` on top."""
    binaries = str(Path(sys.executable).parent)  # has ninja, which DeepSpeed looks for on PATH
    return {
        **os.environ,
        "PATH": os.pathsep.join([binaries, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }
