"""All that the native core calls of Python while regions run. Its C++ has the same names in native/tape/calls.h: `bind`
compares the two, and a class that lacks a method of its base here cannot be made.

The core keeps no bound method: one would keep its executor alive, in a circle that Python's collector does not see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from memplug.errors import ConflictError, InPlaceError, RecomputeError
from memplug.torch_private import DeviceContext, get_function_modes, tree_flatten, tree_unflatten


class ExecutorCalls(ABC):
    """An executor, as the frames of its regions call it. `region`: a `memplug.tokenwise.engine.region.Region`; `frame`:
    the core's `Frame`.
    """

    @property
    @abstractmethod
    def stands_around(self) -> bool:
        """Whether a recompute pass needs `restore`, whatever the frame is like."""

    @abstractmethod
    def is_alone(self) -> bool:
        """Returns whether there is one rank."""

    @abstractmethod
    def is_scratch(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in a scratch buffer owned by the framework."""

    @abstractmethod
    def written_buffers(self) -> BuffersCalls:
        """Returns where a forward notes what it writes to; asked for before its first write."""

    @abstractmethod
    def note_opaque(self, region: Any, why: int | str, why_it_keeps: str = "") -> None:
        """Take note that no tape tells what the region does: the reason, or bits of it. `why_it_keeps`: "" where the
        region runs again.
        """

    @abstractmethod
    def note_timed(self, region: Any, frame: Any) -> None:
        """Take note that a timed forward is over."""

    @abstractmethod
    def restore(self, frame: Any, region: Any) -> None:
        """Run a frame's recompute pass, where that takes more than the tape's operators."""

    @abstractmethod
    def explain(self, phase: str, region: Any, error: BaseException) -> None:
        """Add a note to an error of the device's memory, which passes."""

    @abstractmethod
    def with_region(self, region: Any, error: RuntimeError) -> RuntimeError:
        """Returns the error that backward raises instead, with the region's name."""

    @abstractmethod
    def run_unit_again(
        self,
        unit: Any,
        region: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        state: Any,
        surroundings: Sequence[Callable[[], Any]],
        ambient: Sequence[Any] | None,
        sources: Sequence[tuple[bool, int] | None],
        count: int,
    ) -> list[torch.Tensor | None]:
        """See `memplug.tokenwise.engine.units.run_again`."""


class UnitCalls(ABC):
    """A unit, as the core reads it around a call.

    Attributes:
        writes: which of the tensors that it is given it writes to, by their number.
        writes_unsaid: it may write to what it is given and gives back, which no version tells.
        puts_back: it may put back the state of a generator from which it has drawn.
        reads: gives parameters of its own, which it is not given; asked for before the call.
        lasting: gives tensors that outlive the unit; asked for after the call.
    """

    writes: set[int]
    writes_unsaid: bool
    puts_back: bool
    reads: Callable[[], Iterable[torch.Tensor]]
    lasting: Callable[[], list[torch.Tensor]]

    @abstractmethod
    def note_writes(self, written: Sequence[int]) -> None:
        """Take note that a call wrote to more of what it was given than `writes` says."""


class BuffersCalls(ABC):
    """What one forward writes to in place."""

    @abstractmethod
    def note(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's values: the forward is about to write to it, for the first time."""

    @abstractmethod
    def as_before(self) -> AbstractContextManager[None]:
        """Returns a context in which every buffer has its former values."""


class TimesCalls(ABC):
    """The times of one forward."""

    @abstractmethod
    def begin(self) -> None:
        """Take the time: the forward begins."""

    @abstractmethod
    def time(self, index: int, over: bool) -> None:
        """Take the time: the operator of that index begins, or is over."""

    @abstractmethod
    def begin_backward(self) -> None:
        """Take the time, once: backward asks for a saved tensor."""


class StateCalls(ABC):
    """The Python state that a forward finds.

    Attributes:
        unknown: why it cannot be put back; "" where it can be.
    """

    unknown: str


def bind(core: Any) -> None:
    """Tell the core's module what it calls.

    Raises:
        AttributeError: the core calls another name than the classes here have, or not all of theirs.
    """
    classes = ExecutorCalls, UnitCalls, BuffersCalls, TimesCalls, StateCalls
    names = {each.__name__: {*each.__abstractmethods__, *each.__annotations__} for each in classes}
    core.bind_calls(names, default_device, tree_flatten, tree_unflatten)
    core.raise_failures_with(fail)


def default_device() -> torch.device | None:
    """Returns the device of factory functions, where one was set.

    `torch.get_default_device` would make a tensor to find out.
    """
    modes = reversed(get_function_modes())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def fail(kind: int, size: str) -> NoReturn:
    """Raise what a failure of the core means, by `Failure::Kind` in native/transfer/transfer.h."""
    if kind == 0:
        text = f"a captured {size} tensor was modified in place after its region had ended"
        raise InPlaceError(text, code="MP024")
    if kind == 1:
        raise InPlaceError(
            f"a {size} tensor was modified in place after its region had ended and before its copy to the host ended",
            code="MP024",
        )
    if kind == 2:
        raise InPlaceError(
            f"a function with kernels of its own wrote to a {size} tensor from outside of its region, which is not "
            "undone",
            'Give it a copy to write to, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 4:
        raise InPlaceError(
            "a sparse, nested or quantized tensor from outside of a region was modified in place inside of it, which "
            "is not undone",
            'Modify a clone of it, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 5:
        raise RecomputeError(
            f"a region asks for a gradient in its own forward, which its forwards before did not, and the {size} "
            "tensor that this needs is gone",
            "Run the step again: from now on the region keeps what it needs until its forward is over.",
            code="MP026",
        )
    if kind == 6:
        raise RecomputeError(
            f"the memory of a {size} tensor that a region reads was taken away between its forward and its backward",
            "Leave parameters and inputs of a region as they are until its backward is over: no `.data = ...`, no "
            "`model.to(...)`, no storage that is resized; a wrapper that frees weights in between has to gather them "
            "again for backward, as FSDP2 does for each layer that it wraps.",
            code="MP025",
        )
    if kind == 7:
        raise RecomputeError(
            f"a captured {size} tensor that backward asks for was given back by an earlier backward",
            "Pass `retain_graph=True` to every backward of a graph but the last. If this graph has only one, please "
            "report it: run `memplug doctor` and attach its output.",
            code="MP025",
        )
    raise ConflictError(
        "backward ran through a graph after its memplug session was detached, and its rows are gone",
        "Run backward on the graphs in flight first, then detach.",
    )
