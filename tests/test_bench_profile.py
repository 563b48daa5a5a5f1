"""The benchmarks of the profiler measure what they say; nothing here depends on how fast anything is."""

import json

import numpy as np
import pytest

from tests.bench import logical_layers


def test_operators_take_the_times_of_the_profiled_ones_in_their_order():
    profiled = [("label", 9.0), ("aten::linear", 1.0), ("aten::t", 2.0), ("label", 9.0), ("aten::mm", 3.0)]
    times = logical_layers.match(["aten::linear", "aten::t", "aten::mm"], profiled)
    assert times.tolist() == [1.0, 2.0, 3.0]


def test_what_the_profiler_merges_or_never_shows_takes_no_time():
    # Two of div_.Scalar, which only calls div_.Tensor: one row of the profiler's each.
    recorded = ["aten::div_", "aten::div_", "aten::_version", "aten::div_", "aten::div_", "aten::mm"]
    times = logical_layers.match(recorded, [("aten::div_", 1.0), ("aten::div_", 2.0), ("aten::mm", 3.0)])
    assert times.tolist() == [1.0, 2.0, 0, 0, 0, 3.0]


@pytest.mark.parametrize(
    "profiled",
    [
        [("aten::mm", 1.0), ("aten::add", 1.0)],
        [("aten::add", 1.0), ("aten::mm", 1.0), ("aten::mm", 1.0)],
        [("aten::add", 1.0), ("aten::mm", 1.0), ("aten::add", 1.0)],
        [("aten::mm", 1.0), ("aten::add", 1.0), ("aten::mm", 1.0)],
    ],
)
def test_times_of_another_program_are_refused(profiled):
    with pytest.raises(ValueError, match="operator"):
        logical_layers.match(["aten::add", "aten::mm"], profiled)


def test_logical_layers_gives_a_row_for_each_pass_group_count_and_metric(tmp_path, capsys):
    output = tmp_path / "rows.json"
    shape = ["--layers", "4", "--hidden", "16", "--tokens", "8", "--optimizer", "adamw"]
    logical_layers.main(
        ["--device", "cpu", *shape, "--groups", "1", "2", "4", "8", "--repetitions", "1", "--json", str(output)]
    )
    rows = json.loads(output.read_text())
    found = {(row["mode"], row["metric"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    assert all(row["bench"] == "logical_layers" and row["unit"] == "1" and row["n"] == 1 for row in rows)
    always = {"cv", "error", "eq1_error"}
    for name in ("forward", "backward"):
        for groups in ("1", "2", "4", "8", "layers"):
            metrics = {metric for mode, metric in found if mode == f"{name} {groups}"}
            assert metrics == always | ({"inner_cv"} if groups in ("4", "8", "layers") else set())
        # One group is all of its pass: nothing varies, and its share of itself is exact.
        assert found[f"{name} 1", "cv"] == 0
        assert found[f"{name} 1", "error"] == pytest.approx(0, abs=1e-12)
        assert found[f"{name} 4", "cv"] > 0 and found[f"{name} 4", "eq1_error"] > 0
    assert np.isfinite(list(found.values())).all()
    printed = capsys.readouterr().out
    for text in ("| groups |", "| layers |", "forward CV", "backward Eq. 1", "optimizer: "):
        assert text in printed
