"""Any layer trains with memplug as without, to the bit, or raises an error with advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import event, example, given, settings

from memplug.errors import InPlaceError, RecomputeError, RegionError
from memplug.tokenwise.engine.buffers import IN_PLACE
from tests.support.random_programs import Program, programs

FOUND = (
    # graphs, parts of which outlive the use of their saved tensors
    Program((("raises", "routed", "gradient inside"),) * 2, "same tensor", ("anomaly",), ("twice",) * 3),
    # an operator that raises in a dispatch mode, in a step whose operators are timed
    Program((("raises",),), modes=("dispatch mode",), schedule=("plain",) * 4),
    # a recompute pass that draws random numbers, inside of the backward of batched gradients
    Program((("drops",), ("own kernel", "drops"), ("drops", "address")), schedule=("batched", "batched by function")),
    # a weight that a forward first uses inside of a transform
    Program((("pushed forward",),), modes=("dispatch mode",), schedule=("batched",), kind="frozen layer"),
    # a write to a nested tensor, which has no sizes
    Program((("adds in place",),), "nested argument"),
    # state of a class and of a Python module
    Program((("counts for all", "address"),) * 2, schedule=("plain", "twice")),
    # a buffer whose memory was made in inference mode
    Program((("sets data", "raises"),), schedule=("inferred", "plain")),
    # outputs of a swapped operator that are too small to swap
    Program((("norm",), ()), schedule=("plain",) * 6, entry="scaled", arena=False),
    # a choice by values in an opaque region
    Program((("resizes", "sorts"), ()), schedule=("plain",) * 6, entry="scaled", arena=False),
    # a sparse tensor that a module saves and makes again
    Program((("skips", "later sparse"),), schedule=("micro batches",) * 2, entry="scaled", turn=1, arena=False),
    # a bias that is written to before its region runs again
    Program((("address", "sin"),), schedule=("written between", "written between backwards")),
    # a parameter that is stepped in backward, and is also read by a gradient inside the forward
    Program((("sparse", "gradient of leaf"),), schedule=("stepped in backward",)),
    # a buffer to which the next forward writes, so that backward without memplug raises
    Program((("moves in place", "renames"),), schedule=("reversed",)),
    # a region that is opaque only once there is a plan
    Program((("later raises",), ()), schedule=("plain",) * 6, entry="scaled", turn=4, arena=False),
    # a step with several forwards; one of them gets inputs that need a gradient
    Program((("raises",),) * 2, "with gradient", schedule=("interrupted",) * 7),
    # a region that disables saved-tensor hooks
    Program((("sin",),), modes=("without hooks",)),
)
"""Programs that memplug once trained wrongly."""
EXAMPLES, PLANNED_EXAMPLES, LONG_EXAMPLES = 300, 120, 800
REFUSALS = (InPlaceError, RecomputeError, RegionError)
"""Errors that may end a training; any other error of memplug's is a defect."""
UNDER_HOOKS = ("don't yet support saved tensor hooks", "no hooks here")
"""Errors of torch in a region that runs a transform or disables saved-tensor hooks, which memplug needs."""
UNDER_OTHER_HOOKS = ("Cannot copy out of meta tensor", "NestedTensorImpl doesn't support sizes")
"""Errors of torch where its own hooks save tensors; in a region memplug's hooks save them."""


def found(test: Callable[..., None]) -> Callable[..., None]:
    """Add the programs of `FOUND` to a test of programs."""
    for program in FOUND:
        test = example(program=program)(test)
    return test


def check(program: Program, alpha: float | str) -> None:
    """Raise AssertionError if a training with memplug differs from one without."""
    right, error = program.trained(None)
    ours, other = program.trained(alpha)
    if IN_PLACE in str(error) and len(ours) > len(right):
        event("trained where torch refuses")
        right, error = program.trained(None, copies=True)
    if any(refusal in str(error) for refusal in UNDER_OTHER_HOOKS):
        event("hooks of torch's own")
        assert ours[: len(right)] == right[: len(ours)]
        return
    if isinstance(other, REFUSALS):
        event(f"refused: {type(other).__name__}, {'as by torch' if error else 'where torch trains'}")
        assert other.advice
        assert ours == right[: len(ours)]
        return
    if "without hooks" not in program.modes and any(refusal in str(other) for refusal in UNDER_HOOKS):
        event("a transform inside")
        return
    if (type(other), str(other)) != (type(error), str(error)):
        raise AssertionError(f"without memplug: {error!r}; with it: {other!r}") from other
    event("trained" if error is None else "torch refuses")
    assert ours == right


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@given(program=programs())
@found
@settings(max_examples=EXAMPLES, derandomize=True, database=None)
def test_layer_trains_as_without_memplug_or_raises_with_advice(alpha: float, program: Program) -> None:
    check(program, alpha)


@pytest.mark.long
@given(program=programs(most_steps=8))
@found
@settings(max_examples=PLANNED_EXAMPLES, derandomize=True, database=None)
def test_layer_trains_as_without_memplug_under_a_plan(program: Program) -> None:
    check(program, "auto")


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0, "auto"])
@given(program=programs(most_steps=6))
@settings(max_examples=LONG_EXAMPLES, derandomize=True, database=None)
def test_many_layers_train_as_without_memplug_or_raise_with_advice(alpha: float | str, program: Program) -> None:
    check(program, alpha)
