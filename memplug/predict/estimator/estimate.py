"""`memplug.estimate`: each mode's step on the virtual device, one after the other."""

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

from memplug.config import MemplugConfig, load_config
from memplug.errors import BudgetError, EstimateError, RegionError
from memplug.files import path_of
from memplug.hooks.attach import attach, find_layers
from memplug.predict.estimator import engine as engines
from memplug.predict.estimator import modes as ways
from memplug.predict.estimator.answers import Answers
from memplug.predict.estimator.bound import bound
from memplug.predict.estimator.result import Estimate, ModeEstimate, Span
from memplug.predict.estimator.training import MakeOptimizer, Training
from memplug.predict.estimator.values import Values
from memplug.predict.virtual import Hardware, VirtualDevice
from memplug.session.session import Session
from memplug.session.table import Stage

MOST_STEPS = 60  # until a program has its plan and its addresses
LASTING_STEPS = 1  # after which optimizer states and gradients are there
SERVED_STEPS = 2  # after which what the arena reserves has led to another plan, or not
KEEPING_STEPS = 4  # in which a plan shows that it lasts
UNLIMITED_BYTES = float(1 << 62)
AnswersTo = Callable[[VirtualDevice, nn.Module], contextlib.AbstractContextManager[Any]]

log = logging.getLogger("memplug")


