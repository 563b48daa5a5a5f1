"""Units: calls inside of a region whose kernels no operator shows, and which can be run again by themselves.

On a region's tape a unit is one operator. Each tensor that it made, and returned or saved, is a part of the unit: the
output of a further operator (native/units/unit.h). So a plan can keep, swap or recompute every tensor that a custom
autograd function saved.
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
from memplug.tokenwise.engine.operators import CaptureKind
from memplug.tokenwise.engine.region import Region
from memplug.tokenwise.engine.rerun import held_meanwhile
from memplug.tokenwise.engine.runs import RegionRunner

_NOTHING = contextlib.nullcontext()


class Unit(UnitCalls):
    """A module, or function, that runs as a unit.

    Args:
        executor: runs the regions that the unit is in.
        name: its name within the region.
        kind: kind of its outputs. A `COLLECTIVE` is never run again. None: the outputs are cheap, and captured only if
            a plan decides so.
        is_row_wise: returns whether each row of the outputs comes from one row of the first argument. Called in
            every call of the unit with the state that `forward` yields, unless `kind` or `is_shared` rules out swaps by
            rows.
        is_shared: whether other ranks take part; if so, the unit runs again on all of them or on none.
        puts_back: whether the unit may draw from a generator and then restore the generator's state, as
            `torch.random.fork_rng` does.
        writes_unsaid: whether the unit may write, without advancing versions, to arguments that it returns.
        lasting: called after each call; returns tensors that outlive the call, such as the cast of a weight that the
            module keeps. If the unit saves such a tensor for backward, memplug holds it instead of capturing it.
        reads: returns the parameters that the unit reads besides its arguments.
        forward: returns the context in which the unit's forward runs. The context yields the state that the unit needs
            to run again; the state is complete once the forward is over.
        again: gets the state that `forward` yielded, and returns the context in which the unit runs again.

    Attributes:
        writes: indices, among the tensors of the arguments, of those that calls have written to so far.
    """

    def __init__(
        self,
        executor: RegionRunner,
        name: str,
        kind: CaptureKind | None,
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
        """Note further arguments that a call wrote to; memplug assumes that every later call writes to them too."""
        if not self.is_shared:  # a unit that communicates and writes keeps its region opaque
            self.writes.update(written)
            self.executor.functions.note_found()

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call(*args, **kwargs)`, as a unit of the region whose forward is under way, if there is one."""
        executor = self.executor
        if not (torch.is_grad_enabled() or self.writes):  # not as a unit: memplug holds the outputs
            return call(*args, **kwargs)
        if executor.recomputing:
            state = executor.next_state(self)
            with executor.rerunning(), self.again(state):  # units inside of this one run as plain code
                return call(*args, **kwargs)
        if not executor.core.observes():
            return call(*args, **kwargs)
        surroundings = [take() for take in executor.hooks.surroundings]
        with self._forward() as state:
            overload = "rows" if self._overload == "whole" and self._is_row_wise(state) else self._overload
            return executor.core.run_unit(self, overload, self.name, state, surroundings, call, args, kwargs)


def _overload(kind: CaptureKind | None, is_shared: bool) -> str:
    """Return the overload of the operators that stand for a unit on the tape (native/units/units.cpp).

    In a call that `is_row_wise`, `Unit.run` uses "rows" instead of "whole".
    """
    if kind is None:
        return "shared" if is_shared else ""
    if kind in (CaptureKind.COLLECTIVE, CaptureKind.CHOICE):
        return "exchange" if kind is CaptureKind.COLLECTIVE else "choice"
    name = "attention" if kind is CaptureKind.ATTENTION else "whole"
    return f"{name}_shared" if is_shared else name


def run_again(
    executor: RegionRunner,
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
    """Run a unit again with the tensors of its forward, and return a tensor for each part that is needed.

    Args:
        executor: the executor of the region.
        unit: the unit to run again.
        region: the region that it ran in.
        call: the function that the unit ran.
        args: positional arguments of `call`.
        kwargs: keyword arguments of `call`.
        state: the state that the unit's forward yielded.
        surroundings: see `restored`.
        ambient: the further arguments of `restored`; None: this pass already runs in the forward's state.
        sources: for each part of the unit, where its tensor is: (True, index among the tensors that the unit saves for
            backward), or (False, index among the tensors that it returns). None: the part is not needed.
        count: how many tensors the forward saved.

    Raises:
        RecomputeError: the unit saves more or fewer tensors than in its forward.
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
    # if no saved tensor is wanted, their number does not matter: the model's own hooks may have taken them
    if wanted and len(saved) != count:
        raise RecomputeError(
            f"region {region.name}: {unit.name} saved {count} tensors for backward, and {len(saved)} when run again",
            code="MP021",
        )
    returned = executor.core.tensors_in(out)
    return [None if source is None else (saved if source[0] else returned)[source[1]] for source in sources]
