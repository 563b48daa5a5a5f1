"""Small problems for the token-wise planner."""

from __future__ import annotations

from memplug.tokenwise.plan.linear_program import GAP as SOLVER_GAP
from memplug.tokenwise.plan.solver import Budget, Operator, Region

GAP = 1.0 + 2 * SOLVER_GAP
"""Two plans may each be this share off their optimum."""
AMPLE = 10**15


def operator(name, reads, writes, *, time_s=0.0, size=0, capture="rows", **flags):
    return Operator(name=name, time_s=time_s, inputs=reads, outputs=writes, output_bytes=size, capture=capture, **flags)


def region(*operators, saved, instances=1, forward_s=10.0, backward_s=20.0, input_bytes=0, key="layer", staying=0):
    return Region(
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
