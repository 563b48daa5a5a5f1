"""Measured rates and capacities: plausible, in bounds, and without side effects on the run."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from memplug.device.hardware import host_available_bytes, measure, measure_links

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path):
    """Make a root directory that reports 1000 MiB available, and return a function that adds control groups to it."""

    def write(path: str, text: object) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def group(path: str, limit: object, usage: int, cache: int = 0, v1: bool = False) -> None:
        base = f"sys/fs/cgroup/{'memory/' if v1 else ''}{path}"
        write(f"{base}/{'memory.limit_in_bytes' if v1 else 'memory.max'}", limit)
        write(f"{base}/{'memory.usage_in_bytes' if v1 else 'memory.current'}", usage)
        write(f"{base}/memory.stat", f"anon 5\n{'total_inactive_file' if v1 else 'inactive_file'} {cache}")

    write("proc/meminfo", f"MemTotal: {2000 * 1024} kB\nMemFree: 7 kB\nMemAvailable: {1000 * 1024} kB")
    group.root, group.write = tmp_path, write
    return group


def test_host_memory_without_cgroups_is_what_the_kernel_reports(machine):
    assert host_available_bytes(machine.root) == 1000 * MIB


@pytest.mark.parametrize("v1", [False, True])
def test_cgroup_limit_caps_host_memory_and_its_cache_counts_as_free(machine, v1):
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/x\n4:memory:/job" if v1 else "0::/job")
    machine("job", 500 * MIB, usage=300 * MIB, cache=50 * MIB, v1=v1)
    assert host_available_bytes(machine.root) == 250 * MIB


def test_tightest_of_all_parent_cgroups_limits_host_memory(machine):
    machine.write("proc/self/cgroup", "0::/slice/job")
    machine("slice/job", "max", usage=1 * MIB)
    machine("slice", 400 * MIB, usage=100 * MIB)
    machine("", 900 * MIB, usage=100 * MIB)
    assert host_available_bytes(machine.root) == 300 * MIB


def test_cgroup_limit_above_the_machines_memory_changes_nothing(machine):
    machine.write("proc/self/cgroup", "0::/job")
    machine("job", 5000 * MIB, usage=100 * MIB)
    assert host_available_bytes(machine.root) == 1000 * MIB


def test_limit_of_a_container_is_read_from_the_root_cgroup(machine):
    machine.write("proc/self/cgroup", "4:memory:/docker/0123")
    machine("", 200 * MIB, usage=50 * MIB, v1=True)
    assert host_available_bytes(machine.root) == 150 * MIB


def test_cgroup_over_its_limit_leaves_no_host_memory(machine):
    machine.write("proc/self/cgroup", "0::/job")
    machine("job", 100 * MIB, usage=120 * MIB)
    assert host_available_bytes(machine.root) == 0


def test_cpu_measurement_is_plausible_frozen_and_keeps_the_random_state():
    state = torch.get_rng_state()
    hardware = measure("cpu")
    assert torch.equal(torch.get_rng_state(), state)
    # The bounds span very slow to impossibly fast machines, but a unit that is wrong by 1e3 falls outside.
    assert 1e8 < hardware.d2h_bytes_per_s < 1e12
    assert 1e8 < hardware.h2d_bytes_per_s < 1e12
    assert 1e7 < hardware.pinned_alloc_bytes_per_s < 1e12
    assert 1e9 < hardware.matmul_flops_per_s < 1e14
    assert 0 < hardware.device_free_bytes <= hardware.device_total_bytes
    assert hardware.host_available_bytes <= hardware.device_total_bytes
    assert hardware.device_name
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.d2h_bytes_per_s = 1.0


def test_link_rate_depends_little_on_the_size_of_the_copy():
    # A rate not divided by the copy's size, or timed on a fixed size, would differ by the ratio of the sizes: 32.
    small, large = measure_links("cpu", 4 * MIB), measure_links("cpu", 128 * MIB)
    for few, many in zip(small, large, strict=True):
        assert 1 / 16 < many / few < 16


def test_unmeasurable_device_and_empty_copy_are_refused():
    with pytest.raises(ValueError, match="meta"):
        measure("meta")
    with pytest.raises(ValueError, match="size_bytes"):
        measure_links("cpu", 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_measurement_is_plausible_and_keeps_no_host_memory():
    measure("cuda")
    before = resident_bytes()
    hardware = measure("cuda")
    assert 1e9 < hardware.d2h_bytes_per_s < 1e12
    assert 1e9 < hardware.h2d_bytes_per_s < 1e12
    assert 1e12 < hardware.matmul_flops_per_s < 1e16
    assert hardware.device_free_bytes <= hardware.device_total_bytes
    torch.cuda.empty_cache()
    assert resident_bytes() - before < 128 * MIB


def resident_bytes() -> int:
    """Return the resident memory of this process, which includes memory registered with the driver."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
