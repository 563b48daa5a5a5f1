"""The Megatron-Core and Mixtral recipes on two processes, through the scripts of launch/."""

from __future__ import annotations

import importlib.util
import re
import subprocess

import pytest

from tests.support.folders import ROOT
from tests.support.forking import launch_forked

pytestmark = pytest.mark.distributed

SHORT = ["--steps", "6", "--seq-len", "64"]
MEGATRON = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="Megatron-Core is not installed")


def run(script: str, *arguments: str) -> str:
    """Run a script with two processes, and return the report on standard output."""
    command = ["env", "NPROC=2", "MASTER_PORT=0", str(ROOT / "launch" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def loss(report: str, which: str) -> str:
    """Return a loss as the recipe prints it."""
    return re.search(rf"^{which} loss +(.*)$", report, re.MULTILINE).group(1)


@MEGATRON
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "recipe", "split"),
    [
        ("megatron_torchrun.sh", "megatron_llama2/train.py", ["--tensor", "2", "--sequence"]),
        ("mixtral_megatron.sh", "mixtral/train_megatron.py", ["--expert", "2", "--distributed-optimizer"]),
    ],
)
def test_megatron_recipe_trains_as_without_memplug(script, recipe, split, tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"memplug": {"enabled": true, "tokenwise": {"alpha": 1.0, "min_offload_bytes": 1024}}}')
    plain = launch_forked([ROOT / "examples" / recipe, *SHORT, *split, "--no-memplug"], libraries="megatron")
    ours = run(script, *SHORT, *split, "--memplug-config", str(config))
    assert not re.search("^memplug", plain, re.MULTILINE) and re.search("^memplug stage", ours, re.MULTILINE)
    parameters = "3,036,288" if "mixtral" in script else "820,352"
    assert f" {parameters} parameters" in plain, "as many as Hugging Face's model has"
    for which in ("training", "validation"):
        assert loss(ours, which) == loss(plain, which)
    first, last = map(float, loss(ours, "training").split(" → "))
    assert last < first


@pytest.mark.long
def test_mixtral_recipe_trains_with_deepspeed():
    report = run("mixtral_torchrun.sh", *SHORT)
    first, last = map(float, loss(report, "training").split(" → "))
    assert last < first and "3,036,288 parameters" in report
    assert re.search(r"^memplug regions +4$", report, re.MULTILINE)
