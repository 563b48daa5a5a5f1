"""The virtual device in a process of its own, and programs that cannot have it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.predict.on_virtual.running import run_cases
from tests.support.forking import launch_forked

TAKEN = """
import torch
torch.utils.rename_privateuse1_backend("npu")
"""
LATE = """
import torch
torch.ones(1, requires_grad=True).backward()
"""
STARTS = """
from memplug.predict.virtual import GpuProfile, VirtualDevice
from memplug.errors import HardwareError
from tests.support.virtual_devices import SIMPLE
for _ in range(2):
    try:
        VirtualDevice(SIMPLE)
    except HardwareError as error:
        print(error)
"""
ENDS = """
from tests.support.h200 import measured, predicted
predicted(next(row for row in measured() if row.mode == "selective"))
"""
FULL = """
import torch
from tests.support.virtual_devices import MIB, SIMPLE, VirtualDevice
import dataclasses
VirtualDevice(dataclasses.replace(SIMPLE, memory_bytes=64 * MIB))
there = []
try:
    while True:
        there.append(torch.empty(MIB, dtype=torch.uint8, device="virtual"))
except torch.OutOfMemoryError:
    pass
"""
FORKED = """
import os, sys
from tests.support.virtual_devices import SIMPLE, VirtualDevice
VirtualDevice(SIMPLE)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


CASES = [
    *"time_and_memory operator h200 ranks framework values megatron qwen3 memplug".split(),
    *(pytest.param(cases, marks=pytest.mark.long) for cases in ("estimator", "routing")),
]


@pytest.mark.parametrize("cases", CASES)
def test_cases_on_the_virtual_device_pass(cases: str) -> None:
    run_cases(cases)


@pytest.mark.long
def test_estimated_plans_and_limits_hold_in_training_steps() -> None:
    run_cases("estimated_plan")


@pytest.mark.long
def test_training_steps_keep_to_plans_budgets_and_predicted_times() -> None:
    run_cases("memplug", "-m", "long")


@pytest.mark.long
def test_each_rank_has_its_share_under_further_megatron_layouts() -> None:
    run_cases("megatron", "-m", "long")


def run(program: str, folder: Path, processes: int = 1) -> str:
    """Run a program in processes of its own, which must exit cleanly, and return its output."""
    file = folder / "program.py"
    file.write_text(program)
    return launch_forked([file], processes=processes)


@pytest.mark.parametrize("program", [FULL, FORKED], ids=["full", "forked"])
def test_process_exits_cleanly_with_full_memory_or_in_a_fork(program: str, tmp_path: Path) -> None:
    run(program, tmp_path)


def test_process_exits_cleanly_right_after_a_backward(tmp_path: Path) -> None:
    """End the process right after a backward: autograd's thread could hold Python objects such as a dispatch mode."""
    run(ENDS, tmp_path, processes=3)


@pytest.mark.parametrize(("before", "said"), [(TAKEN, "taken by 'npu'"), (LATE, "before the first backward")])
def test_device_that_torch_cannot_register_raises_with_advice(before: str, said: str, tmp_path: Path) -> None:
    output = run(before + STARTS, tmp_path)
    assert output.count(said) == 2 == output.count("What to do:"), output
