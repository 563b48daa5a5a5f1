"""`memplug.estimate`: runs a training in each mode on the virtual device, and measures one step of it."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from memplug.config import MemplugConfig
from memplug.errors import BudgetError, EstimateError, RegionError, coded
from memplug.hooks.attach import attach
from memplug.hooks.layers import find_layers
from memplug.predict.estimator import engine as engines
from memplug.predict.estimator import modes as ways
from memplug.predict.estimator.answers import Answers
from memplug.predict.estimator.bound import bound
from memplug.predict.estimator.request import UNLIMITED_BYTES, EstimateRequest
from memplug.predict.estimator.result import Estimate, ModeEstimate, Span
from memplug.predict.estimator.training import MakeOptimizer, VirtualTraining
from memplug.predict.estimator.values import Values
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile, VirtualDevice
from memplug.session.session import Session
from memplug.session.table import Stage

MOST_STEPS = 60  # upper limit of steps until memplug has planned decisions and addresses
LASTING_STEPS = 1  # steps until optimizer states and gradients exist
SERVED_STEPS = 2  # first steps with the arena; its reservation may still cause a replan in them
ROOM_STEPS = 8  # steps after which an arena's room counts as large enough, if it did not grow in them
KEEPING_STEPS = 4  # further steps, in which memplug writes the plan to disk
AnswersTo = Callable[[VirtualDevice, nn.Module], contextlib.AbstractContextManager[Any]]

log = logging.getLogger("memplug")


def estimate(
    make_model: Callable[[], nn.Module],
    example_inputs: Callable[[], Any],
    config: MemplugConfig | dict[str, Any] | str | Path | None = None,
    gpu: str | Path | GpuProfile = "h200",
    modes: Sequence[str] = ways.MODES,
    *,
    make_optimizer: MakeOptimizer | None = None,
    engine: Mapping[str, Any] | None = None,
    gpus: int = 1,
    attention: str | None = None,
    host_bytes: float = UNLIMITED_BYTES,
    plan_dir: str | Path | None = None,
    trace: str | Path | None = None,
    routing: str | None = None,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """Estimate time and memory of any module's training step on a GPU, without needing that GPU.

    Call it before the process runs a backward on any other device, because torch lists its devices at the first
    backward. A mode that takes more memory than the GPU has is estimated too (`ModeEstimate.fits`).

    Args:
        make_model: Makes the module; called once for each mode, with the virtual device as torch's default device.
        example_inputs: Makes the arguments of forward: a tensor, a tuple of positional arguments, or a mapping of
            keyword arguments. Tensors on other devices, such as meta, are moved without their values.
        config: memplug's block, as in `memplug.attach`; None: the default block, enabled.
        gpu: The name of a profile in configs/hardware, such as "h200", the path of another profile, or a `GpuProfile`.
        modes: Any of "keep", "full", "selective" and "memplug" (see `MODES` in `modes.py`).
        make_optimizer: Makes the optimizer from the module's parameters; None: the step has no optimizer, and gradients
            stay from step to step.
        engine: The contents of a DeepSpeed JSON: DeepSpeed's engine trains, with the JSON's optimizer and gradient
            accumulation, and `example_inputs` makes one micro-batch. None: no engine. DeepSpeed never frees an engine's
            memory, so a process can estimate only one mode with an engine (`ranks.py` starts a process for each mode).
        gpus: The number of the engine's ranks, all in one machine; rank 0 is estimated.
        attention: The attention back end, such as "flash"; None: the first one in the profile.
        host_bytes: Host memory available to one rank; "host_budget_gib": "auto" takes a share of it.
        plan_dir: The folder for memplug's plan; all ranks of a real run of the same job can use the plan. None: the
            plan is not written.
        trace: A file that `record_values` wrote in a real step with the same batch and sequence length; the model reads
            tensor values from it. The experts of a Hugging Face mixture that run in a loop get tokens as likely as in
            that step, drawn anew in each step; all other values are the same in each step, and if sizes depend on them,
            a warning names the source lines. None: the device makes values up: a number is 1, a condition is true, and
            so is every element of a mask. One warning names the source lines where this may change the step. Most other
            operators that need values fail.
        routing: How tokens spread over the experts of a Hugging Face mixture that run in a loop: "even", "uniform",
            "zipf" or, for example, "zipf:0.5" (see `Routing`). Unless it is even, each step draws other numbers of
            tokens, and the arena has a room for them. None: see `trace`.
        tell: Called with the name of each mode before the mode runs.

    Returns:
        The estimate of each mode, or its error if no plan fits the budget (`Estimate.impossible`).

    Raises:
        ConfigError: The block cannot be used.
        EstimateError: A mode's name is unknown; an operator needs values that are not in the trace; the trace belongs
            to another step; the model has no experts to route to; the DeepSpeed JSON asks for offloading; or the
            arguments contradict each other.
        HardwareError: The GPU or its attention back end is unknown, or the virtual device cannot be made (see
            `VirtualDevice`).
        RegionError: No decoder layers were found.
    """
    request = EstimateRequest.of(
        config,
        gpu,
        modes,
        attention=attention,
        host_bytes=host_bytes,
        plan_dir=plan_dir,
        trace=trace,
        routing=routing,
    )
    return estimate_model(
        make_model, example_inputs, request, make_optimizer=make_optimizer, engine=engine, gpus=gpus, tell=tell
    )


def estimate_model(
    make_model: Callable[[], nn.Module],
    example_inputs: Callable[[], Any],
    request: EstimateRequest,
    *,
    make_optimizer: MakeOptimizer | None = None,
    engine: Mapping[str, Any] | None = None,
    gpus: int = 1,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """Estimate a module as `estimate` does, with arguments that an `EstimateRequest` has checked.

    Args:
        make_model: See `estimate`.
        example_inputs: See `estimate`.
        request: The block, the GPU and the modes.
        make_optimizer: See `estimate`.
        engine: See `estimate`.
        gpus: See `estimate`.
        tell: See `estimate`.
    """
    if engine is not None and len(request.modes) > 1:
        raise EstimateError(
            "a process can estimate only one mode of an engine", "Estimate each mode in a process of its own."
        )
    if engine is not None and make_optimizer is not None:
        raise EstimateError("an engine makes its own optimizer", "Leave out make_optimizer.")
    if engine is None and gpus != 1:
        raise EstimateError(
            f"gpus is {gpus}, and no engine is given", "Pass the contents of a DeepSpeed JSON as engine."
        )
    make_training: Callable[[], VirtualTraining] = functools.partial(
        VirtualTraining, make_model, example_inputs, make_optimizer
    )
    rank: Callable[[], Any] = contextlib.nullcontext
    if engine is not None:
        settings = engines.settings_of(engine, engines.micro_batch_of(engine, gpus), gpus)
        make_training = functools.partial(engines.EngineTraining, make_model, example_inputs, settings)
        rank = functools.partial(engines.rank_of, gpus)
    answers = Answers(Values.read(request.trace) if request.trace is not None else None, request.routing)
    found = estimate_training(make_training, request, rank=rank, answers_to=answers.to, tell=tell)
    if answers.made_up:
        text = (
            "the model reads values, which the estimate makes up (a number is 1, all of a mask is true): %s. "
            "Record those of a real step with `memplug.record_values`, and pass the file to the estimate as trace"
        )
        log.warning(coded("MP028", text), ", ".join(answers.made_up))
    if answers.repeated and any(each.arena_bytes for each in found.modes.values()):
        text = (
            "sizes depend on values at %s, and each step of the estimate has those of the trace: if they change from "
            "step to step, training reserves more memory with the arena, which leaves room for them"
        )
        log.warning(coded("MP028", text), ", ".join(answers.repeated))
    return found


def estimate_workload(
    workload: Workload, request: EstimateRequest, tell: Callable[[str], None] = lambda mode: None
) -> Estimate:
    """Estimate a workload on one GPU, as `estimate` does."""
    make_optimizer = workload.make_optimizer if workload.optimizer else None
    return estimate_model(workload.make_model, workload.inputs, request, make_optimizer=make_optimizer, tell=tell)


def estimate_training(
    make_training: Callable[[], VirtualTraining],
    request: EstimateRequest,
    *,
    rank: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    answers_to: AnswersTo = lambda device, model: contextlib.nullcontext(),
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """Estimate a `VirtualTraining` in each mode, as `estimate` does.

    Args:
        make_training: Makes the training; called once for each mode.
        request: The block, the GPU and the modes.
        rank: Makes a context in which this process is one rank of several; entered after the virtual device is made.
        answers_to: Called with the device and the model; makes a context in which the model's reads of tensor values
            are answered.
        tell: Called with the name of each mode before the mode runs.
    """
    hardware, attention = request.hardware, request.attention
    blocks = {mode: ways.block_of(mode, request.config, request.plan_dir) for mode in request.modes}
    host_bytes = min(request.host_bytes, UNLIMITED_BYTES)
    VirtualDevice(hardware, attention=attention)  # `rank()` needs a virtual device
    found: dict[str, ModeEstimate] = {}
    impossible: dict[str, BudgetError] = {}
    handled = sys.exc_info()[1]
    with rank():
        for mode, block in blocks.items():
            tell(mode)
            device = VirtualDevice(hardware, attention=attention, bounded=False, host_bytes=host_bytes)
            device.restart()
            try:
                found[mode] = _estimated(device, make_training(), mode, block, answers_to)
            except BudgetError as error:
                _clear_frames(error, handled)
                impossible[mode] = error
            except Exception as error:
                _clear_frames(error, handled)
                raise
            finally:
                device.restart()
    return Estimate(hardware, found, impossible)


def _clear_frames(error: BaseException | None, handled: BaseException | None) -> None:
    """Clear the local variables of all frames that an error and its causes passed through.

    The variables would keep tensors of the device alive for as long as the caller keeps the error.

    Args:
        error: The error.
        handled: The error that the caller was already handling when the estimate began; its frames stay as they are.
    """
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _estimated(
    device: VirtualDevice, training: VirtualTraining, mode: str, block: MemplugConfig, answers_to: AnswersTo
) -> ModeEstimate:
    try:
        with answers_to(device, training.model):
            ways.recompute((layer for _, layer in _layers(training.model, block, mode)), mode)
            if mode == "memplug" or block.arena.enabled:
                return _attached(device, training, mode, block)
            for _ in range(LASTING_STEPS):
                training.step()
            found = _measured(device, training, training.step, mode, None, None)
            return replace(found, arena_off_because="the block switches it off")
    finally:
        training.close()


def _attached(device: VirtualDevice, training: VirtualTraining, mode: str, block: MemplugConfig) -> ModeEstimate:
    with attach(training.target, block) as session:
        step = functools.partial(_step, training, session)
        plain, plan, served, amendments = None, None, 0, 0
        for _ in range(MOST_STEPS):
            report = session.report()
            state, plans = report.arena.state, report.replans
            served = served + 1 if state == "serving" and report.arena.amendments == amendments else 0
            amendments, enough = report.arena.amendments, ROOM_STEPS if report.arena.room_bytes else SERVED_STEPS
            if plan != plans and session.stage is Stage.STABLE and session.steps >= LASTING_STEPS:
                plain, plan = _measured(device, training, step, mode, session, None), plans
            elif plan == plans and (served > enough or state == "off"):
                break
            else:
                step()
        if plain is None:
            raise EstimateError(
                f"no plan was made in {MOST_STEPS} steps of mode {mode!r}: each step is a different program",
                "Estimate a module that runs the same operators in every step.",
            )
        for _ in range(KEEPING_STEPS if block.plan_dir else 0):
            step()
        arena = session.report().arena
        if arena.state != "serving":
            why = arena.off_because or f"the arena had no addresses after {session.steps} steps: {arena.state}"
            return replace(plain, arena_off_because=why)
        return _measured(device, training, step, mode, session, plain)


def _step(training: VirtualTraining, session: Session) -> None:
    training.step()
    if not training.marks_steps:
        session.step()


def _layers(model: nn.Module, block: MemplugConfig, mode: str) -> Sequence[tuple[str, nn.Module]]:
    """Return the layers that memplug finds, by name; only in mode "keep" may there be none."""
    silent = block.model_copy(update={"tokenwise": block.tokenwise.model_copy(update={"enabled": False})})
    layers, _ = find_layers(model, silent)
    if not layers and mode != "keep":
        raise RegionError(
            f"no layers were recognised in {type(model).__name__}, and no modules repeat in it",
            'Name its layers in "tokenwise.regions".',
            code="MP001",
        )
    return layers


def _measured(
    device: VirtualDevice,
    training: VirtualTraining,
    step: Callable[[], None],
    mode: str,
    session: Session | None,
    plain: ModeEstimate | None,
) -> ModeEstimate:
    """Run one more step and return its time and memory.

    Args:
        device: The virtual device.
        training: The training that the step belongs to.
        step: Runs the step.
        mode: The mode's name.
        session: memplug's session, whose report counts the copied bytes; None: memplug is not attached.
        plain: The estimate of the same step without the arena; None: the arena does not serve this step.
    """
    before = session.report().as_dict() if session is not None else {}
    began_s, flops = device.synchronize(), device.flops()
    device.reset_peaks()
    device.keep_spans(True)
    try:
        step()
    finally:
        device.keep_spans(False)
        spans = device.take_spans()
    step_s, usage = device.synchronize() - began_s, device.usage()
    after = session.report().as_dict() if session is not None else {}
    return ModeEstimate(
        mode=mode,
        step_s=step_s,
        flops=device.flops() - flops,
        peak_allocated_bytes=plain.peak_allocated_bytes if plain is not None else usage.allocated_peak,
        peak_reserved_bytes=plain.peak_reserved_bytes if plain is not None else usage.reserved_peak,
        arena_reserved_bytes=usage.reserved_peak if plain is not None else None,
        arena_bytes=after["arena_bytes"] if plain is not None else 0,
        arena_room_bytes=after["arena_room_bytes"] if plain is not None else 0,
        host_bytes=after.get("host_pool_bytes", 0),
        to_host_bytes=_change(before, after, "offloaded_bytes", "swap_released_bytes"),
        to_device_bytes=_change(before, after, "prefetched_bytes", "swap_prefetched_bytes"),
        bound=bound(spans, step_s),
        fits=usage.reserved_peak <= device.hardware.memory_bytes,
        spans=_spans(spans, began_s),
        schedule_s=training.schedule_s,
    )


def _spans(noted: Sequence[Any], began_s: float) -> tuple[Span, ...]:
    """Return the spans of a step, with times relative to the step's beginning, in seconds.

    Renumber the streams from 0, the default stream: the device does not reset its stream numbers between modes.
    """
    streams = sorted({0, *(each.stream for each in noted)})
    return tuple(
        Span(
            streams.index(each.stream),
            each.begin_s - began_s,
            each.end_s - began_s,
            each.queued_s - began_s,
            each.name,
        )
        for each in noted
    )


def _change(before: Mapping[str, Any], after: Mapping[str, Any], *names: str) -> int:
    return sum(after.get(name, 0) - before.get(name, 0) for name in names)
