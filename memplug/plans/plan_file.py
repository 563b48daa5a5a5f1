"""Plans as files: one JSON object, written whole or not at all, and refused with a reason if it was changed.

The first line has the format, and a digest of all that follows. After it come the fingerprint, the state that a
training resumes from, and the techniques' parts by name. `load` leaves each part a dict;
`memplug.plans.schema.PlanPart` reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from memplug.errors import LayoutError
from memplug.files import opened, path_of, write_whole
from memplug.plans.schema import DAMAGED, FORMAT, MemoryPlan, PlanPart, TrainingPart
from memplug.plans.values import read, text_of
from memplug.profile.records import Fingerprint

_FIRST_LINE = re.compile(rb'\{"memplug_plan": ([0-9]{1,9}), "sha256": "([0-9a-f]{64})",\n')
_BEGINNING = re.compile(rb'\s*\{\s*"memplug_plan"\s*:')
_BEGINNING_BYTES = 200
_ANOTHER = "Give the path of a plan that `memplug plan` has written (.json)."


@dataclass(frozen=True, kw_only=True)
class _PlanHeader:
    """A plan without its parts."""

    fingerprint: Fingerprint
    training: TrainingPart | None


def save(plan: MemoryPlan, path: str | Path) -> None:
    """Write a plan; at any moment the file at `path` is either the old one or the whole new one.

    Equal plans make files with equal bytes.

    Args:
        plan: any plan.
        path: a file in an existing folder; by convention *.json.

    Raises:
        LayoutError: the file cannot be written there.
    """
    training = asdict(plan.training) if plan.training is not None else None
    parts = {name: part.to_file() if isinstance(part, PlanPart) else part for name, part in sorted(plan.parts.items())}
    members = {"fingerprint": asdict(plan.fingerprint), "training": training, "parts": parts}
    content = text_of(members).encode().removeprefix(b"{\n") + b"\n"
    first = f'{{"memplug_plan": {FORMAT}, "sha256": "{hashlib.sha256(content).hexdigest()}",\n'.encode()

    def write(file: BinaryIO) -> None:
        file.write(first)
        file.write(content)

    write_whole(path_of(path, "plan (.json)", LayoutError), "plan", write, LayoutError)


def load(path: str | Path) -> MemoryPlan:
    """Read a plan that `save` wrote, without judging whether it is sound and fits this run.

    Raises:
        LayoutError: the file is missing, is no plan, was changed or cut short, or is of another format than `FORMAT`.
    """
    path = path_of(path, "memory plan (.json)", LayoutError)
    with opened(path, "memory plan (.json)", LayoutError) as file:
        try:
            return _plan(_document(file), path)
        except LayoutError as error:
            advice = DAMAGED if error.advice == LayoutError.default_advice else error.advice
            raise LayoutError(f"{path}: {error.problem}", advice) from error
        except Exception as error:
            # The fields may hold anything although the digest matches: a user may have changed both.
            reason = f"{type(error).__name__}: {error}"
            raise LayoutError(f"{path}: not a plan that memplug has written: {reason}", DAMAGED) from error


def is_plan(path: str | Path) -> bool:
    """Return whether a file can be read and begins as a plan does."""
    path = Path(path)
    try:
        # Open only regular files: reading a pipe might never end.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return bool(_BEGINNING.match(file.read(_BEGINNING_BYTES)))
    except OSError:
        return False


def _document(file: BinaryIO) -> dict[str, Any]:
    first = file.readline(_BEGINNING_BYTES)
    match = _FIRST_LINE.fullmatch(first)
    if not match:
        if not _BEGINNING.match(first + file.read(_BEGINNING_BYTES)):
            raise LayoutError("not a plan of memplug", _ANOTHER)
        raise LayoutError("the contents are not what was saved")
    version = int(match[1])
    if version != FORMAT:
        raise LayoutError(
            f"a plan of format {version}, and this memplug reads format {FORMAT}",
            "Install the memplug that made it or a newer one, or make it again with this one: `memplug plan`.",
        )
    content = file.read()
    if hashlib.sha256(content).hexdigest().encode() != match[2]:
        raise LayoutError("the contents are not what was saved: changed, or cut short")
    return json.loads(b"{" + content)


def _plan(document: dict[str, Any], file: Path) -> MemoryPlan:
    parts = document.pop("parts")
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        raise ValueError("a part is not a JSON object")
    head = read(_PlanHeader, document)
    return MemoryPlan(fingerprint=head.fingerprint, training=head.training, parts=parts, file=file)