def estimate(
    make_model: Callable[[], nn.Module],
    example_inputs: Callable[[], Any],
    config: MemplugConfig | dict[str, Any] | str | Path | None = None,
    gpu: str | Path | Hardware = "h200",
    modes: Sequence[str] = ways.MODES,
    *,
    make_optimizer: MakeOptimizer | None = None,
    engine: Mapping[str, Any] | None = None,
    gpus: int = 1,
    attention: str | None = None,
    host_bytes: float = UNLIMITED_BYTES,
    plan_dir: str | Path | None = None,
    trace: str | Path | None = None,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """Time and memory of a training step of any module on a GPU that need not be there.

    The process must not have run a backward before, unless on the virtual device: torch learns of devices before that.
    Modes that do not fit the GPU are estimated all the same.

    Args:
        make_model: makes the module, for each mode anew; tensors are made on the virtual device.
        example_inputs: what forward is called with: a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments; those on other devices, such as meta, are moved without their values.
        config: as in `memplug.attach`.
        gpu: the name of a profile of configs/hardware, such as "h200", the path of another one, or a profile.
        modes: of `MODES`.
        make_optimizer: of parameters; None: the step has none, and gradients stay.
        engine: the contents of a DeepSpeed JSON: its engine trains, with its own optimizer; micro-batches are what
            `example_inputs` gives, accumulated as it says. DeepSpeed never frees an engine's memory, so that this is
            for one mode in a process (ranks.py). None: there is no engine.
        gpus: ranks of the engine, all in one machine, of which the first one is estimated.
        attention: the back end of it, such as "flash"; None: the profile's first one.
        host_bytes: memory of the host for one rank, of which "host_budget_gib": "auto" is a share.
        plan_dir: the folder that memplug's plan is written to, for a run of the same job on all its ranks; None: it is
            not written.
        trace: the file of `record_values`, of a real step at the same sizes: what the model's code reads of its tensors
            is as there. None: a number is 1, a condition and all of a mask true, and a warning says so where that may
            make another step of it; most other operators that need values fail.
        tell: called with the name of each mode before it runs.

    Raises:
        ConfigError: the block cannot be used.
        EstimateError: a mode has no such name, an operator needs values, and there are none, or the trace is of
            another step, or the engine offloads; or arguments do not go together.
        HardwareError: there is no such GPU, or it has no such attention, or torch no place for the virtual device.
        RegionError: no decoder layers were found.
    """
    refuse_plan(modes, plan_dir)
    if engine is not None and len(modes) > 1:
        raise EstimateError("a process estimates one mode of an engine", "Estimate each mode in a process of its own.")
    if engine is not None and make_optimizer is not None:
        raise EstimateError("an engine makes its own optimizer", "Leave out make_optimizer.")
    if engine is None and gpus != 1:
        raise EstimateError(f"gpus is {gpus}, and there is no engine", "Give a DeepSpeed JSON's contents as engine.")
    make_training: Callable[[], Training] = functools.partial(Training, make_model, example_inputs, make_optimizer)
    rank: Callable[[], Any] = contextlib.nullcontext
    if engine is not None:
        settings = engines.settings_of(engine, engines.micro_batch_of(engine, gpus), gpus)
        make_training = functools.partial(engines.EngineTraining, make_model, example_inputs, settings)
        rank = functools.partial(engines.rank_of, gpus)
    answers = Answers(Values.read(trace) if trace is not None else None)
    options = {"attention": attention, "host_bytes": host_bytes, "plan_dir": plan_dir, "tell": tell}
    found = estimate_training(make_training, config, gpu, modes, rank=rank, answers_to=answers.to, **options)
    if answers.made_up:
        log.warning(
            "the model reads values, which the estimate makes up (a number is 1, all of a mask is true): %s. "
            "Record those of a real step with `memplug.record_values`, and give them to the estimate",
            ", ".join(answers.made_up),
        )
    return found


def estimate_training(
    make_training: Callable[[], Training],
    config: MemplugConfig | dict[str, Any] | str | Path | None,
    gpu: str | Path | Hardware,
    modes: Sequence[str],
    *,
    rank: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    answers_to: AnswersTo = lambda device, model: contextlib.nullcontext(),
    attention: str | None = None,
    host_bytes: float = UNLIMITED_BYTES,
    plan_dir: str | Path | None = None,
    tell: Callable[[str], None] = lambda mode: None,
) -> Estimate:
    """As `estimate`, of anything that trains.

    Args:
        make_training: called for each mode anew.
        rank: a context in which this process is one rank of several; there is a virtual device already.
        answers_to: a context in which the device answers where the model reads values.
    """
    unknown = [mode for mode in modes if mode not in ways.MODES]
    if unknown:
        raise EstimateError(f"there is no mode {unknown[0]!r}", f"Choose of {', '.join(ways.MODES)}.")
    if not host_bytes >= 0:
        raise EstimateError(f"host memory is {host_bytes} bytes", "Give a number from 0.")
    host_bytes = min(host_bytes, UNLIMITED_BYTES)
    parsed = load_config({"enabled": True} if config is None else config)
    hardware = gpu if isinstance(gpu, Hardware) else Hardware.named(gpu)
    plans = path_of(plan_dir, "folder of plans", EstimateError) if plan_dir is not None else None
    blocks = {mode: ways.block_of(mode, parsed, plans) for mode in modes}
    VirtualDevice(hardware, attention=attention)  # that ranks are of
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
    """Drops the variables of all frames that an error came through, in which tensors of the device would live for as
    long as the caller keeps the error.

    Args:
        handled: the error that the caller was handling already, whose frames stay as they are.
    """
    while error is not None and error is not handled:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def refuse_plan(modes: Sequence[str], plan_dir: str | Path | None) -> None:
    """Raises EstimateError: a plan is asked for, and none of the modes has one."""
    if plan_dir is not None and "memplug" not in modes:
        raise EstimateError("none of these modes has a plan to write", "Estimate mode memplug, or leave out plan_dir.")


def _estimated(
    device: VirtualDevice, training: Training, mode: str, block: MemplugConfig, answers_to: AnswersTo
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


def _attached(device: VirtualDevice, training: Training, mode: str, block: MemplugConfig) -> ModeEstimate:
    with attach(training.target, block) as session:
        step = functools.partial(_step, training, session)
        plain, plan, served = None, None, 0
        for _ in range(MOST_STEPS):
            state, plans = (session.report()[name] for name in ("arena", "replans"))
            served = served + 1 if state == "serving" else 0
            if plan != plans and session.stage is Stage.STABLE and session.steps >= LASTING_STEPS:
                plain, plan = _measured(device, training, step, mode, session, None), plans
            elif plan == plans and (served > SERVED_STEPS or state == "off"):
                break
            else:
                step()
        if plain is None:
            raise EstimateError(f"in {MOST_STEPS} steps of mode {mode!r} no plan was made: each is another program")
        for _ in range(KEEPING_STEPS if block.plan_dir else 0):
            step()
        report = session.report()
        if report["arena"] != "serving":
            why = report["arena_off_because"] or f"it had no addresses after {session.steps} steps: {report['arena']}"
            return replace(plain, arena_off_because=why)
        return _measured(device, training, step, mode, session, plain)


def _step(training: Training, session: Session) -> None:
    training.step()
    if not training.marks_steps:
        session.step()


def _layers(model: nn.Module, block: MemplugConfig, mode: str) -> Sequence[tuple[str, nn.Module]]:
    """That a mode recomputes; a module without layers can be kept all the same."""
    tokenwise = block.tokenwise.model_copy(update={"enabled": True})
    try:
        return find_layers(model, block.model_copy(update={"tokenwise": tokenwise}))
    except RegionError:
        if mode == "keep":
            return ()
        raise


def _measured(
    device: VirtualDevice,
    training: Training,
    step: Callable[[], None],
    mode: str,
    session: Session | None,
    plain: ModeEstimate | None,
) -> ModeEstimate:
    """One more step.

    Args:
        plain: the same without the arena, which this step is served from; None: it is not.
    """
    before = session.report() if session is not None else {}
    began_s, flops = device.synchronize(), device.flops()
    device.reset_peaks()
    device.keep_spans(True)
    try:
        step()
    finally:
        device.keep_spans(False)
        spans = device.take_spans()
    step_s, usage = device.synchronize() - began_s, device.usage()
    after = session.report() if session is not None else {}
    return ModeEstimate(
        mode=mode,
        step_s=step_s,
        flops=device.flops() - flops,
        peak_allocated_bytes=plain.peak_allocated_bytes if plain is not None else usage.allocated_peak,
        peak_reserved_bytes=plain.peak_reserved_bytes if plain is not None else usage.reserved_peak,
        arena_reserved_bytes=usage.reserved_peak if plain is not None else None,
        host_bytes=after.get("host_pool_bytes", 0),
        to_host_bytes=_change(before, after, "offloaded_bytes", "swap_released_bytes"),
        to_device_bytes=_change(before, after, "prefetched_bytes", "swap_prefetched_bytes"),
        bound=bound(spans, step_s),
        fits=usage.reserved_peak <= device.hardware.memory_bytes,
        spans=_spans(spans, began_s),
        schedule_s=training.schedule_s,
    )


def _spans(noted: Sequence[Any], began_s: float) -> tuple[Span, ...]:
    """Spans from the step's beginning; streams count from 0, the default one: theirs go on from mode to mode."""
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
