"""The benchmark of changing lengths reports the figures of each case."""

import json

import pytest

from tests.bench import lengths


@pytest.mark.cpu("it simulates CUDA's allocator")
def test_rows_have_the_figures_of_both_ways(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(lengths.DRAWS, "buckets", lambda draw: [(1, draw.choice([8, 16, 32]))])
    output = tmp_path / "rows.json"
    lengths.main(["--lengths", "buckets", "--steps", "40", "--recorded", "4", "--json", str(output)])
    rows = json.loads(output.read_text())
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    for way in lengths.WAYS:
        case = f"buckets, {way}"
        assert {metric for known, metric in found if known == case} == set(lengths.HEADERS)
        assert 0.5 < found[case, "served"] <= 1 and found[case, "plans"] >= 1 and found[case, "cpu_time"] > 0
        assert 0.9 < found[case, "over"] and 1 <= found[case, "native"] and 1 <= found[case, "expandable"]
        assert 0 < found[case, "longest_bytes"]
    assert found["buckets, kept", "decisions"] == 0 and found["buckets, token-wise", "decisions"] >= 1
    assert "token-wise" in capsys.readouterr().out
