"""The benchmarks of the profiler measure correctly; nothing here depends on speed."""

import json

import numpy as np
import pytest

from tests.bench import (
    finding,
    host_time,
    leaks,
    logical_layers,
    per_operator,
    profiler_overhead,
    stability,
    under_a_list,
)
from tests.bench.stability import Log


def test_operators_get_profiled_times_in_order():
    profiled = [("label", 9.0), ("aten::linear", 1.0), ("aten::t", 2.0), ("label", 9.0), ("aten::mm", 3.0)]
    times = logical_layers.match(["aten::linear", "aten::t", "aten::mm"], profiled)
    assert times.tolist() == [1.0, 2.0, 3.0]


def test_operators_that_the_profiler_merges_or_hides_get_time_0():
    # Two calls of div_.Scalar, which only calls div_.Tensor: the profiler shows one row for each.
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


def test_logical_layers_has_a_row_per_pass_group_count_and_metric(tmp_path, capsys):
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
        # One group is the whole pass: its time does not vary, and its estimate is exact.
        assert found[f"{name} 1", "cv"] == 0
        assert found[f"{name} 1", "error"] == pytest.approx(0, abs=1e-12)
        assert found[f"{name} 4", "cv"] > 0 and found[f"{name} 4", "eq1_error"] > 0
    assert np.isfinite(list(found.values())).all()
    printed = capsys.readouterr().out
    for text in ("| groups |", "| layers |", "forward CV", "backward Eq. 1", "optimizer: "):
        assert text in printed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overhead_of_every_mode_is_relative_to_the_baseline(device, tmp_path, capsys):
    output = tmp_path / "rows.json"
    shape = ["--device", device, "--layers", "1", "--hidden", "16", "--tokens", "4"]
    profiler_overhead.main([*shape, "--rounds", "1", "--json", str(output)])
    rows = json.loads(output.read_text())
    ratios = {row["mode"]: row["value"] for row in rows if row["metric"] == "over_baseline"}
    assert list(ratios) == list(profiler_overhead.MODES) and ratios["baseline"] == 1
    assert all(row["value"] > 0 for row in rows)
    assert "a quarter of the tokens" in capsys.readouterr().out


@pytest.mark.long
def test_host_time_has_a_row_per_case_and_mode(tmp_path, capsys):
    output, mode = tmp_path / "rows.json", "memplug:1+arena"
    few = ["--layers", "2", "--steps", "1", "--rounds", "1"]
    host_time.main(["--cases", "a", "c", "--modes", mode, *few, "--json", str(output)])
    rows = json.loads(output.read_text())
    found = {(row["case"][0], row["mode"], row["metric"]): row["value"] for row in rows}
    assert len(found) == len(rows) and min(found.values()) > 0
    for case in "ac":
        parts = found[case, mode, "forward_s"] + found[case, mode, "backward_s"]
        assert found[case, mode, "step_s"] >= parts
    assert capsys.readouterr().out.count(mode) == 2


def test_operator_cost_is_separated_from_region_cost(monkeypatch, tmp_path):
    """Use a clock that a forward advances by 4 per operator and by 100 per region, and a recompute pass by 2 and 30."""

    def note(self: per_operator.Measured, part: str, run: object) -> None:
        run()
        an_operator, besides = {"alone": (1, 0), "verified": (4, 100), "again": (1, 0), "replay": (2, 30)}[part]
        self.seconds[part].append(an_operator * self.operators[part] + besides)

    monkeypatch.setattr(per_operator.Measured, "_note", note)
    output = tmp_path / "rows.json"
    per_operator.main(["--repeats", "3", "--rounds", "2", "--json", str(output)])
    found = {(row["case"], row["mode"], row["metric"]): row["value"] for row in json.loads(output.read_text())}
    assert len(found) == 3 * 5 * 2
    for kind in per_operator.KINDS:
        assert found[kind, "verified", "operator_s"] == 4 and found[kind, "verified", "region_s"] == 100
        assert found[kind, "added", "operator_s"] == 3 and found[kind, "added", "region_s"] == 100
        assert found[kind, "replay", "operator_s"] == 2 and found[kind, "replay", "region_s"] == 30


