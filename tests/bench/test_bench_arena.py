"""The benchmark of the arena serves every case and reports its figures; nothing here depends on speed."""

import json

import pytest

from tests.bench import arena


@pytest.mark.long  # it compiles a program that replays allocations
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arena_serves_every_case_and_the_rows_have_its_figures(device, tmp_path, capsys):
    output = tmp_path / "rows.json"
    sizes = ["--layers", "1", "--hidden", "64", "--tokens", "32", "--steps", "1", "--rounds", "1"]
    arena.main(["--device", device, "--models", "mixtral", *sizes, "--json", str(output)])
    rows = json.loads(output.read_text())
    found = {(row["case"], row["mode"], row["metric"]): row["value"] for row in rows}
    cases = [f"mixtral, {kept}, {count} in flight" for kept in ("kept", "recomputed") for count in (1, 2)]
    assert {case for case, _, _ in found} == set(cases) and len(found) == len(rows)
    for case in cases:
        assert found[case, "native", "step_s"] > 0 and found[case, "arena", "step_s"] > 0
        assert 0.5 < found[case, "arena", "served"] <= 1
        assert found[case, "arena", "arena_bytes"] >= found[case, "arena", "live_peak_bytes"] > 0
        efficiency = {mode: found[case, mode, "efficiency"] for mode in ("arena", "simulated")}
        assert 0 < efficiency["arena"] <= 1 and 0 < efficiency["simulated"] <= 1
        if device == "cpu":  # on CUDA, memory beside the arena, in segments of 2 MiB, outweighs so small a model
            assert efficiency["arena"] > efficiency["simulated"]
        assert found[case, "native", "host_s_per_allocation"] > 0 and found[case, "arena", "host_s_per_allocation"] > 0
    printed = capsys.readouterr().out
    assert all(case in printed for case in cases) and "arena/native" in printed
