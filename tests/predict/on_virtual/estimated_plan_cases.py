"""Plans and limits of `memplug.estimate` on the virtual device, compared with steps that train by them."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import memplug
from memplug.device.capacity import DEVICE_SHARE
from memplug.predict.estimator import limits
from memplug.predict.estimator.request import EstimateRequest
from memplug.predict.estimator.result import Estimate
from memplug.predict.estimator.shapes import Shape
from memplug.predict.estimator.training import VirtualTraining
from memplug.predict.estimator.workload import Workload
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.support.folders import ROOT
from tests.support.virtual_devices import H200

GIB = 2**30
NO_LIST = {"swap": {"enabled": False}}


@pytest.mark.parametrize("budget_gib", [40.0, 41.7, 44.0])
def test_no_kernel_waits_for_copies_of_gated_mlp_products(budget_gib: float) -> None:
    """Swap the MLP's products, which are as large as all other swapped tensors of a layer, and are offloaded last.

    The next layer begins while the products are offloaded, since earlier offloads have made enough room. Backward
    prefetches the products during the next layer's attention; if a plan swaps more, the products use the room that the
    plan reserves for copies in flight.
    """
    pytest.importorskip("transformers")
    workload = Workload(shape=_shape(), layers=4, seq_len=131072, head=False, optimizer=False)
    block = {"enabled": True, **NO_LIST, "device_budget_gib": budget_gib}
    found = memplug.estimate(workload.make_model, workload.inputs, block, modes=("memplug",))["memplug"]
    kernels = sorted((span.begin_s, span.end_s) for span in found.spans if not span.name.startswith("to "))
    assert found.to_device_bytes > 30e9
    waits_s = [after[0] - before[1] for before, after in itertools.pairwise(kernels)]
    assert max(waits_s) < 0.02, "one of these products takes 0.05 s each way"


def _workload(layers: int = 6) -> Workload:
    shape = Shape(
        {**Shape.read(ROOT / "configs/models/7b.yaml").fields, "hidden_size": 1024, "intermediate_size": 2816}
    )
    return Workload(shape=shape, layers=layers, seq_len=8192)


def _shape() -> Shape:
    return Shape.read(ROOT / "configs" / "models" / "7b.yaml")


def _trained(workload: Workload, block: dict[str, Any], capacity_bytes: float) -> tuple[dict[str, Any], int]:
    """Train two steps on a GPU with that much memory; return the report, and the peak of reserved bytes."""
    device = VirtualDevice(dataclasses.replace(GpuProfile.read(H200), memory_bytes=capacity_bytes))
    device.restart()
    training = VirtualTraining(workload.make_model, workload.inputs, workload.make_optimizer)
    try:
        with memplug.attach(training.model, block) as session:
            for _ in range(2):
                training.step()
                session.step()
            return session.report().as_dict(), device.usage().reserved_peak
    finally:
        del training  # else the frame of a stored error would keep the training alive


def test_training_that_fits_only_with_an_estimated_plan_completes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    workload = Workload(shape=_shape(), layers=4, seq_len=8192)
    block = {"enabled": True, **NO_LIST, "host_budget_gib": 100, "device_budget_gib": 10.5}
    optimizer = workload.make_optimizer
    found = memplug.estimate(
        workload.make_model, workload.inputs, block, "h200", ("memplug",), make_optimizer=optimizer, plan_dir=tmp_path
    )
    assert list(tmp_path.iterdir()) and not found.impossible
    planned = {**block, "plan_dir": str(tmp_path)}
    report, needed_bytes = _trained(workload, planned, 1e12)
    assert report["planned_steps"] == 2 and report["arena_step_served"] == 1
    report, _ = _trained(workload, planned, 1.005 * needed_bytes)
    assert report["planned_steps"] == 2
    with pytest.raises(torch.OutOfMemoryError):
        _trained(workload, {**block, "plan_dir": False}, 1.005 * needed_bytes)


@pytest.mark.parametrize("budget_gib", [12.0, 14.0])
def test_steps_with_the_arena_reserve_98_to_100_percent_of_the_budget(budget_gib: float) -> None:
    """Count the holes in torch's segments as reserved, beside the tensors."""
    pytest.importorskip("transformers")
    found = _of_four_layers({"device_budget_gib": budget_gib}, GpuProfile.read(H200), "memplug")["memplug"]
    assert 0.98 * budget_gib * GIB < found.arena_reserved_bytes <= budget_gib * GIB
    assert found.peak_allocated_bytes < 0.95 * budget_gib * GIB, "the rest of the budget is holes"


def test_memplug_keeps_all_if_that_fits_with_the_arena() -> None:
    pytest.importorskip("transformers")
    hardware = dataclasses.replace(GpuProfile.read(H200), memory_bytes=16.5 / DEVICE_SHARE * GIB)
    found = _of_four_layers({}, hardware, "keep", "memplug")
    assert found["memplug"].step_s == pytest.approx(found["keep"].step_s, rel=1e-3)
    assert found["memplug"].flops == found["keep"].flops and found["memplug"].to_host_bytes == 0


def _of_four_layers(block: dict[str, Any], hardware: GpuProfile, *modes: str) -> Estimate:
    workload = Workload(shape=_shape(), layers=4, seq_len=8192)
    own, optimizer = {"enabled": True, **NO_LIST, **block}, workload.make_optimizer
    return memplug.estimate(workload.make_model, workload.inputs, own, hardware, modes, make_optimizer=optimizer)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "size"), [("keep", "seq_len"), ("full", "micro_batch"), ("memplug", "seq_len")])
def test_longest_sequence_and_largest_batch_fit_and_larger_ones_do_not(mode: str, size: str) -> None:
    pytest.importorskip("transformers")
    hardware = dataclasses.replace(GpuProfile.read(H200), memory_bytes=3 * GIB)
    small = Shape({**_shape().fields, "hidden_size": 1024, "intermediate_size": 2816})
    workload = Workload(shape=small, layers=6, seq_len=4096 if size == "seq_len" else 512, optimizer=False)
    config = memplug.MemplugConfig(enabled=True)
    request = EstimateRequest(config=config, hardware=hardware)
    search = limits.LimitSearch(workload, request, mode)
    most = search.longest() if size == "seq_len" else search.largest_batch()
    for count, fits in ((most, True), (int(1.25 * most), False)):
        changed = dataclasses.replace(workload, **{size: count})
        taken = limits.least_bytes(changed, request, mode)
        assert (taken <= limits.capacity_bytes(hardware, config, mode)) is fits, (count, taken)
