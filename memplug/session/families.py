"""Chooses the sizes that a new program is made for, if steps differ from those of known programs in nothing but sizes.

Programs that differ in nothing else are a family: see `memplug.session.programs`.
"""

from __future__ import annotations

import functools
import operator
from math import floor, log

from memplug.profile.similarity import Program
from memplug.session.programs import BAND, Programs
from memplug.session.ranks import Ranks
from memplug.session.remembered import Remembered
from memplug.session.table import Stage

GROWTH = 1.25
"""A program for larger steps than any before is made for at least so many times their largest size."""


def meet(programs: Programs, ranks: Ranks, program: Program, above: Remembered | None, warmup_steps: int) -> Remembered:
    """Remember the program of a step that ranks have not seen before; all ranks call this for the same step.

    It is made for steps as large as the largest of any rank, and for somewhat larger ones if the family has other
    programs, so that lengths that change step by step make few programs. The warm-up of the family's first program
    counts for it, unless its steps run under the plan of a larger one.

    Args:
        programs: all remembered programs.
        ranks: the ranks that train the model.
        program: this rank's step.
        above: the next larger program of the family; None if there is none, or no family.
        warmup_steps: see `Adjuster`.
    """
    relatives = ranks.gather(programs.relatives(program))
    family = programs.family_of(functools.reduce(operator.and_, relatives)) if above is None else above.family
    members = programs.members(family) if family is not None else []
    nearest = above or (members[-1] if members else None)
    own = nearest.share(program) if nearest is not None else program.size
    forwards = tuple(map(len, program.sizes))
    everyone = ranks.gather((forwards, own))
    sizes = [size for others, size in everyone if size and (nearest is not None or others == forwards)]
    most = max(sizes, default=own or 1.0)
    if above is not None:
        most = BAND ** -max(1, floor(log(1 / most, BAND) + 1e-6))
    elif members:
        most = max(most, GROWTH)
    extent = nearest.extent * most if nearest is not None else 1.0
    if own or nearest is None:
        seen = programs.remember(program, family, extent, max(1.0, most / own) if own else 1.0)
    else:  # an empty step shows no size
        seen = programs.remember(nearest.baseline, family, extent, max(1.0, nearest.reach * most))
    if programs.covering(seen) is seen:
        is_planned = any(one.stage is not Stage.WARM_UP for one in members)
        seen.steps = warmup_steps if is_planned else max((one.steps for one in members), default=0)
    return seen
