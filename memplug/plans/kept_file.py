"""A training's plan on its way to disk: written once where ranks do the same. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from memplug.plans import plan_file
from memplug.plans.schema import MemoryPlan


def keep(plan: MemoryPlan, file: Path, lower: Sequence[Path], higher: Sequence[Path] = ()) -> None:
    """Save a plan, or a link to the first of some files that has the same.

    Args:
        plan: with its training.
        file: of this rank; its folder is made.
        lower: of the ranks below; they may be missing.
        higher: of ranks above that are not there to save theirs; they become links to this rank's.

    Raises:
        LayoutError: the file cannot be written.
        OSError: nor its folder, or a link.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    own = (each for each in lower if plan_file.is_plan(each) and not each.is_symlink())
    shared = next((each for each in own if _same(plan, plan_file.load(each))), None)
    if shared is None:
        if file.is_symlink():
            file.unlink()
        plan_file.save(plan, file)
    else:
        _link(file, shared)
    for each in higher:
        _link(each, file)


def _link(file: Path, shared: Path) -> None:
    """Files of one folder."""
    if not (file.exists() and file.samefile(shared)):
        file.unlink(missing_ok=True)
        file.symlink_to(shared.name)


def _same(one: MemoryPlan, other: MemoryPlan) -> bool:
    """Whether two ranks of one run do the same."""
    ours, theirs = one.training, other.training
    return (
        theirs is not None
        and (ours.run, ours.index, ours.program) == (theirs.run, theirs.index, theirs.program)
        and (ours.decisions and ours.decisions.settings) == (theirs.decisions and theirs.decisions.settings)
        and np.array_equal(one.problem.buffers, other.problem.buffers)
        and np.array_equal(one.solution.offsets, other.solution.offsets)
        and one.dynamic == other.dynamic
    )
