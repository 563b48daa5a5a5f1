"""The benchmarks measure correctly, and write rows that a program can read."""

import json
import subprocess
import sys

import pytest
import torch

from tests.bench import memory, step_time
from tests.bench.cases import MODES, gradient_error
from tests.bench.table import figures, render
from tests.support.folders import ROOT

MIB = 1 << 20
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8)


def test_peak_is_the_largest_sum_of_concurrent_blocks():
    before = _bytes(64 * MIB)

    def step() -> None:
        first = _bytes(3 * MIB)
        second = _bytes(5 * MIB)
        del first
        third = _bytes(4 * MIB)  # second and third: 9 MiB, more than first and second's 8
        del second, third
        _bytes(6 * MIB)

    assert memory.cpu_peak_bytes(step) == 9 * MIB
    assert memory.cpu_peak_bytes(step) == 9 * MIB, "a measurement does not affect the next"
    assert before.numel() == 64 * MIB


def test_peak_counts_live_blocks_and_ignores_frees_of_older_ones():
    held = [_bytes(32 * MIB)]

    def step() -> None:
        held.clear()
        held.append(_bytes(2 * MIB))

    assert memory.cpu_peak_bytes(step) == 2 * MIB


def test_peak_includes_backward_and_operator_scratch_memory():
    weight = torch.randn(256, 256, requires_grad=True)
    weight.grad = torch.zeros_like(weight)

    def step() -> None:
        (weight * weight).sum().backward()  # forward: a product and its sum; backward: two products and the sum of them

    peak = memory.cpu_peak_bytes(step)
    assert 2 * weight.nbytes < peak <= 4 * weight.nbytes + 1024


def test_peak_excludes_memplugs_host_memory():
    slabs: list[torch.Tensor] = []

    def step() -> None:
        slabs.append(_bytes(16 * MIB))
        _bytes(MIB)

    assert memory.cpu_peak_bytes(step, lambda: slabs) == MIB


def test_blocks_name_the_operator_that_allocated_them():
    live = memory.live_at_peak(memory.cpu_blocks(lambda: torch.ones(MIB) + 1))
    assert any("add" in block.operator and block.nbytes == 4 * MIB for block in live)


def test_extrapolation_is_linear_through_two_points():
    assert step_time.extrapolate((2, 0.7), (4, 1.1), 8) == pytest.approx(1.9)
    assert step_time.extrapolate((1, 10.0), (2, 12.0), 4) == pytest.approx(16.0)


def _result(gradient: list[float], **numbers: float) -> dict:
    """Return a worker's answer, with some numbers replaced."""
    known = {"step_s": 1.0, "steps": 1, "peak_allocated_bytes": 1, "peak_reserved_bytes": None, "host_bytes": None}
    return {"outcome": "ok", **known, "gradients": {"w": gradient}, **numbers}


class _Scripted:
    """A substitute for the process of one mode; runs out of memory above some number of layers."""

    def __init__(self, fits: int):
        self.fits = fits

    def measure(self, case, steps):
        if case.layers > self.fits:
            return {"outcome": "out of memory"}
        step_s, peak_bytes = 0.5 + 0.25 * case.layers, 100 + 10 * case.layers
        return _result([1.0], step_s=step_s, steps=steps, peak_allocated_bytes=peak_bytes)


def _case(*extra: str):
    return step_time.plan_of(step_time.parse_args(["--device", "cpu", "--tokens", "64", "--layers", "8", *extra]))[0][0]


def test_keep_all_that_does_not_fit_is_extrapolated_and_marked():
    case = _case()
    result = step_time.measure({"keep_all": _Scripted(fits=4)}, case, "keep_all", 3)
    assert (result["step_s"], result["peak_allocated_bytes"], result["extrapolated_from"]) == (2.5, 180, 4)
    assert "keep_all*" in step_time.table_of({(case, "keep_all"): result})


@pytest.mark.parametrize("mode, fits", [("full", 4), ("keep_all", 1)])
def test_out_of_memory_is_reported_as_a_row(mode, fits):
    case = _case()
    result = step_time.measure({mode: _Scripted(fits)}, case, mode, 3)
    results = {(case, mode): result}
    step_time.compare(results)
    assert "out of memory" in step_time.table_of(results)
    assert [row.value for row in step_time.rows_of(results)] == ["out of memory"]


