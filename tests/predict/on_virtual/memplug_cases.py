"""memplug on the virtual device: budgets are kept, and a step takes the predicted time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.bench import larger_models
from tests.support.virtual_devices import H200, HIDDEN, SIMPLE, Layers


def _trained(device: VirtualDevice, config: dict[str, Any], steps: int = 12) -> tuple[dict[str, Any], int, float]:
    """Train four layers of 8,192 tokens; return a report, and the last step's peak and seconds."""
    device.restart()
    with torch.device("virtual"):
        model = Layers(4).to(torch.bfloat16)
        inputs = torch.randn(1, 8192, HIDDEN, dtype=torch.bfloat16)
    with memplug.attach(model, {"enabled": True, "plan_dir": False, "host_budget_gib": 200, **config}) as session:
        for _ in range(steps):
            began = device.synchronize()
            device.reset_peaks()
            model(inputs).backward(inputs)
            model.zero_grad()
            session.step()
            took_s = device.synchronize() - began
        return session.report().as_dict(), device.usage().requested_peak, took_s


NO_LIST, NO_REGIONS = {"swap": {"enabled": False}}, {"tokenwise": {"enabled": False}}
PLAIN = {"arena": {"enabled": False}, "profiler": {"wait_for_plans": True}}


@pytest.mark.long
def test_swap_list_keeps_its_budget_and_predicted_stall() -> None:
    """Run first on a link that is always as slow as with both directions busy, as the plan assumes.

    Then run on the link's own rates, at which the stall has to be shorter.
    """
    hardware = GpuProfile.read(H200)
    both = {"to_host": hardware.to_host_both_bytes_per_s, "to_device": hardware.to_device_both_bytes_per_s}
    device = VirtualDevice(dataclasses.replace(hardware, **{f"{to}_bytes_per_s": both[to] for to in both}))
    fits, most, alone_s = _trained(device, {**PLAIN, **NO_REGIONS})
    assert fits["swap"] == "fits"
    budget_bytes = int(0.75 * most)
    config = {**PLAIN, **NO_REGIONS, "device_budget_gib": budget_bytes / (1 << 30), "swap": {"enabled": True}}
    report, peak, took_s = _trained(device, config)
    assert report["swap"] == "swapping" and report["swap_repeated"] > 0 == report["swap_passive"]
    assert peak <= budget_bytes and report["swap_peak_bytes"] == report["predicted_swap_peak_bytes"] <= budget_bytes
    assert report["swap_demanded"] == report["swap_cancelled"] == report["swap_refused"] == report["swap_missed"] == 0
    assert 0 < report["swap_stall_s"] == pytest.approx(report["predicted_swap_stall_s"], rel=0.05)
    assert report["swap_stall_s"] == pytest.approx(took_s - alone_s, rel=0.2)
    report, peak, less_s = _trained(VirtualDevice(hardware), config)
    assert peak <= budget_bytes and 0 < report["swap_stall_s"] < report["predicted_swap_stall_s"] and less_s < took_s


@pytest.mark.long
def test_swapping_and_keeping_is_faster_than_full_recomputation() -> None:
    device = VirtualDevice(GpuProfile.read(H200))
    _, most, keep_s = _trained(device, {**PLAIN, **NO_LIST, **NO_REGIONS})
    regions = {"regions": ["layers.*"]}
    config = {**PLAIN, **NO_LIST, "tokenwise": regions, "device_budget_gib": 0.85 * most / (1 << 30)}
    report, peak, took_s = _trained(device, config, steps=16)
    assert report["stage"] == "stable" and report["offloaded_bytes"] > 0
    assert peak < 0.9 * most
    full_s = report["predicted_full_recomputation_s"]
    assert keep_s * 0.99 < took_s < keep_s + 0.9 * (full_s - keep_s)


@pytest.mark.long
def test_plan_in_the_memory_of_full_recomputation_is_faster_than_it() -> None:
    device = VirtualDevice(GpuProfile.read(H200))
    _, most, keep_s = _trained(device, {**PLAIN, **NO_LIST, **NO_REGIONS})
    config = {**PLAIN, **NO_LIST, "tokenwise": {"regions": ["layers.*"], "alpha": 0}}
    _, least, full_s = _trained(device, config)
    config = {**PLAIN, **NO_LIST, "tokenwise": {"regions": ["layers.*"]}, "device_budget_gib": 1.05 * least / (1 << 30)}
    report, peak, took_s = _trained(device, config, steps=16)
    assert 0.98 * report["predicted_peak_bytes"] <= peak <= report["predicted_peak_bytes"] <= 1.05 * least
    assert report["buffer_bytes"] == 0 < report["offloaded_bytes"]
    assert took_s < keep_s + 0.8 * (full_s - keep_s)


def test_first_step_that_exceeds_device_memory_completes() -> None:
    device = VirtualDevice(GpuProfile.read(H200))
    _, most, _ = _trained(device, {**PLAIN, **NO_REGIONS}, steps=1)
    small = VirtualDevice(dataclasses.replace(device.hardware, memory_bytes=0.8 * most))
    report, peak, _ = _trained(small, {**PLAIN, **NO_REGIONS}, steps=1)
    assert report["swap_passive"] > 0 and peak <= 0.8 * most


class _Sines(nn.Module):
    """A layer of `operators` sines."""

    operators = 5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.operators):
            x = x.sin()
        return x


def test_memplugs_own_work_is_charged_as_host_time() -> None:
    """Charge for each operator of a region, for the region, and for recomputing in backward."""
    layers, least_s = 3, 1e-12
    own = ("observe_s", "region_s", "restore_s")
    config = {"tokenwise": {"alpha": 0, "regions": ["[0-2]"]}, "arena": {"enabled": False}, "plan_dir": False}

    def step_s(**costs: float) -> float:
        device = VirtualDevice(dataclasses.replace(SIMPLE, **{**dict.fromkeys(own, least_s), **costs}))
        model, inputs = nn.Sequential(*(_Sines() for _ in range(layers))), torch.empty(1000, device="virtual")
        model.append(nn.Linear(1000, 1, device="virtual"))
        with memplug.attach(model, {"enabled": True, **config}) as session:
            for _ in range(6):
                began_s = device.synchronize()
                model(inputs.clone().requires_grad_()).sum().backward()
                session.step()
        return device.synchronize() - began_s

    alone_s = step_s()
    taken_s = [step_s(**{name: 1.0}) - alone_s for name in own]
    hidden_s = 1e-3  # tolerance: kernel time, for which the host waits only in the run without these costs
    assert taken_s == pytest.approx([layers * _Sines.operators, layers, layers], abs=hidden_s)


@pytest.mark.long
def test_larger_models_benchmark_finds_the_largest_size_that_fits() -> None:
    pytest.importorskip("transformers")
    device = VirtualDevice(dataclasses.replace(GpuProfile.read(H200), memory_bytes=2 << 30))
    shape = larger_models.Shape(tokens=4096, layers=2, hidden=256)
    tokens = larger_models.largest(device, shape, "tokens", "keep")
    assert tokens >= 4096 and larger_models.train(device, dataclasses.replace(shape, tokens=tokens), "keep") is not None
    assert larger_models.train(device, dataclasses.replace(shape, tokens=2 * tokens), "keep") is None
    assert larger_models.largest(device, shape, "tokens", "full") >= tokens
