"""Units: calls inside of a region whose kernels no operator shows, and which can be run again by themselves.

A region's tape has a unit as an operator, and each memory that it made as one of its own (memplug/native/unit.h): so a
plan keeps, swaps or recomputes what a custom autograd function saved, tensor by tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from memplug.errors import RecomputeError
from memplug.tokenwise.regions.ambient import restored
from memplug.tokenwise.regions.operators import Kind

if TYPE_CHECKING:
    from memplug.tokenwise.regions.executor import Executor
    from memplug.tokenwise.regions.region import Region


class Unit:
    """One module, or function, that runs as a unit.

    Args:
        name: within its region.
        kind: what it is made of; a collective is never run again; None: cheap, and captured only where a plan says so.
        is_row_wise: asked for each call: each row of what it makes comes from one row of its first argument.
        is_shared: other ranks take part: it runs again on all of them or on none.
        puts_back: it may draw from a generator and then put back the state that this had, as `torch.random.fork_rng`
            does.
        lasting: tensors that outlive the unit, such as a weight's cast that its module keeps: what it saves of these is
            held. Asked behind each call.
        forward: entered around a forward; gives what it takes to run again as it ran, complete once it is over.
        again: entered around such a run, with that.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        kind: Kind | None,
        is_row_wise: Callable[[], bool] = lambda: False,
        is_shared: bool = False,
        puts_back: bool = True,
        lasting: Callable[[], list[torch.Tensor]] = list,
        forward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        again: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.executor, self.name, self.is_shared, self.puts_back = executor, name, is_shared, puts_back
        self._kind, self._is_row_wise, self.lasting = kind, is_row_wise, lasting
        self._forward, self.again = forward, again

    @property
    def overload(self) -> str:
        """Of its operators on the tape (memplug/native/units.cpp)."""
        if self._kind is None:
            return "shared" if self.is_shared else ""
        if self._kind is Kind.COLLECTIVE:
            return "exchange"
        name = "attention" if self._kind is Kind.ATTENTION else "whole"
        return f"{name}_shared" if self.is_shared else "rows" if name == "whole" and self._is_row_wise() else name

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, as a unit of the region whose forward is under way, if there is one."""
        executor = self.executor
        if not torch.is_grad_enabled():  # nor had it a state in the forward
            return call(*args, **kwargs)
        if executor.recomputing:
            state = executor.next_state(self)
            with executor.rerunning(), self.again(state):  # units inside of it are a part of it
                return call(*args, **kwargs)
        if executor.core is None or not executor.core.observes():
            return call(*args, **kwargs)
        surroundings = [take() for take in executor.hooks.surroundings]
        with self._forward() as state:
            return executor.core.run_unit(self, self.overload, self.name, state, surroundings, call, args, kwargs)


def run_again(
    executor: Executor,
    unit: Unit,
    region: Region,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Any,
    surroundings: Sequence[Callable[[], Any]],
    ambient: Sequence[Any],
    sources: Sequence[tuple[bool, int] | None],
    count: int,
) -> list[torch.Tensor | None]:
    """Run a unit once more, with the tensors that its forward was given, and return what its parts made.

    Args:
        sources: of each part, whether it was saved for backward, else returned, and as the how-manieth; None: it is not
            needed.
        count: how many tensors the forward saved.

    Raises:
        RecomputeError: it saves another number of tensors.
    """
    wanted = {source[1] for source in sources if source is not None and source[0]}
    saved: list[torch.Tensor | None] = []

    def pack(tensor: torch.Tensor) -> None:
        saved.append(tensor.detach() if len(saved) in wanted else None)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _never)
    with (
        executor.rerunning(),
        restored(executor.device, surroundings, *ambient),
        torch.enable_grad(),
        hooks,
        unit.again(state),
    ):
        out = call(*args, **kwargs)
    if wanted and len(saved) != count:  # hooks of the model's own, around the forward, may have taken all that it saved
        raise RecomputeError(
            f"region {region.name}: {unit.name} saved {count} tensors for backward, and {len(saved)} when run again"
        )
    returned = executor.core.tensors_in(out)
    return [None if source is None else (saved if source[0] else returned)[source[1]] for source in sources]


def _never(packed: Any) -> torch.Tensor:
    raise AssertionError("the graph of a recompute pass is never run")
