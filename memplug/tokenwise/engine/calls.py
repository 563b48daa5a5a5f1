"""All Python that the native core calls while regions run.

native/tape/calls.h has the same names: `bind` compares the two. Python cannot instantiate a subclass that lacks one of
the methods here. The core keeps no bound method, since a bound method would keep its executor alive, in a cycle that
Python's collector does not see.
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
    """The methods of an executor that the frames of its regions call.

    In all of them `region` is a `memplug.tokenwise.engine.region.Region`, and `frame` the core's `Frame`.
    """

    @property
    @abstractmethod
    def stands_around(self) -> bool:
        """Return whether every recompute pass has to go through `restore`, even if its frame does not need it."""

    @abstractmethod
    def is_alone(self) -> bool:
        """Return whether there is only one rank."""

    @abstractmethod
    def is_scratch(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in a scratch buffer owned by the framework."""

    @abstractmethod
    def written_buffers(self) -> BuffersCalls:
        """Return a new object in which a forward notes its writes in place; called before the first such write."""

    @abstractmethod
    def note_opaque(self, region: Any, why: int | str, why_it_keeps: str = "") -> None:
        """Note that the region is opaque.

        Args:
            region: the region.
            why: the reason in words, or as bits of `Opaque`.
            why_it_keeps: why all tensors that the region saves stay on the device; "" if they are released and its
                module runs again.
        """

    @abstractmethod
    def note_timed(self, region: Any, frame: Any) -> None:
        """Note that a timed forward is over."""

    @abstractmethod
    def restore(self, frame: Any, region: Any) -> None:
        """Run a frame's recompute pass, if the core cannot do so alone.

        The core cannot if `stands_around` is true, if the frame is opaque or timed, or if the forward wrote in place
        (`written_buffers`). The core also calls this method after its own attempt has failed.
        """

    @abstractmethod
    def explain(self, phase: str, region: Any, error: BaseException) -> None:
        """Add a note to an out-of-memory error of the device that is being raised."""

    @abstractmethod
    def with_region(self, region: Any, error: RuntimeError) -> RuntimeError:
        """Return the error that backward has to raise: `error` itself, or one that also names the region."""

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
        """Run a unit again: see `memplug.tokenwise.engine.units.run_again`."""


class UnitCalls(ABC):
    """The attributes of a unit (a call whose kernels no operator shows) that the core uses before and after the call.

    Attributes:
        writes: indices, among the tensors of the arguments, of those that the unit writes to.
        writes_unsaid: whether the unit may write, without advancing versions, to arguments that it returns.
        puts_back: whether the unit may draw random numbers and then restore the generator's state.
        reads: returns the parameters that the unit reads besides its arguments; called before the unit runs.
        lasting: returns tensors that outlive the call; called after the unit has run.
    """

    writes: set[int]
    writes_unsaid: bool
    puts_back: bool
    reads: Callable[[], Iterable[torch.Tensor]]
    lasting: Callable[[], list[torch.Tensor]]

    @abstractmethod
    def note_writes(self, written: Sequence[int]) -> None:
        """Note that a call wrote to further arguments, which are not in `writes` yet."""


class BuffersCalls(ABC):
    """The memory that one forward writes to in place."""

    @abstractmethod
    def note(self, tensor: torch.Tensor) -> None:
        """Save a tensor's values, just before the forward first writes to it."""

    @abstractmethod
    def as_before(self) -> AbstractContextManager[None]:
        """Return a context in which every buffer has the values from before the forward."""


class TimesCalls(ABC):
    """The device times of one forward."""

    @abstractmethod
    def begin(self) -> None:
        """Take the time at which the forward begins."""

    @abstractmethod
    def time(self, index: int, over: bool) -> None:
        """Take the time at which an operator begins or ends.

        Args:
            index: index of the operator.
            over: whether the operator ends.
        """

    @abstractmethod
    def begin_backward(self) -> None:
        """Take the time at which backward first asks for a saved tensor; later calls do nothing."""


class StateCalls(ABC):
    """The Python state before a forward.

    Attributes:
        unknown: why the state cannot be put back; "" if it can be.
    """

    unknown: str


def bind(core: Any) -> None:
    """Give the core's module the Python names that it calls.

    Raises:
        AttributeError: the core calls a name that these classes lack, or does not call one that they have.
    """
    classes = ExecutorCalls, UnitCalls, BuffersCalls, TimesCalls, StateCalls
    names = {each.__name__: {*each.__abstractmethods__, *each.__annotations__} for each in classes}
    core.bind_calls(names, default_device, tree_flatten, tree_unflatten)
    core.raise_failures_with(fail)


def default_device() -> torch.device | None:
    """Return the default device of factory functions, or None if none was set.

    `torch.get_default_device` would make a tensor to find out.
    """
    modes = reversed(get_function_modes())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def fail(kind: int, size: str) -> NoReturn:
    """Raise the error for a failure of the core.

    Args:
        kind: a `Failure::FailureKind` of native/transfer/transfer.h.
        size: shape and dtype of the tensor concerned, in words.
    """
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
            f"a function with kernels of its own wrote to a {size} tensor from outside of its region, which "
            "memplug cannot undo",
            'Give it a copy to write to, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 4:
        raise InPlaceError(
            "a sparse, nested or quantized tensor from outside of a region was modified in place inside of it, which "
            "memplug cannot undo",
            'Modify a clone of it, or leave the module out of "tokenwise.regions".',
            code="MP024",
        )
    if kind == 5:
        raise RecomputeError(
            f"a region asks for a gradient in its own forward, which its earlier forwards did not, and the {size} "
            "tensor that this needs is gone",
            "Run the step again: from now on the region keeps what it needs until its forward is over.",
            code="MP026",
        )
    if kind == 6:
        raise RecomputeError(
            f"the memory of a {size} tensor that a region reads was freed or replaced between its forward and its "
            "backward",
            "Leave parameters and inputs of a region as they are until its backward is over: no `.data = ...`, no "
            "`model.to(...)`, no storage that is resized; a wrapper that frees weights in between has to gather them "
            "again for backward, as FSDP2 does for each layer that it wraps.",
            code="MP025",
        )
    if kind == 7:
        raise RecomputeError(
            f"a captured {size} tensor that backward asks for was released by an earlier backward",
            "Pass `retain_graph=True` to every backward of a graph but the last. If this graph has only one, please "
            "report it: run `memplug doctor` and attach its output.",
            code="MP025",
        )
    raise ConflictError(
        "backward ran through a graph after its memplug session was detached, and its rows are gone",
        "Run backward on the graphs in flight first, then detach.",
    )
