"""Starts ranks fast, by forking a process that has imported the libraries already.

Starting Python twice and importing torch, DeepSpeed and transformers takes far longer than training a tiny model. The
ranks are processes of their own, with the environment that torchrun sets; `tests.support.launching.launch` tests the
launchers themselves.

`python -m tests.support.forking LIBRARIES` is the process that forks: it reads a request per line, and answers with a
status.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.support import stand_in
from tests.support.folders import ROOT
from tests.support.launching import environment, free_port, kill_tree

Libraries = Literal["deepspeed", "megatron", "transformer_engine"]


def launch_forked(
    arguments: Sequence[str | Path],
    *,
    libraries: Libraries = "deepspeed",
    processes: int = 2,
    module: bool = False,
    time_limit_s: float = 300,
    status: int = 0,
) -> str:
    """Run a script on forked ranks until it ends; the first rank that fails ends the others.

    Args:
        arguments: the script and its arguments.
        libraries: imported before the ranks are forked; "megatron" pretends that the CPU is a CUDA device, and
            "transformer_engine" adds the stand-in of Transformer Engine.
        processes: number of ranks.
        module: the first argument is not a file, but the name of a module whose `main` is called.
        time_limit_s: all processes are killed after this time.
        status: the exit status that the ranks must have.

    Returns:
        The output of all processes, stdout and stderr.

    Raises:
        TimeoutError: the time limit passed; the message ends with the output.
        RuntimeError: a rank ended with another status; the message ends with the output.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        request = {
            "arguments": [str(argument) for argument in arguments],
            "module": module,
            "processes": processes,
            "port": free_port(),
            "folder": os.getcwd(),
            "environment": environment(),
            "output": output.name,
        }
        answer = _forker(libraries).run(request, time_limit_s)
        if answer == "time is over":
            raise TimeoutError(f"not done in {time_limit_s} s: {request['arguments']}\n{output.read()}")
        if answer != str(status):
            raise RuntimeError(f"exit status {answer}: {request['arguments']}\n{output.read()}")
        return output.read()


@functools.cache
def _forker(libraries: Libraries) -> _Forker:
    """Return this test process's one `_Forker` for these libraries."""
    return _Forker(libraries)


class _Forker:
    """Sends requests to the process that forks; starts it for the first request, and again after killing it."""

    def __init__(self, libraries: Libraries):
        self.command = [sys.executable, "-m", "tests.support.forking", libraries]
        self.process: subprocess.Popen[str] | None = None
        atexit.register(self.stop)

    def run(self, request: dict[str, Any], time_limit_s: float) -> str:
        """Return the exit status of the ranks, as text, or "time is over"."""
        if self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment(), stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], time_limit_s)
        answer = self.process.stdout.readline().strip() if ready else "time is over"
        if not answer or not ready:
            kill_tree(self.process)
            self.process = None
        return answer or "unknown: the process that forks ended"

    def stop(self) -> None:
        """End the process that forks, and wait for it."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


# -- the process that forks --------------------------------------------------------------------------------------------


DEEPSPEED = (
    "deepspeed",
    "tests.support.arena_worker",
    "tests.support.hosts",
    "tests.support.serving",
    "tests.support.stepping",
    "yaml",
)
# modules that making an engine would import; one of DeepSpeed's optimizers also imports the compiler
LATE = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
)


def import_deepspeed() -> None:
    """Import all that a script that trains a Llama or a Mixtral with DeepSpeed and memplug imports."""
    for name in DEEPSPEED:
        importlib.import_module(name)
    for name in LATE:
        with contextlib.suppress(ImportError):  # other versions of transformers or DeepSpeed lack some
            importlib.import_module(name)


def import_megatron() -> None:
    """Import all that tests.support.megatron_worker imports."""
    importlib.import_module("tests.support.megatron_worker").prepare()
    for name in ("memplug.session", "memplug.hooks.attach", "memplug.tokenwise.planning", "scipy.optimize"):
        importlib.import_module(name)


def serve(libraries: str) -> int | None:
    """Fork ranks for every request on standard input.

    Returns:
        In a forked rank, its exit status; in the process that forks, None at the end of input.
    """
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # stdout is for answers, but libraries print to it
    if libraries == "transformer_engine":
        stand_in.use()
    (import_deepspeed if libraries == "deepspeed" else import_megatron)()
    importlib.import_module("memplug.native").load()
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage for every engine of ZeRO 3: spare ranks the search of imported modules
    for line in requests:
        request, ranks = json.loads(line), set()
        for rank in range(request["processes"]):
            process = os.fork()
            if process == 0:
                return _be_rank(request, rank)
            ranks.add(process)
        answers.write(f"{_wait(ranks)}\n")
        answers.flush()
    return None


def _wait(ranks: set[int]) -> int:
    """Wait for all ranks; once one fails, kill the others. Return the failed rank's exit status, or 0."""
    failed = 0
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if status != 0 and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def _be_rank(request: Mapping[str, Any], rank: int) -> int:
    """Run the script as torchrun would have started it, and return the exit status."""
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    size, port = str(request["processes"]), str(request["port"])
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.clear()
    os.environ.update({**request["environment"], **of_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    os.chdir(request["folder"])
    sys.argv = request["arguments"]
    try:
        if request["module"]:
            importlib.import_module(sys.argv[0]).main()
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
