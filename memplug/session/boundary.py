"""Runs the actions between two training steps; everything that affects a step changes there.

When a step ends, every rank does the following, in this order:

| action | reason for its place |
|---|---|
| notify the techniques; the arena stops serving | memplug's own requests between steps are no part of the program |
| close the step's forwards; take its time, operators, autograd nodes, input sizes | before other operators run |
| end the recording | the trace covers this step alone |
| vote on a shortage of host memory | needs the regions' settings of this step, before new decisions replace them |
| compare the bytes moved with the plan; check the link for a fixed alpha | needs this step's settings too |
| vote on the program; change stages and decisions; turn to the next program | once the step's program is known |
| let techniques that follow the program propose, install and withdraw | needs the next step's program and decisions |
| switch the classes of regions that begin or cease to run as if memplug were absent | needs the next step's decisions |
| reserve rounding buffers | after the arena, which makes them unnecessary if it serves the next step |
| keep the plan on disk | once its decisions and the parts of all other techniques are in force |
| call the user's callbacks | their report shows the plan of the next step |

Then the next step begins: the session claims the recorder and the arena if no forward did so, begins to record, and
last of all lets the arena serve. If the inputs of the step's first forward are those of another program than expected,
this rank turns to that program then, as far as no collective depends on it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memplug.beside import Beside
from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.device.reserved import Reserved, Served
from memplug.errors import RanksError, coded
from memplug.profile.records import Fingerprint
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.session.adjuster import Adjuster
from memplug.session.claim import NOT_ASKED_FOR, Claim
from memplug.session.followers import Followers
from memplug.session.given import AgreedGiven, Given
from memplug.session.kept_plans import KeptPlans
from memplug.session.plan_store import PlanStore
from memplug.session.ranks import Ranks
from memplug.session.recording import Recording, unused
from memplug.session.table import Stage
from memplug.session.technique import AgreedTechnique
from memplug.session.techniques import AGREED, FOLLOWING, JUDGES

log = logging.getLogger("memplug")

RECENT_STEPS = 50
TIMELINE_FOLDER = "memplug_timeline"
WATCHED_STEPS = 8  # of a stable program, steps are compared by node counts and input sizes, every 8th also by operators


class Boundary:
    """Ends and begins the steps of one session, in the order of the module's table.

    Args:
        config: the block.
        regions: all regions of the session, in forward order.
        device: the device that the regions run on.
        regathers: True if forward gathers parameters (ZeRO 3).
        ranks: the ranks that train the model.
        explain: called with (phase, region, error) for a device out-of-memory error in a region's forward or recompute
            pass.
        request_failed: returns memplug's note for the error of a failed device memory request; called on any thread.
        has_regions: True if this or another rank has regions.

    Attributes:
        agreed: the technique that decides how regions run.
        adjuster: moves the session along its stages.
        claim: the session's claim on the recorder and on the techniques that need it; None until `watch`.
        kept: plans of earlier runs and of this one; None until `resume`.
        watches: True if steps are compared by their operators once the recorder is claimed.
        steps: number of steps that ended.
        planned_steps: number of steps that ran under planned decisions.
        in_program: True once the step's first forward with gradients has begun.
        has_inputs: True once the inputs of the step's first forward are known.
        apart: why the ranks no longer agree on decisions; "" while they do.
    """

    def __init__(
        self,
        config: MemplugConfig,
        regions: Sequence[Any],
        device: Device,
        regathers: bool,
        ranks: Ranks,
        explain: Callable[[str, Any, BaseException], None],
        request_failed: Callable[[], str],
        has_regions: bool,
    ):
        self._config, self._device, self._ranks = config, device, ranks
        self._request_failed = request_failed
        self._folder = Path(config.plan_dir) if config.plan_dir else None
        self._timeline_folder = config.report.timeline
        self._reserved = Reserved(device.memory, self._served)
        self._beside = functools.partial(Beside, config.profiler.wait_for_plans)
        self._following = [technique for technique in FOLLOWING if technique.is_wanted(config)]
        self.agreed: AgreedTechnique[Any] = AGREED(
            AgreedGiven(
                config=config,
                device=device,
                reserved=self._reserved,
                beside=self._beside,
                regions=regions,
                has_regions=has_regions,
                ranks=ranks,
                regathers=regathers,
                explain=explain,
                own=self.unrecorded,
                step_peak=self._step_peak,
                step_trace=self._trace,
                is_served=any(technique.serves for technique in self._following),
                is_relieved=any(technique.relieves for technique in self._following),
            )
        )
        self._unwatched_because = self.agreed.unwatched_because if config.profiler.enabled else NOT_ASKED_FOR
        self.watches = not self._unwatched_because
        begin = Stage.WARM_UP if self.agreed.plans else Stage.STABLE
        self.adjuster = Adjuster(config.profiler, self.agreed, begin, self._ranks)
        if device.memory is not None:
            device.memory.begin()
        self.claim: Claim | None = None
        self.kept: KeptPlans | None = None
        self.steps = self.planned_steps = 0
        self.apart = ""
        self._timelines = 0
        self.in_program = self.has_inputs = self._is_serving = False
        self._retained = 0, 0  # numbers of plans and programs made when the followers last dropped old work
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._last_step: float | None = None

    # -- before the first step -----------------------------------------------------------------------------------------

    def watch(self, make: Callable[[], Recording], tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Prepare to claim the recorder, from which the session learns steps' operators, and techniques get traces.

        If another session has the recorder when this session claims it, one warning names the consequences.

        Args:
            make: makes the session's recording, and with it the recorder; called once the model trains, or when a step
                is to be recorded.
            tensors: returns the parameters and buffers of the model.
        """
        self.claim = Claim(
            make,
            self._following,
            Given(
                config=self._config,
                device=self._device,
                reserved=self._reserved,
                beside=self._beside,
                tell=self.adjuster.tell,
                folder=self._folder,
                host_bytes=self.agreed.free_host_bytes,
                explain=self._request_failed,
                has_regions=AGREED.is_wanted(self._config),
                layer_bytes=self.agreed.layer_bytes,
                tensors=tensors,
            ),
            unwatched_because=self._unwatched_because,
            # without the stage warm-up, each of these techniques counts warm-up steps itself
            warmup_steps=0 if self.agreed.plans else self.adjuster.warmup_steps,
            records=bool(self._timeline_folder),
        )

    def resume(self, job: Fingerprint) -> bool:
        """Resume from the plans of an earlier run of the job, before the first step.

        All ranks call this, after `watch`.

        Returns:
            False if there are no plans to resume from.
        """
        store = PlanStore(self._folder if self._ranks.are_known else None, job, self._ranks, JUDGES)
        self.kept = KeptPlans(store, self._beside(), job, self.agreed, self.adjuster)
        resumed = self.kept.resume()
        if resumed:
            self._settle()
        return resumed

    def begin_inputs(self, inputs: str, *forward: Any) -> None:
        """Turn to the program that begins with these inputs; called before the step's first forward with gradients.

        If a resumed run begins so, claim the recorder, check the inputs, and begin recording.

        Args:
            inputs: shapes and dtypes of the forward's inputs.
            forward: the module, its arguments and its keyword arguments.
        """
        self.has_inputs = True
        has_turned = bool(self.agreed.plans) and self.adjuster.begin(inputs)
        if self.steps == 0 and self.kept is not None and self.kept.file is not None:
            self._begin_run(inputs, *forward)
            return
        if has_turned:
            self.followers.enter(self.adjuster.taken.running)
            recording = self.recording
            if recording is not None:
                recording.recorder.watch(self.watches and self.adjuster.wants_operators(WATCHED_STEPS - 1))
                followers = self.followers
                details = {"traced": followers.detail, "placed": followers.need_places}
                if recording.begin_again(self.adjuster.detail, **details):
                    recording.begin_forward(*forward)
        self._begin_serving()

    def _begin_run(self, inputs: str, *forward: Any) -> None:
        self._take_claim()
        self.kept.check(inputs, self.followers)
        self._begin_recording()
        if self.recording is not None:
            self.recording.begin_forward(*forward)
        self._begin_serving()

    def close(self) -> None:
        """Stop voting and planning: the session is being detached, and no more steps follow."""
        if self.kept is not None:
            self.kept.close(self.followers, self._parts, self.recording)
        self.adjuster.close()
        self.agreed.stay()
        self._ranks.close()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def begin_program(self) -> None:
        """Start the step's program; called when the step's first forward with gradients begins."""
        self.in_program = True
        if self._take_claim():
            self._is_serving = False
        elif self.recording is not None:
            self.recording.recorder.begin_program()
        self._begin_serving()
        self.agreed.begin_program()

    # -- between two steps ---------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Carry out the actions at the end of a step, in the order of the module's table."""
        self.steps += 1
        if self._device.memory is not None:
            self._device.memory.note()
        recording, adjuster = self.recording, self.adjuster
        self._begin_serving()  # if the step ran no forward
        for follower in self.followers:
            follower.technique.end_step()
        self.agreed.end_step()
        self._time_step()
        operators, nodes = self._take()
        if recording is not None:
            recording.end_step()
        self.planned_steps += adjuster.decisions is not None
        program = self.agreed.program(operators, nodes)
        growth, is_own = adjuster.growth(program), adjuster.taken.is_own
        if not self.apart:
            self._agree(program)
        if recording is not None:
            if not recording.able:
                self.followers.close("steps cannot be recorded")
            taken = adjuster.taken
            self.followers.end_step(taken.running, recording.step_trace, is_own and taken.was_right, growth)
            if self._retained != (adjuster.replans, adjuster.programs.made):
                self._retained = adjuster.replans, adjuster.programs.made
                self.followers.retain(adjuster.is_live)
        self._settle()

    def begin_step(self) -> None:
        """Claim the recorder if no forward did, and begin recording; called just before the next step starts."""
        if not self.in_program:
            self._take_claim()  # the step's forwards ran where no hook sees them
        self.in_program = self.has_inputs = False
        self._begin_recording()

    def _agree(self, program: Program) -> None:
        """Vote with the other ranks, and act on the results.

        If a rank is missing, all others stop at the same vote and keep the decisions in force: later decisions could
        differ between ranks.

        Raises:
            RanksError: torch's store is gone, and collectives depend on decisions: another rank may have read a
                result that this rank can no longer read.
        """
        adjuster, agreed = self.adjuster, self.agreed
        try:
            agreed.agree(self.steps, program, adjuster.planned_from, adjuster.stage is Stage.STABLE)
            if agreed.plans:
                adjuster.end_step(self.steps, program)
        except RanksError as error:
            self.apart = error.problem
            agreed.stay()
            adjuster.stay(self.steps, self.apart)
            if self._ranks.may_differ and agreed.may_talk:
                raise RanksError(
                    f"step {self.steps}: {self.apart}; other ranks may run by another plan from now on, and layers of "
                    "the model communicate",
                    "Start the job again from its last checkpoint: the process that holds torch's store (torchrun, "
                    "else rank 0) has ended, or cannot be reached.",
                    code="MP010",
                ) from error
            if self._ranks.is_first_to_say():
                text = (
                    "memplug: step %d: planning ends, and all ranks keep the last plan: %s. Give all ranks that train "
                    "a model the same number of batches. If only some ranks train it together, pass them as `group`. "
                    "Attach again to plan again"
                )
                log.warning(coded("MP010", text), self.steps, self.apart)

    def _settle(self) -> None:
        """Prepare decisions, rounding buffers and region classes for the next step; keep the plan on disk."""
        self.agreed.settle(self.adjuster.stage is Stage.STABLE, self._served().wanted)
        if self.steps and self.kept is not None:
            self.kept.end_step(self.followers, self._parts, self.recording)

    def _begin_recording(self) -> None:
        recording, followers = self.recording, self.followers
        if recording is not None:
            recording.recorder.watch(self.watches and self.adjuster.wants_operators(WATCHED_STEPS - 1))
            self._want_timeline()
            recording.begin_step(self.adjuster.detail, traced=followers.detail, placed=followers.need_places)
        self._is_serving = False
        if not self.adjuster.taken.is_unsure:
            self._begin_serving(joins_late=False)

    def _begin_serving(self, joins_late: bool = True) -> None:
        """Let the techniques begin the step; if another program than expected may run, not before its first forward."""
        if not self._is_serving:
            self._is_serving = True
            for follower in self.followers:
                follower.technique.joins_late = joins_late
                follower.technique.begin_step()

    # -- recorder and arena --------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording | None:
        """Return the session's recording; None without the recorder."""
        return self.claim.recording if self.claim is not None else None

    @property
    def followers(self) -> Followers:
        """Return the techniques that follow the program; empty without the recorder."""
        return self.claim.followers if self.claim is not None else Followers()

    @property
    def _parts(self) -> dict[str, Any] | None:
        return self.claim.parts if self.claim is not None else {}

    def _served(self) -> Served:
        claim = self.claim
        return Served(
            wanted=claim is not None and any(each.serves and not claim.why_off(each.name) for each in FOLLOWING),
            whole=any(each.technique.has_served_whole for each in self.followers),
        )

    def demand_recording(self) -> Recording:
        """Return the session's recording; claim the recorder if this session does not have it yet.

        Raises:
            RecorderError: another session of this process has the recorder.
        """
        if self.recording is None:
            self.claim.demand()
            self._begin_claim()
        return self.recording

    def unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for memplug's own operators, which are no part of the program."""
        recording = self.recording
        return contextlib.nullcontext() if recording is None else recording.recorder.suspended

    def _take_claim(self) -> bool:
        """Claim the recorder if it is still wanted; return whether this call obtained it."""
        taken = self.claim is not None and self.claim.take()
        if taken:
            self._begin_claim()
        return taken

    def _begin_claim(self) -> None:
        self.recording.recorder.watch(self.watches)
        if self.kept is not None and self.kept.file is not None and not self.steps:
            self.kept.begin(self.followers)

    def _take(self) -> tuple[np.ndarray | None, int]:
        """Return the step's operators (None if it was not watched) and its number of autograd nodes."""
        if self.recording is None:
            return None, 0
        recorder = self.recording.recorder
        return recorder.take(), recorder.take_nodes()

    def _want_timeline(self) -> None:
        """Have the step after each plan recorded for `report.timeline`; without planning, the third step."""
        plans = self.adjuster.replans if self.agreed.plans else int(self.steps >= 2)
        folder = self._timeline_folder
        if folder and self.adjuster.stage is Stage.STABLE and plans > self._timelines:
            self._timelines = plans
            folder = Path(TIMELINE_FOLDER if folder is True else folder)
            self.recording.want(unused(folder / f"step{self.steps + 1:06}.npz"))

    def _step_peak(self) -> int | None:
        return self.recording.peak_bytes if self.recording is not None else None

    def _trace(self) -> Trace | None:
        return self.recording.trace if self.recording is not None else None

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def step_s(self) -> float | None:
        """Return the median time from one step's end to the next, in seconds, over the recent steps; None at first."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def _time_step(self) -> None:
        now = self._device.now_s()
        if self._last_step is not None:
            self._step_seconds.append(now - self._last_step)
        self._last_step = now
