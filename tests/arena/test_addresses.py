"""The arena's tables of a plan: requests by place, with their planned addresses, and reusable space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from memplug.arena.plan import auto
from memplug.arena.plan.from_trace import last_step, problem_of
from memplug.arena.plan.part import AddressPlan, address_plan
from memplug.arena.plan.problem import solved
from memplug.arena.planning import plan_with_spaces
from memplug.arena.tables import PARTS, ArenaTables, tables_of
from memplug.errors import LayoutError
from memplug.profile.trace import Pass, Trace
from memplug.profile.trace_file import load
from tests.support.folders import DATA
from tests.support.traces import Recording, recordings


def plan_of(step: Trace) -> AddressPlan:
    problem = problem_of(step)
    solution = auto.plan(problem, time_limit_s=0.2)
    return plan_with_spaces(step, problem, solution)


def spaces_of(tables: ArenaTables, group: int) -> list[tuple[int, int]]:
    rows = tables.spaces[tables.spaces["group"] == group]
    return list(zip(rows["begin"].tolist(), rows["end"].tolist(), strict=True))


def used_units(plan: AddressPlan, first: int, end: int, kept_bytes: int) -> np.ndarray:
    """Return for each 512-byte unit of the reused part whether a buffer uses it in [first, end): bool[units]."""
    used = np.zeros((plan.solution.height - kept_bytes) // 512, bool)
    for buffer, offset in zip(plan.problem.buffers, plan.solution.offsets, strict=True):
        if not buffer["outlives"] and buffer["lower"] < end and first < buffer["upper"]:
            begin = (offset - kept_bytes) // 512
            used[begin : begin + buffer["size"] // 512] = True
    return used


@given(recordings())
def test_tables_group_requests_by_place_at_planned_addresses(recording) -> None:
    plan = plan_of(last_step(recording.trace()))
    tables, table = tables_of(plan), plan.problem.buffers
    requests = tables.requests
    assert sorted(tables.rows.tolist()) == np.flatnonzero(table["lower_phase"] >= 0).tolist()
    kept = table["outlives"][tables.rows]
    reused = requests[~kept]
    assert (reused["offset"] + tables.kept_bytes == plan.solution.offsets[tables.rows[~kept]]).all()
    assert (requests["size"] == table["size"][tables.rows]).all()
    assert (reused["offset"] >= 0).all() and (reused["offset"] + reused["size"] <= tables.reused_bytes).all()
    places = list(zip(requests["phase"].tolist(), requests["layer"].tolist(), strict=True))
    assert len({place for place, before in zip(places, [None, *places], strict=False) if place != before}) == len(
        set(places)
    ), "requests of one place are adjacent"
    for place in set(places):
        rows = tables.rows[[each == place for each in places]]
        assert (np.diff(rows) > 0).all(), "in program order"


@given(recordings())
def test_requests_that_outlive_the_step_get_slots_of_their_own(recording) -> None:
    plan = plan_of(last_step(recording.trace()))
    tables, table = tables_of(plan), plan.problem.buffers
    kept = table[table["outlives"]]
    assert len(tables.slots) == len(kept)
    assert tables.kept_bytes + tables.reused_bytes == plan.solution.height
    sizes: dict[int, tuple[int, int]] = {}
    for request, row in zip(tables.requests, tables.rows, strict=True):
        assert (request["kept"] >= 0) == table["outlives"][row]
        if request["kept"] >= 0:
            kind = (int(table["size"][row]), int(table["stream"][row]))
            assert sizes.setdefault(int(request["kept"]), kind) == kind
    assert len(set(sizes.values())) == len(sizes)
    ends = sorted(
        (slot["offset"], slot["offset"] + sizes[int(slot["kept"])][0]) for slot in tables.slots if slot["kept"] in sizes
    )
    assert all(one[1] <= other[0] for one, other in zip(ends, ends[1:], strict=False))
    assert all(end <= tables.kept_bytes for _, end in ends)


@given(recordings())
def test_each_request_lists_other_streams_that_use_its_bytes(recording) -> None:
    plan = plan_of(last_step(recording.trace()))
    tables = tables_of(plan)
    rows = tables.requests[["size", "offset", "crosses", "stream", "kept"]].tolist()
    for size, offset, crosses, stream, kept in rows:
        if kept >= 0:
            assert crosses == 0
            continue
        expected = 0
        for size2, offset2, _, stream2, kept2 in rows:
            if kept2 < 0 and stream2 != stream and offset < offset2 + size2 and offset2 < offset + size:
                expected |= 1 << stream2
        assert crosses == expected


@pytest.mark.long
@given(recordings())
def test_no_planned_request_uses_reusable_space_in_its_interval(recording) -> None:
    plan = plan_of(last_step(recording.trace()))
    tables = tables_of(plan)
    end = int(plan.problem.buffers["upper"].max(initial=0))
    checks = [(group, 0, end * (PARTS - 1 - at) // PARTS) for at, group in enumerate(tables.reusable)]
    for request, row in zip(tables.requests, tables.rows, strict=True):
        if request["spare"] >= 0:
            lower, upper = plan.problem.buffers[["lower", "upper"]][row].item()
            checks.append((int(request["spare"]), lower, upper))
    for group, first, last in checks:
        used = used_units(plan, first, last, tables.kept_bytes)
        for begin, stop in spaces_of(tables, group):
            assert not used[begin // 512 : stop // 512].any()


def test_phase_between_passes_has_the_number_of_the_preceding_forward() -> None:
    recording = Recording()
    recording.phase(Pass.OTHER)
    requests = [recording.malloc(512)]
    for micro_batch in range(2):
        recording.phase(Pass.FORWARD, micro_batch)
        requests.append(recording.malloc(512))
        recording.phase(Pass.OTHER)
        requests.append(recording.malloc(512))
    for request in requests:
        recording.free(request)
    phases = tables_of(plan_of(recording.trace())).requests["phase"].tolist()
    assert sorted(phases) == sorted([0 * 8, 1 * 8 + 1, 1 * 8, 2 * 8 + 1, 2 * 8])


def test_ungrouped_dynamic_requests_get_the_space_common_to_all_groups() -> None:
    recording = Recording()
    recording.phase(Pass.FORWARD, 0)
    recording.layer("experts", dynamic=True)
    kept, short = recording.malloc(700), recording.malloc(300)
    recording.free(short)
    recording.layer("static")
    static = recording.malloc(512 * 8)
    recording.free(static)
    recording.phase(Pass.BACKWARD, 0)
    recording.layer("experts", dynamic=True)
    recording.free(kept)
    plan = plan_of(recording.trace())
    tables = tables_of(plan)
    first, second, other = tables.dynamic["group"].tolist()
    assert {first, second} == {0, 1} and other == 2
    common = set(spaces_of(tables, first)) & set(spaces_of(tables, second))
    assert set(spaces_of(tables, other)) == common
    assert (tables.dynamic["phase"] == 8 + 1).all()


def test_plan_that_mixes_outliving_and_other_buffers_is_refused() -> None:
    recording = Recording()
    recording.free(recording.malloc(512))
    recording.malloc(512)
    problem = problem_of(recording.trace())
    plan = address_plan(problem, solved(problem, np.array([0, 512]), "by hand"))
    with pytest.raises(LayoutError, match="lie among others"):
        tables_of(plan)


def test_tables_of_a_recorded_7b_step_have_all_its_requests() -> None:
    plan = plan_of(last_step(load(DATA / "llama7b_ckpt.npz")))
    tables = tables_of(plan)
    assert len(tables.requests) == int((plan.problem.buffers["lower_phase"] >= 0).sum()) > 9000
    assert tables.streams == 1 and not tables.requests["crosses"].any()
