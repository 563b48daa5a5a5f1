"""Files that are whole or not there: written at one stroke, and opened only where they are files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from memplug.errors import MemplugError


def write_whole(path: Path, what: str, write: Callable[[BinaryIO], None], error: type[MemplugError]) -> None:
    """At any moment the file at `path` is the old one or the whole new one.

    Args:
        path: A file in a folder that exists.
        what: Is written, for example "trace".
        write: Writes all of it.
        error: To raise.

    Raises:
        MemplugError: Of the class `error`: the file cannot be written there.
    """
    # In the same folder, because a rename is atomic only within a file system.
    partial = path.parent / f".{secrets.token_hex(8)}.partial"
    try:
        try:
            with partial.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as problem:  # a path with a null byte
        advice = "Give the path of a file in a folder that exists, that you may write to and that has room."
        raise error(f"{path}: the {what} cannot be written: {problem}", advice) from problem


def path_of(given: object, what: str, error: type[MemplugError]) -> Path:
    """Returns a path that a user has given; `what` is there, for example "trace (.npz)".

    Raises:
        MemplugError: Of the class `error`: it is no path.
    """
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str) or "\0" in os.fspath(given):
        raise error(f"{given!r} is not the path of a {what}", "Give it as text or as a pathlib.Path.")
    return Path(given)


def opened(path: Path, what: str, error: type[MemplugError]) -> BinaryIO:
    """A file to read; `what` is expected in it, for example "trace (.npz)".

    Raises:
        MemplugError: Of the class `error`: it is unreadable, or not a file.
    """
    advice = f"Give the path of a {what} that you may read."
    try:
        # A device or a pipe might never end.
        if path.exists() and not path.is_file():
            raise error(f"{path}: not a file", advice)
        return path.open("rb")
    except (OSError, ValueError) as problem:  # a path with a null byte
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path}: unreadable: {reason}", advice) from problem
