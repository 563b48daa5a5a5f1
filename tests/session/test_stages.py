"""The table of stages has an entry for every pair of a stage and an event."""

from __future__ import annotations

import itertools

import pytest

from memplug.session.table import TABLE, Stage, StepOutcome, after

ALGORITHM_1 = """
    stage       steady      settled     short
    warm-up     warm-up     gen-policy  warm-up
    gen-policy  gen-policy  stable      warm-up
    stable      stable      stable      warm-up
"""
HEAD, *ROWS = (line.split() for line in ALGORITHM_1.strip().splitlines())
EXPECTED = {
    (Stage(row[0]), StepOutcome[name.upper()]): Stage(cell)
    for row in ROWS
    for name, cell in zip(HEAD[1:], row[1:], strict=True)
}


@pytest.mark.parametrize(("stage", "event"), list(itertools.product(Stage, StepOutcome)))
def test_each_event_leads_to_the_stage_of_algorithm_1(stage: Stage, event: StepOutcome) -> None:
    if stage in (Stage.OFF, Stage.DETACHED):
        with pytest.raises(AssertionError, match=f"that is {stage.value} has no steps"):
            after(stage, event)
    else:
        assert after(stage, event) is EXPECTED[stage, event]


def test_stage_table_has_only_the_expected_entries() -> None:
    assert TABLE == EXPECTED


def test_gen_policy_begins_only_when_the_program_has_settled() -> None:
    assert [
        pair for pair, following in TABLE.items() if following is Stage.GEN_POLICY and pair[0] is not following
    ] == [(Stage.WARM_UP, StepOutcome.SETTLED)]
