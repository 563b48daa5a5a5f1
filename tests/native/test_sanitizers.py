"""The executor's tests, with torch and Python, on a native core that is built with sanitizers.

Python and torch are not instrumented. AddressSanitizer sees only their allocations. ThreadSanitizer also sees their
locks and calls of the C library, but neither plain accesses nor atomic reference counts. So it reports false races,
which `is_of_the_core` filters out. `tests/arena/test_arena_core.py` tests the arena alone, with all of its code
instrumented.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from memplug import native
from tests.support.folders import ROOT
from tests.support.launching import launch

COMPILER = shutil.which("c++")
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
TESTS = [
    *("native/test_native_tape", "device/test_host_pool", "tokenwise/test_plain", "profile/test_recorder_threads"),
    "arena/test_kept_tensors",
    *(f"tokenwise/engine/test_{name}" for name in ("in_flight", "races", "graphs", "in_place")),
    *(f"tokenwise/engine/test_{name}" for name in ("late_offloads", "opaque", "random")),
]
# replay from captured rows is bit-identical only on some CPUs, as matmuls of fewer rows may round differently;
# sanitizers do not work after a fork
UNRELATED = "rows- and test_replay_restores or test_both_processes_of_a_fork"
ADDRESS = {
    # Python and torch keep memory until the process ends, and libraries free memory that others have allocated
    "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def libraries(*names: str) -> str:
    """Return the compiler's sanitizer libraries, for `LD_PRELOAD`; skip the test if it has none."""
    found = []
    for name in names:
        command = [COMPILER or pytest.skip("there is no compiler"), f"-print-file-name=lib{name}.so"]
        found.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        if not Path(found[-1]).is_absolute():
            pytest.skip(f"{COMPILER} has no lib{name}.so")
    return " ".join(found)


def run(tmp_path: Path, preload: str, flags: str, options: dict[str, str]) -> None:
    """Build the core and run the tests on it; an error contains the report that ended the process."""
    env = {"LD_PRELOAD": preload, "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": str(COMPILER)}
    files = [ROOT / "tests" / f"{name}.py" for name in TESTS]
    arguments = ["-q", "-p", "no:cacheprovider", "--capture=sys", f"--basetemp={tmp_path}/tests"]
    arguments += ["-k", f"not ({UNRELATED})", *files]
    command = ["tests.support.sanitized_worker", f"{FLAGS} {flags}", *arguments]
    done = launch(command, launcher="python", module=True, time_limit_s=1800, env=env | options, check=False)
    assert done.returncode == 0, done.stdout


def is_of_the_core(report: str) -> bool:
    """Return whether the core made both accesses of a data race, or has a part in any other report.

    torch frees tensors, graphs and works of collectives when their reference counts reach zero. The sanitizer does not
    see the counts, so earlier accesses of other threads to that memory seem unordered with the free.
    """
    if "WARNING: ThreadSanitizer: data race" not in report:
        return native.CORE.name in report
    stacks = re.findall(
        r"^  (?:Previous )?(?:atomic )?(?:read|write) of size .*\n((?:    #.*\n)*)", report, re.M | re.I
    )
    assert len(stacks) >= 2, report
    return all(native.CORE.name in frame for frame in map(innermost, stacks))


def innermost(stack: str) -> str:
    """Return the stack frame that made an access, directly or through the C library; assume the core if it is lost."""
    return next((frame for frame in stack.splitlines() if "(libtsan.so" not in frame), native.CORE.name)


@pytest.mark.long
def test_core_has_no_invalid_memory_access_and_no_undefined_behaviour(tmp_path: Path) -> None:
    flags = "-fsanitize=address,undefined -fno-sanitize=vptr"  # torch's libraries lack types that vptr checks
    run(tmp_path, libraries("asan", "ubsan"), flags, ADDRESS)


@pytest.mark.long
def test_threads_of_the_core_do_not_race(tmp_path: Path) -> None:
    options = {"TSAN_OPTIONS": f"exitcode=0:history_size=7:log_path={tmp_path}/report"}  # false reports do not fail
    run(tmp_path, libraries("tsan"), "-fsanitize=thread", options)
    reports = "".join(file.read_text() for file in tmp_path.glob("report.*"))
    found = [report for report in reports.split("=" * 18 + "\n") if "WARNING" in report and is_of_the_core(report)]
    assert not found, "\n".join(found)
