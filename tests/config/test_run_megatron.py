"""`memplug.run` around a script of Megatron-LM: it attaches to the model and counts its steps.

Megatron-LM's `megatron.training` is not on PyPI, so the tests have their own `setup_model_and_optimizer` and
`train_step`, with Megatron-LM's signatures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplug import run
from memplug.errors import ConfigError, PatchError
from memplug.hooks import megatron_training
from tests.support.megatron_lm import write_repository


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Enter a folder that looks like Megatron-LM's repository, with a script."""
    write_repository(tmp_path)
    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    for name in saved:
        monkeypatch.delitem(sys.modules, name)
    for name in ("argv", "path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    megatron_training.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(saved)


def result() -> tuple[list[float], list[str]]:
    return tuple(json.loads(Path("result.json").read_text()))


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_gpt.py", "--lr", "--memplug-config", "ds.json", "1"],
        ["pretrain_gpt.py", "--lr", "--memplug-config=ds.json", "1"],
        ["--config", "ds.json", "pretrain_gpt.py", "--lr", "1"],
        ["--config=block.json", "-m", "pretrain_gpt", "--lr", "1"],
    ],
)
def test_script_does_not_see_memplugs_option_and_trains_to_same_losses(repository, command, caplog):
    with caplog.at_level("INFO", logger="memplug"):
        run.main(["pretrain_gpt.py", "--lr", "1", "--memplug-config=off.json"])
    losses, arguments = result()
    assert arguments == ["--lr", "1"] and not hasattr(sys.modules[megatron_training.MODULE].train_step, "__wrapped__")
    assert not caplog.text
    with caplog.at_level("INFO", logger="memplug"):
        run.main(command)
    assert result() == (losses, ["--lr", "1"])
    assert "3 regions, alpha 1.0" in caplog.text
    assert hasattr(sys.modules[megatron_training.MODULE].train_step, "__memplug_original__")


def test_session_counts_every_step_of_megatron(repository, monkeypatch):
    import memplug

    sessions = []

    def attach(target, config):
        sessions.append(original(target, config))
        return sessions[-1]

    original = memplug.attach
    monkeypatch.setattr("memplug.integrations.launched.attach", attach)
    run.main(["pretrain_gpt.py", "--memplug-config", "ds.json"])
    assert [session.steps for session in sessions] == [4]
    assert sessions[0].report().tokenwise.offloaded_bytes > 0


@pytest.mark.parametrize(
    "arguments",
    [["pretrain_gpt.py", "--memplug-config"], ["pretrain_gpt.py", "--memplug-config="], ["--config"], ["--config="]],
)
def test_config_option_without_a_file_is_an_error(repository, arguments):
    with pytest.raises(ConfigError, match="names no file|no script"):
        run.main(arguments)


def test_config_file_without_a_memplug_block_is_an_error(repository):
    (repository / "train.json").write_text(json.dumps({"train_batch_size": 8}))
    with pytest.raises(ConfigError, match=r"train\.json: holds no block"):
        run.main(["--config", "train.json", "pretrain_gpt.py"])


def test_model_without_a_block_stays_unchanged_and_is_named_at_the_end(repository, caplog):
    run.main(["pretrain_gpt.py"])
    (line,) = [record.message for record in caplog.records if record.name == "memplug"]
    assert "nothing was attached: Megatron-LM's model has no block: give one by `--config FILE`" in line


def test_error_names_a_missing_train_step_function(repository):
    file = repository / "megatron" / "training" / "training.py"
    file.write_text(file.read_text().replace("def train_step", "def another_step"))
    with pytest.raises(PatchError, match="train_step"):
        run.main(["pretrain_gpt.py", "--memplug-config", "ds.json"])
