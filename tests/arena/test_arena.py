"""The planned arena serves training, and losses equal those of a run without memplug."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.arena.arena import Counters
from memplug.arena.technique import ArenaState
from memplug.beside import Beside
from memplug.device.device import Device
from memplug.profile.recorder import Detail, Recorder
from memplug.profile.trace import Fingerprint
from memplug.session.followers import Followers
from tests.support.extension import python_streams
from tests.support.serving import (
    ALONE,
    CHECKED,
    Run,
    grouped_mixtral,
    llama,
    mixtral,
    nothing_leaks,
    owned,
    reserved_bytes,
    serving_of,
    train,
)
from tests.support.simulated import ScriptedDevice

pytestmark = pytest.mark.device

OFF = {"enabled": False}
SMALL = {"min_offload_bytes": 1}
BLOCKS = {
    "arena alone": ALONE,
    "arena alone, checked": CHECKED,
    "recomputed": {"enabled": True, "plan_dir": False, "tokenwise": {"alpha": 0, **SMALL}},
    "swapped": {"enabled": True, "plan_dir": False, "tokenwise": {"alpha": 1, **SMALL}},
    "planned": {"enabled": True, "plan_dir": False, "tokenwise": SMALL, "profiler": {"policy_steps": 0}},
    "planned, checked": {
        "enabled": True,
        "plan_dir": False,
        "tokenwise": SMALL,
        "profiler": {"policy_steps": 0},
        "arena": {"checks": True},
    },
}


@pytest.fixture(scope="module")
def without() -> Run:
    """Train the dense model without memplug."""
    return train(OFF, steps=40, validate=10)


@pytest.mark.parametrize("name", BLOCKS)
def test_arena_serves_a_dense_model_with_unchanged_losses(name: str, without: Run) -> None:
    with nothing_leaks():
        run = train(BLOCKS[name], steps=40, validate=10)
    assert run.losses == without.losses
    assert run.states[-1] is ArenaState.SERVING and run.report["arena_plans"] >= 1
    assert run.served >= 0.999
    assert run.report["arena_step_served"] == 1.0
    assert run.report["arena_predicted_fragmentation"] <= 0.005
    # the peak is only about 300 KiB, and two requests of 512 bytes sometimes alternate
    assert run.report["arena_peak_fragmentation"] <= 0.02
    assert run.report["arena_predicted_efficiency"] == 1 - run.report["arena_predicted_fragmentation"]


def test_requests_that_depend_on_routing_are_served_from_their_room() -> None:
    run = train(ALONE, mixtral, steps=40)
    assert run.losses == train(OFF, mixtral, steps=40).losses
    report = run.report
    assert report["arena_dynamic"] > 100 and report["arena_dynamic_bytes"] > 0
    assert report["arena_plans"] <= 2
    served = report["arena_served_bytes"] + report["arena_dynamic_bytes"] + report["arena_reusable_bytes"]
    assert served / (served + report["arena_fallback_bytes"]) >= 0.9
    if torch.get_default_device().type == "cpu":  # elsewhere it counts what torch's allocator reserves too
        assert report["arena_efficiency"] == pytest.approx(1 - report["arena_peak_fragmentation"])
    assert 0.5 < report["arena_predicted_efficiency"] < 1 - report["arena_predicted_fragmentation"], (
        "a part of the room is empty at the recorded steps' peak"
    )


def test_experts_whose_requests_do_not_change_are_served_at_planned_addresses() -> None:
    run = train(ALONE, grouped_mixtral, steps=20)
    assert run.losses == train(OFF, grouped_mixtral, steps=20).losses
    assert run.report["arena_dynamic"] == run.report["arena_dynamic_missed"] == 0
    assert run.report["arena_plans"] == 1 and run.served >= 0.999 and max(run.mismatched[-10:]) == 0


def test_arena_serves_a_swapping_mixture_with_unchanged_losses() -> None:
    block = {"enabled": True, "plan_dir": False, "tokenwise": {"alpha": 1, **SMALL}}
    run = train(block, mixtral, steps=14)
    assert run.losses == train({**block, "arena": {"enabled": False}}, mixtral, steps=14).losses
    assert run.report["arena_dynamic"] > 0


def test_planner_that_fails_turns_the_arena_off_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Beside) -> None:
        self.stop()
        raise IndexError("a bug")

    monkeypatch.setattr(Beside, "take", fail)
    run = train(ALONE)
    assert run.losses == train(OFF).losses
    assert run.states[-1] is ArenaState.OFF and "planning failed: IndexError: a bug" in run.report["arena_off_because"]


@pytest.mark.cpu("it looks at that device")
def test_prefetched_outputs_are_in_the_arena_once_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[bool] = []

    class Noting(ScriptedDevice):
        def empty(self, *args: Any) -> torch.Tensor:
            tensor = super().empty(*args)
            fetched.append(owned(tensor))
            return tensor

    monkeypatch.setattr(Device, "streams", lambda self, core: python_streams(Noting()))
    run = train(BLOCKS["swapped"], steps=12)
    first = run.states.index(ArenaState.SERVING) + 1
    in_a_step = len(fetched) // 12
    assert in_a_step > 5 and not any(fetched[: in_a_step * (first - 1)])
    assert all(fetched[in_a_step * first :])


# -- tensors that outlive a step ---------------------------------------------------------------------------------------


def test_arena_never_overwrites_tensors_kept_across_steps() -> None:
    """Keep the output of every step, and compare it at the end with a copy made in that step."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    torch.manual_seed(0)
    model = llama()
    with memplug.attach(model, CHECKED) as session:
        for _ in range(16):
            batch = torch.randint(0, 64, (2, 16))
            out = model(batch, labels=batch)
            out.loss.backward()
            kept.append((out.logits.detach(), out.logits.detach().clone()))
            session.step()
        assert serving_of(session).state is ArenaState.SERVING
    assert sum(owned(tensor) for tensor, _ in kept) > 0
    for tensor, copied in kept:
        assert torch.equal(tensor, copied)


