"""The arena's work for one program: its state, its recorded steps and its addresses."""

from __future__ import annotations

import collections
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from memplug.arena.amending import Shortfall, Shortfalls
from memplug.arena.arena import Arena
from memplug.arena.plan.part import AddressPlan
from memplug.arena.tables import ArenaTables
from memplug.beside import Beside
from memplug.profile.trace import Trace, without_gradients
from memplug.profile.varying import scales_as

DIFFERING_SHARE = 0.01  # two steps are alike if at most this share of their requests differ


class ArenaState(enum.Enum):
    """The states of the arena."""

    WAITING = "waiting"  # no program has repeated yet
    RECORDING = "recording"  # the next step is recorded, to plan from it
    PLANNING = "planning"  # training goes on meanwhile, served by torch's allocator
    SERVING = "serving"
    OFF = "off"


@dataclass(eq=False, slots=True)
class Addresses:
    """The addresses that serve one program.

    Attributes:
        plan: the arena's part of the plan.
        tables: the same plan, as the native arena reads it.
        source: origin of the plan, in words for the log.
        amended: how often the plan was amended for each kind of shortfall.
        gradients_stay: see `memplug.plans.schema.TrainingPart`.
    """

    plan: AddressPlan
    tables: ArenaTables
    source: str
    amended: Mapping[Shortfall, int] = field(default_factory=collections.Counter)
    gradients_stay: bool = False


class AddressWork:
    """The work for one program, which rests while others run.

    Attributes:
        beside: the process beside training that plans for it.
        state: see `ArenaState`.
        serving: the addresses in force for the program; None before the first.
        amending: `Addresses.amended` of the plan that is being made; empty: a new plan.
        recorded: steps recorded for the plan that is wanted.
        earlier: steps recorded for the program's earlier plans.
        steps: steps since the work began, or since remembered addresses were installed.
        mismatched_steps: steps in a row that do not fit the plan.
        shortfalls: watches `serving`.
        patience: `steps` at which another new plan may be made; that plan sets this to 2 * `steps`.
    """

    def __init__(self, beside: Beside, arena: Arena):
        self.beside = beside
        self.state = ArenaState.WAITING
        self.serving: Addresses | None = None
        self.amending: collections.Counter[Shortfall] = collections.Counter()
        self.recorded: list[Trace] = []
        self.earlier: list[Trace] = []
        self.steps = self.mismatched_steps = 0
        self.shortfalls = Shortfalls(arena)
        self.patience = 1


def alike(one: Trace, other: Trace) -> bool:
    """Return whether two steps make the same requests, in any order, except for at most `DIFFERING_SHARE` of them.

    Requests of validations are not compared, nor are sizes if the steps have inputs of other sizes.
    """
    scales = one.fingerprint.input_sizes != other.fingerprint.input_sizes
    if scales and not scales_as(one, other):
        return False
    counts = []
    for trace in (one, other):
        rows = trace.requests[~without_gradients(trace)]
        kinds = rows[["malloc_operator" if scales else "nbytes", "malloc_layer"]].tolist()
        names = [trace.names[name] for name in trace.operators["name"].tolist()] if scales else []
        counts.append(collections.Counter((names[kind] if scales and kind >= 0 else kind, at) for kind, at in kinds))
    differing = (counts[0] - counts[1]).total() + (counts[1] - counts[0]).total()
    return differing <= DIFFERING_SHARE * max(counts[0].total(), counts[1].total())
