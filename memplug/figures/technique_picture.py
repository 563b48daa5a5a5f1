"""What a technique says and draws of itself: its part of a plan, two plans of it, its section of the block, and what it
builds.

`memplug.<technique>.picture` has one as its `Picture`; whatever shows plans asks all that there are, and names none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from memplug.figures.figure import Column
from memplug.figures.words import Rows
from memplug.plans.schema import MemoryPlan

if TYPE_CHECKING:
    from memplug.block import MemplugConfig


class TechniquePicture:
    """Shows one technique; one that overrides nothing has nothing to say.

    Facts are plain values under stable keys, units in names, for `--json`. They join those of the other techniques, so
    keys are the technique's own.

    Attributes:
        place: among the other techniques, whose rows are below and whose columns are to the right where theirs is
            larger.
        serves: requests for memory are served from memory that the technique has planned.
    """

    place: ClassVar[int] = 100
    serves: ClassVar[bool] = False

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """Returns what a plan holds for the technique, also where it has no part of it."""
        return {}

    def rows(self, facts: dict[str, Any]) -> Rows:
        """Returns what `facts` returned, in words."""
        return []

    def heading(self, plan: MemoryPlan) -> str:
        """Returns what the plan is called by its part; "": another one gives it a name."""
        return ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """Returns the plan's part as panels; None: there is nothing to draw."""
        return None

    def side(self, plan: MemoryPlan) -> dict[str, Any]:
        """Returns facts of one of two plans that are compared."""
        return {}

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """Returns facts of both: what differs."""
        return {}

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """Returns what `diff` returned in words, with what `side` returned under "a" and "b"."""
        return []

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """Returns lines on what the block has the technique do.

        Args:
            config: the block, which is enabled.
            served: one of the techniques that are on serves requests.
        """
        return []

    def block_warnings(self, config: MemplugConfig, ds_config: Mapping[str, Any]) -> Iterable[str]:
        """Returns what other settings of a DeepSpeed JSON do to the technique, a sentence each."""
        return ()

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """Returns what the technique's planner builds beside the native core: by key, its name and what loads it.

        Each raises a NativeError where it cannot be built.
        """
        return {}
