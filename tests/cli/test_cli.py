"""The `memplug` command, run as a user runs it: exit codes, text, JSON, and nothing else on stdout."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from memplug.cli import app
from memplug.config import json_schema, load_config
from memplug.predict.virtual.hardware import LINK_RATES, GpuProfile
from memplug.profile.trace_file import load, save
from memplug.show.summary import summary
from tests.support.folders import ROOT
from tests.support.show_traces import training_trace

run = CliRunner().invoke


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from memplug.cli import main; main()", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def write(tmp_path):
    def write(block: object, **others: object) -> str:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"train_batch_size": 1, "memplug": block, **others}))
        return str(path)

    return write


def test_check_lists_every_problem_and_fails(write):
    result = run(app, ["check", write({"enabled": True, "tokenwise": {"aplha": 1, "regions": []}, "arena": True})])
    assert result.exit_code == 1
    for expected in ("tokenwise.aplha", "tokenwise.alpha", "tokenwise.regions", "arena"):
        assert f"memplug.{expected}" in result.stderr
    assert result.stdout == ""


def test_check_json_lists_every_problem_of_a_bad_block(write):
    result = run(app, ["check", write({"enabled": 3, "host_budget_gib": 0}), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["ok"] is False and answer["advice"]
    assert sorted(problem.split(":")[0] for problem in answer["problems"]) == [
        "memplug.enabled",
        "memplug.host_budget_gib",
    ]


def test_check_describes_the_settings_in_words(write):
    block = {"enabled": True, "host_budget_gib": 64, "tokenwise": {"alpha": 0.125, "regions": ["m.*.attn", "m.*.mlp"]}}
    result = run(app, ["check", write(block)])
    assert result.exit_code == 0
    for expected in ("memplug is on", "0.125", "m.*.attn, m.*.mlp", "64 GiB", "1,048,576 bytes"):
        assert expected in result.stdout


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, ("planned addresses (planner auto)\n", "kept in memplug_plans")),
        ({"plan_dir": False}, ("not kept",)),
        ({"arena": {"planner": "exact", "checks": True}}, ("(planner exact), watching freed memory",)),
        ({"arena": {"enabled": False}}, ("arena is switched off", "torch's own allocator")),
        ({"tokenwise": {"enabled": False}}, ("tokenwise is switched off", "planned addresses")),
    ],
)
def test_check_describes_the_arena_in_words(write, block, expected):
    result = run(app, ["check", write({"enabled": True, **block})])
    assert result.exit_code == 0 and all(part in result.stdout for part in expected)


@pytest.mark.parametrize("block", [{"enabled": False}, {"enabled": False, "tokenwise": {"alpha": 1}}])
def test_check_says_that_memplug_is_off(write, block):
    result = run(app, ["check", write(block)])
    assert result.exit_code == 0 and "memplug is off" in result.stdout and "is on" not in result.stdout


def test_check_json_has_the_configuration_that_training_would_use(write):
    path = write({"enabled": True, "tokenwise": {"alpha": 0.5}})
    answer = json.loads(run(app, ["check", path, "--json"]).stdout)
    assert answer == {"ok": True, "config": load_config(path).model_dump(mode="json"), "warnings": []}


def test_check_warns_of_misspelt_block_in_text_and_json(write):
    path = write({"enabled": True}, mem_plug={})
    assert '"mem_plug" is ignored' in run(app, ["check", path]).stderr
    (warning,) = json.loads(run(app, ["check", path, "--json"]).stdout)["warnings"]
    assert '"mem_plug" is ignored' in warning


def test_check_of_a_missing_file_fails_with_advice(tmp_path):
    result = run(app, ["check", str(tmp_path / "absent.json")])
    assert result.exit_code == 1 and "no such file" in result.stderr and "What to do" in result.stderr


def test_check_without_a_file_is_a_usage_error():
    assert run(app, ["check"]).exit_code == 2


def test_check_schema_prints_the_schema_alone():
    assert json.loads(run(app, ["check", "--schema"]).stdout) == json_schema()


@pytest.mark.parametrize("command", ["run", "check", "doctor", "show", "plan", "diff", "estimate", "tune"])
def test_every_command_has_an_example_in_its_help(command):
    result = run(app, [command, "--help"])
    assert result.exit_code == 0 and f"Example: memplug {command}" in result.stdout


def test_help_test_covers_every_registered_command():
    assert {command.callback.__name__ for command in app.registered_commands} == {
        "run",
        "check",
        "doctor",
        "show",
        "plan",
        "diff",
        "estimate",
        "tune",
    }


def test_check_loads_neither_torch_nor_deepspeed(write):
    code = (
        "import sys; from memplug.cli import app; app(['check', sys.argv[1]], standalone_mode=False); "
        "sys.exit(str([name for name in ('torch', 'deepspeed') if name in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, write({"enabled": True})], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "memplug is on" in result.stdout
    assert result.stderr.strip() == "[]"


def test_doctor_json_has_the_rates_and_names_conflicting_settings(tmp_path):
    result = process(
        "doctor",
        "--json",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:False,backend:cudaMallocAsync",
        CUDA_LAUNCH_BLOCKING="0",
        CXX="no-such-compiler",
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert result.returncode == 1, "not ready: a setting conflicts"
    facts = json.loads(result.stdout)
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["versions"]["torch"] != "absent"
    assert facts["compiler"] == "absent"
    assert facts["native_core"]["ready"] is False and "C++ compiler" in facts["native_core"]["advice"]
    assert facts["address_search"]["ready"] is False and facts["planner_rules"]["ready"] is False
    rates = [value for name, value in facts["hardware"].items() if name.endswith("_per_s")]
    assert len(rates) == 4 and all(rate > 0 for rate in rates)
    (conflict,) = facts["conflicts"]
    assert conflict["setting"].startswith("PYTORCH_CUDA_ALLOC_CONF=") and conflict["effect"]


def test_doctor_in_a_pipe_is_plain_text_with_progress_on_stderr_only(monkeypatch):
    import torch

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    result = run(app, ["doctor"])
    assert result.exit_code == 0
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["torch"].strip() in (torch.__version__, torch.__version__.partition("+")[0])  # may lack +cpu
    assert lines["ready"].strip().startswith("yes") and lines["native core"].strip().startswith("built")
    assert "GB/s" in lines["device to host"] and "TFLOP/s" in lines["matmul"]
    assert result.stdout.isascii()
    assert "measuring" in result.stderr and "measuring" not in result.stdout


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurements of the doctor, which take half a minute, by the profile of an H200."""
    from memplug.predict.virtual import measuring

    profile = json.loads((ROOT / "configs" / "hardware" / "h200.json").read_text())
    for entry in (*profile["matmul_flops"].values(), *map(profile.get, LINK_RATES)):
        entry["value"] = [[1e6, entry["value"] / 2], [1e9, entry["value"]]]
    for way in ("forward", "backward"):
        profile[f"attention_{way}_flops"].pop("flash")
    monkeypatch.setattr(measuring, "measure_profile", lambda device, host_time, doing: profile)
    return profile


