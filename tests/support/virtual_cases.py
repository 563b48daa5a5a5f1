"""The virtual device: its clocks, its memory, its operators, and what it says of steps that were measured on an H200.

Run by tests/device/test_virtual.py in a process of its own: torch has one such device for good, and learns of it before
the first backward.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.device.virtual import Hardware, VirtualDevice, costs
from memplug.errors import HardwareError
from tests.bench import larger_models
from tests.bench.caching_allocator import CachingAllocator
from tests.support.folders import ROOT

H200 = ROOT / "configs" / "hardware" / "h200.json"
MIB = 1 << 20
SIMPLE = Hardware(
    name="simple",
    memory_bytes=1e12,
    matmul_flops=1e12,
    attention_forward_flops=1e12,
    attention_backward_flops=1e12,
    memory_bytes_per_s=1e9,
    kernel_s=1e-6,
    to_host_bytes_per_s=1e6,
    to_device_bytes_per_s=2e6,
    copy_s=1e-9,
    launch_s=1e-9,
)


@pytest.fixture
def device() -> Iterator[VirtualDevice]:
    """A megabyte takes a second to the host, half a one to the device, and a millisecond to be read."""
    device = VirtualDevice(SIMPLE)
    device.synchronize()
    device.empty_cache()
    yield device


def on_device(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="virtual")


def seconds(device: VirtualDevice) -> float:
    return device.synchronize()


# -- time --------------------------------------------------------------------------------------------------------------


def test_kernels_take_what_they_compute_or_move_one_after_the_other(device: VirtualDevice) -> None:
    left, right = torch.empty(100, 200, device="virtual"), torch.empty(200, 300, device="virtual")
    began = seconds(device)
    product = left @ right
    assert seconds(device) - began == pytest.approx(2 * 100 * 200 * 300 / 1e12, rel=1e-2)
    began = seconds(device)
    product.add_(1)
    product + product
    assert seconds(device) - began == pytest.approx((2 + 3) * 100 * 300 * 4 / 1e9, rel=1e-2)


def test_views_take_no_time_and_share_memory(device: VirtualDevice) -> None:
    x = torch.empty(4, 6, device="virtual")
    began, used = seconds(device), device.usage().allocated
    views = [x.t(), x[1:], x.view(2, 12), x.unsqueeze(0).expand(3, 4, 6), x.chunk(2)[1], x.reshape(24), x.detach()]
    assert seconds(device) == began and device.usage().allocated == used
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in views)


def test_streams_run_beside_each_other_and_wait_by_events(device: VirtualDevice) -> None:
    side = torch.Stream("virtual")
    x, y = on_device(MIB), torch.empty(MIB, dtype=torch.uint8)
    began = seconds(device)
    with side:
        y.copy_(x, non_blocking=True)  # 1.05 s
        copied = side.record_event(torch.Event("virtual", enable_timing=True))
    begin = torch.Event("virtual", enable_timing=True)
    begin.record()
    x.add_(1)
    assert not copied.query() and begin.query()
    torch.accelerator.current_stream().wait_event(copied)
    end = torch.Event("virtual", enable_timing=True)
    end.record()
    assert seconds(device) - began == pytest.approx(MIB / 1e6, rel=1e-3)
    assert begin.elapsed_time(end) / 1e3 == pytest.approx(MIB / 1e6, rel=1e-3) and copied.query()


def test_each_direction_of_the_link_carries_one_copy_at_a_time(device: VirtualDevice) -> None:
    x, y = on_device(MIB), torch.empty(MIB, dtype=torch.uint8)
    began = seconds(device)
    for to_host in (True, True, False):
        with torch.Stream("virtual"):
            (y if to_host else x).copy_(x if to_host else y, non_blocking=True)
    assert seconds(device) - began == pytest.approx(2 * MIB / 1e6, rel=1e-3)
    began = seconds(device)
    x.copy_(y)
    assert torch.accelerator.current_stream().query(), "the host has waited"
    assert seconds(device) - began == pytest.approx(MIB / 2e6, rel=1e-3)


def test_spans_are_what_kept_streams_busy(device: VirtualDevice) -> None:
    x = on_device(MIB)
    device.keep_spans(True)
    x.add_(1)
    x.cpu()
    device.keep_spans(False)
    x.add_(1)
    first, second = device.take_spans()
    assert (first.name, second.name) == ("aten::add_", "to host") and first.end_s <= second.begin_s
    assert second.end_s - second.begin_s == pytest.approx(MIB / 1e6, rel=1e-3)
    assert device.take_spans() == []


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_request_beyond_the_memory_fails_as_one_of_a_device_does(device: VirtualDevice) -> None:
    small = VirtualDevice(Hardware(**{**vars(SIMPLE), "memory_bytes": device.usage().reserved + 40 * MIB}))
    kept = on_device(30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 20971520 bytes"):
        on_device(20 * MIB)
    del kept
    assert small.usage().retries == 0
    assert on_device(36 * MIB).numel() == 36 * MIB and small.usage().retries == 1, "what was free went back"


@pytest.mark.parametrize("expandable", [False, True])
def test_memory_is_given_out_as_the_simulated_allocator_does(device: VirtualDevice, expandable: bool) -> None:
    chance, simulated = random.Random(0), CachingAllocator(expandable=expandable)
    device = VirtualDevice(SIMPLE, expandable_segments=expandable)
    device.empty_cache()
    before = device.usage()
    live: list[tuple[torch.Tensor, object]] = []
    for _ in range(3000):
        if live and chance.random() < 0.5:
            tensor, handle = live.pop(chance.randrange(len(live)))
            del tensor
            simulated.free(handle)
        else:
            nbytes = int(10 ** chance.uniform(1, 7.8))
            live.append((on_device(nbytes), simulated.malloc(nbytes)))
        now = device.usage()
        assert now.allocated - before.allocated == simulated.allocated_bytes
    assert now.reserved - before.reserved == simulated.reserved_bytes


def test_pages_of_expandable_segments_go_where_they_are_asked_for() -> None:
    device = VirtualDevice(SIMPLE, expandable_segments=True)
    device.empty_cache()
    there = device.usage().reserved
    VirtualDevice(Hardware(**{**vars(SIMPLE), "memory_bytes": there + 100 * MIB}), expandable_segments=True)
    kept = [on_device(20 * MIB) for _ in range(5)]
    del kept[1], kept[2]  # 20 MiB each, with 20 in between
    apart = on_device(40 * MIB)
    assert device.usage().reserved == there + 100 * MIB and device.usage().retries > 0
    with pytest.raises(torch.OutOfMemoryError):
        on_device(MIB)
    del apart, kept
    assert on_device(100 * MIB).numel() == 100 * MIB


def test_what_is_free_once_a_stream_is_past_it_is_waited_for_where_memory_is_short(device: VirtualDevice) -> None:
    there = device.usage().reserved
    VirtualDevice(Hardware(**{**vars(SIMPLE), "memory_bytes": there + 40 * MIB}))
    used, side = on_device(30 * MIB), torch.Stream("virtual")
    with side:
        torch.empty(30 * MIB, dtype=torch.uint8).copy_(used, non_blocking=True)
    used.record_stream(side)
    del used
    before_s = device.now_s()
    assert on_device(32 * MIB).numel() == 32 * MIB and device.now_s() > before_s


def test_what_another_stream_uses_is_not_given_out_before_that_is_past(device: VirtualDevice) -> None:
    used, side = on_device(MIB * 3), torch.Stream("virtual")
    address = used.data_ptr()
    with side:
        torch.empty(MIB * 3, dtype=torch.uint8).copy_(used, non_blocking=True)
    used.record_stream(side)
    del used
    assert on_device(MIB * 3).data_ptr() != address
    device.synchronize()
    assert on_device(MIB * 3).data_ptr() == address


# -- operators ---------------------------------------------------------------------------------------------------------


def test_a_training_step_of_common_operators_runs(device: VirtualDevice) -> None:
    with torch.device("virtual"):
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(8 * 16 * 16, 32),
            nn.GELU(),
            nn.LayerNorm(32),
            nn.Linear(32, 10),
        )
        images, labels = torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.autocast("virtual", torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() == 1 and loss.device.type == "virtual"
    assert all(p.device.type == "virtual" for state in optimizer.state.values() for p in (state["exp_avg"],))


def test_operators_are_the_kernels_that_cuda_has(device: VirtualDevice) -> None:
    with torch.device("virtual"):
        norm, x = nn.RMSNorm(8), torch.randn(2, 4, 6, 8, requires_grad=True)
    device.keep_spans(True)
    F.scaled_dot_product_attention(norm(x), x, x, is_causal=True).sum().backward()
    device.keep_spans(False)
    names = [span.name for span in device.take_spans()]
    assert {"aten::_fused_rms_norm", "attention", "attention_backward", "aten::_fused_rms_norm_backward"} <= set(names)
    assert len(names) < 12


def test_what_depends_on_data_fails(device: VirtualDevice) -> None:
    with pytest.raises(RuntimeError):
        torch.empty(3, device="virtual").nonzero()


def test_operators_on_the_cpu_are_as_before(device: VirtualDevice) -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    F.rms_norm(x, (3,)).sum().backward()
    assert x.grad.isfinite().all() and (x @ x.t())[0, 0] == 5


# -- memplug on it -----------------------------------------------------------------------------------------------------


def _trained(device: VirtualDevice, config: dict[str, Any], steps: int = 12) -> tuple[dict[str, Any], int, float]:
    """Four layers of 8,192 tokens: a report, and of the last step the peak and seconds."""
    gc.collect()
    device.empty_cache()
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
        return session.report(), device.usage().requested_peak, took_s


NO_LIST, NO_REGIONS = {"swap": {"enabled": False}}, {"tokenwise": {"enabled": False}}
PLAIN = {"arena": {"enabled": False}, "profiler": {"wait_for_plans": True}}


def test_a_swap_list_keeps_to_its_budget_and_waits_no_longer_than_it_says() -> None:
    device = VirtualDevice(Hardware.read(H200))
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


def test_regions_swap_keep_and_recompute_and_that_is_faster_than_recomputing_all() -> None:
    device = VirtualDevice(Hardware.read(H200))
    _, most, keep_s = _trained(device, {**PLAIN, **NO_LIST, **NO_REGIONS})
    regions = {"regions": ["layers.*"]}
    config = {**PLAIN, **NO_LIST, "tokenwise": regions, "device_budget_gib": 0.85 * most / (1 << 30)}
    report, peak, took_s = _trained(device, config, steps=16)
    assert report["stage"] == "stable" and report["offloaded_bytes"] > 0
    assert peak < 0.9 * most
    full_s = report["predicted_full_recomputation_s"]
    assert keep_s * 0.99 < took_s < keep_s + 0.9 * (full_s - keep_s)


def test_a_first_step_that_does_not_fit_completes() -> None:
    device = VirtualDevice(Hardware.read(H200))
    _, most, _ = _trained(device, {**PLAIN, **NO_REGIONS}, steps=1)
    small = VirtualDevice(dataclasses.replace(device.hardware, memory_bytes=0.8 * most))
    report, peak, _ = _trained(small, {**PLAIN, **NO_REGIONS}, steps=1)
    assert report["swap_passive"] > 0 and peak <= 0.8 * most


def test_larger_models_finds_the_largest_that_fits() -> None:
    pytest.importorskip("transformers")
    gc.collect()
    device = VirtualDevice(dataclasses.replace(Hardware.read(H200), memory_bytes=2 << 30))
    device.empty_cache()
    shape = larger_models.Shape(tokens=4096, layers=2, hidden=256)
    tokens = larger_models.largest(device, shape, "tokens", "keep")
    assert tokens >= 4096 and larger_models.train(device, dataclasses.replace(shape, tokens=tokens), "keep") is not None
    assert larger_models.train(device, dataclasses.replace(shape, tokens=2 * tokens), "keep") is None
    assert larger_models.largest(device, shape, "tokens", "full") >= tokens


# -- against a real one ------------------------------------------------------------------------------------------------

TOKEN_HEADS, HIDDEN, INTERMEDIATE = 32, 4096, 11008


class DecoderLayer(nn.Module):
    """The one that was measured: of a 7B Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-5) for _ in range(2))
        self.qkv, self.out = (nn.Linear(HIDDEN, width * HIDDEN, bias=False) for width in (3, 1))
        self.gate, self.up = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, tokens, 3, TOKEN_HEADS, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(
            _rotated(query, cos, sin), _rotated(key, cos, sin), value, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Layers(nn.Module):
    """A stack of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = x.shape[1], HIDDEN // TOKEN_HEADS // 2
        cos, sin = (torch.ones(shape, dtype=x.dtype, device=x.device) for _ in range(2))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), -1)


def _measured() -> list[SimpleNamespace]:
    with open(ROOT / "tests" / "data" / "h200.csv") as file:
        rows = [SimpleNamespace(**row) for row in csv.DictReader(file)]
    return [
        row for row in rows if row.layer == "layers.py" and row.attention == "cudnn" and row.mode in ("keep", "full")
    ]


@pytest.mark.parametrize("row", _measured(), ids=lambda row: f"{row.tokens}-{row.layers}-{row.mode}")
def test_a_step_takes_what_it_took_on_an_h200(row: SimpleNamespace) -> None:
    gc.collect()
    device = VirtualDevice(Hardware.read(H200))
    tokens, gigabyte = int(row.tokens), 1e9
    with torch.device("virtual"):
        layers = nn.ModuleList(DecoderLayer() for _ in range(int(row.layers))).to(torch.bfloat16)
        cos, sin = (torch.empty(tokens, HIDDEN // TOKEN_HEADS // 2, dtype=torch.bfloat16) for _ in range(2))
        inputs = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)

    def step() -> None:
        x = inputs.detach().requires_grad_()
        for layer in layers:
            x = layer(x, cos, sin) if row.mode == "keep" else checkpoint(layer, x, cos, sin, use_reentrant=False)
        x.backward(inputs)

    step()
    began = device.synchronize()
    device.empty_cache()
    device.reset_peaks()
    step()
    assert device.synchronize() - began == pytest.approx(float(row.step_s), rel=0.09)
    memory = device.usage()
    assert memory.allocated_peak / gigabyte == pytest.approx(float(row.peak_allocated_gb), rel=0.015)
    if row.peak_reserved_gb:
        assert memory.reserved_peak / gigabyte == pytest.approx(float(row.peak_reserved_gb), rel=0.04)


# -- costs and profiles ------------------------------------------------------------------------------------------------


def _work(name: str, *sizes: tuple[int, ...], causal: bool = False) -> SimpleNamespace:
    tensors = [SimpleNamespace(sizes=size, nbytes=0) for size in sizes]
    return SimpleNamespace(name=name, inputs=tensors, outputs=[], causal=causal)


def test_attention_computes_two_products_and_in_backward_five() -> None:
    shape = (2, 4, 16, 8)
    pairs = 2 * 4 * 16 * 16
    assert costs.attention_flops(_work("attention", shape, shape, shape), backward=False) == 2 * 2 * pairs * 8
    causal = _work("attention_backward", shape, shape, shape, causal=True)
    assert costs.attention_flops(causal, backward=True) == 5 * pairs * 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", "a hardware profile has"),
        ('{"name": "x"}', "a hardware profile has"),
        (H200.read_text().replace("150100000000.0", "-1"), "above 0"),
        (H200.read_text().replace("published", "heard"), "where it is from"),
    ],
)
def test_a_profile_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(HardwareError, match=said):
        Hardware.read(tmp_path / "gpu.json")
