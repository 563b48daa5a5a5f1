"""Swap problems made by hand or at random, and the best swap list of a problem, found by trying all swap lists."""

import numpy as np
from hypothesis import strategies as st

from memplug.profile.records import OPERATOR
from memplug.swap.plan.policy import NEGLIGIBLE_S, forced
from memplug.swap.plan.problem import Candidate, SwapProblem, least_budget
from memplug.swap.plan.simulator import NOT_FORCED, place, simulate
from tests.support.traces import Recording


def step(candidates, *, other_bytes=0, operators=12, budget_bytes, seconds=1.0, rate=10.0, busy_s=0.0, **kwargs):
    """Return a problem whose candidates (nbytes, last use, next use) are live from the last use to the next one.

    Other memory takes `other_bytes`: one number for all operators, or a number for each. Each operator takes `seconds`,
    and the link copies `rate` bytes per second.
    """
    in_use = np.zeros(operators, np.int64) + np.asarray(other_bytes)
    for nbytes, last_use, next_use in candidates:
        in_use[last_use : next_use + 1] += nbytes
    return SwapProblem(
        in_use_bytes=in_use,
        begin_s=np.concatenate(([0.0], np.cumsum(np.zeros(operators) + seconds))),
        candidates=tuple(Candidate(index, *each) for index, each in enumerate(candidates)),
        budget_bytes=budget_bytes,
        **{
            "host_bytes": 10**9,
            "d2h_bytes_per_s": rate,
            "h2d_bytes_per_s": rate,
            "d2h_busy_s": np.zeros(operators) + busy_s,
            "h2d_busy_s": np.zeros(operators) + busy_s,
            **kwargs,
        },
    )


@st.composite
def steps(draw, most=20):
    """Draw problems with budgets from the least possible one to the memory that the step takes."""
    operators = draw(st.integers(6, 60))
    count = draw(st.integers(1, most))
    candidates = []
    for _ in range(count):
        last_use = draw(st.integers(0, operators - 3))
        candidates.append((draw(st.integers(1, 100)), last_use, draw(st.integers(last_use + 2, operators - 1))))
    rate = draw(st.sampled_from([3.0, 10.0, 30.0, 100.0, 1000.0]))
    busy_s = draw(st.sampled_from([0.0, 0.5, 0.9]))
    other = np.array(draw(st.lists(st.integers(0, 50), min_size=operators, max_size=operators)))
    problem = step(candidates, other_bytes=other, operators=operators, budget_bytes=10**9, rate=rate, busy_s=busy_s)
    least, most_bytes = least_budget(problem).nbytes, int(problem.in_use_bytes.max())
    share = draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9]))
    budget = least + int(share * (most_bytes - least))
    return step(candidates, other_bytes=other, operators=operators, budget_bytes=budget, rate=rate, busy_s=busy_s)


def fewest_bytes(problem, *, longest_stall_s):
    """Return the fewest bytes of candidates that meet the budget and stall at most `longest_stall_s`, or None.

    All subsets of the candidates are tried, except those that exceed the budget however long they stall.
    """
    count = len(problem.candidates)
    sizes = np.array([each.nbytes for each in problem.candidates])
    need = problem.in_use_bytes - problem.budget_bytes
    at_least = {}
    for operator in np.flatnonzero(need > 0).tolist():
        here = tuple(each.gap.start <= operator < each.gap.stop for each in problem.candidates)
        at_least[here] = max(at_least.get(here, 0), int(need[operator]))
    subsets = ((np.arange(1 << count)[:, None] >> np.arange(count)) & 1).astype(np.float32)
    enough = np.ones(len(subsets), bool)
    for here, nbytes in at_least.items():
        enough &= subsets @ (sizes * here).astype(np.float32) >= nbytes
    total = subsets @ sizes.astype(np.float32)
    for subset in sorted(np.flatnonzero(enough).tolist(), key=lambda subset: total[subset]):
        chosen = {index: NOT_FORCED for index in range(count) if subset >> index & 1}
        stall_s = simulate(problem, place(problem, forced(problem, chosen, may_add=False))).stall_s
        if stall_s <= longest_stall_s + NEGLIGIBLE_S:
            return int(total[subset])
    return None


def with_an_optimizer():
    """Return a step of three operators and an optimizer: the second operator needs 100 bytes, the optimizer 80.

    The optimizer's state of 50 bytes exists beforehand.
    """
    recording = Recording()
    recording.step()
    batch, state, weight = recording.tensor(1), recording.tensor(50), recording.tensor(1)
    for nbytes in (10, 100, 10):
        recording.op("aten::mm", (batch,))
        recording.free(recording.malloc(nbytes))
    recording.op("aten::empty")
    request = recording.malloc(80)
    recording.op("aten::add_", (weight, state), (weight,))
    recording.free(request)
    operators = np.array(recording.operators, OPERATOR)
    operators["depth"][3:] = -1
    return recording.trace(operators=operators, base_bytes=52)


def three_tensors():
    """Return a step of twelve operators, a second each: tensors of 30, 20 and 10 bytes, and a parameter of 7."""
    recording = Recording()
    recording.step(seconds=12.0)
    made = [recording.tensor(nbytes) for nbytes in (30, 20, 10)]
    parameter = recording.tensor(7)
    requests = {}
    uses = {0: made[0], 1: made[1], 2: made[2], 4: made[2], 5: made[2], 9: made[1], 10: made[0]}
    for operator in range(12):
        tensor = uses.get(operator)
        first = tensor is not None and tensor not in requests
        recording.op("aten::op", (parameter,) if first or tensor is None else (tensor,), (tensor,) if first else ())
        if first:
            requests[tensor] = recording.malloc(recording.tensors[tensor][0])
        if operator in (5, 9, 10):
            recording.free(requests[tensor])
    return recording.trace(base_bytes=7)
