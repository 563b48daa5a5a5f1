"""tests/gpu_session.sh, for a machine with a GPU: its commands exist, its steps are limited and independent."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench import step_time, trained
from tests.support.folders import ROOT
from tests.support.recipes import checks, layout, settings

SCRIPT = ROOT / "tests/gpu_session.sh"
MOST_S = 12 * 60
# replaces `timeout`: notes the command that it should run, and lets one step fail
STAND_IN = """#!/usr/bin/env bash
shift 3
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>"$COMMANDS"
[[ $* != *"$FAILS"* ]]
"""


@dataclass(frozen=True)
class Ran:
    """The results of a run of the script."""

    status: int
    summary: dict[str, str]
    commands: list[list[str]]
    folder: Path


def run(folder: Path, *steps: str, fails: str = "no step") -> Ran:
    """Run the script without any of its commands."""
    (folder / "timeout").write_text(STAND_IN)
    (folder / "timeout").chmod(0o755)
    commands, out = folder / "commands", folder / "out"
    commands.touch()
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COMMANDS": str(commands), "FAILS": fails}
    environment.pop("REHEARSE", None)
    done = subprocess.run(
        [SCRIPT, out, *steps], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr, done.stderr
    lines = (out / "summary.txt").read_text().splitlines()
    summary = {line.split()[0]: line.split("exit ")[1] for line in lines}
    return Ran(done.returncode, summary, [json.loads(line) for line in commands.read_text().splitlines()], out)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("session"))


def limits() -> dict[str, int]:
    """Return the seconds of each step, as in the script."""
    found = re.findall(r"^step (\w+) (\d+) ", SCRIPT.read_text(), re.MULTILINE)
    return {name: int(seconds) for name, seconds in found}


def test_session_script_is_valid_bash():
    subprocess.run(["bash", "-n", SCRIPT], check=True)


def test_step_limits_add_up_to_at_most_twelve_minutes():
    assert len(limits()) >= 9
    assert sum(limits().values()) <= MOST_S


def test_every_step_runs_once_and_is_in_the_summary(everything: Ran):
    assert everything.status == 0
    assert everything.summary == dict.fromkeys(limits(), "0")
    assert len(everything.commands) == len(limits())


def test_files_and_modules_in_commands_exist(everything: Ran):
    for command in everything.commands:
        for before, word in zip(command, command[1:], strict=False):
            if before in ("-m", "-p") and re.fullmatch(r"[\w.]+", word):
                assert importlib.util.find_spec(word), command
            if word.startswith(("tests/", "configs/", "examples/")):
                assert (ROOT / word).exists(), command


def test_benchmarks_accept_their_arguments(everything: Ran):
    def of(module: str) -> list[list[str]]:
        return [command[3:] for command in everything.commands if command[1:3] == ["-m", module]]

    timed = [
        step_time.plan_of(step_time.parse_args([*words, "--device", "cuda"])) for words in of("tests.bench.step_time")
    ]
    assert [(case.tokens, case.layers) for ((case, *_),) in timed] == [(32768, 8), (8192, 16)]
    recipes = [trained.parse_args(words).recipe for words in of("tests.bench.trained")]
    assert sorted(recipes) == sorted(trained.RECIPES)


@pytest.mark.parametrize("name", trained.RECIPES)
@pytest.mark.parametrize(("tiny", "budget_bytes"), [([], None), (["--tiny"], 2**30)])
def test_recipes_accept_their_arguments(name: str, tiny: list[str], budget_bytes: int | None, tmp_path: Path):
    recipe = trained.RECIPES[name]
    script, *words = trained.arguments(recipe, trained.parse_args([name, *tiny]), tmp_path, budget_bytes)
    assert Path(script).is_file()
    parse = (layout if recipe.is_megatron else settings).parse_args
    args = parse([*words, "--check"])
    inputs = (layout if recipe.is_megatron else settings).read(args, checks.Ranks(count=1))
    assert not inputs.problems


def test_failed_step_does_not_stop_the_others(tmp_path: Path):
    ran = run(tmp_path, fails="doctor --measure")
    assert ran.status == 1
    assert ran.summary == dict.fromkeys(limits(), "0") | {"measure": "1"}


def test_only_requested_steps_run(tmp_path: Path):
    ran = run(tmp_path, "step_time_8k", "build")
    assert list(ran.summary) == ["build", "step_time_8k"]
    assert json.loads((ran.folder / "rows.json").read_text()) == []


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([2.0, 1.0], [2.0, 1.0], 0.0), ([2.0, 1.0], [2.0, 1.1], 0.1), ([2.0], [float("nan")], float("inf"))],
)
def test_loss_difference_is_that_of_the_worst_step(one: list[float], other: list[float], expected: float):
    assert trained.apart(one, other) == pytest.approx(expected)
