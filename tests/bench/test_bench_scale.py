"""The configurations for eight GPUs, their predictions, and the README's section agree."""

from __future__ import annotations

import json

from memplug.config import load_config
from tests.bench import scale
from tests.bench.scale import CONFIGURATIONS, Predicted
from tests.support.folders import ROOT
from tests.support.readmes import commands_of

FITS = Predicted(fits=True, tokens_per_s=1100.0, device_bytes=7e10, host_bytes=2e10)


def test_every_model_has_a_fitting_configuration_on_each_machine() -> None:
    models = {each.model for each in CONFIGURATIONS}
    assert {(each.model, each.gpu) for each in CONFIGURATIONS} == {
        (model, gpu) for model in models for gpu in ("h100", "h200")
    }
    assert models == {"llama3_8b", "llama3_70b", "qwen3_8b", "mixtral_8x7b"} and len(CONFIGURATIONS) == 8
    found = scale.read()
    assert list(found) == [each.name for each in CONFIGURATIONS]
    for each in CONFIGURATIONS:
        assert found[each.name]["memplug"].fits and "full" in found[each.name], each.name


def test_readme_has_the_commands_and_the_predicted_table() -> None:
    """Check the section; tests/repository/test_readmes.py checks its commands like those of all READMEs."""
    section = scale.section(scale.read())
    assert section in scale.README.read_text(), "python -m tests.bench.scale --readme"
    trains = [str(command) for command in commands_of(section) if command.words[0] != "memplug"]
    assert trains == [each.command for each in CONFIGURATIONS]


def test_tuned_configuration_keeps_the_settings_of_its_deepspeed_json() -> None:
    for each in (each for each in CONFIGURATIONS if each.is_tuned):
        given, made = (
            json.loads((ROOT / "configs" / name).read_text()) for name in (each.ds_json, f"tuned/{each.name}.json")
        )
        assert made["gradient_accumulation_steps"] == each.accumulation
        assert {name: made[name] for name in ("optimizer", "scheduler", "bf16")} == {
            name: given[name] for name in ("optimizer", "scheduler", "bf16")
        }
        assert load_config(made["memplug"]).enabled


def test_table_marks_predictions_and_modes_that_do_not_fit() -> None:
    estimated, tuned = (next(each for each in CONFIGURATIONS if each.is_tuned is way) for way in (False, True))
    full = Predicted(fits=True, tokens_per_s=1000.0)
    found = {
        estimated.name: {"memplug": FITS, "full": full, "keep": Predicted(fits=False, tokens_per_s=1200.0)},
        tuned.name: {"memplug": FITS, "full": Predicted(fits=False)},
    }
    head, _, *lines = scale.table(found).splitlines()
    assert "predicted" in head and len(lines) == 2
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][3:] == ["by `memplug estimate`", "1,100", "70.0", "20.0", "1,000", "1.10", "does not fit"]
    assert cells[1][3:] == ["by `memplug tune`", "1,100", "70.0", "20.0", "does not fit", "", "not predicted"]


def test_predictions_are_kept_for_the_next_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(scale, "FOUND", tmp_path / "scale.json")
    assert scale.read() == {}
    found = {"llama3_8b_h100": {"memplug": FITS, "keep": Predicted(fits=False, took_s=3.0)}}
    scale.write(found)
    assert scale.read() == found