def test_doctor_measures_a_profile_into_a_file_and_prints_its_rates(tmp_path, measured):
    file = tmp_path / "mine.json"
    result = run(app, ["doctor", "--measure", str(file)])
    assert result.exit_code == 0 and result.stdout.isascii() and "measuring" in result.stderr
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["written to"].strip() == str(file) and lines["device"].strip() == "NVIDIA H200"
    assert lines["matmul, bfloat16"].strip() == "324 TFLOP/s at 1.0e+06 operations, 648 TFLOP/s at 1.0e+09 operations"
    assert "620 TFLOP/s at 32,768 tokens" in lines["attention forward, cudnn"]
    assert "55.3 GB/s at 954 MiB" in lines["device to host"]
    assert "49.1 GB/s at 954 MiB" in lines["host to device, both directions"]
    assert GpuProfile.named(str(file)).name == "NVIDIA H200" and json.loads(file.read_text()) == measured


def test_doctor_json_equals_the_measured_profile_file(tmp_path, measured):
    file = tmp_path / "mine.json"
    answer = json.loads(run(app, ["doctor", "--measure", str(file), "--json"]).stdout)
    assert answer["file"] == str(file) and answer["profile"] == json.loads(file.read_text()) == measured


def test_doctor_refuses_an_unwritable_profile_file(tmp_path, measured):
    result = run(app, ["doctor", "--measure", str(tmp_path / "absent" / "mine.json")])
    assert result.exit_code == 2 and "measuring" not in result.stderr
    result = run(app, ["doctor", "--measure", str(tmp_path)])
    assert result.exit_code == 1 and "the hardware profile cannot be written" in result.stderr


