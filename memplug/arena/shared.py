"""Solves addresses once for all ranks that have the same problem.

The first rank to begin solves the problem and writes a file in the folder of plans. The other ranks wait for this file,
in their processes beside training, and have the judge check it.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

from memplug.arena.judge import judge
from memplug.arena.plan import auto
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import Problem, Solution
from memplug.errors import LayoutError
from memplug.plans import plan_file

FOLDER = "solved"
POLL_S = 0.02
GRACE_S = 5.0  # after the time limit, a rank waits this much longer for the first rank's file
LASTS_S = 3600.0  # age at which any rank removes a file, since no rank needs it any more


def solve_once(problem: Problem, planner: str, time_limit_s: float, folder: Path | None) -> Solution:
    """Return the solution of a problem, from this process or from another rank with the same problem.

    Args:
        problem: any layout problem.
        planner: see `memplug.arena.plan.auto.plan`.
        time_limit_s: seconds; see `memplug.arena.plan.auto.plan`.
        folder: a folder that all ranks see; None: this process solves by itself.

    Raises:
        LayoutError: see `memplug.arena.plan.auto.plan`.
    """
    if folder is None:
        return auto.plan(problem, planner, time_limit_s=time_limit_s)
    file = folder / FOLDER / f"{_digest(problem, planner)}.addresses"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_old(file.parent)
        is_first = _is_first(file)
    except OSError:  # the folder cannot be written to: nothing is shared
        return auto.plan(problem, planner, time_limit_s=time_limit_s)
    if not is_first:
        found = _found(problem, file, time.monotonic() + time_limit_s + GRACE_S)
        if found is not None:
            return found
    solution = auto.plan(problem, planner, time_limit_s=time_limit_s)
    with contextlib.suppress(LayoutError):  # if the disk is full, the other ranks solve by themselves
        plan_file.save(address_plan(problem, solution).alone(), file)
    return solution


def _digest(problem: Problem, planner: str) -> str:
    tables = (problem.buffers, problem.orderings)
    return hashlib.sha256(planner.encode() + b"".join(table.tobytes() for table in tables)).hexdigest()[:24]


def _is_first(file: Path) -> bool:
    try:
        file.with_suffix(".begun").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _found(problem: Problem, file: Path, deadline: float) -> Solution | None:
    """Wait for the first rank's solution, and return it; None if it is late or damaged, or the judge refuses it."""
    while not file.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    try:
        found = AddressPlan.of(plan_file.load(file))
    except LayoutError:
        return None
    return None if found is None or judge(problem, found.solution) else found.solution


def _remove_old(folder: Path) -> None:
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > LASTS_S:
                file.unlink(missing_ok=True)
