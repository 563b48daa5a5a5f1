"""Planning beside training: runs one task in a separate process, so that no training step waits for it.

A thread would not do: planners are partly Python, and a training step of small operators holds the GIL all the time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger("memplug")

NICENESS = 5  # training comes first, but planning must still advance on a busy machine


class Beside:
    """Runs one task at a time, in a separate process.

    Args:
        waits: True to start no process: `take` runs the task itself, and training waits for it.
    """

    def __init__(self, waits: bool):
        self._waits = waits
        self._task: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stop: weakref.finalize | None = None

    @property
    def is_busy(self) -> bool:
        """Return whether a task has begun whose result `take` has not returned."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        """Return whether `take` would return without waiting for a process."""
        return self._process is None or self._process.poll() is not None

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a task; kill the former one if it still runs.

        Args:
            function: A module-level function, since the process imports it by name.
            *arguments: Its arguments. They and the result must be picklable.
        """
        self.stop()
        self._task = function, arguments
        if self._waits:
            return
        try:
            self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._fall_back(error)

    def take(self) -> Any:
        """Wait for the task, and return its result or raise its error.

        If the process failed, run the task in the calling process.
        """
        assert self._task is not None, "`begin` comes first"
        function, arguments = self._task
        if self._process is not None:
            self._process.wait()
            try:
                result, error = pickle.loads((Path(self._folder.name) / "result").read_bytes())
            except (OSError, pickle.UnpicklingError, EOFError) as lost:
                self._fall_back(lost)
            else:
                self.stop()
                if error is not None:
                    raise error
                return result
        self.stop()
        return function(*arguments)

    def stop(self) -> None:
        """Kill the task, if there is one."""
        self._task = self._process = None
        if self._stop is not None:
            self._stop()
            self._stop = self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memplug")
        task, result = (Path(self._folder.name) / name for name in ("task", "result"))
        task.write_bytes(pickle.dumps(self._task))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memplug.plans.worker", str(task), str(result)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._stop = weakref.finalize(self, _end, self._process, self._folder)
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    def _fall_back(self, error: Exception) -> None:
        log.warning("memplug: the planning process failed, so training waits for this one plan: %s", error)
        self._process = None


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    folder.cleanup()
