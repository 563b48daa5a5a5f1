"""Between two training steps, where all that changes a step changes.

A step ends, on every rank, in this order:

| what | why there |
|---|---|
| techniques are told; the arena serves nothing | what memplug asks for in between is no part of the program |
| forwards of the step are closed, its sizes, operators, nodes and time taken | before anything else runs operators |
| the recording ends | its trace is of the step alone |
| a shortage of host memory is voted on | by the regions' settings of this step, which new decisions replace |
| what the step moved is compared with its plan; the link is checked for a fixed alpha | likewise |
| the program is voted on; stage and decisions change | with the step's program, and before the next one's settings |
| techniques that follow the program propose, install and withdraw | for the program and decisions of the next step |
| plain regions get their own class back, or memplug's | by the next step's decisions |
| rounding buffers are reserved | once it is known whether the arena takes their place |
| the plan is kept on disk | once both halves of it are in force |
| callbacks | they see the report of a settled session |

Then the next one begins: the recorder and the arena are claimed where no forward did, the recording begins, and last of
all the arena serves.
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
WATCHED_STEPS = 8  # one in so many is watched while stable; of the others, autograd's node count and sizes are compared


class Boundary:
    """See the module's text.

    Args:
        config: the block.
        regions: all of the session's, in forward order.
        device: where they run.
        regathers: forward gathers parameters (ZeRO 3).
        ranks: that train the model.
        explain: an error of the device's memory passes, in a phase of a region.
        request_failed: what is known as a request for device memory fails for good; on any thread.

    Attributes:
        agreed: decides how regions run.
        adjuster: moves along the stages.
        claim: on the recorder, and on what needs it; None until `watch`.
        kept: plans of earlier runs, and of this one; None until `resume`.
        watches: operators of steps are compared, if the recorder can be had.
        steps: that ended.
        planned_steps: of these, those that ran by decisions from their beginning.
        in_program: the step's first forward with gradients has begun.
        apart: why the ranks decide nothing together any more; "" while they do.
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
        self.in_program = False
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._last_step: float | None = None

    # -- before the first step -----------------------------------------------------------------------------------------

    def watch(self, make: Callable[[], Recording], tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Compare the operators of steps too, and have the techniques that the block asks for follow them.

        Where another session has the recorder, one warning says what is missing.

        Args:
            make: gives the session's recording, and with it the recorder; called once the model trains, or when a step
                is to be recorded.
            tensors: parameters and buffers of the model.
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
            # they plan for a program under its decisions, which come after steps enough
            warmup_steps=0 if self.agreed.plans else self.adjuster.warmup_steps,
            records=bool(self._timeline_folder),
        )

    def resume(self, job: Fingerprint) -> bool:
        """Go on from the plans of an earlier run of the job, before the first step; False: there are none.

        Called by all ranks, after `watch`.
        """
        store = PlanStore(self._folder if self._ranks.are_known else None, job, self._ranks, JUDGES)
        self.kept = KeptPlans(store, self._beside(), job, self.agreed, self.adjuster)
        resumed = self.kept.resume()
        if resumed:
            self._settle()
        return resumed

    def begin_run(self, inputs: str, *forward: Any) -> None:
        """See `AttachedModel.begin_run`."""
        if self.claim is None:
            return
        self._take_claim()
        self.kept.check(inputs, self.followers)
        self._begin_recording()
        if self.recording is not None:
            self.recording.begin_forward(*forward)

    def close(self) -> None:
        """The session is being detached, and there are no more steps."""
        if self.kept is not None:
            self.kept.close(self.followers, self._parts, self.recording)
        self.adjuster.close()
        self.agreed.stay()
        self._ranks.close()

    # -- in a step -----------------------------------------------------------------------------------------------------

    def begin_program(self) -> None:
        """A step's first forward with gradients begins, and with it the step's program."""
        self.in_program = True
        if self._take_claim():
            for follower in self.followers:
                follower.technique.begin_step()
        elif self.recording is not None:
            self.recording.recorder.begin_program()
        self.agreed.begin_program()

    # -- between two steps ---------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """A step is over."""
        self.steps += 1
        if self._device.memory is not None:
            self._device.memory.note()
        recording, adjuster = self.recording, self.adjuster
        for follower in self.followers:
            follower.technique.end_step()
        self.agreed.end_step()
        self._time_step()
        operators, nodes = self._take()
        if recording is not None:
            recording.end_step()
        self.planned_steps += adjuster.decisions is not None
        if not self.apart:
            self._agree(self.agreed.program(operators, nodes))
        if recording is not None:
            if not recording.able:
                self.followers.close("steps cannot be recorded")
            self.followers.end_step(adjuster.lasting, recording.step_trace)
        self._settle()

    def begin_step(self) -> None:
        """Called just before the next step starts."""
        if not self.in_program:
            self._take_claim()  # it trains, in forwards that no hook sees
        self.in_program = False
        self._begin_recording()

    def _agree(self, program: Program) -> None:
        """All that ranks decide together. Where one of them is missing, all others stop in the same place, with the
        decisions that are in force: any later ones would not be the same everywhere.

        Raises:
            RanksError: others may run by later ones, as torch's store is gone, and collectives depend on them.
        """
        adjuster, agreed = self.adjuster, self.agreed
        try:
            planned_from = adjuster.programs.current.baseline if adjuster.decisions else None
            agreed.agree(program, planned_from, adjuster.stage is Stage.STABLE)
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
                    "else rank 0) has ended, or cannot be reached any more.",
                    code="MP010",
                ) from error
            if self._ranks.is_first_to_say():
                text = (
                    "memplug: step %d: planning ends, and all ranks keep the last plan: %s. Give all ranks that train "
                    "a model as many batches, and ranks that do not train together a `group` each; attach again to "
                    "plan again"
                )
                log.warning(coded("MP010", text), self.steps, self.apart)

    def _settle(self) -> None:
        """What the next step is to run by is in force."""
        self.agreed.settle(self.adjuster.stage is Stage.STABLE, self._served().wanted)
        if self.steps and self.kept is not None:
            self.kept.end_step(self.followers, self._parts, self.recording)

    def _begin_recording(self) -> None:
        recording, followers = self.recording, self.followers
        if recording is not None:
            stable = self.adjuster.stage is Stage.STABLE
            recording.recorder.watch(self.watches and not (stable and self.steps % WATCHED_STEPS))
            self._want_timeline()
            recording.begin_step(self.adjuster.detail, traced=followers.detail, placed=followers.need_places)
        for follower in followers:
            follower.technique.begin_step()

    # -- recorder and arena --------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording | None:
        """None without the recorder."""
        return self.claim.recording if self.claim is not None else None

    @property
    def followers(self) -> Followers:
        """None of them without the recorder."""
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
        """Claims the recorder, if that was not done yet; raises as `Claim.demand` does."""
        if self.recording is None:
            self.claim.demand()
            self._begin_claim()
        return self.recording

    def unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        """Operators inside are memplug's own."""
        recording = self.recording
        return contextlib.nullcontext() if recording is None else recording.recorder.suspended

    def _take_claim(self) -> bool:
        """Returns whether the recorder was got by this call."""
        taken = self.claim is not None and self.claim.take()
        if taken:
            self._begin_claim()
        return taken

    def _begin_claim(self) -> None:
        self.recording.recorder.watch(self.watches)
        if self.kept is not None and self.kept.file is not None and not self.steps:
            self.kept.begin(self.followers)

    def _take(self) -> tuple[np.ndarray | None, int]:
        """Operators and nodes of the step."""
        if self.recording is None:
            return None, 0
        recorder = self.recording.recorder
        return recorder.take(), recorder.take_nodes()

    def _want_timeline(self) -> None:
        """`report.timeline`: the step after each plan; where nothing is planned, the third one."""
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
        """Median of the last steps, from one end to the next."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def _time_step(self) -> None:
        now = self._device.now_s()
        if self._last_step is not None:
            self._step_seconds.append(now - self._last_step)
        self._last_step = now
