"""Finds calls of torch's CUDA allocator that the arena does not forward, by reading torch's headers.

The arena stands in front of that allocator. If a call that it does not forward is pure virtual, the arena cannot be
built. Any other such call silently reaches the base class instead of torch's allocator.
"""

from __future__ import annotations

import re
from pathlib import Path

_CLASSES = {
    "c10/cuda/CUDACachingAllocator.h": "CUDAAllocator",
    "c10/core/CachingDeviceAllocator.h": "DeviceAllocator",
    "c10/core/Allocator.h": "Allocator",
}
_FRONT = Path(__file__).parent.parent / "profile/native"
_FUNCTION = re.compile(
    r"(?P<before>[^;{}()]*?)(?P<name>~?\b\w+)\s*\((?P<parameters>(?:[^()]|\([^()]*\))*)\)[^;{}()]*[;{]"
)


def not_handed_on(include: Path | None = None) -> list[str]:
    """Return the calls that the arena does not forward, as "name, parameters: 2"; empty if torch has no CUDA.

    Args:
        include: the folder of the headers, by default the installed torch's.
    """
    if include is None:
        import torch

        if torch.version.cuda is None:
            return []
        include = Path(torch.__file__).parent / "include"
    known = {
        (name, count)
        for file in ("hands_on.h", "cuda_front.cpp")
        for name, count, _ in _functions((_FRONT / file).read_text())
    }
    calls = {
        (name, count)
        for file, owner in _CLASSES.items()
        if (include / file).exists()
        for name, count, before in _functions(_body((include / file).read_text(), owner))
        if "virtual" in before.split() and not name.startswith("~")
    }
    return [f"{name}, parameters: {count}" for name, count in sorted(calls - known)]


def _body(source: str, owner: str) -> str:
    """Return the text between the braces of a class."""
    found = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)?{owner}\b[^;{{]*{{(.*?)^}};", source, re.M | re.S)
    return found[1] if found else ""


def _functions(source: str) -> list[tuple[str, int, str]]:
    """Return (name, number of parameters, preceding text) for each piece of source that looks like a function."""
    code = re.sub(
        r"//[^\n]*|/\*.*?\*/|^\s*#(?:[^\n]*\\\n)*[^\n]*|\b(?:public|private|protected):", "", source, flags=re.M | re.S
    )
    return [(each["name"], _count(each["parameters"]), each["before"]) for each in _FUNCTION.finditer(code)]


def _count(parameters: str) -> int:
    while (inner := re.sub(r"<[^<>]*>|\([^()]*\)|\{[^{}]*\}", "", parameters)) != parameters:
        parameters = inner
    return parameters.count(",") + 1 if parameters.strip() else 0
