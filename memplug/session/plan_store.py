"""A folder of plans, one for each program of a job; a later run of the job resumes from them at its first step.

Each plan is for one program of one rank. Ranks that run the same program share the file of the lowest of them. Either
all ranks resume, or none does: a rank uses its plan for a program only if each rank has one from the same run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from memplug.beside import Beside
from memplug.errors import LayoutError, coded
from memplug.plans import kept_file, plan_file
from memplug.plans.judge import Judges, mistakes_of
from memplug.plans.schema import MemoryPlan
from memplug.profile.records import Fingerprint
from memplug.session.ranks import Ranks

log = logging.getLogger("memplug")

MOST_PLANS = 8  # a run resumes from at most so many plans of its job, the latest ones
MOST_COMPARED = 8  # the most similar job is sought among so many plans, the latest ones

_Key = tuple[str, int, int]  # (run, index of the program in that run, its plans: see `TrainingPart`)


class PlanStore:
    """The plans of one job on disk.

    Args:
        folder: the folder of the plan files; None to keep no plans.
        job: fingerprint of the job that trains on this rank.
        ranks: the ranks, which agree on the plans to resume from.
        judges: judges of the parts that this run reads; other parts stay in the plans unchanged.

    Attributes:
        refused: why the run resumes from no plan although there are some; "" if there are none.
    """

    def __init__(self, folder: Path | None, job: Fingerprint, ranks: Ranks, judges: Judges):
        self.refused = ""
        self._folder, self._job, self._ranks, self._judges = folder, job, ranks, judges
        self._run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"

    @property
    def run(self) -> str:
        """Return the name of this run: the same on all ranks after `load`; it sorts after the names of earlier runs."""
        return self._run

    def load(self, unfit: Callable[[MemoryPlan], str]) -> list[MemoryPlan]:
        """Return the plans that all ranks resume from; the run begins under the first one. All ranks call this.

        The plans of the latest run come first, and among these the plan for that run's first program.

        Args:
            unfit: returns why a plan cannot be used here; "" if it can.
        """
        own, refused = self._own(unfit)
        everyone: list[tuple[str, list[_Key], str]] = self._ranks.gather(
            (self._run, sorted(own), refused), patient=True
        )
        self._run = everyone[0][0]
        self.refused = next((why for _, _, why in everyone if why), "")
        common = set.intersection(*(set(keys) for _, keys, _ in everyone))
        if any(keys for _, keys, _ in everyone) and not common and not self.refused:
            self.refused = "no earlier run has kept a plan for every rank"
        latest = {key[:2]: key for key in sorted(common)}  # a program may have been planned for again
        runs = sorted({run for run, _ in latest}, reverse=True)
        order = [latest[program] for run in runs for program in sorted(latest) if program[0] == run]
        return [own[key] for key in order[:MOST_PLANS]]

    def keep(self, plan: MemoryPlan, beside: Beside) -> None:
        """Write a plan of this run; it replaces an earlier one for the same inputs.

        If a lower rank has written the same plan, its file serves this rank too. In an estimate this rank's file also
        serves the higher ranks, since their processes do not exist.

        Args:
            plan: the plan, with its `training` set.
            beside: writes the file in a process of its own.
        """
        if self._folder is not None:
            files = [self._folder / self._name(plan, rank) for rank in range(self._job.world_size)]
            own = self._job.rank
            higher = files[own + 1 :] if self._ranks.are_made_up else []
            beside.begin(kept_file.keep, plan, tuple(self._judges), files[own], files[:own], higher)

    # -- files ---------------------------------------------------------------------------------------------------------

    def _name(self, plan: MemoryPlan, rank: int) -> str:
        program = plan.training.program
        shapes = repr((plan.fingerprint.inputs, program and program.sizes))
        return f"{self._job.job.digest()}-{hashlib.sha256(shapes.encode()).hexdigest()[:8]}{self._suffix(rank)}"

    def _suffix(self, rank: int) -> str:
        return f".rank{rank}.json" if self._job.world_size > 1 else ".json"

    def _own(self, unfit: Callable[[MemoryPlan], str]) -> tuple[dict[_Key, MemoryPlan], str]:
        """Return this rank's plans by key, and why there are none ("" if there are some)."""
        if self._folder is None or not os.path.isdir(self._folder):  # unlike `Path.is_dir`, this never raises
            return {}, ""
        refused, own = "", {}
        for file in self._folder.glob(f"{self._job.job.digest()}-*{self._suffix(self._job.rank)}"):
            try:
                plan = plan_file.load(file)
                why = self._unsound(plan) or unfit(plan)
            except LayoutError as error:
                text = "memplug: a kept plan is not used: %s. This run makes its own"
                log.warning(coded("MP014", text), error.problem)
                refused = refused or error.problem
                continue
            if why:
                refused = refused or f"{file}: {why}"
                continue
            own[plan.training.run, plan.training.index, plan.training.plans] = plan
            if unread := sorted(plan.parts.keys() - {each.name for each in self._judges}):
                text = (
                    "memplug: %s has parts that no technique here reads: %s. They stay in the file. If a technique "
                    "that reads them should be here, install it; else ignore this"
                )
                log.warning(text, file, ", ".join(unread))
        return own, "" if own else refused or self._nearest()

    def _unsound(self, plan: MemoryPlan) -> str:
        """Return why a plan does not belong to this job or is invalid; "" if it can be used."""
        if plan.training is None:
            return "it was made by `memplug plan`, and has no state of a training run to resume from"
        if changes := plan.fingerprint.changes(self._job):
            return "; ".join(changes)
        mistake = next(mistakes_of(plan, self._judges), "")
        return f"the judge refuses it: {mistake}" if mistake else ""

    def _nearest(self) -> str:
        """Return how this job differs from the most similar job that has a plan; "" if there are no plans."""
        files = [file for file in self._folder.glob("*.json") if plan_file.is_plan(file)]
        latest = sorted(files, key=_modified_s, reverse=True)[:MOST_COMPARED]
        differing = []
        for file in latest:
            try:
                plan = plan_file.load(file)
            except LayoutError as error:
                return error.problem
            if plan.training is not None:
                differing.append((file, plan.fingerprint.changes(self._job)))
        if not differing:
            return ""
        file, changes = min(differing, key=lambda each: len(each[1]))
        if not changes:
            return f"{file} is for another rank than {self._job.rank}"
        return f"{file} is for another job: {'; '.join(changes)}"


def _modified_s(file: Path) -> float:
    """Return when a file was last written, in seconds; 0 if another run has removed it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
