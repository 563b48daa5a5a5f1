"""`memplug run --config` attaches in scripts that train by transformers' or Lightning's Trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from memplug.config import load_config
from memplug.hooks.regions import attached_to
from memplug.integrations import launched, unchanged
from memplug.session.table import Stage
from memplug.startup.outcome import Outcome
from tests.clients.parts import RUN
from tests.support.folders import ROOT
from tests.support.hosts import block, tiny_llama, train

SCRIPTS = {
    "transformers": """
from transformers import Trainer, TrainingArguments
from tests.clients.parts import llama, samples
model = llama()
trainer = Trainer(model, TrainingArguments("out", max_steps=6, per_device_train_batch_size=2,
    gradient_accumulation_steps=2, gradient_checkpointing=True, logging_steps=1, report_to="none", use_cpu=True,
    save_strategy="no", disable_tqdm=True), train_dataset=samples(32))
callbacks = list(trainer.callback_handler.callbacks)
trainer.train()
same = callbacks == trainer.callback_handler.callbacks
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
""",
    "lightning": """
import torch
import PACKAGE as pl
from tests.clients.parts import batches, llama
losses = []
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama()
    def training_step(self, batch, index):
        losses.append(self.model(**batch).loss)
        return losses[-1]
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
module = Module()
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
callbacks = list(trainer.callbacks)
trainer.fit(module, torch.utils.data.DataLoader(batches(6), batch_size=None))
same, model, losses = callbacks == trainer.callbacks, module.model, [loss.item() for loss in losses]
""",
}
ENDS = """
import json
from tests.clients.parts import digest
json.dump([losses, digest(model), same], open("result.json", "w"))
"""


LONG = [pytest.param(package, marks=pytest.mark.long) for package in ("lightning.pytorch", "pytorch_lightning")]


@pytest.mark.parametrize("package", ["transformers", *LONG])
def test_unchanged_script_trains_the_same_and_keeps_its_callbacks(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    script = SCRIPTS["transformers" if package == "transformers" else "lightning"].replace("PACKAGE", package)
    Path("train.py").write_text(script + ENDS)
    Path("block.json").write_text(json.dumps(block(alpha=1)))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    results = []
    for command in ([sys.executable], [*RUN, "--config", "block.json"]):
        done = subprocess.run([*command, "train.py"], capture_output=True, text=True, env=env, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(json.loads(Path("result.json").read_text()))
    assert len(results[0][0]) == 6 and results[0] == results[1] and results[1][2]
    assert done.stderr.count("2 regions, alpha 1.0") == 1 and "nothing was attached" not in done.stderr
    assert "after 6 steps" in done.stderr


class Stub:
    """A trainer of transformers' or Lightning's shape, which trains a tiny model for one step."""

    def __init__(self, *callbacks: Any, deepspeed: Any = None, fails: bool = False):
        self.model, self.fails = tiny_llama(), fails
        self.args, self.callback_handler = SimpleNamespace(deepspeed_plugin=deepspeed), SimpleNamespace()
        self.callback_handler.callbacks = list(callbacks)
        self.stages: list[Any] = []

    def train(self) -> str:
        """Train as `Trainer.train` does."""
        callbacks = self.callback_handler.callbacks
        for callback in callbacks:
            callback.on_train_begin(self.args, None, None, model=self.model)
        train(self.model)
        self.stages += [(callback.session.stage, callback.session) for callback in callbacks if callback.session]
        if self.fails:
            raise ArithmeticError
        for callback in callbacks:
            callback.on_step_end(self.args, None, None)
            callback.on_train_end(self.args, None, None)
        return "trained"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """Return a function that patches `Stub` in place of transformers' Trainer, and gives the run's outcome."""
    module = ModuleType(unchanged.TRANSFORMERS)
    module.Trainer = Stub
    monkeypatch.setitem(sys.modules, unchanged.TRANSFORMERS, module)

    def installed(config: Any) -> Outcome:
        outcome = Outcome()
        launched.install(unchanged.TRANSFORMERS, None if config is None else load_config(config), outcome)
        return outcome

    yield installed
    unchanged.uninstall()


def test_callback_is_added_for_one_training_and_removed_if_it_fails(install: Callable[..., Outcome]) -> None:
    outcome = install(block(alpha=1))
    assert "Trainer.train" in outcome.explain()
    for fails in (False, True):
        trainer = Stub(fails=fails)
        if fails:
            with pytest.raises(ArithmeticError):
                trainer.train()
        else:
            assert trainer.train() == "trained" and outcome.explain() is None
        ((stage, session),) = trainer.stages
        assert stage is Stage.STABLE and session.stage is Stage.DETACHED
        assert not trainer.callback_handler.callbacks and attached_to(trainer.model) is None


def test_own_callback_of_a_script_is_the_only_one(install: Callable[..., Outcome]) -> None:
    from memplug.integrations.transformers import MemplugCallback

    outcome = install(block(alpha=1))
    trainer = Stub(own := MemplugCallback(block(alpha=0)))
    trainer.train()
    assert len(trainer.stages) == 1 and trainer.callback_handler.callbacks == [own] and outcome.explain() is None


def test_trainer_without_a_block_is_left_alone_with_advice(install: Callable[..., Outcome]) -> None:
    outcome = install(None)
    trainer = Stub()
    assert trainer.train() == "trained" and not trainer.stages
    assert outcome.explain().endswith("the Trainer of transformers has no block: give one by `--config FILE`")


@pytest.mark.parametrize("config", [None, block(alpha=1)], ids=["no block", "block"])
def test_trainer_under_deepspeed_gets_no_callback(config: Any, install: Callable[..., Outcome]) -> None:
    outcome = install(config)
    trainer = Stub(deepspeed=object())
    assert trainer.train() == "trained" and not trainer.stages and not outcome.off


def test_block_that_is_off_leaves_trainer_unpatched(install: Callable[..., Outcome]) -> None:
    own = Stub.train
    outcome = install({"enabled": False})
    assert Stub.train is own and outcome.explain() is None
