"""Small problems for the token-wise planner."""

from __future__ import annotations

from hypothesis import strategies as st

from memplug.tokenwise.plan.linear_program import GAP as SOLVER_GAP
from memplug.tokenwise.plan.solver import Budget, PlannedOperator, PlannedRegion

GAP = 1.0 + 2 * SOLVER_GAP
"""The ratio by which the times of two optimal plans may differ: each may be off by the solver's tolerance."""
AMPLE = 10**15


def operator(name, reads, writes, *, time_s=0.0, size=0, capture="rows", **flags):
    return PlannedOperator(
        name=name, time_s=time_s, inputs=reads, outputs=writes, output_bytes=size, capture=capture, **flags
    )


def region(*operators, saved, instances=1, forward_s=10.0, backward_s=20.0, input_bytes=0, key="layer", staying=0):
    return PlannedRegion(
        key=key,
        instances=instances,
        operators=operators,
        saved=frozenset(saved),
        given=frozenset({0}),
        input_bytes=input_bytes,
        staying=staying,
        forward_s=forward_s,
        backward_s=backward_s,
    )


def budget(d2h=1e12, h2d=1e12, host=AMPLE, device=0):
    return Budget(d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, host_bytes=host, device_bytes=device)


MIB = 2**20  # unit of all sizes: a plan counts whole bytes, so a few bytes would be rounded noticeably


@st.composite
def layers(draw, key="layer", most=6):
    """Draw a random region; storage 0 is its input, storage 1 + i the output of operator i."""
    operators = []
    for index in range(draw(st.integers(1, most))):
        reads = tuple(draw(st.sets(st.integers(0, index), min_size=1, max_size=3)))
        capture = draw(st.sampled_from(("rows", "rows", "whole", "never")))
        operators.append(
            operator(
                f"op{index}",
                reads,
                (index + 1,),
                time_s=float(draw(st.integers(0, 10))),
                size=MIB * draw(st.integers(1, 100)),
                capture=capture,
                always_runs=capture == "never" and draw(st.booleans()),
                always_swapped=capture == "whole" and draw(st.booleans()),
            )
        )
    forward_s = sum(o.time_s for o in operators) + 1.0
    return region(
        *operators,
        saved=draw(st.sets(st.integers(0, len(operators)))),
        instances=draw(st.integers(1, 4)),
        forward_s=forward_s,
        backward_s=2.0 * forward_s,
        input_bytes=MIB * draw(st.integers(0, 50)),
        staying=draw(st.integers(0, 1)),
        key=key,
    )


problems = st.one_of(st.tuples(layers()), st.tuples(layers("first", 4), layers("second", 4)))
budgets = st.builds(
    budget,
    d2h=st.integers(1, 60).map(lambda rate: float(MIB * rate)),
    h2d=st.integers(1, 60).map(lambda rate: float(MIB * rate)),
    host=st.integers(0, 1500).map(MIB.__mul__),
    device=st.one_of(st.just(0), st.integers(0, 400).map(MIB.__mul__)),
)


OPERATOR = PlannedOperator(name="mm", time_s=1.0, inputs=(0,), outputs=(1,), output_bytes=100, capture="whole")
REGION = PlannedRegion(
    key="layer",
    instances=4,
    operators=(OPERATOR,),
    saved=frozenset({1}),
    given=frozenset({0}),
    input_bytes=10,
    forward_s=1.0,
    backward_s=2.0,
    saved_bytes=100,
)
BUDGET = Budget(d2h_bytes_per_s=1.0, h2d_bytes_per_s=1.0, host_bytes=1000, device_bytes=400)
