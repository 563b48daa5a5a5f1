"""Operators, their costs, and the profiles of the costs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memplug.errors import HardwareError
from memplug.predict.virtual import GpuProfile, Rate, VirtualDevice, costs
from tests.support.virtual_devices import H200, SIMPLE


def test_training_step_of_common_operators_runs(device: VirtualDevice) -> None:
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


def test_operators_run_as_the_fused_kernels_of_cuda(device: VirtualDevice) -> None:
    with torch.device("virtual"):
        norm, x = nn.RMSNorm(8), torch.randn(2, 4, 6, 8, requires_grad=True)
    device.keep_spans(True)
    F.scaled_dot_product_attention(norm(x), x, x, is_causal=True).sum().backward()
    device.keep_spans(False)
    names = [span.name for span in device.take_spans()]
    assert {"aten::_fused_rms_norm", "attention", "attention_backward", "aten::_fused_rms_norm_backward"} <= set(names)
    assert len(names) < 12


def test_mask_selects_its_assumed_share_and_other_dynamic_shapes_fail(device: VirtualDevice) -> None:
    mask = torch.empty(8, 4, dtype=torch.bool, device="virtual")
    assert mask.nonzero().shape == (32, 2)
    device.assume_true(0.25)
    assert mask.nonzero().shape == (8, 2) and torch.ones(4, device="virtual").masked_select(mask).shape == (8,)
    device.assume_true(1.0)
    with pytest.raises(RuntimeError):
        torch.empty(3, device="virtual").unique()


def test_every_value_read_from_the_virtual_device_is_one(device: VirtualDevice) -> None:
    numbers = torch.zeros(2000, device="virtual")
    assert numbers[3].item() == 1 and numbers.tolist() == [1.0] * 2000 and "device='virtual:0'" in repr(numbers)


def test_cpu_operators_still_compute_beside_the_virtual_device(device: VirtualDevice) -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    F.rms_norm(x, (3,)).sum().backward()
    assert x.grad.isfinite().all() and (x @ x.t())[0, 0] == 5


# -- costs and profiles ------------------------------------------------------------------------------------------------


def _work(name: str, *sizes: tuple[int, ...], causal: bool = False) -> SimpleNamespace:
    tensors = [SimpleNamespace(sizes=size, nbytes=0) for size in sizes]
    return SimpleNamespace(name=name, inputs=tensors, outputs=[], causal=causal)


def test_rate_is_interpolated_by_the_logarithm_of_the_size() -> None:
    rate = Rate(((10.0, 100.0), (1000.0, 300.0), (10000.0, 200.0)))
    assert [rate.at(size) for size in (1, 10, 100, 1000, 1e5)] == [100, 100, pytest.approx(200), 300, 200]
    assert Rate.always(5.0).at(0.1) == Rate.always(5.0).at(1e9) == 5.0


def test_matmul_time_is_the_slower_of_compute_and_memory_for_its_dtype() -> None:
    hardware = dataclasses.replace(
        SIMPLE, matmul_flops={"bfloat16": Rate(((1e6, 1e9), (1e8, 3e9))), "float32": Rate.always(1e9)}, kernel_s=1e-12
    )
    for side, flops, element_bytes, expected_s in (
        (100, 2e6, 4, 2e6 / 1e9),
        (100, 2e6, 2, 2e6 / (1e9 + 2e9 * math.log(2) / math.log(100))),
        (2, 16, 4, 3 * 4 * 4 / 1e9),  # bound by memory, not by compute
    ):
        matrix = SimpleNamespace(sizes=(side, side), nbytes=side * side * element_bytes)
        work = SimpleNamespace(name="aten::mm", inputs=[matrix, matrix], outputs=[matrix], causal=False)
        assert costs.matmul_flops(work) == flops
        assert costs.kernel_s(hardware, "flash", work) == pytest.approx(expected_s)
    matrix.nbytes *= 2
    with pytest.raises(HardwareError, match="elements of 8 bytes"):
        costs.kernel_s(hardware, "flash", work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_matmul_has_the_flops_of_one_matmul_over_all_rows(device: VirtualDevice, dtype: torch.dtype) -> None:
    rows, groups, inner, outer = 96, 3, 32, 64
    tokens = torch.empty(rows, inner, dtype=dtype, device="virtual", requires_grad=True)
    weight = torch.empty(groups, inner, outer, dtype=dtype, device="virtual", requires_grad=True)
    ends, before = torch.empty(groups, dtype=torch.int32, device="virtual"), device.flops()
    out = torch.nn.functional.grouped_mm(tokens, weight, offs=ends)
    out.backward(torch.empty_like(out))
    assert out.shape == (rows, outer) and weight.grad.shape == weight.shape and tokens.grad.shape == tokens.shape
    assert device.flops() - before == 3 * 2 * rows * inner * outer


@pytest.mark.parametrize(("left", "right"), [((96, 32), (3, 32, 64)), ((32, 96), (96, 64)), ((3, 64, 32), (32, 96))])
def test_grouped_matmul_flops_do_not_depend_on_the_split_dimension(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    assert costs.matmul_flops(_work("aten::_grouped_mm", left, right)) == 2 * 96 * 32 * 64


def test_copy_time_depends_on_direction_and_size_plus_a_fixed_cost() -> None:
    rates = {"to_device_bytes_per_s": Rate(((1e3, 1e6), (1e5, 3e6))), "to_device_both_bytes_per_s": Rate.always(1e6)}
    hardware = dataclasses.replace(SIMPLE, copy_s=1.0, **rates)
    assert costs.copy_s(hardware, False, 10**4) == pytest.approx((1 + 1e4 / 2e6, 1 + 1e4 / 1e6))
    assert costs.copy_s(hardware, True, 10**6) == (2.0, 2.0)


def test_attention_time_depends_on_back_end_and_length() -> None:
    hardware = dataclasses.replace(
        SIMPLE,
        attention_forward_flops={"cudnn": Rate(((16, 1e6), (64, 2e6))), "flash": Rate.always(4e6)},
        attention_backward_flops={"cudnn": Rate.always(1e6), "flash": Rate.always(1e6)},
    )
    assert (hardware.attention(None), hardware.attention("flash")) == ("cudnn", "flash")
    with pytest.raises(HardwareError, match="simple has no attention back end 'math': it has cudnn, flash"):
        VirtualDevice(hardware, attention="math")
    for tokens, backend, rate in ((16, "cudnn", 1e6), (32, "cudnn", 1.5e6), (64, "cudnn", 2e6), (32, "flash", 4e6)):
        work = _work("attention", *[(1, 1, tokens, 8)] * 3)
        assert costs.kernel_s(hardware, backend, work) == pytest.approx(4 * tokens * tokens * 8 / rate)


@pytest.mark.parametrize("file", sorted(H200.parent.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_hardware_profiles_are_plausible(file: Path) -> None:
    hardware = GpuProfile.read(file)
    assert {"bfloat16", "float32"} <= set(hardware.matmul_flops) and hardware.memory_bytes > 20e9
    for alone, both in (
        (hardware.to_host_bytes_per_s, hardware.to_host_both_bytes_per_s),
        (hardware.to_device_bytes_per_s, hardware.to_device_both_bytes_per_s),
    ):
        assert 0.5 * alone.at(1 << 26) <= both.at(1 << 26) <= alone.at(1 << 26)


def test_profile_is_found_by_gpu_name_or_path(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(H200.read_text().replace("NVIDIA H200", "mine"))
    assert GpuProfile.named("h200") == GpuProfile.named("H200") == GpuProfile.read(H200)
    assert GpuProfile.named(str(mine)).name == GpuProfile.named("mine", tmp_path).name == "mine"
    with pytest.raises(HardwareError, match="no GPU 'h201': there are 4090, 910b, a100, h100, h200") as refused:
        GpuProfile.named("h201")
    assert "memplug doctor --measure" in refused.value.advice


def test_attention_counts_two_matmuls_in_forward_and_five_in_backward() -> None:
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
        (H200.read_text().replace("1.501e11", "-1"), "above 0"),
        (H200.read_text().replace("32768", "8192"), "sizes rising"),
        (H200.read_text().replace("[8192, ", "["), "sizes rising"),
        (H200.read_text().replace('"flash"', '"efficient"', 1), "other back ends"),
        (H200.read_text().replace("published", "heard"), "where it is from"),
        (H200.read_text().replace("5.53e10", "[[64, 1e10], [64, 2e10]]"), "sizes rising"),
        (H200.read_text().replace("to_host_both_bytes_per_s", "both"), "to_host_both_bytes_per_s"),
    ],
)
def test_invalid_profile_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "gpu.json").write_text(text)
    with pytest.raises(HardwareError, match=said):
        GpuProfile.read(tmp_path / "gpu.json")


def test_host_copies_of_any_size_hold_ones(device: VirtualDevice) -> None:
    """Copy into host memory that held other numbers before."""
    numbers = torch.ones(100_000, dtype=torch.long, device="virtual")
    for _ in range(2):
        there = numbers.cpu()
        assert there.eq(1).all()
        there.fill_(7)
        del there


def test_scaled_and_batched_matmuls_take_the_time_of_their_flops(device: VirtualDevice) -> None:
    left, right = (torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="virtual") for _ in range(2))
    batch, out = torch.empty(4, 64, 64, device="virtual"), torch.empty(64, 64, device="virtual")
    one, product = torch.ones((), device="virtual"), 2 * 64**3
    eighth = dataclasses.replace(SIMPLE, matmul_flops={**SIMPLE.matmul_flops, "float8": Rate.always(2e9)})
    device = VirtualDevice(eighth)
    for run, flops, rate in (
        (lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16), product, 2e9),
        (lambda: torch.addbmm(out, batch, batch), 4 * product, 1e9),
    ):
        began_s, before = device.synchronize(), device.flops()
        run()
        assert device.flops() - before == flops
        assert device.synchronize() - began_s == pytest.approx(flops / rate, rel=0.01)
