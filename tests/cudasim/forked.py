"""`tests.support.forking` for ranks on simulated CUDA: one process imports the libraries, then forks each rank.

`python -m tests.cudasim.forked LIBRARIES` is the process that forks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from tests.support import forking
from tests.support.launching import environment

MOST_PROCESSES = 2


@contextlib.contextmanager
def ranks_on_cuda(libraries: forking.Libraries) -> Iterator[Callable[..., str]]:
    """Yield `tests.support.forking.launch_forked` for ranks of up to `MOST_PROCESSES` on CUDA."""
    forker = forking._Forker(libraries)
    forker.command = [sys.executable, "-m", "tests.cudasim.forked", libraries]
    on_cuda = functools.partial(environment, {"DS_ACCELERATOR": "cuda", "LOCAL_WORLD_SIZE": str(MOST_PROCESSES)})
    with (
        mock.patch.object(forking, "environment", on_cuda),
        mock.patch.object(forking, "_forker", lambda libraries: forker),
    ):
        try:
            yield forking.launch_forked
        finally:
            forker.stop()


if __name__ == "__main__":
    # Libraries count devices when they are imported. torch takes that for a use of the devices, after which no forked
    # child could use them.
    with mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: int(os.environ["LOCAL_WORLD_SIZE"])):
        status = forking.serve(sys.argv[1])
    sys.exit(status)
