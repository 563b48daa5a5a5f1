"""Requests that another recorded step makes otherwise are dynamic, and no others, whatever module makes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.profile import varying
from memplug.profile.trace import Pass, Trace
from memplug.profile.varying import observed, same
from tests.support.traces import Recording

SHAPE = ("a", "b", "c")


def step(*requests: tuple[str, int], layer: str = "layers.0", second: tuple[tuple[str, int], ...] = ()) -> Trace:
    """Return a step of requests (operator, bytes) in one layer, then of `second` in another."""
    recording = Recording()
    recording.step()
    recording.phase(Pass.FORWARD, 0)
    for name, of_it in ((layer, requests), ("layers.1", second)):
        recording.layer(name)
        for operator, nbytes in of_it:
            recording.op(operator)
            recording.free(recording.malloc(nbytes))
    return recording.trace()


def dynamic(first: Trace, *others: Trace) -> list[int]:
    """Return the rows of the first step's dynamic requests."""
    return np.flatnonzero(observed(first, others)[0].requests["dynamic"]).tolist()


def test_steps_of_equal_requests_have_no_dynamic_request() -> None:
    one = step(("a", 600), ("b", 1024), layer="experts")
    assert dynamic(one, step(("a", 700), ("b", 1024), layer="experts")) == [], "both take two blocks"


OTHERS = (("c", 512),) * 30


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((("a", 600), ("b", 5000)), [1]),  # another size
        ((("a", 600),), [1]),  # does not come
        ((("a", 600), ("x", 9000), ("b", 1024)), []),  # one more comes
        ((("a", 600), ("x", 1024)), [1]),  # another operator asks
    ],
)
def test_request_is_dynamic_if_another_step_makes_it_otherwise(other: tuple, expected: list[int]) -> None:
    assert dynamic(step(("a", 600), ("b", 1024), *OTHERS), step(*other, *OTHERS)) == expected


def with_inputs(trace: Trace, *inputs: str) -> Trace:
    return replace(trace, fingerprint=replace(trace.fingerprint, inputs=inputs))


def test_requests_whose_sizes_follow_from_the_inputs_are_not_dynamic() -> None:
    one = with_inputs(step(("a", 8000), ("b", 1024), ("c", 64_000), *OTHERS), "int64[1, 8]")
    two = with_inputs(step(("a", 16_000), ("b", 1024), ("c", 256_000), *OTHERS), "int64[1, 16]")
    marked, (other,) = observed(one, [two])
    assert not marked.requests["dynamic"].any() and not other.requests["dynamic"].any()
    scaling = marked.scaling
    assert [scaling.terms[term] for term in scaling.term.tolist()[:3]] == [(1,), (), (1, 1)]
    assert scaling.factor.tolist()[:3] == [1000, 0, 1000] and scaling.largest.tolist()[:3] == [16_000, 1024, 256_000]


def test_requests_of_experts_are_dynamic_though_the_inputs_scale() -> None:
    one = with_inputs(step(("a", 8000), ("b", 1024), layer="layers.0.experts"), "int64[1, 8]")
    two = with_inputs(step(("a", 9000), ("b", 1024), layer="layers.0.experts"), "int64[1, 16]")
    one, two = (replace(each, layers=tuple(replace(of, dynamic=True) for of in each.layers)) for each in (one, two))
    assert dynamic(one, two) == [0]


@pytest.mark.parametrize("inputs", [("int64[1, 16]", "int64[1, 8]"), ("int64[1, 16], int64[4]",), ()])
def test_steps_with_other_dimensions_are_compared_by_bytes(inputs: tuple[str, ...]) -> None:
    one = with_inputs(step(("a", 8000), ("b", 1024), *OTHERS), "int64[1, 8]")
    two = with_inputs(step(("a", 16_000), ("b", 1024), *OTHERS), *inputs)
    assert dynamic(one, two) == [0] and observed(one, [two])[0].scaling is None


def test_all_requests_of_a_loop_that_runs_more_often_are_dynamic() -> None:
    first, other = (step(*(("a", 512), ("b", 512 * size), ("c", 512)) * 2) for size in (3, 4))
    assert dynamic(first, other) == [1, 4], "equal numbers of runs: each request is compared with that at its turn"
    longer = step(*(("a", 512), ("b", 2048), ("c", 512)) * 3)
    assert dynamic(first, longer) == [0, 1, 2, 3, 4, 5]


def test_request_is_dynamic_if_any_of_the_steps_differs() -> None:
    first = step(("a", 600), ("b", 1024))
    assert dynamic(first, step(("a", 600), ("b", 1024)), step(("a", 6000), ("b", 1024))) == [0]


def test_requests_that_come_more_often_shift_no_other_place() -> None:
    first = step(("a", 600), second=(("b", 1024),))
    assert dynamic(first, step(("a", 600), ("a", 600), second=(("b", 1024),))) == [0]


def test_place_of_very_many_requests_is_compared_from_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    first = step(*OTHERS, ("b", 1024), ("c", 512), ("b", 1024), *OTHERS[1:])
    other = step(*OTHERS, ("b", 2048), ("c", 512), ("b", 2048), *OTHERS)
    assert dynamic(first, other) == [30, 32]
    monkeypatch.setattr(varying, "MOST_PAIRS", 8)
    assert dynamic(first, other) == [30, 31, 32]


def test_requests_in_another_order_are_not_dynamic() -> None:
    assert dynamic(step(("a", 600), ("b", 2048)), step(("b", 2048), ("a", 600))) == []


def test_layers_are_compared_by_name_and_not_by_number() -> None:
    first, other = step(("a", 600), layer="one"), step(("a", 600), layer="two")
    assert dynamic(first, other) == [0]
    assert dynamic(step(second=(("b", 9),)), step(("a", 600), second=(("b", 9),))) == []


@st.composite
def steps(draw: st.DrawFn) -> Trace:
    request = st.tuples(st.sampled_from(SHAPE), st.sampled_from((512, 1024, 4096)))
    return step(*draw(st.lists(request, max_size=8)), second=tuple(draw(st.lists(request, max_size=4))))


@given(steps(), st.lists(steps(), max_size=3))
def test_all_steps_have_the_same_planned_requests_in_each_place(first: Trace, others: list[Trace]) -> None:
    marked, rest = observed(first, others)

    def planned(trace: Trace) -> list[list[tuple[str, int]]]:
        rows = trace.requests[~trace.requests["dynamic"]]
        return [
            sorted(
                (trace.names[trace.operators["name"][row["malloc_operator"]]], int(row["nbytes"])) for row in rows[at]
            )
            for at in (
                [trace.layers[layer].name == name for layer in rows["malloc_layer"]]
                for name in ("layers.0", "layers.1")
            )
        ]

    assert all(planned(other) == planned(marked) for other in rest)


@given(steps(), steps())
def test_each_request_is_the_same_as_at_most_one_of_another_step(first: Trace, other: Trace) -> None:
    partner = same(first, other)
    found = partner[partner >= 0]
    assert len(found) == len(np.unique(found))
    assert (first.requests["nbytes"][partner >= 0] == other.requests["nbytes"][found]).all()
    assert (same(first, first) == np.arange(len(first.requests))).all()
