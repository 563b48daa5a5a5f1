"""Between two training steps, where all that changes a step changes.

A step ends, on every rank, in this order:

| what | why there |
|---|---|
| the arena serves nothing | what memplug asks for in between is no part of the program |
| forwards of the step are closed, its sizes, operators, nodes and time taken | before anything else runs operators |
| the recording ends | its trace is of the step alone |
| a shortage of host memory is voted on | by the regions' settings of this step, which a new policy replaces |
| what the step moved is compared with its plan | likewise |
| the program is voted on; stage and policy change | with the step's program, and before the next one's settings |
| the link is checked for a fixed alpha | the stage says whether this was a step to time |
| the arena plans, serves or lets go | for the program and policy of the next step |
| plain regions leave, or come back | by the next step's policy |
| rounding buffers are reserved | once it is known whether the arena takes their place |
| the plan is kept on disk | once both halves of it are in force |
| callbacks | they see the report of a settled session |

Then the next one begins: the recorder and the arena are claimed where no forward did, the recording begins, and last of
all the arena serves.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memplug.arena.arena import Arena
from memplug.arena.manager import Serving
from memplug.beside import Beside
from memplug.config import MemplugConfig
from memplug.execute.region import Region
from memplug.execute.tokenwise import Executor
from memplug.profile.records import Fingerprint
from memplug.profile.similarity import Program
from memplug.session.claim import Claim
from memplug.session.kept_plans import KeptPlans
from memplug.session.recording import Recording, unused
from memplug.stages.adjuster import Adjuster
from memplug.stages.checking import AlphaCheck
from memplug.stages.plain_regions import PlainRegions
from memplug.stages.plan_store import PlanStore
from memplug.stages.predictions import Predictions
from memplug.stages.ranks import Ranks
from memplug.stages.rounding import Rounding
from memplug.stages.shortage import Shortage
from memplug.stages.table import Stage

RECENT_STEPS = 50
TIMELINE_FOLDER = "memplug_timeline"
WATCHED_STEPS = 8  # one in so many is watched while stable; of the others, autograd's node count and sizes are compared


class Boundary:
    """See the module's text.

    Args:
        config: the block.
        regions: all of the session's, in forward order.
        executor: which runs them.
        plain: of these, those that run as without memplug.

    Attributes:
        adjuster, check, predictions, rounding: see there.
        claim: on the recorder and the arena; None until `watch`.
        kept: plans of earlier runs, and of this one; None until `resume`.
        steps: that ended.
        planned_steps: of these, those that ran by a policy from their beginning.
        plans: regions run by plans; else by a number for alpha, or there are none.
    """

    def __init__(self, config: MemplugConfig, regions: Sequence[Region], executor: Executor, plain: PlainRegions):
        self._config, self._regions, self._executor, self._plain = config, regions, executor, plain
        tokenwise = config.tokenwise
        self.plans = tokenwise.enabled and isinstance(tokenwise.alpha, str)
        self.watches = self.plans and config.profiler.enabled
        self._ranks = Ranks()
        begin = Stage.WARM_UP if self.plans else Stage.STABLE
        self.adjuster = Adjuster(config, regions, executor, begin, self._step_peak, self._ranks)
        self.check = AlphaCheck(config, regions, executor, self._ranks)
        self.predictions = Predictions(executor)
        self.rounding = Rounding(config, executor, planned=self.plans)
        self._shortage = Shortage(executor, self._ranks)
        self.claim: Claim | None = None
        self.kept: KeptPlans | None = None
        self.steps = self.planned_steps = 0
        self._timelines = 0
        self._in_program = False  # of a step: its first forward with gradients has begun
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._last_step: float | None = None

    # -- before the first step -----------------------------------------------------------------------------------------

    def watch(self, make: Callable[[], Recording]) -> None:
        """See `Session.watch`."""
        config = self._config
        self.claim = Claim(
            make,
            self._make_serving if config.arena.enabled else None,
            watches=self.watches,
            wanted=self.watches or bool(config.report.timeline) or config.arena.enabled,
        )

    def resume(self, job: Fingerprint) -> bool:
        """See `Session.resume`."""
        config, folder = self._config, self._config.plan_dir
        store = PlanStore(Path(folder) if folder and self._ranks.are_known else None, job, self._ranks)
        beside = Beside(config.profiler.wait_for_plans)
        self.kept = KeptPlans(store, beside, job, config, self._regions, self._executor, self.adjuster)
        resumed = self.kept.resume()
        if resumed:
            self._settle()
        return resumed

    def begin_run(self, inputs: str, *forward: Any) -> None:
        """See `Session.begin_run`."""
        if self.claim is None:
            return
        self._take_claim()
        self.kept.check(inputs, self.serving)
        self._begin_recording()
        if self.recording is not None:
            self.recording.begin_forward(*forward)

    def close(self) -> None:
        """The session is being detached, and there are no more steps."""
        if self.kept is not None:
            self.kept.close(self.serving, self.recording)
        self.adjuster.close()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def begin_program(self) -> None:
        """A forward with gradients begins: the first time in a step, its program does."""
        if self._in_program:
            return
        self._in_program = True
        if not self._take_claim() and self.recording is not None:
            self.recording.recorder.begin_program()
        self.adjuster.begin_program()

    # -- between two steps ---------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """A step is over."""
        self.steps += 1
        recording, serving, adjuster = self.recording, self.serving, self.adjuster
        if serving is not None:
            serving.pause()
        sizes = self._executor.flow.end_step([region.native for region in self._regions])
        self._time_step()
        operators, nodes = self._take()
        if recording is not None:
            recording.end_step()
        if self._regions and adjuster.stage is Stage.STABLE:
            self._shortage.end_step()
        else:
            self._shortage.skip_step()
        if self.plans:
            self._compare(Program(operators, sizes, nodes, self._plain.unseen))
        self.check.end_step()
        if serving is not None:
            if not recording.able:
                serving.close("steps cannot be recorded")
            serving.end_step(adjuster.lasting, recording.step_trace)
        self._settle()

    def begin_step(self) -> None:
        """Called just before the next step starts."""
        if not self._in_program:
            self._take_claim()  # it trains, in forwards that no hook sees
        self._in_program = False
        self._begin_recording()

    def _compare(self, program: Program) -> None:
        policy, adjuster = self.adjuster.policy, self.adjuster
        if policy is None:
            self.predictions.skip_step()
        else:
            self.planned_steps += 1
            self.predictions.end_step(policy, program, adjuster.programs.current.baseline)
        adjuster.end_step(self.steps, program)

    def _settle(self) -> None:
        """What the next step is to run by is in force."""
        policy, has_arena = self.adjuster.policy, self.claim is not None and self.claim.has_arena
        if self.plans:
            self._plain.end_step(policy)
        self.rounding.end_step(policy, self.adjuster.stage is Stage.STABLE and not has_arena)
        if self.steps and self.kept is not None:
            self.kept.end_step(self.serving, has_arena, self.recording)

    def _begin_recording(self) -> None:
        recording, serving = self.recording, self.serving
        if recording is not None:
            stable = self.adjuster.stage is Stage.STABLE
            recording.recorder.watch(self.watches and not (stable and self.steps % WATCHED_STEPS))
            self._want_timeline()
            recording.begin_step(
                self.adjuster.detail,
                traced=serving is not None and serving.records,
                placed=serving is not None and serving.places,
            )
        if serving is not None:
            serving.begin_step()

    # -- recorder and arena --------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording | None:
        """None without the recorder."""
        return self.claim.recording if self.claim is not None else None

    @property
    def serving(self) -> Serving | None:
        """None without the arena."""
        return self.claim.serving if self.claim is not None else None

    def demand_recording(self) -> Recording:
        """Claims the recorder, if that was not done yet; raises as `Claim.demand` does."""
        if self.recording is None:
            self.claim.demand()
            self.recording.recorder.watch(self.watches)
        return self.recording

    def unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        """Operators inside are memplug's own."""
        recording = self.recording
        return contextlib.nullcontext() if recording is None else recording.recorder.suspended

    def _take_claim(self) -> bool:
        """Returns whether the recorder was got by this call."""
        taken = self.claim is not None and self.claim.take()
        if taken:
            self.recording.recorder.watch(self.watches)
        return taken

    def _make_serving(self) -> Serving:
        config = self._config
        arena = Arena(self._executor.device.torch_device, config.arena.checks)
        warmup_steps = 0 if self.plans else config.profiler.warmup_steps  # a plan of regions comes after them
        beside = Beside(config.profiler.wait_for_plans)
        serving = Serving(config.arena, arena, warmup_steps, beside, self.adjuster.tell)
        if self.kept is not None and self.kept.file is not None and not self.steps:
            self.kept.serve(serving)
        return serving

    def _take(self) -> tuple[np.ndarray | None, int]:
        """Operators and nodes of the step."""
        if self.recording is None:
            return None, 0
        recorder = self.recording.recorder
        return recorder.take(), recorder.take_nodes()

    def _want_timeline(self) -> None:
        """`report.timeline`: the step after each plan; where nothing is planned, the third one."""
        plans = self.adjuster.replans if self.plans else int(self.steps >= 2)
        folder = self._config.report.timeline
        if folder and self.adjuster.stage is Stage.STABLE and plans > self._timelines:
            self._timelines = plans
            folder = Path(TIMELINE_FOLDER if folder is True else folder)
            self.recording.want(unused(folder / f"step{self.steps + 1:06}.npz"))

    def _step_peak(self) -> int | None:
        return self.recording.peak_bytes if self.recording is not None else None

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Median of the last steps, from one end to the next."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_step is not None:
            self._step_seconds.append(now - self._last_step)
        self._last_step = now
