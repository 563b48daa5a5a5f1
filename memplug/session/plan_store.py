"""Plans in a folder, one for each program of a job: a later run of the same job goes on from them at its first step.

A plan is of one rank's program; where ranks run the same, the file of the lowest of them serves all. All ranks go on
from plans that were made in one run, of the same programs, or none does.
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

MOST_PLANS = 8  # of a job that a run goes on from, the latest
MOST_COMPARED = 8  # plans of other jobs, of which the nearest is named

_Key = tuple[str, int]  # run and index of its program


class PlanStore:
    """The plans of one job.

    Args:
        folder: that they are kept in; None: nothing is.
        job: what trains on this rank.
        ranks: who agree on what to go on from.
        judges: of the parts that the run reads; others stay in the plans as they are.

    Attributes:
        refused: why the run goes on from no plan, though there are some; "" where there are none.
    """

    def __init__(self, folder: Path | None, job: Fingerprint, ranks: Ranks, judges: Judges):
        self.refused = ""
        self._folder, self._job, self._ranks, self._judges = folder, job, ranks, judges
        self._run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"

    @property
    def run(self) -> str:
        """Names this run; the same on all ranks once `load` was called. Later runs sort behind earlier ones."""
        return self._run

    def load(self, unfit: Callable[[MemoryPlan], str]) -> list[MemoryPlan]:
        """The plans that all ranks go on from; the one to begin with first. Called by all ranks.

        It begins with the first program of the latest run.

        Args:
            unfit: why a plan cannot be used here; "": it can.
        """
        own, refused = self._own(unfit)
        everyone: list[tuple[str, list[_Key], str]] = self._ranks.gather(
            (self._run, sorted(own), refused), patient=True
        )
        self._run = everyone[0][0]
        self.refused = next((why for _, _, why in everyone if why), "")
        common = set.intersection(*(set(keys) for _, keys, _ in everyone))
        if any(keys for _, keys, _ in everyone) and not common and not self.refused:
            self.refused = "the ranks have no plans of one run"
        runs = sorted({run for run, _ in common}, reverse=True)
        order = [key for run in runs for key in sorted(common) if key[0] == run]
        return [own[key] for key in order[:MOST_PLANS]]

    def keep(self, plan: MemoryPlan, beside: Beside) -> None:
        """Keep a plan of this run, in place of an earlier one of the same inputs; where a lower rank has kept the same,
        that is this rank's too. In an estimate it is the higher ranks' as well, of which none is there to keep its own.

        Args:
            plan: with its training.
            beside: writes it.
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
        """Plans of this rank, and why there are none."""
        if self._folder is None or not os.path.isdir(self._folder):  # which raises nothing
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
            own[plan.training.run, plan.training.index] = plan
            if unread := sorted(plan.parts.keys() - {each.name for each in self._judges}):
                text = (
                    "memplug: %s has parts that no technique here reads: %s. They stay in the file. There is nothing "
                    "to do, unless such a technique was meant to be here"
                )
                log.warning(text, file, ", ".join(unread))
        return own, "" if own else refused or self._nearest()

    def _unsound(self, plan: MemoryPlan) -> str:
        """Why a plan is none of this job, or none at all; "" where it is."""
        if plan.training is None:
            return "it was made by `memplug plan`, and says nothing of training"
        if changes := plan.fingerprint.changes(self._job):
            return "; ".join(changes)
        mistake = next(mistakes_of(plan, self._judges), "")
        return f"the judge refuses it: {mistake}" if mistake else ""

    def _nearest(self) -> str:
        """How this job differs from the one of the nearest plan; "" where there are no plans."""
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
            return f"{file} is of another rank than {self._job.rank}"
        return f"{file} is of another job: {'; '.join(changes)}"


def _modified_s(file: Path) -> float:
    """Returns when a file was written last, in seconds; 0 where it is gone, as another run may remove it."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
