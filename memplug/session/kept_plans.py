"""Plans across runs: resumes from plans that an earlier run of the job left on disk, and writes this run's plans."""

from __future__ import annotations

import collections
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memplug import native
from memplug.beside import Beside
from memplug.errors import LayoutError, coded
from memplug.plans.schema import MemoryPlan, PlannedProgram, TrainingPart
from memplug.profile.records import Fingerprint
from memplug.profile.similarity import Program, similar
from memplug.session.adjuster import Adjuster, Lasting
from memplug.session.followers import Followers
from memplug.session.inputs import kind
from memplug.session.plan_store import PlanStore
from memplug.session.recording import Recording
from memplug.session.remembered import Remembered
from memplug.session.technique import AgreedTechnique

log = logging.getLogger("memplug")

SIZES = ("family", "extent", "reach", "is_mixed")  # of a program, see `Remembered`
SETTLED_STEPS = 8  # an amended plan (see `end_step`) is written to disk after so many steps under it


@dataclass(frozen=True, slots=True)
class _RanPlan:
    """A plan that steps ran under.

    Attributes:
        lasting: the program and its decisions.
        parts: names and parts of the techniques that follow the program; empty if a part is missing.
    """

    lasting: Lasting
    parts: tuple[tuple[str, Any], ...]


