"""`memplug plan` and `memplug diff`, run as a user runs them: exit codes, text, JSON, files."""

import csv
import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from memplug.arena.judge import judge_addresses
from memplug.arena.plan.part import AddressPlan
from memplug.cli import app
from memplug.plans.plan_file import load
from memplug.profile.trace_file import save
from tests.support.folders import DATA, ROOT
from tests.support.schedules import Schedule, record
from tests.support.show_traces import training_trace

TRACE = DATA / "llama7b_long_ckpt.npz"
INSTANCE = DATA / "dsa" / "minimalloc_C.1048576.csv"
KEYS = ["height_bytes", "live_peak_bytes", "efficiency", "lower_bound_bytes", "requests", "fragmentation", "fits"]


def run(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


def answer(*arguments: object) -> dict:
    result = run("plan", *arguments, "--json")
    assert result.exit_code in (0, 1), result.stderr
    return json.loads(result.stdout)


def test_judge_accepts_the_plan_of_a_trace(tmp_path):
    result = run("plan", TRACE, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0 and "1,284" in result.stdout and "fragmentation" in result.stdout
    made = load(tmp_path / "plan.json")
    plan = AddressPlan.of(made)
    assert list(made.parts) == ["arena"] and made.training is None
    assert judge_addresses(plan) == () and len(plan.problem) == 1284
    assert plan.predictions.fragmentation <= 0.005


def test_facts_of_plan_json_match_the_written_plan(tmp_path):
    facts = answer(TRACE, "-o", tmp_path / "plan.json")
    assert list(facts)[: len(KEYS)] == KEYS
    plan = AddressPlan.of(load(tmp_path / "plan.json"))
    assert facts["requests"] == len(plan.problem) and facts["height_bytes"] == plan.solution.height
    assert facts["lower_bound_bytes"] == plan.problem.lower_bound and facts["fits"] is None
    assert facts["efficiency"] == pytest.approx(facts["live_peak_bytes"] / facts["height_bytes"])
    assert facts["fragmentation"] == pytest.approx(1 - facts["lower_bound_bytes"] / facts["height_bytes"])
    assert facts["optimal"] is (facts["height_bytes"] == facts["lower_bound_bytes"])


@pytest.mark.parametrize("planner", ["exact", "bilevel", "spatiotemporal", "search", "auto"])
def test_every_planner_can_be_selected(planner):
    facts = answer(TRACE, "--planner", planner, "--time-limit", 2)
    assert facts["height_bytes"] >= facts["lower_bound_bytes"] and facts["seconds"] < 60
    assert facts["planner"] == planner or planner == "auto"


def test_unknown_planner_is_a_usage_error_that_names_the_known_ones():
    result = run("plan", TRACE, "--planner", "magic")
    assert result.exit_code == 2 and "spatiotemporal" in result.stderr


def test_planned_csv_has_disjoint_offsets_within_capacity(tmp_path):
    output = tmp_path / "out.csv"
    facts = answer(INSTANCE, "--capacity", 1048576, "-o", output)
    assert facts["fits"] is True and facts["height_bytes"] <= 1048576
    rows, before = (list(csv.DictReader(path.open())) for path in (output, INSTANCE))
    assert [{**row, "offset": None} for row in rows] == [{**row, "offset": None} for row in before]
    spans = [(int(r["lower"]), int(r["upper"]), int(r["offset"]), int(r["offset"]) + int(r["size"])) for r in rows]
    for at, (lower, upper, begin, end) in enumerate(spans):
        assert 0 <= begin and end <= 1048576
        for other_lower, other_upper, other_begin, other_end in spans[:at]:
            assert lower >= other_upper or other_lower >= upper or begin >= other_end or other_begin >= end


def test_capacity_below_the_lower_bound_fails_and_lists_peak_requests():
    result = run("plan", INSTANCE, "--capacity", 1000000, "--time-limit", 1)
    assert result.exit_code == 1 and "fits" in result.stdout
    assert "No plan fits" in result.stderr and "are in use at once" in result.stderr
    assert result.stderr.count("request ") == 10 and "more, of" in result.stderr
    assert answer(INSTANCE, "--capacity", 1000000, "--time-limit", 1)["fits"] is False


def test_expired_time_limit_gives_the_best_plan_so_far(tmp_path):
    result = run("plan", DATA / "dsa" / "minimalloc_D.1048576.csv", "--time-limit", 0, "-o", tmp_path / "out.csv")
    assert result.exit_code == 0 and "the best when the time ran out" in result.stdout
    assert (tmp_path / "out.csv").exists()


def test_malformed_csv_line_is_reported_by_its_number(tmp_path):
    lines = INSTANCE.read_text().splitlines()
    lines[7] = "6,1,2,-5"
    (tmp_path / "bad.csv").write_text("\n".join(lines))
    result = run("plan", tmp_path / "bad.csv")
    assert result.exit_code == 1 and "line 8" in result.stderr and result.stdout == ""


@pytest.mark.parametrize("name", ["absent.npz", "absent.csv"])
def test_missing_file_fails_with_advice(tmp_path, name):
    result = run("plan", tmp_path / name)
    assert result.exit_code == 1 and name in result.stderr and "What to do" in result.stderr


def test_plan_refuses_a_step_that_the_trace_lacks(tmp_path):
    save(training_trace(steps=3), tmp_path / "trace.npz")
    assert answer(tmp_path / "trace.npz", "--step", 1)["requests"] > 0
    result = run("plan", tmp_path / "trace.npz", "--step", 3)
    assert result.exit_code == 1 and "3" in result.stderr


def test_plan_omits_dynamic_requests_and_reports_their_served_share(tmp_path):
    step = record(Schedule(source="mixtral_ckpt", layers=2, micro_batches=4, dynamic=True, recompute=True))
    save(step, tmp_path / "trace.npz")
    facts = answer(tmp_path / "trace.npz")
    dynamic = int((step.requests["dynamic"]).sum())
    assert facts["dynamic_requests"] == dynamic == len(step.requests) - facts["requests"]
    assert 0 < facts["dynamic_served_bytes"] < facts["dynamic_bytes"]
    assert facts["efficiency"] is None and facts["live_peak_bytes"] > facts["lower_bound_bytes"]
    assert "would have found room" in run("plan", tmp_path / "trace.npz").stdout


def test_unwritable_output_fails_with_advice(tmp_path):
    result = run("plan", TRACE, "-o", tmp_path / "no" / "plan.json")
    assert result.exit_code == 1 and "What to do" in result.stderr


def test_diff_counts_moved_requests_and_finds_none_between_equal_plans(tmp_path):
    for name, planner in (("a", "search"), ("b", "spatiotemporal")):
        assert run("plan", TRACE, "--planner", planner, "-o", tmp_path / f"{name}.json").exit_code == 0
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    same = json.loads(run("diff", a, a, "--json").stdout)
    assert same["moved_requests"] == 0 and same["same_requests"] == 1284 and same["height_change_bytes"] == 0
    other = json.loads(run("diff", a, b, "--json").stdout)
    assert other["same_requests"] == 1284 and other["moved_requests"] > 0
    assert run("diff", a, b).exit_code == 0
    result = run("diff", a, TRACE)
    assert result.exit_code == 1 and str(TRACE) in result.stderr


def test_planning_loads_no_torch(tmp_path):
    shutil.copy(INSTANCE, tmp_path / "in.csv")
    code = (
        "import sys; from memplug.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "sys.exit(str([name for name in ('torch', 'deepspeed') if name in sys.modules]))"
    )
    command = [sys.executable, "-c", code, "plan", str(tmp_path / "in.csv"), "--time-limit", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.stderr.splitlines()[-1] == "[]"
