"""`memplug.run`: an unchanged script, with memplug installed around it."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import memplug
from memplug import run
from memplug.errors import ConfigError
from tests.support.hosts import block, ds_config, process_group

PROBE = """
import json, sys
json.dump([__name__, sys.argv, sys.path[0]], open("probe.json", "w"))
"""

SCRIPT = """
import json, sys
import deepspeed
from tests.support.hosts import tiny_llama, train_engine
model = tiny_llama()
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])[0]
losses = train_engine(engine, 3)
layers = sorted(key for layer in engine.module.model.layers for key in layer.__dict__ if "memplug" in key)
weights = [parameter.double().sum().item() for parameter in engine.module.parameters()]
json.dump([losses, weights, layers], open(sys.argv[2], "w"))
engine.destroy()
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("argv", "path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.chdir(tmp_path)
    yield
    memplug.uninstall()
    gc.collect()  # tensors in the arena of a destroyed engine would be in the way of later tests


def test_memplug_run_runs_a_script_as_python_does(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(PROBE)
    own = ["--steps", "5", "data", "--memplug", "x", "--", "--memplug-config", "y"]
    run.main(["--local_rank=1", "scripts/train.py", *own])
    name, argv, path = json.loads(Path("probe.json").read_text())
    assert name == "__main__"
    assert argv == ["scripts/train.py", "--local_rank=1", *own]
    assert path == str(folder.resolve())


def test_main_without_arguments_uses_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text(PROBE)
    monkeypatch.setattr(sys, "argv", ["run.py", "train.py", "x"])
    run.main()
    assert json.loads(Path("probe.json").read_text())[1] == ["train.py", "x"]


def test_memplug_run_runs_a_module_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sft.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    run.main(["--local_rank=1", "-m", "trainer.sft", "--steps", "5"])
    name, argv, path = json.loads(Path("probe.json").read_text())
    assert name == "__main__"
    assert argv == [str(package / "sft.py"), "--local_rank=1", "--steps", "5"]
    assert path == str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "no script"),
        (["--local_rank=0"], "no script"),
        (["a.py"], r"no script a\.py"),
        (["-m"], "no module was named"),
        (["-m", "nowhere.train"], r"no module nowhere\.train"),
    ],
)
def test_missing_script_or_module_is_an_error_with_advice(arguments: list[str], problem: str) -> None:
    import deepspeed

    original = deepspeed.initialize
    with pytest.raises(ConfigError, match=problem) as error:
        run.main(arguments)
    assert "script" in error.value.advice or "memplug.run" in error.value.advice or "-m" in error.value.advice
    assert deepspeed.initialize is original


def test_exit_status_of_the_script_reaches_the_launcher() -> None:
    Path("train.py").write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as exit_:
        run.main(["train.py"])
    assert exit_.value.code == 7


def trained(tmp_path: Path, name: str, config: dict, by_memplug: bool) -> list:
    """Return the output of SCRIPT, run in this process by memplug or by itself."""
    script, ds_json, output = tmp_path / "train.py", tmp_path / f"{name}.json", tmp_path / f"{name}.out"
    script.write_text(SCRIPT)
    ds_json.write_text(json.dumps(config))
    if by_memplug:
        run.main([str(script), str(ds_json), str(output)])
    else:
        sys.argv = ["train.py", str(ds_json), str(output)]
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    return json.loads(output.read_text())


@pytest.mark.parametrize("off", [None, {"enabled": False}], ids=["absent", "disabled"])
def test_disabled_run_is_bit_identical_and_restores_deepspeed(tmp_path: Path, off: dict | None) -> None:
    with process_group(tmp_path):
        import deepspeed

        original = deepspeed.initialize
        expected = trained(tmp_path, "plain", ds_config(1), by_memplug=False)
        assert trained(tmp_path, "off", ds_config(1, off), by_memplug=True) == expected
        if off is None:  # memplug stays installed: an engine made later may have the block
            assert deepspeed.initialize is not original
            memplug.uninstall()
        assert deepspeed.initialize is original
        assert os.environ["LOCAL_RANK"] == "0"


def test_enabled_run_attaches_every_layer_and_trains_to_the_same_weights(tmp_path: Path) -> None:
    with process_group(tmp_path):
        losses, weights, _ = trained(tmp_path, "plain", ds_config(1), by_memplug=False)
        measured = trained(tmp_path, "on", ds_config(1, block(alpha=1)), by_memplug=True)
        assert measured == [losses, weights, ["_memplug_region"] * 3]


def test_config_option_applies_to_an_engine_without_its_own_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mp.json").write_text(json.dumps(block(alpha=1)))
    (tmp_path / "train.py").write_text(SCRIPT)
    with process_group(tmp_path):
        losses, weights, _ = trained(tmp_path, "plain", ds_config(1), by_memplug=False)
        for own, said in ((None, 0), (block(alpha=0), 1)):
            memplug.uninstall()
            caplog.clear()
            (tmp_path / "ds.json").write_text(json.dumps(ds_config(1, own)))
            with caplog.at_level("INFO", logger="memplug"):
                run.main(["--config", "mp.json", "train.py", "ds.json", "out.json"])
            assert json.loads(Path("out.json").read_text()) == [losses, weights, ["_memplug_region"] * 3]
            assert caplog.text.count('the engine\'s own "memplug" block is in force, not that of --config') == said
            assert f"3 regions, alpha {0.0 if said else 1.0}" in caplog.text