def test_gradient_error_finds_differences_between_equal_norms():
    assert gradient_error({"w": [2.0, 1.0]}, {"w": [2.0, 1.0]}) == 0
    assert gradient_error({"w": [2.0, -1.0]}, {"w": [2.0, 1.0]}) == pytest.approx(1.0)


def test_table_marks_modes_whose_gradients_differ():
    case = _case()
    results = {(case, "keep_all"): _result([1.0, 0.0]), (case, "full"): _result([1.0, 0.5])}
    step_time.compare(results)
    assert results[case, "keep_all"]["gradients_ok"] and not results[case, "full"]["gradients_ok"]
    assert "DIFFERS" in step_time.table_of(results)


def test_table_columns_line_up():
    lines = render(("tokens", "mode"), [("8,192", "full"), ("1", "memplug:0.5")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    shown = {None: "-", 0.0: "0", 0.00001234: "0.00001234", 1.0: "1", 123456.0: "123456"}
    assert {value: figures(value) for value in shown} == shown


@pytest.mark.parametrize("mode", ["memplug:2", "memplug_over:keep_all", "memplug_over", "full:1"])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(SystemExit):
        step_time.parse_args(["--device", "cpu", "--modes", mode])


@pytest.mark.long
@DEVICES
def test_step_time_compares_all_modes_in_one_run(device, tmp_path):
    output, modes = tmp_path / "rows.json", [*MODES, "flag", "wrapper", "memplug_over:flag", "memplug_over:wrapper"]
    command = [sys.executable, "-m", "tests.bench.step_time", "--device", device, "--model", "tiny", "--modes", *modes]
    command += ["--tokens", "64", "--layers", "4", "--steps", "1", "--rounds", "1"]
    command += ["--min-offload-bytes", "4096", "--json", str(output)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(output.read_text())
    assert all(set(row) == {"bench", "case", "mode", "metric", "unit", "value", "n"} for row in rows)
    assert {row["mode"] for row in rows} == set(modes)
    found = {(row["mode"], row["metric"]): row["value"] for row in rows}
    for mode in modes:
        assert found[mode, "outcome"] == "ok"
        assert found[mode, "gradients_ok"] == 1
        assert found[mode, "step_s"] > 0 and found[mode, "over_full"] > 0
        assert found[mode, "peak_allocated_bytes"] > 0
        assert mode in done.stdout
    assert found["full", "peak_allocated_bytes"] < found["keep_all", "peak_allocated_bytes"]
    # alpha "auto" swaps only if memory is short, and a GPU has space for all of a tiny model
    assert (found["memplug", "host_bytes"] > 0) is (device == "cpu")
    if device == "cpu":
        for way in ("flag", "wrapper"):
            replaced = found[f"memplug_over:{way}", "peak_allocated_bytes"]
            assert replaced <= found[way, "peak_allocated_bytes"]


@pytest.mark.long
@DEVICES
def test_step_time_compares_with_megatron_cores_own_recomputation(device, tmp_path):
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed")
    output, modes = tmp_path / "rows.json", ["keep_all", "full", "selective", "memplug:1"]
    command = [sys.executable, "-m", "tests.bench.step_time", "--host", "megatron", "--device", device]
    command += ["--model", "tiny", "--modes", *modes]
    command += ["--tokens", "64", "--layers", "2", "--steps", "1", "--rounds", "1"]
    command += ["--min-offload-bytes", "4096", "--json", str(output)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(output.read_text())
    assert {row["case"] for row in rows} == {f"megatron tiny 64x2 {device}"}
    found = {(row["mode"], row["metric"]): row["value"] for row in rows}
    assert all(found[mode, "gradients_ok"] == 1 for mode in modes)
    assert found["full", "peak_allocated_bytes"] < found["keep_all", "peak_allocated_bytes"]
    assert found["memplug:1", "host_bytes"] > 0


def test_modes_without_megatron_core_support_are_refused():
    with pytest.raises(SystemExit):
        step_time.parse_args(["--device", "cpu", "--host", "megatron", "--modes", "deepspeed"])
