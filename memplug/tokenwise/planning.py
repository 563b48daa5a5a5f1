"""Turns the executor's observations into the planner's problem, and the planner's solution into settings of regions.

Executor and planner do not know each other. One step is observed at the safest setting (inputs and attention outputs
swapped, every matmul recomputed), with device times around every operator. The tapes of this step become the planner's
regions. The groups of the planner's solution become the decisions of each region.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from statistics import fmean, median
from typing import Any

from memplug.sizes import HOST_ROW_BYTES
from memplug.tokenwise import host_time
from memplug.tokenwise.engine import operators
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.tape import Form, Tape
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.decisions import Decision, Decisions, Setting
from memplug.tokenwise.plan.model import part_bytes

Seconds = Callable[[Any, Any], float]


class StepObserver:
    """A listener of `Executor.time_forwards` that keeps the last timed tape of every region.

    The keys of all dictionaries are names of regions. Here the inputs of a region include the results of its
    collectives, and of its operators that choose (topk, sort): memplug swaps these whole, like inputs.

    Attributes:
        tapes: last tape of each region.
        input_bytes: bytes of the inputs that one forward swaps; the mean over the region's forwards, since not all of
            them swap the same inputs.
        largest_input_bytes: bytes of the inputs that one forward swaps; maximum over the region's forwards.
        input_tensors: number of inputs that one forward swaps; maximum over the region's forwards.
        given_bytes: bytes of all tensors among a forward's arguments; maximum over the region's forwards.
        saved_bytes: bytes that a forward's backward asks for; maximum over the region's forwards.
        is_agreed: see `Setting`.
        is_large: returns whether a tensor of this many bytes may be offloaded; smaller ones stay on the device.
    """

    def __init__(self, is_large: Callable[[int], bool]) -> None:
        self.is_large = is_large
        self.clear()

    def clear(self) -> None:
        """Drop all tapes."""
        self.tapes: dict[str, Tape] = {}
        self.input_bytes: dict[str, float] = {}
        self.largest_input_bytes: dict[str, int] = {}
        self.input_tensors: dict[str, int] = {}
        self.given_bytes: dict[str, int] = {}
        self.saved_bytes: dict[str, int] = {}
        self._whole: dict[str, set[int]] = {}
        self._forwards: Counter[str] = Counter()
        self.is_agreed = False

    def __call__(self, region: Region, frame: Any, tape: Tape) -> None:
        """Note the tape and the sizes of a timed frame whose forward is over; the largest forward's tape stays."""
        name = region.name
        # results of collectives and of operators that choose are swapped whole, like inputs; an opaque region swaps
        # only its input
        whole = tape.received | _chosen(tape) if not region.opaque else set()
        if frame.given_bytes >= self.given_bytes.get(name, 0):
            self.tapes[name], self._whole[name], self.given_bytes[name] = tape, whole, frame.given_bytes
        self.saved_bytes[name] = max(frame.saved_bytes, self.saved_bytes.get(name, 0))
        large = list(filter(self.is_large, (tape.bytes[number] for number in whole)))
        input_bytes, before = frame.offered_bytes + sum(large), self.input_bytes.get(name, 0.0)
        self._forwards[name] += 1
        self.input_bytes[name] = before + (input_bytes - before) / self._forwards[name]
        self.largest_input_bytes[name] = max(input_bytes, self.largest_input_bytes.get(name, 0))
        self.input_tensors[name] = max(frame.offered + len(large), self.input_tensors.get(name, 0))

    def settle(self, is_agreed: bool) -> None:
        """Set whether recompute passes may run units that communicate again (`memplug.tokenwise.agreement`).

        If they may not, the outputs of such units are swapped like inputs.

        Args:
            is_agreed: see `Setting`.
        """
        self.is_agreed = is_agreed
        for name, tape in self.tapes.items() if is_agreed else ():
            shared = self._whole[name] & tape.received & _shared(tape)
            large = list(filter(self.is_large, (tape.bytes[number] for number in shared)))
            self.input_bytes[name] -= sum(large)
            self.largest_input_bytes[name] -= sum(large)
            self.input_tensors[name] -= len(large)


