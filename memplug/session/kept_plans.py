"""From run to run: begins with the plans that an earlier run of the same job kept, and keeps those of this one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from memplug import native
from memplug.arena.manager import Serving, State
from memplug.beside import Beside
from memplug.config import MemplugConfig
from memplug.errors import LayoutError, MemplugError
from memplug.execute.region import Region
from memplug.execute.tokenwise import Executor
from memplug.plan.layout.problem import BUFFER, Problem, Solution
from memplug.plan.policy import Learnt, Policy, Setting
from memplug.plan.schema import MemoryPlan, PlannedProgram, Training, memory_plan
from memplug.profile.hardware import link_rates
from memplug.profile.records import Fingerprint
from memplug.profile.similarity import Program, similar
from memplug.session.recording import Recording
from memplug.show.words import size
from memplug.stages import budgets, planning
from memplug.stages.adjuster import Adjuster, Lasting
from memplug.stages.plan_store import PlanStore
from memplug.stages.programs import Remembered

log = logging.getLogger("memplug")

SETTLED_STEPS = 8  # that ran by other addresses than those kept, amended ones, before these are kept instead

_Made = tuple[Lasting, MemoryPlan | None]  # what ran, and the addresses that it was served by


class KeptPlans:
    """Called at the beginning of a run, and at the end of every step.

    Args:
        store: of the job's plans.
        beside: writes them.
        job: what trains.
        config: the block.
        regions: all of the session's.
        executor: which runs them.
        adjuster: which goes on from plans, and makes them.

    Attributes:
        file: that the run goes on from; None: it began as a first one.
        refused: why there is none; "" where nothing was kept.
    """

    def __init__(
        self,
        store: PlanStore,
        beside: Beside,
        job: Fingerprint,
        config: MemplugConfig,
        regions: Sequence[Region],
        executor: Executor,
        adjuster: Adjuster,
    ):
        self.file: Path | None = None
        self.refused = ""
        self._store, self._beside, self._job, self._config = store, beside, job, config
        self._regions, self._executor, self._adjuster = regions, executor, adjuster
        self._plans: dict[Lasting, MemoryPlan] = {}  # that the run began with
        self._kept: dict[int, _Made] = {}  # by index of the program
        self._is_first = True  # the step that ends next
        self._is_turned_away = False  # it began with other inputs than were expected
        self._made: _Made | None = None
        self._steps = 0  # that ran by it

    def resume(self) -> bool:
        """Go on from the plans of an earlier run, before the first step; False: there are none for all ranks. Called by
        all of them.
        """
        plans = self._store.load(self._unfit)
        if not plans:
            self._refuse(self._store.refused)
            return False
        self.file = plans[0][0]
        trainings = [plan.training for _, plan in plans]
        if trainings[0].policy is None:
            lasting = [Lasting(None, None)]  # nothing tells programs apart
        else:
            known = [(_program_of(training.program), training.policy) for training in trainings]
            first = trainings[0].first
            lasting = self._adjuster.resume(known, str(self.file), first and _program_of(first))
            self._executor.pool.reserve(max(policy.solution.host_bytes for _, policy in known))
        self._plans = {each: plan for each, (_, plan) in zip(lasting, plans, strict=False)}
        self._kept = {_index_of(each): (each, _addresses(plan)) for each, plan in self._plans.items()}
        return True

    def serve(self, serving: Serving) -> None:
        """The arena was got: it begins with the plans that have addresses."""
        plans = {lasting: plan for lasting, plan in self._plans.items() if _addresses(plan)}
        if self._adjuster.lasting in plans:
            serving.resume(plans, self._adjuster.lasting, f"as an earlier run kept it in {self.file}")

    def check(self, inputs: str, serving: Serving | None) -> None:
        """The first forward is given these inputs: others than the plan was made for are served nothing, and regions
        run at the safest setting; but where that would change which collectives a recompute pass launches, only once
        all ranks agree at the end of the step.
        """
        plan = self._plans[self._adjuster.lasting]
        expected = plan.problem.fingerprint.inputs[:1] or (inputs,)
        if inputs == expected[0]:
            return
        log.warning(
            "memplug: the plan in %s is not used: it was made for inputs %s, and this step begins with %s",
            self.file,
            expected[0],
            inputs,
        )
        if serving is not None:
            serving.turn_away()
        self._executor.hooks.on_larger()
        for region in self._regions if not self._executor.regathers else ():
            if not region.native.communicates:
                region.set(Setting(region.kind))
                region.native.seen = False
        self._is_turned_away = True

    def end_step(self, serving: Serving | None, has_arena: bool, recording: Recording | None) -> None:
        """A step is over: keep the plan that it ran by, once that serves; and where it was amended, once that lasts. A
        rank above 0 waits a step longer, to find what lower ranks have kept.

        Args:
            serving: of the arena; None where there is none yet.
            has_arena: it serves, or may yet.
            recording: of the steps that it was planned from.
        """
        lasting = self._adjuster.lasting
        if self.file is not None and self._is_first and lasting not in self._plans:
            self._refuse(f"{self.file} is of another program than the first step's")
        elif self._is_turned_away and lasting.policy is not None:
            planning.put(lasting.policy, self._regions)  # the inputs were hardly others
        self._is_first = self._is_turned_away = False
        self._finish(waits=False)
        made = self._in_force(serving)
        if made is None or (has_arena and made[1] is None) or (lasting.program and lasting.program.borrowed):
            self._steps = 0
            return
        kept = self._kept.get(_index_of(lasting))
        is_new = kept is None or kept[0] != lasting
        self._steps = self._steps + 1 if is_new or made == self._made else 0
        self._made = made
        wait = 1 if is_new else SETTLED_STEPS
        if made != kept and self._steps > wait + min(self._job.rank, 1):
            self._steps = 0
            self._keep(*made, recording)

    def close(self, serving: Serving | None, recording: Recording | None) -> None:
        """There are no more steps: keep what was amended since."""
        made = self._in_force(serving)
        self._finish(waits=True)
        if made is not None and made[1] is not None and made[0] == self._kept.get(_index_of(made[0]), (None,))[0]:
            self._keep(*made, recording)
        self._finish(waits=True)

    def _finish(self, waits: bool) -> None:
        """The file that is being written is there; or it is said why not, since a full disk must not end training."""
        if not self._beside.is_busy or not (waits or self._beside.is_done):
            return
        try:
            self._beside.take()
        except (OSError, LayoutError) as error:
            log.warning("memplug: the plan is not kept: %s", error)

    def _in_force(self, serving: Serving | None) -> _Made | None:
        lasting, serves = self._adjuster.lasting, serving is not None and serving.state is State.SERVING
        return None if lasting is None else (lasting, serving.plan if serves else None)

    def _refuse(self, why: str) -> None:
        self.file, self.refused = None, why
        if why:
            self._adjuster.tell(f"begins as a first run: {why}")

    def _keep(self, lasting: Lasting, memory: MemoryPlan | None, recording: Recording | None) -> None:
        index = _index_of(lasting)
        former, self._kept[index] = self._kept.get(index), (lasting, memory)
        if former == (lasting, memory):
            return
        if memory is None and (lasting.policy is None or (former is not None and former[0] == lasting)):
            return  # there is nothing to keep; or the addresses that were kept serve another time
        if memory is None:
            trace = recording.trace if recording is not None else None
            inputs = trace.fingerprint.inputs if trace is not None else ()
            empty = Problem(buffers=np.empty(0, BUFFER), fingerprint=replace(self._job, inputs=inputs))
            memory = memory_plan(empty, Solution(offsets=np.empty(0, np.int64), height=0, planner="none", optimal=True))
        self._finish(waits=True)
        self._store.keep(replace(memory, training=self._training(index, lasting, recording)), self._beside)
        self._finish(waits=False)

    def _training(self, index: int, lasting: Lasting, recording: Recording | None) -> Training:
        program, policy, rates = lasting.program, lasting.policy, (0.0, 0.0)
        if policy is not None:
            settings = {
                region.name: _with_learnt(policy.settings[region.name], region)
                for region in self._regions
                if region.name in policy.settings
            }
            policy = replace(policy, settings=settings)
            rates = link_rates(self._executor.device.torch_device)
        return Training(
            run=self._store.run,
            index=index,
            program=program and _planned(program.baseline, recording),
            policy=policy,
            first=self._first_unlike(program, recording) if program is not None else None,
            gradients_stay=recording is not None and recording.gradients_stay,
            d2h_bytes_per_s=rates[0],
            h2d_bytes_per_s=rates[1],
        )

    def _first_unlike(self, program: Remembered, recording: Recording | None) -> PlannedProgram | None:
        first, limits = self._adjuster.first, self._adjuster.programs.limits
        alike = not first.same_sizes(program.baseline) or similar(first, program.baseline, *limits)
        return None if alike else _planned(first, recording)

    def _unfit(self, plan: MemoryPlan) -> str:
        """Why this machine has no room for a plan; "" where it has."""
        policy: Policy | None = plan.training.policy
        if policy is None:
            return ""
        host_bytes, budget_bytes = policy.solution.host_bytes, self._executor.pool.budget_bytes
        if host_bytes > budget_bytes:
            return f"it swaps {size(host_bytes)}, and the host budget is {size(budget_bytes)}"
        device_bytes = budgets.device_bytes(self._config, self._executor.device)
        if policy.peak_bytes is not None and device_bytes is not None and policy.peak_bytes > device_bytes:
            return f"it takes {size(policy.peak_bytes)} of the device, which has {size(device_bytes)}"
        return ""


def _index_of(lasting: Lasting) -> int:
    return lasting.program.index if lasting.program is not None else 0


def _addresses(plan: MemoryPlan) -> MemoryPlan | None:
    """The plan, if it has any."""
    return plan if len(plan.problem) else None


def _with_learnt(setting: Setting, region: Region) -> Setting:
    native_region = region.native
    learnt = Learnt(native_region.communicates, native_region.offloads_late, native_region.unneeded)
    return replace(setting, learnt=learnt)


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
    """With operators numbered as in this process."""
    operators = None
    if planned.operators is not None:
        try:
            numbers = np.array(native.load().operator_numbers(list(planned.names)), np.int32)
            operators = numbers[np.array(planned.operators, np.int64)]
        except MemplugError:  # there is no compiler: steps are compared by what else is known of them
            operators = None
    return Program(operators, planned.sizes, planned.nodes, frozenset(planned.unseen))
