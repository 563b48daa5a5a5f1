"""The judge of swap lists accepts the planner's lists and refuses broken ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.swap.judge import JudgedSwap, ListLimits, mistakes_of_swaps
from memplug.swap.plan.from_trace import LinkLoad, swap_problem
from memplug.swap.plan.policy import swap_list
from memplug.swap.plan.problem import least_budget
from tests.support.swapping import three_tensors, with_an_optimizer
from tests.support.traces import recordings

FIRST = JudgedSwap(tensor=0, nbytes=30, last_use=0, release=4, prefetch=7, next_use=10)
SECOND = JudgedSwap(tensor=1, nbytes=20, last_use=1, release=6, prefetch=7, next_use=9)
SOUND = [FIRST, SECOND]


def limits(**changes):
    n = 12
    sound = ListLimits(67, 50, 10.0, 10.0, 2.0, np.ones(n), np.zeros(n), np.zeros(n))
    return sound._replace(**changes)


def test_judge_accepts_valid_lists():
    assert list(mistakes_of_swaps(SOUND, three_tensors(), limits())) == []
    assert list(mistakes_of_swaps([], three_tensors(), limits())) == []
    # a tensor that is used again after its gap
    twice = [JudgedSwap(2, 10, 2, 3, 4, 4)]
    assert list(mistakes_of_swaps(twice, three_tensors(), limits())) == []


def test_judge_counts_optimizer_tensors_while_the_optimizer_runs():
    swap, times = JudgedSwap(1, 50, -1, 0, 3, 3), {"operator_s": np.ones(4), "stall_s": 99.0}
    busy = {"d2h_busy_s": np.zeros(4), "h2d_busy_s": np.zeros(4)}
    assert list(mistakes_of_swaps([swap], with_an_optimizer(), limits(device_bytes=132, **times, **busy))) == []
    (mistake,) = mistakes_of_swaps([swap], with_an_optimizer(), limits(device_bytes=131, **times, **busy))
    assert "operator 3 has 132 bytes" in mistake


BROKEN = {
    "unknown tensor": ([FIRST._replace(tensor=4)], {}, "names tensor 4"),
    "negative tensor index": ([FIRST._replace(tensor=-1)], {}, "names tensor -1"),
    "too few bytes": ([FIRST._replace(nbytes=29)], {}, "its tensor has 30"),
    "too many bytes": ([FIRST._replace(nbytes=31)], {}, "its tensor has 30"),
    "no bytes": ([FIRST._replace(nbytes=0)], {}, "of 0 bytes"),
    "another tensor's size": ([FIRST._replace(tensor=1)], {}, "its tensor has 20"),
    "tensor of another technique": (SOUND, {"others": (1,)}, "another technique"),
    "released before its last use ends": ([FIRST._replace(release=0)], {}, "not in order"),
    "prefetched before it is released": ([FIRST._replace(release=8)], {}, "not in order"),
    "offloaded for no operator": ([FIRST._replace(release=7)], {}, "not in order"),
    "prefetched after its next use": ([FIRST._replace(prefetch=11)], {}, "not in order"),
    "next use before last use": ([FIRST._replace(last_use=10, next_use=0)], {}, "not in order"),
    "last use below -1": ([FIRST._replace(last_use=-2)], {}, "not in order"),
    "last use before the step of a tensor made in it": (
        [FIRST._replace(last_use=-1)],
        {},
        "does not exist as the step begins",
    ),
    "use in a gap until the end of the step": ([FIRST._replace(next_use=12)], {}, "used while it is swapped"),
    "next use beyond the step": ([FIRST._replace(next_use=13)], {}, "not in order"),
    "last use of another tensor": ([SECOND._replace(last_use=2)], {}, "its last use, does not use it"),
    "next use of another tensor": ([SECOND._replace(next_use=8)], {}, "its next use, does not use it"),
    "use inside the gap": ([JudgedSwap(2, 10, 2, 3, 5, 5)], {}, "used while it is swapped"),
    "the same swap twice": ([FIRST, FIRST], {"host_bytes": 99, "stall_s": 99.0}, "before it is back"),
    "overlapping swaps of one tensor": (
        [FIRST, FIRST._replace(release=8, prefetch=9)],
        {"host_bytes": 99, "stall_s": 99.0},
        "before it is back",
    ),
    "operator above the budget": (SOUND, {"device_bytes": 66}, "operator 3 has 67 bytes in use"),
    "more than host memory": (SOUND, {"host_bytes": 49}, "the host has 49"),
    "late copy to the host": ([FIRST._replace(release=3)], {"stall_s": 0.5}, "copies to the host"),
    "late copy to the device": ([FIRST._replace(prefetch=8)], {"stall_s": 0.5}, "copies to the device"),
    "copies late only in sum": (SOUND, {"stall_s": 0.9}, "copies to the device"),
    "link shared with other copies": (
        [FIRST],
        {"stall_s": 0.0, "d2h_busy_s": np.full(12, 0.5)},
        "copies to the host",
    ),
    "slower link": ([FIRST], {"stall_s": 0.0, "h2d_bytes_per_s": 9.0}, "copies to the device"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_judge_names_the_mistake_of_a_broken_list(kind):
    swaps, changes, words = BROKEN[kind]
    found = list(mistakes_of_swaps(swaps, three_tensors(), limits(**changes)))
    assert any(words in mistake for mistake in found), found


def judged(found, problem):
    return [
        JudgedSwap(each.tensor, each.nbytes, each.last_use, swap.release, swap.prefetch, each.next_use)
        for swap in found.swaps
        for each in [problem.candidates[swap.candidate]]
    ]


@given(recordings(), st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([1.0, 20.0, 1000.0]))
@settings(max_examples=200, deadline=None)
def test_judge_accepts_planned_lists_down_to_their_peak_and_no_lower(recording, share, rate):
    trace = recording.trace()
    if not len(trace.operators):
        return
    seconds = np.full(len(trace.operators), 0.1)
    everything = swap_problem(trace, LinkLoad(rate, rate), budget_bytes=-(10**9), host_bytes=2**62, operator_s=seconds)
    least, most = least_budget(everything).nbytes, int(everything.in_use_bytes.max())
    problem = replace(everything, budget_bytes=least + int(share * (most - least)))
    found = swap_list(problem)
    allowed = ListLimits(
        problem.budget_bytes,
        found.swapped_bytes,
        rate,
        rate,
        found.simulation.stall_s,
        seconds,
        0 * seconds,
        0 * seconds,
    )
    swaps = judged(found, problem)
    assert list(mistakes_of_swaps(swaps, trace, allowed)) == []
    peak = int(found.simulation.in_use_bytes.max())
    assert list(mistakes_of_swaps(swaps, trace, allowed._replace(device_bytes=peak))) == []
    assert any(
        "in use" in mistake for mistake in mistakes_of_swaps(swaps, trace, allowed._replace(device_bytes=peak - 1))
    )
