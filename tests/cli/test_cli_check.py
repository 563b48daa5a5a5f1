"""`memplug check` on the rest of a DeepSpeed JSON, `memplug --version`, and the doctor's row on memlock."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memplug.cli import app
from memplug.config import load_config, read_ds_config
from memplug.device import host_pool
from memplug.ds_json.keys import WITHOUT_EFFECT
from memplug.tokenwise import budgets

run = CliRunner().invoke


@pytest.fixture
def warnings_of(tmp_path):
    """Return the warnings of `memplug check`, which must be the same in text and in JSON."""

    def check(ds_config: dict) -> list[str]:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(ds_config))
        in_words, as_json = run(app, ["check", str(path)]), run(app, ["check", str(path), "--json"])
        assert in_words.exit_code == as_json.exit_code == 0
        warnings = json.loads(as_json.stdout)["warnings"]
        assert in_words.stderr.splitlines() == [f"Warning: {warning}" for warning in warnings]
        return warnings

    return check


ON = {"enabled": True}


@pytest.mark.parametrize("section", [{}, {"partition_activations": True, "cpu_checkpointing": True}])
def test_check_warns_of_activation_checkpointing(warnings_of, section):
    (warning,) = warnings_of({"memplug": ON, "activation_checkpointing": section})
    for expected in ('"activation_checkpointing"', "deepspeed.checkpointing.configure", "refuses to attach"):
        assert expected in warning


OFFLOADS = [
    ({"offload_optimizer": {"device": "cpu"}}, "zero_optimization.offload_optimizer: cpu"),
    ({"offload_param": {"device": "nvme", "nvme_path": "/n"}}, "zero_optimization.offload_param: nvme"),
    (
        {"offload_optimizer": {"device": "cpu", "super_offload": True}},
        "zero_optimization.offload_optimizer: cpu with super_offload",
    ),
    ({"cpu_offload": True}, "zero_optimization.cpu_offload"),
    ({"cpu_offload_param": True}, "zero_optimization.cpu_offload_param"),
    ({"zenflow": {"topk_ratio": 0.1}}, "zero_optimization.zenflow"),
]


@pytest.mark.parametrize(("zero", "named"), OFFLOADS)
def test_check_names_zero_offloads_and_advises_a_host_budget(warnings_of, zero, named):
    (warning,) = warnings_of({"memplug": ON, "zero_optimization": {"stage": 3, **zero}})
    assert f"({named})" in warning and "host memory and the link" in warning
    assert 'set "memplug": {"host_budget_gib": ...}' in warning


def test_check_names_every_deepspeed_offload_in_one_warning(warnings_of):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    (warning,) = warnings_of({"memplug": ON, "zero_optimization": zero})
    assert "offload_optimizer: cpu and zero_optimization.offload_param: cpu" in warning


def test_check_refuses_a_setting_under_both_former_and_present_name(tmp_path):
    path = tmp_path / "ds.json"
    zero = {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"memplug": ON, "zero_optimization": zero}))
    result = run(app, ["check", str(path)])
    assert result.exit_code == 1 and "cpu_offload and offload_optimizer are one setting" in result.stderr


def test_check_does_not_advise_a_host_budget_that_is_set(warnings_of):
    zero = {"offload_optimizer": {"device": "cpu"}}
    (warning,) = warnings_of({"memplug": {**ON, "host_budget_gib": 64}, "zero_optimization": zero})
    assert "64 GiB a rank" in warning and "set" not in warning


@pytest.mark.parametrize(
    "ds_config",
    [
        {"memplug": ON},
        {"memplug": ON, "zero_optimization": True},
        {"memplug": ON, "zero_optimization": {"offload_optimizer": {"device": "none"}, "offload_param": None}},
        {"memplug": ON, "zero_optimization": {"cpu_offload": False, "zenflow": None}},
        # Nothing is swapped or recomputed, so nothing conflicts or competes.
        {"memplug": {"enabled": False}, "activation_checkpointing": {}, "zero_optimization": {"cpu_offload": True}},
        {
            "memplug": {**ON, "tokenwise": {"enabled": False}},
            "activation_checkpointing": {},
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        },
    ],
)
def test_check_is_silent_without_conflicts(warnings_of, ds_config):
    assert warnings_of(ds_config) == []


def test_check_names_each_auto_value_that_accelerate_would_refuse(warnings_of):
    spelt_out = {**ON, "host_budget_gib": "auto", "tokenwise": {"alpha": "auto", "regions": ["layers.*"]}}
    (warning,) = warnings_of({"memplug": spelt_out, "train_batch_size": "auto"})
    assert "memplug.host_budget_gib, memplug.tokenwise.alpha out" in warning and "Accelerate" in warning
    assert warnings_of({"memplug": ON, "train_batch_size": "auto"}) == []


def test_settings_that_check_looks_for_exist_in_deepspeed():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    known = set(DeepSpeedZeroConfig.model_fields)
    assert {key for zero, _ in OFFLOADS for key in zero} <= known
    assert "super_offload" in DeepSpeedZeroOffloadOptimizerConfig.model_fields
    others = {key for key in known if "offload" in key} - {key for zero, _ in OFFLOADS for key in zero}
    assert others <= set(WITHOUT_EFFECT), "a new way to offload that check does not know"


MISPLACED = [
    ({"zero_optimization": {"memplug": ON}}, '"zero_optimization.memplug"'),
    ({"optimizer": {"type": "Adam", "params": {"lr": 1, "mem_plug": ON}}}, '"optimizer.params.mem_plug"'),
    ({"train": [{}, {"MemPlug": ON}]}, '"train[1].MemPlug"'),
    ({"a.b": {"c": {"memplugs": True}}}, '"a.b.c.memplugs"'),
]


@pytest.mark.parametrize(("ds_config", "path"), MISPLACED)
@pytest.mark.parametrize("block", [{}, {"memplug": ON}])
def test_check_names_the_path_of_a_block_below_top_level(warnings_of, block, ds_config, path):
    (warning,) = warnings_of({**ds_config, **block})
    assert warning.startswith(f"{path} is ignored") and "top level" in warning


@pytest.mark.parametrize("key", ["tokenwise", "arena", "host_budget_gib", "device_budget_gib", "plan_dir", "enabled"])
def test_check_warns_of_memplug_fields_at_top_level(warnings_of, key):
    (warning,) = warnings_of({key: {}, "memplug": {"enabled": False}})
    assert warning == f'top-level "{key}" is ignored: it belongs in the "memplug" block'


def test_check_accepts_keys_of_other_tools(warnings_of):
    others = {"profiler": {}, "report": {}, "flops_profiler": {"enabled": True}, "plugins": {"memory": {"plug": 1}}}
    assert warnings_of({"memplug": {"enabled": False}, **others}) == []


def test_training_logs_misplaced_block_once_but_no_other_check_warnings(caplog):
    ds_config = {
        "memplug": ON,
        "activation_checkpointing": {"profile": True},
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "memplug": {}},
    }
    with caplog.at_level(logging.INFO, "memplug"):
        read_ds_config(ds_config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith('"zero_optimization.memplug" is')


def test_block_without_the_memplug_key_leaves_memplug_off_and_warns(tmp_path, caplog):
    path = tmp_path / "block.json"
    path.write_text('{"enabled": true}')
    assert not load_config(path).enabled
    assert 'top-level "enabled" is ignored: it belongs in the "memplug" block' in caplog.text


def test_version_is_one_line_and_imports_no_torch():
    from importlib.metadata import version

    code = (
        "import sys; from memplug.cli import app; app(['--version'], standalone_mode=False); "
        "print([name for name in ('torch', 'deepspeed', 'pydantic') if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    expected = f"memplug {version('memplug')} (Python {sys.version.split()[0]}, torch {version('torch')})\n"
    assert result.stdout == expected and result.stderr.strip() == "[]"


GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "device", "expected"),
    [
        (None, "cuda:0", "unlimited: no limit on pinned memory"),
        (64 << 10, "cuda:0", "64 KiB: less than the host budget (auto), 100.0 GiB. If a run warns that the driver"),
        (8 << 20, "cpu", "8 MiB: no matter on the CPU"),
        (100 * GIB, "cuda:0", "102,400 MiB: more than the host budget (auto), 100.0 GiB"),
        (100 * GIB - 1, "cuda:0", "less than the host budget (auto), 100.0 GiB"),
    ],
)
def test_doctor_says_whether_the_limit_on_locked_memory_matters(doctor_of, limit, device, expected):
    row, facts = doctor_of(limit, device)
    assert row == facts["memlock"] and expected in row
    assert facts["host_budget_bytes"] == 100 * GIB
    assert ("`ulimit -l unlimited`" in row) == ("less than" in row)


def test_memlock_row_quotes_the_registration_warning(doctor_of):
    """Let users who search for the warning's words find the row."""
    row, _ = doctor_of(0, "cuda:0")
    words = "the driver refused to register host memory"
    assert words in row and words in Path(host_pool.__file__).read_text()


@pytest.fixture
def doctor_of(monkeypatch):
    """Return the doctor's memlock row and its facts, for a host budget of 100 GiB."""
    module = sys.modules["memplug.cli.doctor"]
    absent = {"ready": False, "problem": "not asked", "advice": ""}
    monkeypatch.setattr(module, "_built", lambda load: absent)
    monkeypatch.setattr("memplug.device.device.host_available_bytes", lambda: 125 * GIB)
    for name in budgets.LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)

    def ask(limit: int | None, device: str) -> tuple[str, dict]:
        rates = dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s", "pinned_alloc_bytes_per_s"), 1e9)
        sizes = dict.fromkeys(("host_available_bytes", "device_free_bytes", "device_total_bytes"), 125 * GIB)
        hardware = {"device": device, "device_name": "", "matmul_flops_per_s": 1e12, **rates, **sizes}
        monkeypatch.setattr(module, "_hardware", lambda: {**hardware, "memlock_limit_bytes": limit})
        lines = dict(line.split("  ", 1) for line in run(app, ["doctor"]).stdout.splitlines())
        return lines["memlock limit"].strip(), json.loads(run(app, ["doctor", "--json"]).stdout)

    return ask
