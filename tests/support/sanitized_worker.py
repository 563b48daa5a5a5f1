"""Runs tests on a native core that is compiled with more flags.

`python -m tests.support.sanitized_worker FLAGS TESTS...`

Start it with the sanitizers' libraries in `LD_PRELOAD`, since they have to be in the process before Python is. The
processes that it starts run without these libraries: a shell can crash with them, and the compiler does not need them.
"""

from __future__ import annotations

import os
import sys

from memplug import native
from memplug.native import building


def main() -> int:
    import pytest

    os.environ.pop("LD_PRELOAD", None)
    ordinary, further = building.flags(), sys.argv[1].split()
    building.flags = lambda: [*ordinary, *further]
    library = native.CORE.library()
    native.load()
    if b"__asan_init" not in library.read_bytes() and b"__tsan_init" not in library.read_bytes():
        sys.exit(f"{library} has no sanitizer in it")
    return pytest.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
