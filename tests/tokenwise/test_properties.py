"""Whatever a layer does: it trains with memplug as without, to the bit, or an error says what to do."""

from __future__ import annotations

import pytest
from hypothesis import event, example, given, settings

from memplug.errors import MemplugError
from tests.support.random_programs import Program, programs

KEPT_BRANCHES = Program((("raises", "routed", "gradient inside"),) * 2, "same tensor", ("anomaly",), ("twice",) * 3)
"""Steps whose graphs live on in part, after all that they have on the device was used up."""
EXAMPLES, PLANNED_EXAMPLES, LONG_EXAMPLES = 300, 60, 800
UNDER_HOOKS = ("don't yet support saved tensor hooks", "no hooks here")
"""Of torch, in a region that runs a transform or disables such hooks, by which memplug sees what autograd saves."""

UNDER_OTHER_HOOKS = ("Cannot copy out of meta tensor", "NestedTensorImpl doesn't support sizes")
"""Of torch, where hooks of torch's own save tensors, which memplug saves by its own in a region."""


def check(program: Program, alpha: float | str) -> None:
    """Raises AssertionError where a training with memplug differs from one without."""
    right, error = program.trained(None)
    found, other = program.trained(alpha)
    if isinstance(other, MemplugError):
        event(f"refused: {type(other).__name__}")
        assert other.advice
        assert found == right[: len(found)]
        return
    if any(refusal in str(other) for refusal in UNDER_HOOKS):
        event("a transform inside")
        return
    if any(refusal in str(error) for refusal in UNDER_OTHER_HOOKS):
        event("hooks of torch's own")
        assert found[: len(right)] == right
        return
    if (type(other), str(other)) != (type(error), str(error)):
        raise AssertionError(f"without memplug: {error!r}; with it: {other!r}") from other
    event("trained" if error is None else "torch refuses")
    assert found == right


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@given(program=programs())
@example(program=KEPT_BRANCHES)
@settings(max_examples=EXAMPLES, derandomize=True, database=None)
def test_a_layer_trains_as_without_memplug_or_an_error_has_advice(alpha: float, program: Program) -> None:
    check(program, alpha)


@given(program=programs(most_steps=8))
@settings(max_examples=PLANNED_EXAMPLES, derandomize=True, database=None)
def test_a_layer_trains_as_without_memplug_with_a_plan(program: Program) -> None:
    check(program, "auto")


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
@given(program=programs(most_steps=6))
@settings(max_examples=LONG_EXAMPLES, derandomize=True, database=None)
def test_many_layers_train_as_without_memplug_or_an_error_has_advice(alpha: float | str, program: Program) -> None:
    check(program, alpha)
