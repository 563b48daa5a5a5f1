"""Plans that are the same in every test: addresses alone, addresses with decisions, and tensors of a swap list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from memplug.arena.plan.part import AddressPlan, DynamicSpace, address_plan
from memplug.arena.plan.problem import ORDERING, Buffer, Problem, buffers
from memplug.plans.schema import MemoryPlan, PlannedProgram, TrainingPart
from memplug.profile.records import Fingerprint
from memplug.swap.plan.part import Target
from memplug.tokenwise.plan.decisions import Decision, Decisions, Learnt, Setting
from memplug.tokenwise.plan.model import Group, RegionPlan, TokenwisePlan
from tests.support.layouts import LAYERS, PHASES, stacked

MIB = 1 << 20


def small_plan(**solution: Any) -> AddressPlan:
    """Return a plan of four requests and one dynamic group."""
    rows = [Buffer(lower=i, upper=i + 2, size=512, alignment=512, lower_phase=0, lower_layer=i % 3) for i in range(4)]
    problem = Problem(
        buffers=buffers(rows),
        ids=np.array([0, 1, 3, 4]),
        orderings=np.array([(1, 0, 1), (1, 1, 0)], ORDERING),
        phases=PHASES,
        layers=LAYERS,
        fingerprint=Fingerprint(model="Llama", inputs=("int64[1, 8]",), versions=(("torch", "2.11.0"), ("µ", "1"))),
    )
    group = DynamicSpace(
        malloc_phase=0,
        malloc_layer=2,
        free_phase=1,
        free_layer=2,
        stream=0,
        lower=5,
        upper=12,
        spaces=((512, 1536), (1537, 2048)),
        mallocs=tuple(range(5, 12)),
        peak_bytes=99,
    )
    return address_plan(problem, replace(stacked(problem), seconds=1.25, **solution), (group,), 99)


def decisions() -> Decisions:
    """Return decisions for two regions."""
    group = Group(
        instances=2,
        fractions={3: 0.5},
        keep=frozenset({9, 4}),
        runs=frozenset({7, 2}),
        swapped_bytes=5,
        kept_bytes=6,
        recompute_s=0.1,
    )
    solution = TokenwisePlan(
        regions={"key": RegionPlan(groups=(group, replace(group, plain=True)), forward_s=1.0, backward_s=2.0)},
        alpha=None,
        alpha_cut_by_host=False,
        inputs_swapped=True,
        forward_s=1.0,
        backward_s=2.0,
        step_s=3.0,
        host_bytes=4,
        device_bytes=5,
        in_flight_bytes=0,
        bound="none",
    )
    captured = {3: Decision("aten::mm", 0.5), 4: Decision("aten::add.Tensor", 1.0, keep=True)}
    learnt = Learnt(communicates=True, offloads_late=False, unneeded={5: "aten::mm"}, asks=True)
    settings = {
        "layers.0": Setting("key", 0.25, captured, planned_from=2**64 - 5, learnt=learnt),
        "layers.1": Setting("key", plain_bytes=7),
    }
    return Decisions(
        solution=solution,
        settings=settings,
        frame_bytes=1,
        peak_bytes=7,
        full_recomputation_s=4.5,
        held_bytes=6,
        d2h_bytes_per_s=5e10,
    )


def decided_plan() -> MemoryPlan:
    """Return a plan with decisions, as a training keeps it."""
    program = PlannedProgram(
        names=("aten::mm", "aten::t"), operators=(1, 0, 0), sizes=((1, 2), ()), nodes=3, unseen=(1,)
    )
    training = TrainingPart(run="20261123T1-a", index=1, program=program, gradients_stay=True)
    return replace(small_plan().alone(), training=training).with_part(decisions())


def target(operator: str, mib: int, **fields: Any) -> Target:
    """Return a target of a swap list: one tensor between two uses, of which the first is by that operator."""
    look = {"dtype": "float32", "output": True, "slot": 0, "uses": 1, "kinds": 1, "recent": 1, "tolerance": 4}
    places = {"last_use": 1, "release": 2, "prefetch": 5, "next_use": 6}
    return Target(nbytes=mib * MIB, operator=operator, **{**look, **places, **fields})


def assert_same(loaded: MemoryPlan, saved: AddressPlan) -> None:
    """Assert that all fields of the addresses are equal, including all rows and the dtypes of arrays.

    Only the width of a text dtype may differ.
    """
    one, other = AddressPlan.of(loaded), saved
    assert loaded.fingerprint == saved.problem.fingerprint
    for mine, its in ((one.problem, other.problem), (one.solution, other.solution)):
        for name in type(mine).__dataclass_fields__.keys() - {"fingerprint"}:
            a, b = getattr(mine, name), getattr(its, name)
            if isinstance(a, np.ndarray):
                kinds = (a.dtype.kind, b.dtype.kind) if name == "ids" and len(a) else (a.dtype, b.dtype)
                assert a.tolist() == b.tolist(), name
                assert kinds[0] == kinds[1] or (name == "ids" and not len(a)), name
            else:
                assert a == b and type(a) is type(b), name
    assert one.dynamic == other.dynamic and one.predictions == other.predictions