def group_regions(regions: Sequence[Region], observer: StepObserver) -> dict[str, list[Region]]:
    """Set the key of every observed region, and return the regions by key.

    The key names the operator sequence: regions that ran the same operators share a plan.
    """
    groups: dict[str, list[Region]] = {}
    for region in regions:
        tape = observer.tapes.get(region.name)
        if tape is not None:
            region.key = f"{region.kind}:{'opaque' if region.opaque else fingerprint(tape)}"
            groups.setdefault(region.key, []).append(region)
    return groups


def fingerprint(tape: Tape) -> str:
    """Return a name for the operator sequence and the storages that backward asked for, the same in every process."""
    text = ";".join(f"{record.func}{record.inputs}{record.outputs}" for record in tape.records)
    return hashlib.sha256(f"{text}|{sorted(tape.asked)}".encode()).hexdigest()[:12]


def describe(groups: dict[str, list[Region]], observer: StepObserver, executor: Executor) -> list[plan.PlannedRegion]:
    """Return the planner's regions, one for each key, with measured times and bytes.

    Times are medians over the regions with the same key.
    """
    seconds = executor.device.seconds_between
    backwards_s = _backward_seconds(observer, seconds)
    with executor.hooks.own():
        host = executor.device.host_time or host_time.measure()
    described = []
    for key, members in groups.items():
        tapes = [observer.tapes[region.name] for region in members]
        in_flight = max(1, max(region.native.peak for region in members))
        span_s, launched = median(seconds(*tape.span) for tape in tapes), len(tapes[0].records)
        busy_s = median(sum(seconds(*stamp) for stamp in tape.stamps) for tape in tapes)
        forward_s = host.forward_s(launched, span_s, busy_s)
        backward_s = median(backwards_s[region.name] for region in members)
        sending = _sending(members)
        overhead_forward_s, overhead_backward_s = host.overhead_s(
            launched, forward_s, backward_s, waits=executor.device.runs_behind
        )
        operations, saved, given = _module(forward_s) if members[0].opaque else _replayed(tapes, seconds, observer)
        described.append(
            plan.PlannedRegion(
                key=key,
                instances=len(sending) * in_flight,
                staying=(len(members) - len(sending)) * in_flight,
                operators=operations,
                saved=saved,
                given=given,
                input_bytes=ceil(fmean(observer.input_bytes[region.name] for region in sending)),
                input_tensors=max(observer.input_tensors[region.name] for region in sending),
                forward_s=forward_s,
                backward_s=backward_s,
                overhead_forward_s=overhead_forward_s,
                overhead_backward_s=overhead_backward_s,
                saved_bytes=max(observer.saved_bytes[region.name] for region in members),
            )
        )
    return described


def _chosen(tape: Tape) -> set[int]:
    """Return the storages made by operators that choose (topk, sort): a recompute pass must not make them anew."""
    return {
        n for record in tape.records if operators.kind_of(record.func) is CaptureKind.CHOICE for n in record.outputs
    }


def _shared(tape: Tape) -> set[int]:
    """Return the storages made by units that communicate."""
    return {n for record in tape.records if operators.is_shared(record.func) for n in record.outputs}


def _replayed(
    tapes: list[Tape], seconds: Seconds, observer: StepObserver
) -> tuple[tuple[plan.PlannedOperator, ...], frozenset[int], frozenset[int]]:
    """Describe the operators of regions that ran the same operator sequence.

    Returns:
        The operators, the storages that backward asks for, and the storages that exist before the recompute pass.
    """
    tape = tapes[0]
    operations = tuple(_operator(tapes, index, seconds, observer) for index in range(len(tape.records)))
    received = tape.received - _shared(tape) if observer.is_agreed else tape.received
    given = tape.given | received | _chosen(tape) | _small_parts(tape, observer)
    return operations, frozenset(tape.asked), frozenset(given)


def _small_parts(tape: Tape, observer: StepObserver) -> set[int]:
    """Return the storages of units that are too small to offload; they stay on the device, and are not recomputed."""
    parts = [record for record in tape.records if operators.is_part_of_unit(record.func)]
    return {n for record in parts for n in record.outputs if not observer.is_large(tape.bytes[n])}


def _module(forward_s: float) -> tuple[tuple[plan.PlannedOperator, ...], frozenset[int], frozenset[int]]:
    """Return an opaque region for the planner: one operator, which runs the module again from its input."""
    whole = plan.PlannedOperator(
        name="the module", time_s=forward_s, inputs=(0,), outputs=(1,), output_bytes=0, capture="never"
    )
    return (whole,), frozenset({1}), frozenset({0})


