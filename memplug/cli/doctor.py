"""`memplug doctor`: says what this machine can do."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from memplug.cli.output import AsJson, print_facts, progress
from memplug.cli.rates import measure_into
from memplug.cli.versions import versions

# Environment variables that conflict with memplug (regular expressions), and their effects.
_CONFLICTS = (
    (
        r"PYTORCH_(CUDA_)?ALLOC_CONF=.*\bbackend\s*:\s*cudaMallocAsync\b",
        "replaces torch's caching allocator, whose statistics memplug uses for reports and budgets: remove it",
    ),
    (
        r"PYTORCH_(CUDA_)?ALLOC_CONF=.*\bpinned_use_cuda_host_register\s*:\s*True\b",
        "torch then pins host memory too: leave room for that with host_budget_gib, or remove the setting",
    ),
    (r"PYTORCH_NO_CUDA_MEMORY_CACHING=.*\S", "every free waits for the device, so no copy overlaps compute: unset it"),
    (r"CUDA_LAUNCH_BLOCKING=\s*[1-9]", "every launch waits for the device, so no copy overlaps compute: unset it"),
)


def doctor(
    measure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only measure the GPU, for half a minute, and write its rates as a hardware profile.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what memplug finds on this machine: versions, compiler, device, measured rates, conflicting settings.

    Builds the native core and the libraries of the techniques unless they are built already.
    """
    if measure is not None:
        measure_into(measure, as_json=as_json)
        return
    from memplug.show.techniques import in_place

    libraries = {key: library for each in in_place() for key, library in each.libraries().items()}
    facts = {"versions": versions(), "compiler": _compiler()}
    with progress("building the native core, unless it is built already (half a minute)"):
        facts["native_core"] = _native_core()
        facts |= {key: _built(load) for key, (_, load) in libraries.items()}
    with progress("importing torch and measuring the device (a few seconds)"):
        from memplug.config import MemplugConfig
        from memplug.device.device import Device
        from memplug.tokenwise.budgets import host_budget_bytes
        from memplug.torch_private import KNOWN, is_newer_than_known

        facts["torch"] = {"known": KNOWN, "newer": is_newer_than_known()}
        facts["hardware"] = _hardware()
        facts["host_budget_bytes"] = host_budget_bytes(MemplugConfig(), Device())
    facts["memlock"] = _memlock(facts["hardware"], facts["host_budget_bytes"])
    facts["conflicts"] = _conflicts(os.environ)
    names = {key: name for key, (name, _) in libraries.items()}
    print_facts(facts, _doctor_rows(facts, names), as_json=as_json)
    if _unbuilt(facts) or facts["conflicts"]:
        raise typer.Exit(1)


def _compiler() -> str:
    import shlex
    import shutil
    import subprocess

    # the compiler that torch.utils.cpp_extension would call
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        return "absent"
    answer = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30)
    lines = answer.stdout.splitlines()
    return lines[0] if answer.returncode == 0 and lines else f"`{shlex.join(command)} --version` failed"


def _native_core() -> dict[str, object]:
    from memplug import native

    core = _built(native.load)
    if core["ready"]:
        import torch

        from memplug.native.cuda_calls import not_handed_on

        arena = torch.version.cuda is None or hasattr(native.load(), "stand_before_cuda")
        core |= {"folder": str(native.CORE.build_folder()), "arena": arena, "lost_calls": not_handed_on()}
    return core


def _built(load: Callable[[], object]) -> dict[str, object]:
    from memplug.errors import NativeError

    try:
        load()
    except NativeError as error:
        return {"ready": False, "problem": error.problem, "advice": error.advice}
    return {"ready": True}


def _hardware() -> dict[str, object]:
    from dataclasses import asdict

    import torch

    from memplug.device.hardware import measure

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return {"device": str(device), **asdict(measure(device))}


