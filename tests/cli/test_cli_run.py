"""`memplug run`: memplug is in each Python process that a command starts, and other processes are left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memplug.integrations import launched
from memplug.startup.path_entry import sitecustomize
from tests.support.folders import ROOT
from tests.support.megatron_lm import write_repository

STARTUP = Path(sitecustomize.__file__).parent
STARTS = """
import subprocess, sys
print("modules of the parent", sorted({"torch", "memplug"} & set(sys.modules)))
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""
RUN = [sys.executable, "-c", "from memplug.cli import main; main()", "run"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder like Megatron-LM's repository, with a script, and a starter that runs the script as its child."""
    write_repository(tmp_path)
    (tmp_path / "starter.py").write_text(STARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(*arguments: str, path: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `memplug run` with these arguments, and wait for its end."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT)])), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*RUN, *arguments], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_child_process_of_a_command_trains_with_memplug(repository: Path) -> None:
    plain = subprocess.run(
        [sys.executable, "pretrain_gpt.py", "--lr", "1"], env={**os.environ, "PYTHONPATH": f".:{ROOT}"}, timeout=600
    )
    assert plain.returncode == 0
    expected = json.loads(Path("result.json").read_text())
    Path("result.json").unlink()
    done = started("--config", "block.json", "python", "starter.py", "pretrain_gpt.py", "--lr", "1", path=".")
    assert json.loads(Path("result.json").read_text()) == expected
    assert "modules of the parent []" in done.stdout
    assert "3 regions, alpha 1.0" in done.stderr and "nothing was attached" not in done.stderr


def test_disabled_block_changes_no_result_and_no_message(repository: Path) -> None:
    command = [sys.executable, "pretrain_gpt.py", "--lr", "1"]
    env = {**os.environ, "PYTHONPATH": f".:{ROOT}", "OMP_NUM_THREADS": "1"}
    plain = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert plain.returncode == 0, plain.stderr
    expected = json.loads(Path("result.json").read_text())
    Path("result.json").unlink()
    done = started("--config", "off.json", "pretrain_gpt.py", "--lr", "1", path=".")
    assert json.loads(Path("result.json").read_text()) == expected
    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["true"], "no process imported DeepSpeed, Megatron-LM's training loop, or the Trainer"),
        (["pretrain_gpt.py"], "Megatron-LM's model has no block: give one by `--config FILE`"),
        (
            ["--config", "block.json", "python", "-c", "import megatron.training.training"],
            "no process called Megatron-LM's training loop",
        ),
        (["--config", "off.json", "pretrain_gpt.py"], None),
        (["python", "-c", "raise SystemExit(7)"], None),
    ],
)
def test_memplug_run_says_at_its_end_why_nothing_was_attached(
    repository: Path, arguments: list[str], reason: str | None
) -> None:
    done = started(*arguments, path=".", code=7 if "SystemExit" in arguments[-1] else 0)
    if reason is None:
        assert "nothing was attached" not in done.stderr
    else:
        assert done.stderr.splitlines()[-1].startswith(f"memplug: nothing was attached: {reason}")


def test_process_without_a_framework_keeps_its_modules_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("probe.py").write_text("import json, sys; print(json.dumps([sorted(sys.modules), sys.path, sys.argv]))")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run([sys.executable, "probe.py", "--config", "x"], capture_output=True, text=True, env=env)
    measured = json.loads(started("probe.py", "--config", "x").stdout)
    modules, *rest = json.loads(plain.stdout)
    assert rest == measured[1:]
    assert sorted({"sitecustomize", *modules}) == measured[0]


def test_empty_entry_of_the_path_stays_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").mkdir()
    Path("here.py").write_text("found = True\n")
    Path("tools/train.py").write_text("import here; print(here.found)")
    env = {**os.environ, "PYTHONPATH": f":{ROOT}"}
    done = subprocess.run([*RUN, "python", "tools/train.py"], capture_output=True, text=True, env=env, timeout=600)
    assert done.stdout == "True\n", done.stderr


def test_memplug_run_around_memplug_run_attaches_once(repository: Path) -> None:
    done = started("--config", "block.json", "python", "-m", "memplug.run", "pretrain_gpt.py", path=".")
    assert done.stderr.count("3 regions, alpha 1.0") == 1 and "nothing was attached" not in done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_users_sitecustomize_runs_as_without_memplug(
    tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(f"ran = __file__\n{'import nowhere' if fails else ''}\n")
    Path("probe.py").write_text("import sys; print(getattr(sys.modules.get('sitecustomize'), 'ran', None))")
    env = {**os.environ, "PYTHONPATH": f"{other}:{ROOT}"}
    plain = subprocess.run([sys.executable, "probe.py"], capture_output=True, text=True, env=env)
    assert plain.stdout == f"{None if fails else other / 'sitecustomize.py'}\n"
    done = started("probe.py", path=str(other))
    assert done.stdout == plain.stdout
    assert ("No module named 'nowhere'" in plain.stderr) == ("No module named 'nowhere'" in done.stderr) == fails


def test_python_that_lacks_memplug_trains_without_it_and_says_so(repository: Path) -> None:
    (repository / "train.py").write_text("import sys; sys.modules['memplug'] = None; import megatron.training.training")
    done = started("--config", "block.json", "train.py", path=".")
    assert "has no memplug, and trains without it" in done.stderr


def test_exit_code_after_a_signal_is_128_plus_its_number() -> None:
    started("python", "-c", "import os; os.kill(os.getpid(), 9)", code=128 + signal.SIGKILL)


def test_signals_reach_the_command(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*RUN, str(script)], env=env, start_new_session=True)
    try:
        while not (tmp_path / "ready").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 9
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere-to-be-found"], 127, "there is no command nowhere-to-be-found"),
        (["--config", "nowhere.json", "true"], 1, "nowhere.json: no such file"),
        (["--confg", "x.json", "true"], 2, "--confg"),
        ([], 2, "COMMAND"),
    ],
)
def test_unusable_command_line_is_refused(arguments: list[str], code: int, text: str) -> None:
    assert text in started(*arguments, code=code).stderr


def test_sitecustomize_watches_the_modules_of_all_frameworks() -> None:
    assert sitecustomize.MODULES == tuple(launched.ENTRIES)
    assert sitecustomize.VARIABLE.startswith("PYTHON"), "DeepSpeed's launcher exports such names to other nodes"
    assert [file.name for file in sorted(STARTUP.glob("sitecustomize*"))] == ["sitecustomize.py"]
