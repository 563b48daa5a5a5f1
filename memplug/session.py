"""One attached model: its regions, its executor, what tells where a step ends, and what it reports of itself.

Until there is a plan, every region runs at the safest setting: inputs and attention outputs swapped, every matmul
recomputed. With a number for alpha there is nothing to plan: the session is stable at once, and times one step only, to
check the number.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memplug import closing, report
from memplug.claim import Claim
from memplug.config import MemplugConfig
from memplug.errors import RecorderError
from memplug.execute.arena import Arena
from memplug.execute.device import Device
from memplug.execute.hooks import Hooks
from memplug.execute.region import Region
from memplug.execute.tokenwise import Executor
from memplug.kept_plans import KeptPlans
from memplug.plan import tokenwise as plan
from memplug.profile.records import Fingerprint
from memplug.profile.similarity import Program
from memplug.profile.trace import Trace
from memplug.recording import Recording, of_rank, unused
from memplug.stages import budgets
from memplug.stages.adjuster import Adjuster
from memplug.stages.checking import AlphaCheck
from memplug.stages.plain_regions import PlainRegions
from memplug.stages.plan_store import PlanStore
from memplug.stages.predictions import Predictions
from memplug.stages.ranks import Ranks
from memplug.stages.rounding import Rounding
from memplug.stages.serving import Serving
from memplug.stages.shortage import Shortage
from memplug.stages.table import Stage

log = logging.getLogger("memplug")

RECENT_STEPS = 50
TIMELINE_FOLDER = "memplug_timeline"
UNMARKED_FORWARDS = 100  # of the model, after which `step()` seems to have been forgotten
WATCHED_STEPS = 8  # one in so many is watched while stable; of the others, autograd's node count and sizes are compared


class Session:
    """Made by `memplug.attach`. A context manager: leaving it detaches.

    Args:
        config: the block.
        regions: the modules' regions, in forward order.
        device: where they run.
        regathers: forward gathers parameters (ZeRO 3).
    """

    def __init__(self, config: MemplugConfig, regions: Sequence[Region], device: Device, regathers: bool = False):
        self.config = config
        self.regions = list(regions)
        self.device = device
        host_bytes, tokenwise = budgets.host_budget_bytes(config), config.tokenwise
        self.plain = PlainRegions(self.regions)
        hooks = Hooks(explain=self._explain, on_larger=self.plain.enter_all, own=self._unrecorded)
        self.executor = Executor(device, host_bytes, tokenwise.min_offload_bytes, regathers, tokenwise.buffers, hooks)
        self.steps = 0
        self._planned_steps = 0
        self._timelines = 0
        self._claim: Claim | None = None
        self._kept: KeptPlans | None = None
        self.forwards = 0  # with gradients, of regions, or of a model that has none
        self._missed_steps = False
        self.steps_are_marked = False  # by a hook: the user need not call `step`
        self.owner: Any = None  # a callback that attached, and detaches
        self._in_program = False  # of a step: its first forward with gradients has begun
        self.on_step: list[Callable[[Session], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=RECENT_STEPS)
        self._last_step: float | None = None
        self._plans = tokenwise.enabled and isinstance(tokenwise.alpha, str)
        self._watches = self._plans and config.profiler.enabled
        begin = Stage.WARM_UP if self._plans else Stage.STABLE
        self._ranks = Ranks()
        self._adjuster = Adjuster(config, self.regions, self.executor, begin, self._step_peak, self._ranks)
        self._shortage = Shortage(self.executor, self._ranks)
        self._check = AlphaCheck(config, self.regions, self.executor, self._ranks)
        self._predictions = Predictions(self.executor)
        self._rounding = Rounding(self.executor, planned=self._plans)
        self.at_detach(closing.at_exit(self))
        if self._plans:
            self._adjuster.tell(f"{len(self.regions)} regions, planned for once the program repeats")
        elif config.tokenwise.enabled:
            self._adjuster.tell(f"{len(self.regions)} regions, alpha {config.tokenwise.alpha}")
        else:
            self._adjuster.tell("no regions: the planned arena alone")

    # -- what users call -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Mark the end of a training step (of the optimizer, not of a micro-batch), on every rank.

        Frameworks with a hook call it themselves.
        """
        if self.stage is Stage.DETACHED:
            return
        self.steps += 1
        recording, serving = self._recording, self._serving
        if serving is not None:
            serving.pause()
        sizes = self.executor.flow.end_step([region.native for region in self.regions])
        self._time_step()
        operators, nodes = self._take()
        if recording is not None:
            recording.end_step()
        if self.regions and self.stage is Stage.STABLE:
            self._shortage.end_step()
        else:
            self._shortage.skip_step()
        if self._plans:
            policy = self._adjuster.policy
            self._planned_steps += policy is not None
            program = Program(operators, sizes, nodes, self.plain.unseen)
            if policy is None:
                self._predictions.skip_step()
            else:
                self._predictions.end_step(policy, program, self._adjuster.programs.current.baseline)
            self._adjuster.end_step(self.steps, program)
        self._check.end_step()
        if serving is not None:
            if not recording.able:
                serving.close("steps cannot be recorded")
            serving.end_step(self._adjuster.lasting, recording.step_trace)
        self._settle()
        for callback in self.on_step:
            callback(self)
        self._begin_step()

    def record(self, file: str | Path | None = None) -> None:
        """Record the next whole step, from the end of this one on: `trace` has it then.

        Args:
            file: also save it there, for `memplug show`; with several ranks each has its own, as in
                "trace.rank0.npz" for "trace.npz".

        Raises:
            NativeError: there is no compiler here.
            RecorderError: another session of this process has the recorder, or this one is off or detached.
        """
        if self._claim is None or self.stage is Stage.DETACHED:
            raise RecorderError("a session that is detached records nothing", "Attach again.")
        if self._recording is None:
            self._claim.demand()
            self._use_recorder()
        self._recording.want(None if file is None else of_rank(Path(file)))

    @property
    def trace(self) -> Trace | None:
        """Of the last step that was recorded in detail, because of `record` or to plan from; None so far."""
        return self._recording.trace if self._recording is not None else None

    def report(self) -> dict[str, Any]:
        """Counters and predictions: bytes, seconds and counts, by name.

        `swapped_share` is how much of what was to be swapped still is, below 1 once the host memory of a rank has run
        out; `step_s` is the median of the last steps, from one `step()` to the next; `predicted_*` come from the plan
        and are None before there is one, the peak with the rounding buffers that are reserved now; `program` is the
        index of the current one among the `programs` remembered, and `replans` counts how often a plan was made.
        `sent_step_bytes` went to the host in the second step under the latest plan, or the first after it that was as
        large as the one that it was made from, and was to send `expected_step_bytes`.
        `alpha_by_link` and `alpha_by_host` are the largest fractions that the link hides behind each region's forward,
        and that the host budget holds; None until a number above 0 for alpha is checked.
        """
        programs = self._adjuster.programs
        return {
            "stage": self.stage.value,
            "steps": self.steps,
            "regions": len(self.regions),
            "plain_regions": sum(region.is_plain for region in self.regions),
            "alpha": self.config.tokenwise.alpha,
            "alpha_by_link": self._check.by_link,
            "alpha_by_host": self._check.by_host,
            "program": programs.current.index if programs.current else None,
            "programs": len(programs),
            "replans": self._adjuster.replans,
            "planned_steps": self._planned_steps,
            "swapped_fraction": report.swapped_fraction(self.config, self.solution, self.regions),
            "swapped_share": self.executor.share,
            "step_s": statistics.median(self._step_seconds) if self._step_seconds else None,
            **report.predicted(self._adjuster.policy, self._predictions, self._rounding),
            **report.counters(self.executor),
            "resumed_from": str(self._kept.file) if self._kept and self._kept.file else None,
            "not_resumed_because": (self._kept.refused or None) if self._kept else None,
            "recorded_steps": self._recording.steps if self._recording is not None else 0,
            "profiler": "operators" if self._recording is not None and self._watches else "sizes",
            "profiler_off_because": (self._claim.profiler_off_because or None) if self._claim else None,
            **report.arena(self._serving, self._claim.arena_off_because if self._claim else ""),
        }

    def detach(self) -> None:
        """Undo every patch and give all memory back, on every rank; a second call does nothing.

        Run backward on graphs in flight first.
        """
        if self.stage is Stage.DETACHED:
            return
        line = closing.line(self)
        self._adjuster.close()
        while self._undo:
            self._undo.pop()()
        if self._claim is not None:
            self._claim.release("the session is detached")
        self.executor.close()
        if self._claim is not None:  # else attaching failed
            self.tell(line)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    @property
    def stage(self) -> Stage:
        """Where the session stands."""
        return self._adjuster.stage

    @property
    def history(self) -> list[tuple[int, Stage, int, str]]:
        """(step, stage, index of the program, why) of each change of stage or program, the last thousand of them."""
        return list(self._adjuster.history)

    @property
    def solution(self) -> plan.TokenwisePlan | None:
        """The plan in force; None without one, and while plans are tried."""
        return self._adjuster.policy.solution if self._adjuster.policy else None

    # -- what hooks call -----------------------------------------------------------------------------------------------

    def watch(self, make: Callable[[], Recording]) -> None:
        """Compare the operators of steps too, and serve them from the arena, where the block asks for it.

        Without a compiler, or where another session has the recorder, one warning says what is missing.

        Args:
            make: gives the session's recording, and with it the recorder; called once the model trains, or when a step
                is to be recorded.
        """
        config = self.config
        self._claim = Claim(
            make,
            self._make_serving if config.arena.enabled else None,
            watches=self._watches,
            wanted=self._watches or bool(config.report.timeline) or config.arena.enabled,
        )

    def resume(self, job: Fingerprint) -> bool:
        """Go on from the plans of an earlier run of the job, before the first step; False: there are none.

        Called by all ranks, after `watch`.
        """
        config, folder = self.config, self.config.plan_dir
        store = PlanStore(Path(folder) if folder else None, job, self._ranks)
        self._kept = KeptPlans(store, job, config, self.regions, self.executor, self._adjuster)
        resumed = self._kept.resume()
        if resumed:
            self._settle()
        return resumed

    def begin_run(self, inputs: str, *forward: Any) -> None:
        """The first forward of a run that goes on from an earlier one's plan.

        Args:
            inputs: shapes and dtypes of what it is given.
            forward: the module, its arguments and keyword arguments.
        """
        if self._claim is None or self.stage is Stage.DETACHED:
            return
        if self._claim.take():
            self._use_recorder()
        self._kept.check(inputs, self._serving)
        self._begin_recording()
        if self._recording is not None:
            self._recording.begin_forward(*forward)

    def begin_forward(self) -> None:
        """The model, or a region of it, runs forward with gradients: the first time in a step, its program begins."""
        self.forwards += 1
        if not self.steps and self.forwards == UNMARKED_FORWARDS * max(1, len(self.regions)):
            self.miss_steps(f"{self.forwards:,} forwards with gradients have run")
        recomputes = torch._C._current_graph_task_id() != -1  # in a backward, maybe on a thread of autograd's
        if self._in_program or recomputes or self.stage is Stage.DETACHED:
            return
        self._in_program = True
        if self._claim is not None and self._claim.take():
            self._use_recorder()
        elif self._recording is not None:
            self._recording.recorder.begin_program()
        self._adjuster.begin_program()

    def miss_steps(self, seen: str) -> None:
        """Training goes on, and the ends of its steps are not marked: say so once."""
        if self._missed_steps or self.steps_are_marked:
            return
        self._missed_steps = True
        log.warning(
            "memplug: %s, and no step has ended: nothing is planned. Add `session.step()` after `optimizer.step()`",
            seen,
        )

    def _make_serving(self) -> Serving:
        config = self.config
        arena = Arena(self.device.torch_device, config.arena.checks)
        warmup_steps = 0 if self._plans else config.profiler.warmup_steps  # a plan of regions comes after them
        serving = Serving(config.arena, arena, warmup_steps, self._adjuster.tell)
        if self._kept is not None and self._kept.file is not None and not self.steps:
            self._kept.serve(serving)
        return serving

    @contextlib.contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """What runs inside belongs to the optimizer, in a recording."""
        if self._recording is None or not self._recording.placed:
            yield
            return
        recorder = self._recording.recorder
        former = recorder.enter_optimizer()
        try:
            yield
        finally:
            recorder.leave(former)

    def at_detach(self, undo: Callable[[], None]) -> None:
        """Register how to undo a patch; undone in reverse order."""
        self._undo.append(undo)

    @contextlib.contextmanager
    def explaining(self, phase: str) -> Iterator[None]:
        """A device out-of-memory error that passes gets a note of what memplug knew."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._explain(phase, None, error)
            raise

    def _explain(self, phase: str, region: Region | None, error: BaseException) -> None:
        peak_bytes, name = budgets.peak_bytes(self.device), region.name if region else None
        report.add_note(error, report.out_of_memory_note(phase, name, self.report(), peak_bytes))

    def tell(self, text: str) -> None:
        """One line, on rank 0."""
        self._adjuster.tell(text)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def _recording(self) -> Recording | None:
        return self._claim.recording if self._claim is not None else None

    @property
    def _serving(self) -> Serving | None:
        return self._claim.serving if self._claim is not None else None

    def _use_recorder(self) -> None:
        self._recording.recorder.watch(self._watches)

    def _unrecorded(self) -> contextlib.AbstractContextManager[Any]:
        recording = self._recording
        return contextlib.nullcontext() if recording is None else recording.recorder.suspended

    def _settle(self) -> None:
        """Whatever the next step is to run by is in force."""
        policy, has_arena = self._adjuster.policy, self._claim is not None and self._claim.has_arena
        if self._plans:
            self.plain.end_step(policy)
        self._rounding.end_step(policy, self.stage is Stage.STABLE and not has_arena)
        if self.steps and self._kept is not None:
            self._kept.end_step(self._serving, has_arena, self._recording)

    def _take(self) -> tuple[np.ndarray | None, int]:
        """Operators and nodes of the step."""
        if self._recording is None:
            return None, 0
        recorder = self._recording.recorder
        return recorder.take(), recorder.take_nodes()

    def _begin_step(self) -> None:
        """Called just before the next step starts."""
        if not self._in_program and self._claim is not None and self._claim.take():
            self._use_recorder()  # it trains, in forwards that no hook sees
        self._in_program = False
        self._begin_recording()

    def _begin_recording(self) -> None:
        recording, serving = self._recording, self._serving
        if recording is not None:
            stable = self.stage is Stage.STABLE
            recording.recorder.watch(self._watches and not (stable and self.steps % WATCHED_STEPS))
            self._want_timeline()
            recording.begin_step(
                self._adjuster.detail,
                traced=serving is not None and serving.records,
                placed=serving is not None and serving.places,
            )
        if serving is not None:
            serving.begin_step()

    def _want_timeline(self) -> None:
        """`report.timeline`: the step after each plan; where nothing is planned, the third one."""
        plans = self._adjuster.replans if self._plans else int(self.steps >= 2)
        folder = self.config.report.timeline
        if folder and self.stage is Stage.STABLE and plans > self._timelines:
            self._timelines = plans
            folder = Path(TIMELINE_FOLDER if folder is True else folder)
            self.record(unused(folder / f"step{self.steps + 1:06}.npz"))

    def _step_peak(self) -> int | None:
        return self._recording.peak_bytes if self._recording is not None else None

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_step is not None:
            self._step_seconds.append(now - self._last_step)
        self._last_step = now


def initial_regions(config: MemplugConfig, named_kinds: Sequence[tuple[str, str]]) -> list[Region]:
    """Regions at the policy they start with: the block's alpha, or the safest setting until there is a plan.

    Args:
        named_kinds: (qualified name, class name) of each module.
    """
    alpha = config.tokenwise.alpha
    return [Region(name, kind, rows=0.0 if isinstance(alpha, str) else float(alpha)) for name, kind in named_kinds]
