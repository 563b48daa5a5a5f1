"""A profile of this machine: plausible rates, each marked as measured or assumed; the virtual device runs on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memplug.device.host_time import HostTime
from memplug.errors import HardwareError
from memplug.predict.virtual import GpuProfile, Rate, measuring
from memplug.predict.virtual.measuring import measure_profile, write_profile
from tests.support.forking import launch_forked

HOST_TIME = HostTime(launch_s=3e-6, observe_s=1e-6, time_s=5e-6, region_s=4e-5, restore_s=0.0)
STEP = """
import sys, torch
from torch.nn.functional import scaled_dot_product_attention
from memplug.device.host_time import HostTime
from memplug.predict.virtual import GpuProfile, VirtualDevice
device = VirtualDevice(GpuProfile.named(sys.argv[1]))
with torch.device("virtual"):
    layer, x = torch.nn.Linear(64, 192, dtype=torch.bfloat16), torch.randn(1, 256, 64, dtype=torch.bfloat16)
query, key, value = layer(x).view(1, 256, 3, 4, 16).permute(2, 0, 3, 1, 4)
scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
layer.weight.cpu()
print(device.synchronize())
"""


@pytest.fixture(scope="module")
def profile() -> dict[str, Any]:
    return measure_profile("cpu", HOST_TIME)


@pytest.fixture
def file(tmp_path: Path, profile: dict[str, Any]) -> Path:
    write_profile(tmp_path / "mine.json", profile)
    return tmp_path / "mine.json"


def entries(profile: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, entry in profile.items():
        if name != "name":
            yield from [entry] if "from" in entry else entry.values()


def test_measured_cpu_rates_are_plausible(file: Path) -> None:
    hardware = GpuProfile.read(file)
    # From a very slow to an impossibly fast machine: a rate that is off by a unit prefix, 1e3, falls outside.
    for rate in (hardware.matmul_flops["float32"], hardware.matmul_flops["float64"]):
        assert 1e8 < rate.at(1e9) < 1e14
    for rates in (hardware.attention_forward_flops, hardware.attention_backward_flops):
        assert tuple(rates) == ("flash",) and 1e7 < rates["flash"].at(512) < 1e14
    links = (hardware.to_host_bytes_per_s, hardware.to_device_bytes_per_s)
    both = (hardware.to_host_both_bytes_per_s, hardware.to_device_both_bytes_per_s)
    assert all(1e8 < rate.at(1 << 26) < 1e12 for rate in (*links, *both))
    assert 1e8 < hardware.memory_bytes_per_s < 1e13 and 1e8 < hardware.memory_bytes < 1e14
    assert all(1e-9 < seconds < 1e-2 for seconds in (hardware.kernel_s, hardware.copy_s, hardware.launch_s))
    assert (hardware.observe_s, hardware.region_s, hardware.restore_s) == (1e-6, 4e-5, 1e-9), "the given host times"
    assert hardware.name


def test_written_profile_marks_each_rate_as_measured_or_assumed(file: Path, profile: dict[str, Any]) -> None:
    assumed = [name for name, entry in profile.items() if "from" in entry and entry["from"] == "assumed"]
    assert assumed == ["collective_bytes_per_s", "collective_s"]
    assert all(entry["from"] == "measured" for entry in entries(profile) if entry["from"] != "assumed")
    assert json.loads(file.read_text()) == profile
    assert isinstance(GpuProfile.read(file).to_host_bytes_per_s, Rate)
    assert len(file.read_text().splitlines()) < 33, "a line for each rate"


def test_virtual_device_runs_on_a_measured_profile(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    assert 0 < float(launch_forked([script, file], processes=1)) < 10


def test_measurement_refuses_unsupported_devices_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can measure cpu and cuda, got meta"):
        measure_profile("meta", HOST_TIME)
    with pytest.raises(HardwareError, match="the hardware profile cannot be written"):
        write_profile(tmp_path / "absent" / "mine.json", {"name": "mine"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_a_gpu_keeps_its_random_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_SERIES_S", 0.2)  # simulated CUDA computes on the CPU: measure briefly
    state, said = torch.cuda.get_rng_state(), []
    measured = measure_profile("cuda", HOST_TIME, said.append)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    write_profile(tmp_path / "gpu.json", measured)
    hardware = GpuProfile.read(tmp_path / "gpu.json")
    assert (
        hardware.name == torch.cuda.get_device_name() and hardware.attention(None) in hardware.attention_forward_flops
    )
    assert hardware.memory_bytes == pytest.approx(torch.cuda.mem_get_info()[1], rel=1e-3)
    assert said[0] == "the link" and len(said) >= 4