class KeptPlans:
    """Resumes from kept plans when a run begins, and writes new plans to disk at the ends of the run's steps.

    Args:
        store: the job's plans on disk.
        beside: writes the files.
        job: fingerprint of the job that trains.
        agreed: the technique whose decisions are kept.
        adjuster: resumes from plans, and makes new ones.

    Attributes:
        file: the plan that the run resumed from; None if it did not resume.
        refused: why the run did not resume; "" if no plan was kept.
    """

    def __init__(
        self, store: PlanStore, beside: Beside, job: Fingerprint, agreed: AgreedTechnique[Any], adjuster: Adjuster
    ):
        self.file: Path | None = None
        self.refused = ""
        self._store, self._beside, self._job = store, beside, job
        self._agreed, self._adjuster = agreed, adjuster
        self._plans: dict[Lasting, MemoryPlan] = {}  # the plans that the run resumed from
        self._kept: dict[int, _RanPlan] = {}  # the plans on disk, by index of the program
        self._is_first = True  # True until the run's first step has ended
        self._is_turned_away = False  # True while the first step runs with other inputs than the plan was made for
        self._made: dict[int, _RanPlan] = {}  # the plan that was in force last, by index of the program
        self._steps: collections.Counter[int] = collections.Counter()  # of steps before which it was in force

    def resume(self) -> bool:
        """Resume from the plans of an earlier run, before the first step; all ranks call this.

        Returns:
            False if there are no plans that serve all ranks.
        """
        plans = self._store.load(self._unfit)
        if not plans:
            self._refuse(self._store.refused)
            return False
        self.file = plans[0].file
        decided = [self._agreed.kept(plan) for plan in plans]
        if decided[0] is None:
            lasting = [Lasting(None, None)]  # a plan without decisions: steps are not compared
            self._adjuster.tell(f"resumes from the plan that an earlier run kept in {self.file}")
        else:
            programs = [_program_of(plan.training.program) for plan in plans]
            first = plans[0].training.first
            sizes = [{name: getattr(plan.training, name) for name in SIZES} for plan in plans]
            known = list(zip(programs, sizes, decided, strict=True))
            lasting = self._adjuster.resume(known, str(self.file), first and _program_of(first))
            self._agreed.reserve(decided)
        self._plans = dict(zip(lasting, plans, strict=False))
        for each, plan in self._plans.items():
            if each.program is not None:
                each.program.begins.update(plan.training.begins)
                each.program.plans = plan.training.plans
        self._kept = {_index_of(each): _RanPlan(each, ()) for each in self._plans}
        return True

    def begin(self, followers: Followers) -> None:
        """Let the techniques resume from their parts of the plans; called once the recorder is claimed."""
        if self._adjuster.taken.running in self._plans:
            for lasting, parts in followers.resume(self._plans, self._adjuster.taken.running).items():
                self._kept[_index_of(lasting)] = _RanPlan(lasting, tuple(parts.items()))

    def check(self, inputs: str, followers: Followers) -> None:
        """Warn and take the plan out of force if no kept plan suits the inputs of the first forward."""
        taken = self._adjuster.taken
        plan = self._plans.get(taken.running)
        expected = (plan.fingerprint.inputs[:1] if plan is not None else ()) or (inputs,)
        if plan is not None and (taken.is_recognised or inputs == expected[0]):
            return
        if taken.program is None and kind(inputs) == kind(expected[0]) and followers.scale:
            return
        text = (
            "memplug: the plan in %s is not used: it was made for inputs %s, and this step begins with %s. This run "
            "makes its own"
        )
        log.warning(coded("MP014", text), self.file, expected[0], inputs)
        followers.enter(None)
        self._agreed.turn_away()
        self._is_turned_away = True

    def end_step(self, followers: Followers, parts: dict[str, Any] | None, recording: Recording | None) -> None:
        """Write the plan in force to disk after one step under it, or an amended plan after `SETTLED_STEPS` steps.

        An amended plan has the decisions of a plan on disk, and a new part of another technique. Ranks above 0 wait one
        step longer, so that they find the plan that rank 0 wrote.

        Args:
            followers: the techniques that `parts` belong to.
            parts: the parts in force, by technique; None while one of them is missing.
            recording: the session's recording; None without the recorder.
        """
        lasting, running = self._adjuster.lasting, self._adjuster.taken.running
        if self.file is not None and self._is_first and running not in self._plans:
            self._refuse(f"{self.file} is for another program than that of the first step")
        elif self._is_turned_away and running is not None and running.decisions is not None:
            self._agreed.install(running.decisions)  # the step ran the plan's program after all
        self._is_first = self._is_turned_away = False
        self._finish(waits=False)
        if lasting is None:
            return
        index = _index_of(lasting)
        if parts is None:
            self._steps[index] = 0
            return
        made, kept = _RanPlan(lasting, tuple(parts.items())), self._kept.get(index)
        is_amended = kept is not None and kept.lasting == lasting and len(made.parts) <= len(kept.parts)
        self._steps[index] = 0 if is_amended and made != self._made.get(index) else self._steps[index] + 1
        self._made[index] = made
        wait = SETTLED_STEPS if is_amended else 1
        if made != kept and self._steps[index] > wait + min(self._job.rank, 1):
            self._steps[index] = 0
            self._keep(made, followers, recording)

    def close(self, followers: Followers, parts: dict[str, Any] | None, recording: Recording | None) -> None:
        """Write the plan in force to disk when the session ends, if it differs from the plan there.

        If a part is missing, or no plan with these decisions is on disk yet, write the decisions alone.

        Args:
            followers: the techniques that `parts` belong to.
            parts: the parts in force, by technique; None while one of them is missing.
            recording: the session's recording; None without the recorder.
        """
        self._finish(waits=True)
        lasting = self._adjuster.lasting
        if lasting is not None:
            kept = self._kept.get(_index_of(lasting))
            is_amended = kept is not None and kept.lasting == lasting
            made = _RanPlan(lasting, tuple(parts.items()) if parts and is_amended else ())
            self._keep(made, followers, recording)
        self._finish(waits=True)

    def _finish(self, waits: bool) -> None:
        """Collect the result of writing a file, or warn if it failed: a full disk must not end training.

        Args:
            waits: True to wait for a file that is still being written.
        """
        if not self._beside.is_busy or not (waits or self._beside.is_done):
            return
        try:
            self._beside.take()
        except (OSError, LayoutError) as error:
            log.warning('memplug: the plan is not kept: %s. Set "plan_dir" to a writable folder', error)

    def _refuse(self, why: str) -> None:
        self.file, self.refused = None, why
        if why:
            self._adjuster.tell(f"no kept plan is used: {why}")

    def _keep(self, made: _RanPlan, followers: Followers, recording: Recording | None) -> None:
        lasting = made.lasting
        index = _index_of(lasting)
        former = self._kept.get(index)
        # do not overwrite a plan that has more parts: a technique may be off in this run alone
        has_less = former is not None and former.lasting == lasting and len(made.parts) < len(former.parts)
        if former == made or has_less or not (made.parts or lasting.decisions):
            return
        self._kept[index] = made
        plan = self._plan(index, lasting, recording)
        if lasting.decisions is not None:
            plan = self._agreed.keep(lasting.decisions, plan)
        for name, part in made.parts:
            plan = followers.find(name).keep(part, plan)
        self._finish(waits=True)
        self._store.keep(plan, self._beside)
        self._finish(waits=False)

    def _plan(self, index: int, lasting: Lasting, recording: Recording | None) -> MemoryPlan:
        """Return a plan without this run's parts; it has only those of the plan that the run resumed from."""
        resumed, trace = self._plans.get(lasting), recording.trace if recording is not None else None
        made_from = resumed or trace
        inputs = made_from.fingerprint.inputs if made_from is not None else ()
        begins = lasting.program.begins if lasting.program is not None else {}
        if begins and not (inputs and inputs[0] in begins):  # the trace is another program's
            inputs = (next(reversed(begins)),)
        return MemoryPlan(
            fingerprint=replace(self._job, inputs=inputs),
            training=self._training(index, lasting, recording),
            parts=resumed.parts if resumed is not None else {},
        )

    def _training(self, index: int, lasting: Lasting, recording: Recording | None) -> TrainingPart:
        program, resumed = lasting.program, self._plans.get(lasting)
        # an amended plan keeps the name of the run that made it, which the other ranks' files of the plan have too
        run, index = (self._store.run, index) if resumed is None else (resumed.training.run, resumed.training.index)
        return TrainingPart(
            run=run,
            index=index,
            program=program and _planned(program.baseline, recording),
            first=self._first_unlike(program, recording) if program is not None else None,
            gradients_stay=recording is not None and recording.gradients_stay,
            **(self._sizes(program) if program is not None else {}),
        )

    def _sizes(self, program: Remembered) -> dict[str, Any]:
        found = {name: getattr(program, name) for name in SIZES}
        family = program.family if isinstance(program.family, str) else f"{self._store.run}:{program.family}"
        begins = {inputs: share for inputs, share in program.begins.items() if share}
        return {**found, "plans": program.plans, "family": family, "begins": begins}

    def _first_unlike(self, program: Remembered, recording: Recording | None) -> PlannedProgram | None:
        first, limits = self._adjuster.first, self._adjuster.programs.limits
        alike = not first.same_sizes(program.baseline) or similar(first, program.baseline, *limits)
        return None if alike else _planned(first, recording)

    def _unfit(self, plan: MemoryPlan) -> str:
        """Return why this machine cannot resume from a plan; "" if it can."""
        decisions = self._agreed.kept(plan)
        if (decisions is None) != (plan.training.program is None):
            return "there are decisions without a program, or a program without decisions"
        return self._agreed.lacks(decisions) if decisions is not None else ""


def _index_of(lasting: Lasting) -> int:
    return lasting.program.index if lasting.program is not None else 0


def _planned(program: Program, recording: Recording | None) -> PlannedProgram:
    names, operators = (), None
    if program.operators is not None and recording is not None:
        used, operators = np.unique(program.operators, return_inverse=True)
        known = recording.recorder.names
        names, operators = tuple(known[number] for number in used), tuple(operators.tolist())
    return PlannedProgram(
        names=names, operators=operators, sizes=program.sizes, nodes=program.nodes, unseen=tuple(sorted(program.unseen))
    )


def _program_of(planned: PlannedProgram) -> Program:
    """Return the program of a kept plan, its operators numbered as in this process."""
    operators = None
    if planned.operators is not None:
        numbers = np.array(native.load().operator_numbers(list(planned.names)), np.int32)
        operators = numbers[np.array(planned.operators, np.int64)]
    return Program(operators, planned.sizes, planned.nodes, frozenset(planned.unseen))
