"""A model's profile with simple numbers, and configurations of it."""

from __future__ import annotations

from typing import Any

from memplug.predict.tune.machine import Machine
from memplug.predict.tune.profiled import ModelProfile, ProfiledPart
from memplug.predict.tune.search import Configuration, Offload, StepLayout
from memplug.predict.virtual.hardware import GpuProfile, Rate


def hardware(to_host: float = 1.0, to_device: float = 1.0, **fields: Any) -> GpuProfile:
    """Return a GPU whose link and collectives move 1 byte per second; its memory moves 100 bytes per second."""
    rate = {"bfloat16": Rate.always(1e9)}
    values = {
        "name": "counted",
        "memory_bytes": 1e6,
        "peak_flops": 2e9,
        "matmul_flops": rate,
        "attention_forward_flops": {"flash": Rate.always(1.0)},
        "attention_backward_flops": {"flash": Rate.always(1.0)},
        "memory_bytes_per_s": 100.0,
        "kernel_s": 1e-9,
        "to_host_bytes_per_s": Rate.always(to_host),
        "to_device_bytes_per_s": Rate.always(to_device),
        "to_host_both_bytes_per_s": Rate.always(to_host),
        "to_device_both_bytes_per_s": Rate.always(to_device),
        "copy_s": 1e-9,
        "launch_s": 1e-9,
        "observe_s": 1e-12,
        "region_s": 1e-12,
        "restore_s": 1e-12,
        "collective_bytes_per_s": 1.0,
        "collective_s": 1e-9,
    }
    return GpuProfile(**{**values, **fields})


def machine(gpus: int = 2, host_bytes_per_s: float = 50.0, **fields: Any) -> Machine:
    """Return a machine of several such GPUs."""
    return Machine(hardware=hardware(**fields), gpus=gpus, host_bytes_per_s=host_bytes_per_s)


def part(forward_s: float, parameters: tuple[int, ...], saved_bytes: int, **fields: int) -> ProfiledPart:
    """Return a part whose backward takes twice as long as its forward."""
    peaks = {"forward_peak_bytes": saved_bytes, "backward_peak_bytes": 0, **fields}
    return ProfiledPart(
        forward_s=forward_s, backward_s=2 * forward_s, parameters=parameters, saved_bytes=saved_bytes, **peaks
    )


def model(layers: int = 4, micro_batch: int = 1, forward_s: float = 10.0) -> ModelProfile:
    """Return a profile with ten parameters per layer; a layer saves 70 bytes: 10 are its output, 40 can be swapped."""
    return ModelProfile(
        embedding=part(1.0, (8,), 10 * micro_batch),
        layer=part(forward_s * micro_batch, (7, 3), 70 * micro_batch, backward_peak_bytes=5 * micro_batch),
        head=part(2.0, (1, 9), 30 * micro_batch, forward_peak_bytes=50 * micro_batch, backward_peak_bytes=20),
        layers=layers,
        hidden_bytes=10 * micro_batch,
        swapped_bytes=40 * micro_batch,
        tokens=100 * micro_batch,
    )


def configuration(
    stage: int = 3, offload: Offload = "none", micro_batch: int = 1, accumulation: int = 1, **numbers: int
) -> Configuration:
    """Return a configuration of that model, which has six chunks.

    By default all chunks persist unless some are offloaded, and below ZeRO 3 all are buffered.
    """
    layout = StepLayout(stage=stage, offload=offload, micro_batch=micro_batch, accumulation=accumulation)
    persist = 6 if offload == "none" else 0
    given = {"n_persist": persist, "n_buffer": 6 if stage < 3 else 0, "n_swap": 0, "n_checkpoint": 0, **numbers}
    return Configuration(layout=layout, **given)
