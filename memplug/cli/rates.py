"""`memplug doctor --measure FILE`: measures this machine's GPU, and writes a profile for the virtual device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from memplug.cli.output import print_facts, progress, refusing

_OWN = {"observe_s": "an operator", "region_s": "a region", "restore_s": "its recompute pass"}


def measure_into(file: Path, *, as_json: bool) -> None:
    """Measure the current CUDA device, or the CPU if there is none, write the profile and print it."""
    if not file.absolute().parent.is_dir():  # checked first, because the measurement takes long
        raise typer.BadParameter(f"{file}: its folder does not exist", param_hint="--measure")
    with progress("measuring the device (half a minute)") as say:
        import torch

        from memplug.predict.virtual.measuring import measure_profile, write_profile
        from memplug.tokenwise import host_time

        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        profile = measure_profile(device, host_time.measure(), say)
    with refusing():
        write_profile(file, profile)
    print_facts({"file": str(file), "device": str(device), "profile": profile}, _rows(file, profile), as_json=as_json)


def _rows(file: Path, profile: dict[str, Any]) -> list[tuple[str, str]]:
    def value(name: str) -> Any:
        return profile[name]["value"]

    def link(name: str) -> str:
        return _points(profile[f"{name}_bytes_per_s"], _gigabytes, lambda nbytes: f"{nbytes / 2**20:,.0f} MiB")

    rows = [("device", profile["name"]), ("memory", f"{value('memory_bytes') / 2**30:.1f} GiB")]
    for dtype, entry in profile["matmul_flops"].items():
        rows.append((f"matmul, {dtype}", _points(entry, _flops, lambda flops: f"{flops:.1e} operations")))
    for way in ("forward", "backward"):
        for backend, entry in profile[f"attention_{way}_flops"].items():
            words = _points(entry, _flops, lambda tokens: f"{tokens:,} tokens")
            rows.append((f"attention {way}, {backend}", words))
    return [
        *rows,
        ("memory bandwidth", _gigabytes(value("memory_bytes_per_s"))),
        ("shortest kernel", f"{value('kernel_s') * 1e6:.1f} us"),
        ("launch, host", f"{value('launch_s') * 1e6:.1f} us an operator"),
        ("memplug, host", ", ".join(f"{value(name) * 1e6:.1f} us {each}" for name, each in _OWN.items())),
        ("device to host", link("to_host")),
        ("host to device", link("to_device")),
        ("device to host, both directions", link("to_host_both")),
        ("host to device, both directions", link("to_device_both")),
        ("shortest copy", f"{value('copy_s') * 1e6:.1f} us"),
        ("other GPUs", "not measured: estimates assume that collectives use the link to the host"),
        ("written to", str(file)),
    ]


def _points(entry: dict[str, Any], words: Callable[[float], str], at: Callable[[float], str]) -> str:
    """Return the rates at the smallest and the largest size, and the highest rate, in words."""
    points = entry["value"]
    shown = dict([points[0], max(points, key=lambda point: point[1]), points[-1]])
    return ", ".join(f"{words(shown[size])} at {at(size)}" for size in sorted(shown))


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _gigabytes(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s"