@pytest.mark.long
def test_long_run_ends_with_a_plan_for_each_sequence_length(tmp_path, capsys):
    output = tmp_path / "rows.json"
    assert stability.main(["--steps", "150", "--tokens", "8", "--json", str(output)]) == 0
    found = {row["metric"]: row["value"] for row in json.loads(output.read_text())}
    assert found["plans"] == 2 and found["skipped_steps"] > 0 and found["largest_loss_difference"] < 1e-3
    remembering, forgetting = (found[f"share_of_steps_with_a_plan_{way}"] for way in ("remembering", "forgetting"))
    assert remembering > forgetting
    assert "stages as expected" in capsys.readouterr().out


def test_long_run_check_finds_every_problem():
    plain = Log(losses=[1.0, 2.0], skipped=1)
    right = Log(losses=[1.0, 2.0], skipped=1, report={"replans": 2, "stage": "stable"})
    assert stability.problems(plain, right) == []
    wrong = Log(losses=[1.0, 2.1], skipped=0, report={"replans": 3, "stage": "warm-up"})
    assert len(stability.problems(plain, wrong)) == 4


@pytest.mark.parametrize("steps", ["100", pytest.param("300", marks=pytest.mark.long)])
def test_long_run_writes_its_memory_curve_and_growth(steps, chrome, tmp_path):
    output, picture = tmp_path / "rows.json", tmp_path / "curve.png"
    leaks.main(["--steps", steps, "--json", str(output), "--png", str(picture)])
    rows = json.loads(output.read_text())
    assert sum(row["metric"] == "resident_bytes" for row in rows) == leaks.SAMPLES
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert leaks.growth_bytes_a_step([(step, 1000 + 7 * max(step, 50)) for step in range(100)]) == pytest.approx(7)


@pytest.mark.long
@pytest.mark.parametrize("alpha", ["0", "auto"])
def test_long_run_of_awkward_steps_leaks_no_objects(alpha, capsys):
    leaks.main(["--steps", "320", "--awkward", "--alpha", alpha])
    assert "counts that grew: none" in capsys.readouterr().out


def test_growing_object_count_ends_the_run_with_an_error(monkeypatch):
    counts = iter([{"tensors": 5}, {"tensors": 6}])
    monkeypatch.setattr(leaks, "left_behind", lambda executor: next(counts))
    monkeypatch.setattr(leaks, "resident_bytes", lambda: 10**8)
    assert leaks.main(["--steps", "100", "--awkward"]) == 1


def test_growth_of_resident_memory_ends_the_run_with_an_error(monkeypatch, capsys):
    sizes = iter(range(10**8, 10**9, 10**4))
    monkeypatch.setattr(leaks, "resident_bytes", lambda: next(sizes))
    assert leaks.main(["--steps", "100"]) == 1
    assert "growth over the second half: 2000.0 bytes a step" in capsys.readouterr().out


def test_finding_benchmark_counts_targets_and_uses(tmp_path, capsys):
    pytest.importorskip("transformers")
    output = tmp_path / "rows.json"
    finding.main(["--models", "convolutions", "--times", "2", "--rounds", "1", "--json", str(output)])
    rows = {row["metric"]: row["value"] for row in json.loads(output.read_text())}
    assert rows["targets"] > 25 and rows["uses"] > rows["targets"]
    assert "convolutions" in capsys.readouterr().out


def test_under_a_list_benchmark_separates_the_time_of_copies(tmp_path, capsys):
    pytest.importorskip("transformers")
    output = tmp_path / "rows.json"
    under_a_list.main(["--layers", "4", "--steps", "2", "--rounds", "1", "--json", str(output)])
    found = {(row["mode"], row["metric"]): row["value"] for row in json.loads(output.read_text())}
    assert found["none", "step_over_none"] == 1
    copies_s = found["list", "step_s"] - found["less copies", "step_s"]
    assert copies_s == pytest.approx(found["copies alone", "step_s"]) and copies_s > 0
    assert "tensors" in capsys.readouterr().out
