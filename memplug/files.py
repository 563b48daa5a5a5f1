"""Files that are complete or absent: written atomically, and opened only if they are regular files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from memplug.errors import MemplugError


def write_whole(path: Path, what: str, write: Callable[[BinaryIO], None], error: type[MemplugError]) -> None:
    """Replace a file atomically: at any moment `path` holds the old file or the whole new one.

    Args:
        path: A file in a folder that exists.
        what: Name of the content for messages, for example "trace".
        write: Writes all of the content to the open file.
        error: Class of the error to raise.

    Raises:
        MemplugError: The file cannot be written there; an instance of `error`.
    """
    # The partial file is in the same folder because a rename is atomic only within one file system.
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
    except (OSError, ValueError) as problem:  # ValueError: the path contains a null byte
        advice = "Give the path of a file in a folder that exists, that you may write to and that has room."
        raise error(f"{path}: the {what} cannot be written: {problem}", advice) from problem


def path_of(given: object, what: str, error: type[MemplugError]) -> Path:
    """Check and return a path that a user gave.

    Args:
        given: The user's value.
        what: Name of the expected file for messages, for example "trace (.npz)".
        error: Class of the error to raise.

    Raises:
        MemplugError: `given` cannot be a path; an instance of `error`.
    """
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str) or "\0" in os.fspath(given):
        raise error(f"{given!r} is not the path of a {what}", "Give it as text or as a pathlib.Path.")
    return Path(given)


def opened(path: Path, what: str, error: type[MemplugError]) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: The file.
        what: Name of the expected content for messages, for example "trace (.npz)".
        error: Class of the error to raise.

    Raises:
        MemplugError: The file is unreadable, or not a regular file; an instance of `error`.
    """
    advice = f"Give the path of a {what} that you may read."
    try:
        # Reading a device or a pipe might never end.
        if path.exists() and not path.is_file():
            raise error(f"{path}: not a file", advice)
        return path.open("rb")
    except (OSError, ValueError) as problem:  # ValueError: the path contains a null byte
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{path}: unreadable: {reason}", advice) from problem