def test_arena_memory_is_freed_with_its_last_tensor_after_detach() -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with nothing_leaks():
        with memplug.attach(model, ALONE) as session:
            for _ in range(8):
                out = model(batch, labels=batch)
                out.loss.backward()
                session.step()
        logits, expected = out.logits.detach(), out.logits.detach().clone()
        del out
        model.zero_grad()
        assert owned(logits) and reserved_bytes() > 0
        assert torch.equal(logits, expected)
        del logits
        gc.collect()
    assert not any(owned(p) for p in model.parameters())


@pytest.mark.cpu("of its allocator")
def test_recording_ignores_blocks_of_an_earlier_arena() -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(model, ALONE) as session:
        for _ in range(8):
            out = model(batch, labels=batch)
            out.loss.backward()
            session.step()
    assert owned(out.logits)
    recorder = Recorder("cpu")
    try:
        recorder.begin(Detail.REQUESTS)
        del out
        model.zero_grad()
        torch.ones(4)
        trace = recorder.end(Fingerprint(), [])
    finally:
        recorder.stop()
    assert trace.base_bytes == 0 and trace.requests["nbytes"].tolist() == [16]
    assert (trace.events["request"] >= 0).all()


def test_optimizer_state_made_after_planning_is_not_overwritten() -> None:
    """Switch momentum on in step 9, several steps after the arena began to serve."""

    def run(block: dict[str, Any]) -> list[float]:
        torch.manual_seed(0)
        model, losses = llama(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with memplug.attach(model, block) as session:
            for step in range(16):
                optimizer.param_groups[0]["momentum"] = 0.9 if step >= 9 else 0
                batch = torch.randint(0, 64, (2, 16))
                loss = model(batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                session.step()
        return losses

    assert run(CHECKED) == run(OFF)


# -- programs ----------------------------------------------------------------------------------------------------------


def test_alternating_programs_each_keep_their_own_plan() -> None:
    """Alternate two sequence lengths, twelve steps each; when a length returns, its earlier plan must still be there.

    The longer length comes first: the prefetch limit grows with the largest region so far, so a longer length that came
    second would change the plan of the shorter one.
    """
    block = {"enabled": True, "plan_dir": False, "tokenwise": SMALL, "profiler": {"policy_steps": 0}}

    def length(step: int) -> int:
        return (40, 16)[step // 12 % 2]

    run = train(block, steps=48, length=length)
    assert run.losses == train(OFF, steps=48, length=length).losses
    assert run.states[35] is run.states[47] is ArenaState.SERVING
    assert run.mismatched[34] == run.mismatched[46] == 0
    assert run.states[28:35] == [ArenaState.SERVING] * 7, "the first program's plan is still there"


def test_arena_plans_anew_if_only_requests_show_a_new_program() -> None:
    """Train with the arena alone, where memplug compares no programs: only unplanned requests show the change."""

    def length(step: int) -> int:
        return 16 if step < 10 else 40

    run = train(ALONE, steps=24, length=length)
    assert run.losses == train(OFF, steps=24, length=length).losses
    assert run.report["arena_plans"] >= 2
    assert run.mismatched[11] > 100 and max(run.mismatched[-4:]) == 0


def test_constantly_changing_lengths_cause_at_most_six_plans() -> None:
    def length(step: int) -> int:
        return 8 + 4 * (step * 7 % 11)

    run = train(ALONE, steps=60, length=length)
    assert run.losses == train(OFF, steps=60, length=length).losses
    assert run.report["arena_plans"] <= 6


# -- reports and recordings --------------------------------------------------------------------------------------------


def test_report_says_that_the_configuration_switches_the_arena_off() -> None:
    run = train({**ALONE, "tokenwise": {"alpha": 0}, "arena": {"enabled": False}}, steps=6)
    assert run.report["arena"] == "off" and run.report["arena_off_because"] == "the block switches it off"
    assert run.report["arena_bytes"] == run.report["arena_served"] == run.report["arena_plans"] == 0


def test_step_report_has_counter_differences_and_current_gauges() -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(model, ALONE) as session:
        counts = []
        for _ in range(10):
            model(batch, labels=batch).loss.backward()
            session.step()
            counts.append(serving_of(session).counters)
        step = serving_of(session).step
        names = set(Counters.__annotations__)
        held = {name for name in names if name.startswith(("reserved_", "leftover_", "live_", "peak_"))}
        added = {name: getattr(counts[-1], name) - getattr(counts[-2], name) for name in names - held}
        assert {name: getattr(step, name) for name in names - held} == added
        assert {name: getattr(step, name) for name in held} == {name: getattr(counts[-1], name) for name in held}
        assert added["from_arena"] == added["planned"] + added["dynamic"] + added["reusable"] > 100
        assert step.reserved_bytes > 0
        assert names | {"since"} == {name for name in dir(step) if not name.startswith("_")}


def test_torch_profiler_sees_arena_blocks() -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))

    def step() -> None:
        model(batch, labels=batch).loss.backward()

    with memplug.attach(model, ALONE) as session:
        for _ in range(8):
            step()
            session.step()
        assert serving_of(session).state is ArenaState.SERVING
        before = serving_of(session).counters.planned
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
        assert serving_of(session).counters.planned > before + 100
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(event.nbytes() > 0 for event in events) > 100
    assert sum(event.nbytes() < 0 for event in events) > 100


def test_recording_has_the_same_requests_with_and_without_the_arena(tmp_path: Path) -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(model, ALONE) as session:
        for step in range(10):
            if step == 2:
                session.record()
            if step == 7:
                native = session.trace
                session.record()
            model(batch, labels=batch).loss.backward()
            model.zero_grad()
            session.step()
        served = session.trace
        assert serving_of(session).state is ArenaState.SERVING
    assert native is not served
    assert native.requests["nbytes"].tolist() == served.requests["nbytes"].tolist()
    assert served.replays_exactly() and (served.live_bytes >= 0).all()


# -- one model after another -------------------------------------------------------------------------------------------


def test_second_session_gets_an_arena_too() -> None:
    first = train(ALONE, steps=8)
    second = train(CHECKED, steps=8)
    assert first.losses == second.losses
    assert first.report["arena_served"] > 0 and second.report["arena_served"] > 0


def test_arena_is_released_with_its_session_even_without_detach() -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with nothing_leaks():
        session = memplug.attach(model, ALONE)
        for _ in range(8):
            model(batch, labels=batch).loss.backward()
            model.zero_grad()
            session.step()
        assert serving_of(session).state is ArenaState.SERVING
        arena = serving_of(session)._arena
        session._attached.boundary.claim.followers = Followers()
        del arena
        gc.collect()
        assert not owned(torch.ones(64))


def test_garbage_collecting_an_old_session_leaves_the_new_arena_serving() -> None:
    batch = torch.randint(0, 64, (2, 16))
    sessions = []
    for _ in range(2):
        model = llama()
        with memplug.attach(model, ALONE) as session:
            for step in range(10):
                model(batch, labels=batch).loss.backward()
                model.zero_grad()
                session.step()
                if step == 7:
                    sessions.clear()
                    gc.collect()
            assert serving_of(session).state is ArenaState.SERVING
            assert serving_of(session).step.planned > 100
        sessions.append(session)


def test_copied_and_pickled_models_contain_nothing_of_memplug() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = type(model)
    with memplug.attach(model, ALONE):
        copied, pickled = copy.deepcopy(model), pickle.dumps(model)
        assert type(copied) is before and b"memplug" not in pickled and isinstance(model, nn.Sequential)
        assert not any("memplug" in key for key in copied.__dict__)
    assert type(model) is before and not any("memplug" in key for key in model.__dict__)


def test_attaching_again_returns_the_existing_session() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with memplug.attach(model, ALONE) as session:
        assert memplug.attach(model, ALONE) is session
    with memplug.attach(model, ALONE) as another:
        assert another is not session


def test_efficiency_is_unknown_until_the_plan_has_served_a_step() -> None:
    model, tokens = mixtral(), torch.Generator().manual_seed(1)
    block, found = {**ALONE, "profiler": {"wait_for_plans": True}}, []
    with memplug.attach(model, block) as session:
        for _ in range(20):
            batch = torch.randint(0, 64, (2, 16), generator=tokens)
            model(batch, labels=batch).loss.backward()
            model.zero_grad()
            session.step()
            found.append((session.report().arena, session.report().arena.plans + session.report().arena.amendments))
    made = 0
    for report, plans in found:
        assert (report.efficiency is None) == (plans == 0 or plans > made), "no step was served since the last plan"
        assert report.efficiency is None or 0.1 < report.efficiency <= 1
        made = plans
    assert found[-1][0].efficiency is not None
