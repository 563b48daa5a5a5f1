"""Names, groups and colours of phases and layers, and runs of values along a clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.figures.clock import runs
from memplug.figures.groups import BEFORE, OUTSIDE, by_layer, by_phase, is_dark, phase_letters, phase_words
from memplug.profile.trace import Layer, Pass, Phase


@given(st.lists(st.integers(-1, 2), max_size=40), st.integers(1, 9))
def test_runs_cover_all_values_and_are_exact_if_few(values, at_most):
    found = runs(np.array(values, np.int64), at_most)
    assert len(found.start) <= max(at_most, 1)
    edges = [0, *found.end.tolist()] if values else []
    assert edges == ([*found.start.tolist(), len(values)] if values else [])
    if len(found.start) < at_most:
        spelt_out = np.repeat(found.value, found.end - found.start).tolist()
        changes = sum(a != b for a, b in zip(values, values[1:], strict=False))
        assert changes + 1 > at_most or spelt_out == values


def test_many_layers_share_few_groups_in_order():
    groups = by_layer([Layer(f"model.layers.{i}") for i in range(80)])
    labels = [group.label for group in groups.groups]
    assert labels[:3] == [BEFORE, OUTSIDE, "layers 0-9"] and labels[-1] == "layers 70-79"
    assert groups.of.tolist() == [2 + i // 10 for i in range(80)] + [1], "index -1 refers to the last entry"
    assert len({group.colour for group in groups.groups}) == len(labels)


@pytest.mark.parametrize(
    "names, labels",
    [
        (["model.layers.7"], ["layer 7"]),
        (["encoder"], ["encoder"]),
        (["model.layers.1", "model.layers.10"], ["layer 1", "layer 10"]),
        (["model.layers.0", "lm_head"], ["model.layers.0", "lm_head"]),
        (["h.0.attn", "h.0.mlp"], ["attn", "mlp"]),
        ([""], ["(root)"]),
        ([f"b{i}" for i in range(10)], ["b0 to b1", "b2 to b3", "b4 to b5", "b6 to b7", "b8 to b9"]),
    ],
)
def test_layer_labels_have_only_the_distinguishing_parts(names, labels):
    assert [group.label for group in by_layer([Layer(name) for name in names]).groups[2:]] == labels


def test_phases_are_ordered_by_kind_and_many_share_groups():
    phases = [Phase(kind, i) for i in range(16) for kind in (Pass.FORWARD, Pass.BACKWARD)] + [Phase(Pass.OPTIMIZER)]
    groups = by_phase(phases)
    assert [group.label for group in groups.groups[:4]] == [
        BEFORE,
        "optimizer",
        "forward of micro-batches 0-1",
        "forward of micro-batches 2-3",
    ]
    assert len(groups.groups) == 2 + 8 + 8
    assert groups.of[phases.index(Phase(Pass.BACKWARD, 15))] == 17
    assert [group.label for group in by_phase([Phase(Pass.EITHER, i) for i in range(9)]).groups[1:3]] == [
        "forward or backward 0-1",
        "forward or backward 2-3",
    ]


@pytest.mark.parametrize(
    "phase, words, letters",
    [
        (Phase(Pass.FORWARD, 0), "forward of micro-batch 0", "F0"),
        (Phase(Pass.BACKWARD, 12), "backward of micro-batch 12", "B12"),
        (Phase(Pass.BACKWARD), "backward", "B"),
        (Phase(Pass.PREFETCH, 1), "prefetch of micro-batch 1", "pre1"),
        (Phase(Pass.OPTIMIZER), "optimizer", "opt"),
        (Phase(Pass.OTHER), "between passes", ""),
        (Phase(Pass.EITHER, 3), "forward or backward 3", "P3"),
    ],
)
def test_each_phase_has_a_full_and_a_short_name(phase, words, letters):
    assert (phase_words(phase), phase_letters(phase)) == (words, letters)


def test_dark_and_light_colours_are_distinguished():
    assert is_dark("#000000") and is_dark("#440154") and not is_dark("#ffffff") and not is_dark("#e8d92b")
