"""The benchmark of the planners reports each planner's result; nothing here depends on speed."""

import json

import pytest

from tests.bench import layout


@pytest.mark.long  # each planner uses its time limit of a second
def test_every_planner_has_rows_and_no_height_is_below_the_lower_bound(tmp_path, capsys):
    output = tmp_path / "rows.json"
    layout.main(["--quick", "--json", str(output)])
    rows = json.loads(output.read_text())
    found = {(row["case"], row["mode"], row["metric"]): row["value"] for row in rows}
    assert len(found) == len(rows)
    modes = (*layout.BASELINES, *layout.PLANNERS)
    assert {(case, mode) for case, mode, _ in found} == {(case, mode) for case in layout.QUICK for mode in modes}
    for case in layout.QUICK:
        heights = {mode: found[case, mode, "height over lower bound"] for mode in modes}
        assert min(heights.values()) >= 1 and heights["auto"] == min(heights[mode] for mode in layout.PLANNERS)
        assert all(found[case, mode, "judge"] in ("accepted", "optimal") for mode in layout.PLANNERS)
        assert all(found[case, mode, "peak"] > 2**20 and found[case, mode, "requests"] > 0 for mode in modes)
    printed = capsys.readouterr().out
    assert "| case " in printed and printed.count("llama7b_long_ckpt") == len(modes)


def test_baseline_gets_the_same_requests_as_the_planners():
    problem = layout.problem_of("llama7b_long_ckpt")
    events = layout._events(problem)
    assert len(events) == 2 * len(problem) and events[:, 2].sum() == 2 * problem.buffers["size"].sum()
    live, most = 0, 0
    for kind, _, nbytes, _ in events.tolist():
        live += nbytes if kind == 0 else -nbytes
        most = max(most, live)
    assert live == 0 and most == problem.lower_bound


def test_failed_planner_is_reported():
    with pytest.raises(RuntimeError, match="absent.csv by search failed"):
        layout.run("absent.csv", "search", 1.0)
