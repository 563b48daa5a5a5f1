"""Measures the memory that torch's CPU allocator serves beside an arena."""

from __future__ import annotations

from types import TracebackType

from memplug import native

UNLIMITED_BYTES = 2**62


class BesideArena:
    """Counts the CPU's bytes that are in use at once and not an arena's, while it is entered as a context.

    A recording within the context begins with the bytes that this counts.
    """

    def __init__(self) -> None:
        self._core, self._before = native.load(), 0

    def __enter__(self) -> BesideArena:
        self._core.limit_cpu(UNLIMITED_BYTES)  # memplug counts the bytes under a limit
        self.peak_bytes()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._core.limit_cpu(-1)

    def peak_bytes(self) -> int:
        """Return the most bytes in use at once since the last call, beyond those in use then."""
        in_use, peak = self._core.cpu_bytes()
        self._core.limit_cpu(UNLIMITED_BYTES)  # counts the peak from here on
        found, self._before = peak - self._before, in_use
        return found
