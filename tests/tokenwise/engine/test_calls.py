"""All Python methods that the native core calls exist; a missing one raises before a step runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memplug.device.device import Device
from memplug.tokenwise.engine import calls
from memplug.tokenwise.engine.buffers import Buffers
from memplug.tokenwise.engine.core import core
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.state import CallState
from memplug.tokenwise.engine.times import Times
from memplug.tokenwise.engine.units import Unit


class Noting:
    """A stand-in for the core's module that records its calls."""

    names: dict[str, set[str]]

    def bind_calls(self, names: dict[str, set[str]], *functions: Callable[..., Any]) -> None:
        """Record the names of the methods, and pass them on to the core."""
        self.names = names
        core().bind_calls(names, *functions)

    def raise_failures_with(self, fail: Callable[..., Any]) -> None:
        """Do nothing: the core's module has the function already."""


@pytest.fixture
def names() -> dict[str, set[str]]:
    noting = Noting()
    calls.bind(noting)
    return noting.names


def test_python_objects_have_every_method_that_the_core_calls(names: dict[str, set[str]]) -> None:
    executor = Executor(Device(), 1 << 20)
    unit = Unit(executor, "unit", None)
    made = {
        "Executor": executor,
        "Unit": unit,
        "Buffers": Buffers(),
        "Times": Times(executor.device),
        "State": CallState(),
    }
    assert names.keys() == {f"{name}Calls" for name in made} and all(names.values())
    for kind, instance in made.items():
        assert not [name for name in names[f"{kind}Calls"] if not hasattr(instance, name)]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"restore"}, "calls a name that is no part .*: ExecutorCalls.restore"),
        ({"restores"}, "does not call a name .*: ExecutorCalls.restores"),
        ({"is_alone", "alone"}, "calls a name that is no part .*: ExecutorCalls.is_alone"),
    ],
)
def test_bind_raises_if_method_names_differ_from_those_of_the_core(
    names: dict[str, set[str]], changed: set[str], says: str
) -> None:
    others = {**names, "ExecutorCalls": names["ExecutorCalls"] ^ changed}
    with pytest.raises(AttributeError, match=says):
        core().bind_calls(others, *3 * [print])
    with pytest.raises(AttributeError, match="UnitCalls"):
        core().bind_calls({name: each for name, each in names.items() if name != "UnitCalls"}, *3 * [print])


@pytest.mark.parametrize("name", sorted(calls.ExecutorCalls.__abstractmethods__))
def test_executor_class_that_lacks_a_called_method_raises(name: str) -> None:
    inherited = {key: value for key, value in vars(Executor).items() if key not in (name, "__dict__", "__weakref__")}
    lacking = type("Lacking", (calls.ExecutorCalls,), inherited)
    with pytest.raises(TypeError, match=name):
        lacking(Device(), 1 << 20)