def _memlock(hardware: Mapping[str, object], host_budget_bytes: int) -> str:
    """Return the limit on locked memory in words, compared with the host budget."""
    limit = hardware["memlock_limit_bytes"]
    if limit is None:
        return "unlimited: no limit on pinned memory"
    words = f"{limit / 2**20:,.0f} MiB" if limit >= 2**20 else f"{limit / 2**10:,.0f} KiB"
    if not hardware["device"].startswith("cuda"):
        return f"{words}: no matter on the CPU, where nothing is pinned"
    if limit >= host_budget_bytes:
        return f"{words}: more than the host budget (auto), {_gib(host_budget_bytes)}"
    # The driver decides whether memory that it registers counts against the limit.
    return (
        f"{words}: less than the host budget (auto), {_gib(host_budget_bytes)}. If a run warns that the driver refused "
        "to register host memory, raise it: `ulimit -l unlimited`, or `--ulimit memlock=-1` for a container"
    )


def _conflicts(environment: Mapping[str, str]) -> list[dict[str, str]]:
    settings = sorted(f"{variable}={value}" for variable, value in environment.items())
    return [
        {"setting": setting, "effect": effect}
        for pattern, effect in _CONFLICTS
        for setting in settings
        if re.match(pattern, setting, re.DOTALL)
    ]


def _doctor_rows(facts: dict, libraries: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the facts as (name, value) in words; `libraries` has the names of libraries by their keys in `facts`."""
    hardware, core = facts["hardware"], facts["native_core"]
    if core["ready"]:
        built = f"built, in {core['folder']}"
        without = "absent: this version of torch has a CUDA allocator that memplug does not know"
    else:
        built, without = f"absent: {core['problem']}", "absent: see the native core"
    conflicts = [("conflict", f"{conflict['setting']}: {conflict['effect']}") for conflict in facts["conflicts"]]
    return [
        *((name, _needed_for(name) if version == "absent" else version) for name, version in facts["versions"].items()),
        ("torch supported", facts["torch"]["known"] + (": this one is newer" if facts["torch"]["newer"] else "")),
        ("C++ compiler", facts["compiler"]),
        ("native core", built),
        ("planned arena", f"available{_lost(core['lost_calls'])}" if core.get("arena") else without),
        *(
            (name, "built" if facts[key]["ready"] else f"absent: {facts[key]['problem']}")
            for key, name in libraries.items()
        ),
        ("device", f"{hardware['device']}: {hardware['device_name']}"),
        ("device memory", f"{_gib(hardware['device_free_bytes'])} free of {_gib(hardware['device_total_bytes'])}"),
        ("host memory", f"{_gib(hardware['host_available_bytes'])} available"),
        ("device to host", f"{hardware['d2h_bytes_per_s'] / 1e9:.1f} GB/s, both directions running"),
        ("host to device", f"{hardware['h2d_bytes_per_s'] / 1e9:.1f} GB/s, both directions running"),
        ("pinned allocation", f"{hardware['pinned_alloc_bytes_per_s'] / 1e9:.2f} GB/s"),
        ("matmul", f"{hardware['matmul_flops_per_s'] / 1e12:.2f} TFLOP/s"),
        ("host budget", f"{_gib(facts['host_budget_bytes'])} a rank (auto)"),
        ("memlock limit", facts["memlock"]),
        *(conflicts or [("conflicts", "none")]),
        ("ready", _verdict(facts)),
    ]


def _lost(calls: list[str]) -> str:
    return f", but these calls do not reach torch's CUDA allocator: {'; '.join(calls)}" if calls else ""


def _verdict(facts: dict) -> str:
    if unbuilt := _unbuilt(facts):
        return f"no: see the {unbuilt[0].replace('_', ' ')} above. {facts[unbuilt[0]]['advice']}"
    if facts["conflicts"]:
        return "no: see the conflicts above"
    return "yes" if facts["hardware"]["device"].startswith("cuda") else "yes, on the CPU: torch sees no CUDA device"


def _unbuilt(facts: dict) -> list[str]:
    """Return the keys of the native core and the libraries that were not built."""
    return [key for key, fact in facts.items() if isinstance(fact, Mapping) and fact.get("ready") is False]


def _needed_for(package: str) -> str:
    return "absent: only DeepSpeed's engines need it" if package == "deepspeed" else "absent"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
