"""The stages of a program as one table: WarmUp, GenPolicy, Stable (Chameleon, section 4, Algorithm 1)."""

from __future__ import annotations

import enum


class Stage(enum.Enum):
    """The stage that a session is in: that of the program that its next step is expected to run."""

    OFF = "off"
    WARM_UP = "warm-up"
    GEN_POLICY = "gen-policy"
    STABLE = "stable"
    DETACHED = "detached"


class StepOutcome(enum.Enum):
    """The outcome of a step for the program that it ran, once all ranks agree on that program."""

    STEADY = "the stage goes on"
    SETTLED = "the stage is over: enough steps, or the best plan is known"
    SHORT = "the device has less room than the plan needs"


TABLE = {
    (Stage.WARM_UP, StepOutcome.STEADY): Stage.WARM_UP,
    (Stage.WARM_UP, StepOutcome.SETTLED): Stage.GEN_POLICY,
    (Stage.WARM_UP, StepOutcome.SHORT): Stage.WARM_UP,
    (Stage.GEN_POLICY, StepOutcome.STEADY): Stage.GEN_POLICY,
    (Stage.GEN_POLICY, StepOutcome.SETTLED): Stage.STABLE,
    (Stage.GEN_POLICY, StepOutcome.SHORT): Stage.WARM_UP,
    (Stage.STABLE, StepOutcome.STEADY): Stage.STABLE,
    (Stage.STABLE, StepOutcome.SETTLED): Stage.STABLE,
    (Stage.STABLE, StepOutcome.SHORT): Stage.WARM_UP,
}


def after(stage: Stage, event: StepOutcome) -> Stage:
    """Return the stage that follows `stage` after a step with the outcome `event`."""
    following = TABLE.get((stage, event))
    assert following is not None, f"a session that is {stage.value} has no steps: {event.value}"
    return following