@pytest.fixture
def trace_file(tmp_path):
    save(training_trace(), tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def test_show_prints_a_summary_and_writes_nothing(trace_file):
    result = run(app, ["show", str(trace_file)])
    assert result.exit_code == 0 and result.stderr == "" and result.stdout.isascii()
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines() if not line.startswith(" "))
    assert lines["model"].strip() == "Stack, 1,234,567 parameters"
    assert lines["peak"].strip() == f"360.00 MiB in use ({360 * 2**20:,} bytes)"
    for expected in ("the same, to the byte", "backward of micro-batch 1, model.layers.3, aten::mm", "NVIDIA H200"):
        assert expected in result.stdout
    assert list(trace_file.parent.iterdir()) == [trace_file]


def test_show_json_is_the_summary(trace_file):
    answer = json.loads(run(app, ["show", str(trace_file), "--json"]).stdout)
    assert answer == json.loads(json.dumps(summary(load(trace_file))))
    assert answer["peak_bytes"] == 360 * 2**20


def test_show_writes_requested_files_and_names_them_on_stderr(chrome, trace_file):
    wanted = {"html": b"<!doctype html>", "png": b"\x89PNG", "snapshot": b"\x80\x04", "chrome": b'{"displayTimeUnit"'}
    options = [text for view in wanted for text in (f"--{view}", str(trace_file.with_name(view)))]
    result = run(app, ["show", str(trace_file), "--json", *options])
    assert result.exit_code == 0 and json.loads(result.stdout)["operators"]
    for view, start in wanted.items():
        assert trace_file.with_name(view).read_bytes().startswith(start)
        assert f"writing {trace_file.with_name(view)}" in result.stderr


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_show_reports_one_error_if_the_file_is_no_trace(tmp_path, content):
    path = tmp_path / "trace.npz"
    if content is not None:
        path.write_bytes(content)
    result = run(app, ["show", str(path), "--html", str(tmp_path / "page.html")])
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith(f"{path}: ") and result.stderr.count("What to do: ") == 1
    assert "Traceback" not in result.stderr and not (tmp_path / "page.html").exists()


def test_show_without_picture_packages_prints_summary_and_names_them(trace_file, monkeypatch):
    hidden = [name for name in sys.modules if name.partition(".")[0] in ("plotly", "kaleido")]
    for name in {"plotly", "kaleido", *hidden}:
        monkeypatch.setitem(sys.modules, name, None)
    files = {view: trace_file.with_name(view) for view in ("html", "png", "snapshot")}
    result = run(app, ["show", str(trace_file), *(text for view in files for text in (f"--{view}", str(files[view])))])
    assert result.exit_code == 1 and "360.00 MiB in use" in result.stdout
    assert "--html was not written: a page needs plotly, which is not installed" in result.stderr
    assert "--png was not written: a picture needs kaleido, which is not installed" in result.stderr
    assert result.stderr.count("pip install 'memplug[pictures]'") == 2
    assert files["snapshot"].exists() and not files["html"].exists() and not files["png"].exists()


def test_show_writes_other_files_if_one_cannot_be_written(trace_file):
    unwritable, written = trace_file / "page.html", trace_file.with_name("trace.json")
    result = run(app, ["show", str(trace_file), "--html", str(unwritable), "--chrome", str(written)])
    assert result.exit_code == 1 and f"--html was not written: {unwritable}: " in result.stderr
    assert json.loads(written.read_text())["traceEvents"]


def test_show_step_option_selects_that_step(tmp_path):
    save(training_trace(steps=3), tmp_path / "trace.npz")
    one, all_of_them = (
        json.loads(run(app, ["show", str(tmp_path / "trace.npz"), "--json", *more]).stdout)
        for more in (("--step", "1"), ())
    )
    assert (one["steps"], one["operators"]) == (1, all_of_them["operators"] // 3)
    assert one["peak_bytes"] == all_of_them["peak_bytes"] and one["allocator_peak_bytes"] is None
    refused = run(app, ["show", str(tmp_path / "trace.npz"), "--step", "3"])
    assert refused.exit_code == 2 and "the trace has 3 steps" in refused.stderr


def test_show_loads_no_torch(chrome, trace_file):
    code = (
        "import sys; from memplug.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "sys.exit(str([name for name in ('torch',) if name in sys.modules]))"
    )
    options = [text for view in ("html", "png", "snapshot", "chrome") for text in (f"--{view}", f"{trace_file}.{view}")]
    result = subprocess.run(
        [sys.executable, "-c", code, "show", str(trace_file), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stderr.splitlines()[-1] == "[]"
