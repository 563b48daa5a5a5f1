"""A plan for larger steps than the observed one: bytes and times grow with the inputs."""

from memplug.tokenwise.plan import scaled
from memplug.tokenwise.plan.model import InFlight
from tests.support.plans import operator, region


def test_bytes_and_times_grow_with_the_inputs_and_attentions_time_with_their_square():
    observed = region(
        operator("mm", (0,), (1,), time_s=2.0, size=100, rows=10),
        operator("attention", (1,), (2,), time_s=3.0, size=40, capture="whole", always_swapped=True),
        saved={1, 2},
        input_bytes=60,
    )
    larger = scaled.region(observed, 1.5)
    matmul, attention = larger.operators
    assert (matmul.time_s, matmul.output_bytes, matmul.rows) == (3.0, 150, 15)
    assert (attention.time_s, attention.output_bytes) == (6.75, 60)
    assert (larger.input_bytes, larger.forward_s, larger.backward_s) == (90, 15.0, 30.0)
    assert larger.instances == observed.instances and larger.saved == observed.saved


def test_step_of_the_largest_size_is_left_as_it_is():
    observed = region(operator("mm", (0,), (1,), size=100), saved={1})
    assert scaled.region(observed, 1.0) is observed


def test_room_and_peak_grow_beside_what_is_there_before_the_step():
    assert scaled.in_flight([InFlight(2, 10), InFlight(1, 0)], 1.5) == (InFlight(2, 15), InFlight(1, 0))
    assert scaled.peak_bytes(1000, 400, 1.5) == 1300
    assert scaled.peak_bytes(300, 400, 1.5) == 400, "the trace began later than the peak"
