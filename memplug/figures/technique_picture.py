"""The interface by which a technique describes and draws itself.

It shows the technique's part of a plan, the differences between two plans, the technique's section of the block, and
the libraries that its planner builds. `memplug.<technique>.picture` has an instance named `PICTURE`. The code that
shows plans asks every installed technique, and names none.
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
    """Shows one technique; a subclass that overrides nothing shows nothing.

    Facts are plain values for `--json`, under stable keys that name the units. memplug merges the facts of all
    techniques, so each technique uses keys of its own.

    Attributes:
        place: Order among the techniques: rows are sorted by it from top to bottom, columns from left to right.
        serves: Whether the technique serves memory requests from memory that it has planned.
    """

    place: ClassVar[int] = 100
    serves: ClassVar[bool] = False

    def facts(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the technique's facts of a plan, even if the plan has no part for it."""
        return {}

    def rows(self, facts: dict[str, Any]) -> Rows:
        """Return the result of `facts` in words."""
        return []

    def heading(self, plan: MemoryPlan) -> str:
        """Return a title for the plan from the technique's part, or "" to leave it to another technique."""
        return ""

    def column(self, plan: MemoryPlan) -> Column | None:
        """Return the technique's part as panels, or None if there is nothing to draw."""
        return None

    def side(self, plan: MemoryPlan) -> dict[str, Any]:
        """Return the facts of one of two plans in a comparison."""
        return {}

    def diff(self, a: MemoryPlan, b: MemoryPlan) -> dict[str, Any]:
        """Return facts on the differences between two plans."""
        return {}

    def diff_rows(self, facts: dict[str, Any]) -> Rows:
        """Return the result of `diff` in words; the results of `side` are in `facts` under "a" and "b"."""
        return []

    def block_words(self, config: MemplugConfig, *, served: bool) -> list[str]:
        """Return lines that say what the technique will do under this block.

        Args:
            config: The block, which is enabled.
            served: Whether the block switches on a technique that serves memory requests.
        """
        return []

    def block_warnings(self, config: MemplugConfig, ds_config: Mapping[str, Any]) -> Iterable[str]:
        """Return warnings, a sentence each, on other settings of a DeepSpeed JSON that affect the technique."""
        return ()

    def libraries(self) -> Mapping[str, tuple[str, Callable[[], object]]]:
        """Return the libraries that the technique's planner builds beside the native core.

        Returns:
            By key: the library's name, and a function that loads it, or raises NativeError if it cannot be built.
        """
        return {}
