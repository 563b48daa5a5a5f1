"""The resource that limits a step's time, found from the step's spans."""

from __future__ import annotations

import pytest

from memplug.predict.estimator.bound import bound
from memplug.predict.estimator.result import Span


def _span(name: str, begin_s: float, end_s: float, stream: int = 0) -> Span:
    return Span(stream, begin_s, end_s, begin_s, name)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([_span("aten::mm", 0, 1)], "compute"),
        ([_span("aten::mm", 0, 0.5), _span("aten::mm", 0.49, 0.99), _span("to host", 0, 1, 1)], "compute"),
        ([_span("aten::mm", 0, 0.5), _span("to host", 0.4, 0.9, 1), _span("aten::mm", 0.9, 1)], "link"),
        ([_span("aten::mm", 0, 0.5), _span("to device", 0.4, 0.6, 2), _span("aten::mm", 0.9, 1)], "host"),
        ([_span("aten::mm", 0, 0.5), _span("c10d::allgather_", 0.3, 1, 1)], "collectives"),
        ([_span("aten::mm", 0, 0.5), _span("c10d::send", 0.3, 0.6, 1), _span("to host", 0.3, 1, 2)], "link"),
        ([_span("aten::mm", 0, 0.5), _span("c10d::send", 0.5, 0.6, 1), _span("to host", 0.6, 0.75, 2)], "host"),
        ([], "host"),
    ],
)
def test_step_is_bound_by_the_resource_that_is_busy_while_kernels_wait(spans: list[Span], expected: str) -> None:
    assert bound(spans, 1.0) == expected