def _sending(members: Sequence[Region]) -> Sequence[Region]:
    """Return the regions whose tensors leave the device before backward: those that do not offload late.

    If all of them offload late, return all. If they have units that communicate, return all too: such a unit must run
    again on all ranks or on none, but ranks may differ in which regions offload late.
    """
    if any(region.native.shares for region in members):
        return members
    return [region for region in members if not region.native.offloads_late] or members


def decisions_of(
    solution: plan.TokenwisePlan,
    groups: dict[str, list[Region]],
    observer: StepObserver,
    observed_peak_bytes: int | None = None,
    full_recomputation_s: float | None = None,
    held_bytes: int | None = None,
    scale: float = 1.0,
) -> Decisions:
    """Return the settings that a plan gives to each observed region.

    Args:
        solution: the plan.
        groups: regions by key, from `group_regions`.
        observer: the observations that the plan was made from.
        observed_peak_bytes: peak of the allocated bytes in the step at the safest setting; None: unknown.
        full_recomputation_s: see `Decisions`.
        held_bytes: see `Decisions`.
        scale: size of the largest step that the plan is made for, over that of the observed one.
    """
    settings, frame_bytes = {}, 0
    for key, members in groups.items():
        region_plan = solution.regions.get(key)
        if region_plan is None:
            continue
        instances = sum(group.instances for group in region_plan.groups)
        sending = _sending(members)
        for region in members:
            # tensors of regions that offload late live shortest: they get the decisions of the last region in `sending`
            ordinal = sending.index(region) if region in sending else len(sending)
            group = region_plan.group(ordinal * instances // len(sending))
            tape = observer.tapes[region.name]
            saved_bytes = observer.saved_bytes[region.name]
            if group.plain:
                settings[region.name] = Setting(
                    key, plain_bytes=ceil(scale * observer.given_bytes[region.name]), kept_bytes=saved_bytes
                )
                continue
            captured = {i: Decision(_name_of(tape, i), fraction) for i, fraction in group.fractions.items()}
            captured.update({i: Decision(_name_of(tape, i), 1.0, keep=True) for i in group.keep})
            input_bytes = round(observer.input_bytes[region.name]) if solution.inputs_swapped else 0
            frame_bytes = max(frame_bytes, _frame_bytes(tape, group, observer, region.name))
            swapped = _swapped_bytes(tape, group, observer)
            recomputed_bytes = saved_bytes  # an opaque region recomputes all that backward asks for
            if not region.opaque:  # other regions recompute the outputs of the operators that their pass runs
                recomputed_bytes = sum(_output_bytes(tape, index) - swapped.get(index, 0) for index in group.runs)
            settings[region.name] = Setting(
                key,
                _mean_fraction(tape, group),
                captured,
                solution.inputs_swapped,
                input_bytes + sum(swapped.values()),
                tape.native.fingerprint if not region.opaque else None,
                is_agreed=observer.is_agreed,
                kept_bytes=sum(_output_bytes(tape, index) for index in group.keep),
                recomputed_bytes=recomputed_bytes,
            )
    return Decisions(
        solution=solution,
        settings=settings,
        frame_bytes=ceil(scale * frame_bytes),
        peak_bytes=None if observed_peak_bytes is None else observed_peak_bytes + solution.device_bytes,
        full_recomputation_s=full_recomputation_s,
        held_bytes=held_bytes,
    )


def _name_of(tape: Tape, index: int) -> str:
    """Return the operator's name as the native core spells it."""
    schema = tape.records[index].func._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _sizes(tape: Tape, index: int) -> list[int]:
    """Return the bytes of each of an operator's outputs."""
    return [tape.bytes[number] for number in tape.records[index].outputs]


def _output_bytes(tape: Tape, index: int) -> int:
    return sum(_sizes(tape, index))


def _swapped_bytes(tape: Tape, group: plan.Group, observer: StepObserver) -> dict[int, int]:
    """Return the swapped bytes of each operator's outputs, by index of the operator.

    Sizes are from the region's own tape, since an expert may get more tokens in one layer than in another. Small
    outputs, such as a norm's statistics, stay on the device.
    """
    return {
        index: part_bytes(sum(filter(observer.is_large, _sizes(tape, index))), tape.records[index].rows, fraction)
        for index, fraction in group.fractions.items()
    }


def _frame_bytes(tape: Tape, group: plan.Group, observer: StepObserver, name: str) -> int:
    """Return the device bytes of a region's prefetched tensors.

    A tensor that is swapped in part gets memory for all its rows; the other rows are recomputed there.
    """
    outputs = [tape.bytes[number] for index in group.fractions for number in tape.records[index].outputs]
    tensors = observer.input_tensors[name] + len(outputs)
    return observer.largest_input_bytes[name] + sum(outputs) + tensors * (HOST_ROW_BYTES - 1)


def put(decisions: Decisions | None, regions: Sequence[Region], executor: Executor) -> None:
    """Run regions by decisions from the next forward on.

    Regions without a decision run at the safest setting: inputs and attention outputs swapped, every matmul recomputed.
    """
    for region in regions:
        setting = decisions.settings.get(region.name) if decisions is not None else None
        region.set(setting or Setting(region.kind))
    hold_to(decisions, executor)


def hold_to(decisions: Decisions | None, executor: Executor) -> None:
    """Keep to the device bytes that decisions allow, from the next forward on; None: to those of the safest setting."""
    executor.flow.most_held_bytes = decisions.held_bytes if decisions is not None else None
    executor.flow.granted_bytes = decisions.solution.in_flight_bytes if decisions is not None else 0


def _operator(tapes: list[Tape], index: int, seconds: Seconds, observer: StepObserver) -> plan.PlannedOperator:
    native, record = tapes[0].native, tapes[0].records[index]
    capture, is_part = native.capture(index), operators.is_part_of_unit(record.func)
    output_bytes = round(fmean(_output_bytes(tape, index) for tape in tapes))
    view = record.form is Form.VIEW
    # each recompute pass also runs the operators that write to an argument, but they are no reason to run a pass
    always_runs = native.always_runs(index) and record.form is not Form.WRITE and index not in tapes[0].spared
    return plan.PlannedOperator(
        name=str(record.func),
        time_s=0.0 if view else median(seconds(*tape.stamps[index]) for tape in tapes),
        inputs=() if view else record.inputs,
        outputs=record.outputs if record.form is not Form.WRITE else record.outputs + record.written,
        output_bytes=output_bytes,
        capture=capture if observer.is_large(output_bytes) else "never",
        rows=record.rows if len({tape.records[index].rows for tape in tapes}) == 1 else 0,
        always_runs=always_runs,
        always_swapped=operators.kind_of(record.func) is CaptureKind.ATTENTION,
        made_by_rows=_unit_of(tapes[0], index) if is_part and capture == "rows" else None,
    )


def _unit_of(tape: Tape, index: int) -> int:
    """Return the index of the unit that made the output of operator `index`."""
    return next(i for i in range(index, -1, -1) if operators.is_unit(tape.records[i].func))


def _mean_fraction(tape: Tape, group: plan.Group) -> float:
    """Return the share of matmul output bytes that the group swaps.

    A forward whose operators differ from the observed ones swaps this share.
    """
    matmuls = [i for i, record in enumerate(tape.records) if operators.kind_of(record.func) is CaptureKind.ROWS]
    sizes = {i: _output_bytes(tape, i) for i in matmuls}
    total = sum(sizes.values())
    return sum(group.fractions.get(i, 0.0) * size for i, size in sizes.items()) / total if total else 0.0


def _backward_seconds(observer: StepObserver, seconds: Seconds) -> dict[str, float]:
    """Return each region's backward time, without its recompute pass.

    A region's backward lasts from its first request for a saved tensor to the next region's first request. The region
    whose backward is last gets the median of all other regions' times.
    """
    begun = {name: tape for name, tape in observer.tapes.items() if tape.backward_begin is not None}
    if not begun:
        return {name: 2 * seconds(*tape.span) for name, tape in observer.tapes.items()}
    origin = next(iter(begun.values())).backward_begin
    order = sorted(begun, key=lambda name: seconds(origin, begun[name].backward_begin))
    durations = {}
    for name, following in zip(order, order[1:], strict=False):
        tape = begun[name]
        recompute = seconds(*tape.recompute_span) if tape.recompute_span is not None else 0.0
        durations[name] = max(0.0, seconds(tape.backward_begin, begun[following].backward_begin) - recompute)
    fallback = median(durations.values()) if durations else 2 * median(seconds(*tape.span) for tape in begun.values())
    return {name: durations.get(name, fallback) for name in observer.tapes}
