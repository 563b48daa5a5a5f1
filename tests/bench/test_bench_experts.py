"""The benchmark of mixtures reports the figures of each case; experts whose sizes do not change are served whole."""

import json

import pytest

from tests.bench import experts, routing


@pytest.mark.cpu("it simulates CUDA's allocator")
def test_grouped_experts_are_served_whole_and_the_rows_have_their_figures(tmp_path, capsys):
    output = tmp_path / "rows.json"
    sizes = ["--layers", "1", "--hidden", "32", "--tokens", "32", "--steps", "16", "--recorded", "2"]
    experts.main(["--models", "mixtral", "--micro-batches", "1", *sizes, "--json", str(output)])
    found = {(row["case"], row["metric"]): row["value"] for row in json.loads(output.read_text())}
    cases = [f"mixtral, {kind}, {way}, 1 in flight" for kind in experts.EXPERTS for way in experts.WAYS]
    assert {case for case, _ in found} == set(cases)
    for case in cases:
        assert 0 < found[case, "native"] <= 1 and 0 < found[case, "expandable"] <= 1
        assert found[case, "live_bytes"] > 0 and 0 <= found[case, "served"] <= 1
        if "grouped" in case:
            assert found[case, "served"] == 1 and found[case, "plans"] == 1 and found[case, "beside_bytes"] == 0
            assert 0.9 < found[case, "efficiency"] <= 1
    printed = capsys.readouterr().out
    assert all(case in printed for case in cases) and "efficiency" in printed


def test_drawn_sizes_are_served_and_the_rows_have_their_figures(tmp_path):
    output = tmp_path / "rows.json"
    routing.main(
        ["--steps", "kept", "--deviations", "0", "0.1", "--recorded", "2", "--served", "2", "--json", str(output)]
    )
    found = {(row["case"], row["metric"]): row["value"] for row in json.loads(output.read_text())}
    fixed, drawn = "kept, deviation 0.0", "kept, deviation 0.1"
    assert found[fixed, "efficiency"] == 1 and found[fixed, "missed"] == 0
    assert 0.6 < found[drawn, "efficiency"] < 1 and found[drawn, "missed"] < 0.1
