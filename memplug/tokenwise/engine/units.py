"""Units: calls inside of a region whose kernels no operator shows, and which can be run again by themselves.

A region's tape has a unit as an operator, and each memory that it made as one of its own (native/units/unit.h): so a
plan keeps, swaps or recomputes what a custom autograd function saved, tensor by tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from memplug.errors import RecomputeError
from memplug.tokenwise.engine.ambient import no_transforms, restored
from memplug.tokenwise.engine.calls import UnitCalls
from memplug.tokenwise.engine.operators import Kind
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.rerun import held_meanwhile
from memplug.tokenwise.engine.runs import Runs

_NOTHING = contextlib.nullcontext()


class Unit(UnitCalls):
    """One module, or function, that runs as a unit.

    Args:
        name: within its region.
        kind: what it is made of; a collective is never run again; None: cheap, and captured only where a plan says so.
        is_row_wise: asked for each call, with what `forward` gave: each row of what it makes comes from one row of its
            first argument.
        is_shared: other ranks take part: it runs again on all of them or on none.
        puts_back: it may draw from a generator and then put back the state that this had, as `torch.random.fork_rng`
            does.
        writes_unsaid: its kernels may write to what it is given and gives back, which no version tells.
        lasting: tensors that outlive the unit, such as a weight's cast that its module keeps: what it saves of these is
            held. Asked behind each call.
        reads: parameters of its own, which it is not given.
        forward: entered around a forward; gives what it takes to run again as it ran, complete once it is over.
        again: entered around such a run, with that.

    Attributes:
        writes: which of the tensors that it is given it writes to, by their number, as far as its calls have shown.
    """

    def __init__(
        self,
        executor: Runs,
        name: str,
        kind: Kind | None,
        is_row_wise: Callable[[Any], bool] = lambda state: False,
        is_shared: bool = False,
        puts_back: bool = True,
        writes_unsaid: bool = False,
        lasting: Callable[[], list[torch.Tensor]] = list,
        reads: Callable[[], Iterable[torch.Tensor]] = list,
        forward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        again: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self.executor, self.name, self.is_shared, self.puts_back = executor, name, is_shared, puts_back
        self._is_row_wise, self.lasting, self.reads, self.writes_unsaid = is_row_wise, lasting, reads, writes_unsaid
        self._forward, self.again = forward, again
        self._overload = _overload(kind, is_shared)
        self.writes: set[int] = set()

    def note_writes(self, written: Sequence[int]) -> None:
        """It wrote to more of what it was given than `writes` says: it will, from now on."""
        if not self.is_shared:  # else its region stays opaque
            self.writes.update(written)
            self.executor.functions.note_found()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, as a unit of the region whose forward is under way, if there is one."""
        executor = self.executor
        if not (torch.is_grad_enabled() or self.writes):  # what it makes is held
            return call(*args, **kwargs)
        if executor.recomputing:
            state = executor.next_state(self)
            with executor.rerunning(), self.again(state):  # units inside of it are a part of it
                return call(*args, **kwargs)
        if not executor.core.observes():
            return call(*args, **kwargs)
        surroundings = [take() for take in executor.hooks.surroundings]
        with self._forward() as state:
            overload = "rows" if self._overload == "whole" and self._is_row_wise(state) else self._overload
            return executor.core.run_unit(self, overload, self.name, state, surroundings, call, args, kwargs)


def _overload(kind: Kind | None, is_shared: bool) -> str:
    """Of its operators on the tape (native/units/units.cpp), where it is not by rows."""
    if kind is None:
        return "shared" if is_shared else ""
    if kind in (Kind.COLLECTIVE, Kind.CHOICE):
        return "exchange" if kind is Kind.COLLECTIVE else "choice"
    name = "attention" if kind is Kind.ATTENTION else "whole"
    return f"{name}_shared" if is_shared else name


def run_again(
    executor: Runs,
    unit: Unit,
    region: Region,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Any,
    surroundings: Sequence[Callable[[], Any]],
    ambient: Sequence[Any] | None,
    sources: Sequence[tuple[bool, int] | None],
    count: int,
) -> list[torch.Tensor | None]:
    """Run a unit once more, with the tensors that its forward was given, and return what its parts made.

    Args:
        ambient: see `restored`; None: the state is the forward's.
        sources: of each part, whether it was saved for backward, else returned, and its index among those; None: it is
            not needed.
        count: how many tensors the forward saved.

    Raises:
        RecomputeError: it saves another number of tensors.
    """
    wanted = {source[1] for source in sources if source is not None and source[0]}
    saved: list[torch.Tensor | None] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor | None:
        plain = tensor.detach() if len(saved) in wanted or region.native.asks else None
        saved.append(plain if len(saved) in wanted else None)
        return plain

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, held_meanwhile)
    around = _NOTHING if ambient is None else restored(executor.device, surroundings, *ambient)
    with no_transforms(), executor.rerunning(), around, hooks, unit.again(state):
        out = call(*args, **kwargs)
    if wanted and len(saved) != count:  # hooks of the model's own, around the forward, may have taken all that it saved
        raise RecomputeError(
            f"region {region.name}: {unit.name} saved {count} tensors for backward, and {len(saved)} when run again",
            code="MP021",
        )
    returned = executor.core.tensors_in(out)
    return [None if source is None else (saved if source[0] else returned)[source[1]] for source in sources]
