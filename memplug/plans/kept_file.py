"""Writes a run's plan to disk; ranks whose plans have the same effect share one file. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from memplug.plans import plan_file
from memplug.plans.schema import MemoryPlan, PlanPart


def keep(
    plan: MemoryPlan,
    kinds: Collection[type[PlanPart]],
    file: Path,
    lower: Sequence[Path],
    higher: Sequence[Path] = (),
) -> None:
    """Save a plan; if a lower rank's file holds a plan with the same effect, make a link to that file instead.

    Args:
        plan: the plan, with its `training` set.
        kinds: the types of its parts.
        file: this rank's file; its folder is created.
        lower: files of the lower ranks; they may be missing.
        higher: in an estimate, the files of the higher ranks, whose processes do not exist; they become links to this
            rank's file.

    Raises:
        LayoutError: the file cannot be written.
        OSError: the folder or a link cannot be made.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    own = (each for each in lower if plan_file.is_plan(each) and not each.is_symlink())
    shared = next((each for each in own if _same(plan, plan_file.load(each), kinds)), None)
    if shared is None:
        if file.is_symlink():
            file.unlink()
        plan_file.save(plan, file)
    else:
        _link(file, shared)
    for each in higher:
        _link(each, file)


def _link(file: Path, shared: Path) -> None:
    """Make `file` a link to another file of its folder."""
    if not (file.exists() and file.samefile(shared)):
        file.unlink(missing_ok=True)
        file.symlink_to(shared.name)


def _same(one: MemoryPlan, other: MemoryPlan, kinds: Collection[type[PlanPart]]) -> bool:
    """Return whether two plans belong to the same program of one run, and have the same effect."""
    ours, theirs = one.training, other.training
    if theirs is None or (ours.run, ours.index, ours.program) != (theirs.run, theirs.index, theirs.program):
        return False
    read = {kind.name: kind for kind in kinds}
    return one.parts.keys() == other.parts.keys() and all(
        read[name].of(one).does_as(read[name].of(other)) if name in read else one.parts[name] == other.parts[name]
        for name in one.parts
    )
