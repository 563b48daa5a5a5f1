"""The benchmark of mixtures reports the figures of each case; experts whose sizes do not change are served whole."""

import json
from pathlib import Path

import pytest

from tests.bench import experts, routing

TINY = ["--layers", "1", "--hidden", "32", "--tokens", "32", "--recorded", "2", "--micro-batches", "1"]


def found_in(file: Path) -> dict[tuple[str, str], float]:
    """Return the values of a file of rows, by case and metric."""
    return {(row["case"], row["metric"]): row["value"] for row in json.loads(file.read_text())}


@pytest.mark.cpu("it simulates CUDA's allocator")
def test_grouped_experts_are_served_whole_and_the_rows_have_their_figures(tmp_path, capsys):
    output = tmp_path / "rows.json"
    chosen = ["--models", "mixtral", "--experts", "grouped", "--rounds", "0"]
    experts.main([*chosen, *TINY, "--steps", "16", "--json", str(output)])
    found = found_in(output)
    cases = [f"mixtral, grouped, {way}, 1 in flight" for way in experts.WAYS]
    assert {case for case, _ in found} == set(cases)
    for case in cases:
        assert found[case, "served"] == 1 and found[case, "plans"] == 1 and found[case, "beside_bytes"] == 0
        assert found[case, "varying"] == found[case, "grown"] == 0 and 0.9 < found[case, "efficiency"] <= 1
        assert 0 < found[case, "native"] <= 1 and 0 < found[case, "expandable"] <= 1
        assert 0 < found[case, "largest_bytes"] < found[case, "live_bytes"] <= found[case, "most_bytes"]
        assert (case, "cpu_time") not in found
    printed = capsys.readouterr().out
    assert all(case in printed for case in cases) and "efficiency" in printed


@pytest.mark.cpu("it simulates CUDA's allocator")
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("deepspeed", "looped"),
        ("megatron", "looped"),
        pytest.param("megatron-ep2", "looped", marks=[pytest.mark.distributed, pytest.mark.long]),
        pytest.param("megatron", "grouped", marks=pytest.mark.long),
    ],
)
def test_frameworks_steps_are_served_and_timed(model, kind, tmp_path):
    if model.startswith("megatron"):
        pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    output = tmp_path / "rows.json"
    chosen = ["--models", model, "--experts", kind, "--ways", "kept", "--rounds", "1", "--block", "2"]
    experts.main([*chosen, *TINY, "--steps", "16", "--json", str(output)])
    found, case = found_in(output), f"{model}, {kind}, kept, 1 in flight"
    assert found[case, "served"] > 0.5 and found[case, "plans"] >= 1 and found[case, "cpu_time"] > 0
    assert (found[case, "varying"] > 0) == (kind == "looped")


def test_the_worst_rank_is_the_row(monkeypatch):
    def launch(arguments, **options):
        for rank, (efficiency, served) in enumerate([(0.99, 0.999), (None, 0.9), (None, 0.8)]):
            figures = {"efficiency": efficiency, "served": served}
            (Path(arguments[1]) / f"{rank}.json").write_text(json.dumps(figures))

    monkeypatch.setattr(experts, "launch_forked", launch)
    case = experts.Case("megatron-ep4", "looped", "kept", 1)
    assert experts.measure(case, experts.parse_args([])) == {"efficiency": None, "served": 0.8}


def test_drawn_sizes_are_served_and_the_rows_have_their_figures(tmp_path):
    output = tmp_path / "rows.json"
    routing.main(
        ["--steps", "kept", "--deviations", "0", "0.1", "--recorded", "2", "--served", "2", "--json", str(output)]
    )
    found = found_in(output)
    fixed, drawn = "kept, even, deviation 0.0", "kept, even, deviation 0.1"
    assert found[fixed, "efficiency"] == 1 and found[fixed, "missed"] == 0
    assert found["kept, zipf, deviation 0.0", "efficiency"] > 0.95  # the planner has little time
    assert 0.6 < found[drawn, "efficiency"] < 1 and found[drawn, "missed"] < 0.1
