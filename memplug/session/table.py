"""The stages of a session as one table: WarmUp, GenPolicy, Stable (Chameleon, section 4, Algorithm 1)."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """The stage that a session is in."""

    OFF = "off"
    WARM_UP = "warm-up"
    GEN_POLICY = "gen-policy"
    STABLE = "stable"
    DETACHED = "detached"


class StepOutcome(enum.Enum):
    """The outcome of a step, once all ranks agree on the program that it ran."""

    STEADY = "the same program, for too few steps yet"
    SETTLED = "the same program, for enough steps"
    KNOWN = "another program, with decisions"
    CHANGED = "another program, without decisions"


TABLE = {
    (Stage.WARM_UP, StepOutcome.STEADY): Stage.WARM_UP,
    (Stage.WARM_UP, StepOutcome.SETTLED): Stage.GEN_POLICY,
    (Stage.WARM_UP, StepOutcome.KNOWN): Stage.STABLE,
    (Stage.WARM_UP, StepOutcome.CHANGED): Stage.WARM_UP,
    (Stage.GEN_POLICY, StepOutcome.STEADY): Stage.GEN_POLICY,
    (Stage.GEN_POLICY, StepOutcome.SETTLED): Stage.STABLE,
    (Stage.GEN_POLICY, StepOutcome.KNOWN): Stage.STABLE,
    (Stage.GEN_POLICY, StepOutcome.CHANGED): Stage.WARM_UP,
    (Stage.STABLE, StepOutcome.STEADY): Stage.STABLE,
    (Stage.STABLE, StepOutcome.SETTLED): Stage.STABLE,
    (Stage.STABLE, StepOutcome.KNOWN): Stage.STABLE,
    (Stage.STABLE, StepOutcome.CHANGED): Stage.WARM_UP,
}


def after(stage: Stage, event: StepOutcome) -> Stage:
    """Return the stage that follows `stage` after a step with the outcome `event`."""
    following = TABLE.get((stage, event))
    assert following is not None, f"a session that is {stage.value} has no steps: {event.value}"
    return following
