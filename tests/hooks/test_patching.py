"""Patches of several sessions on one object: undone in any order, they leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest

import memplug
from memplug.hooks.patching import ORIGINAL, patch
from memplug.session.table import Stage
from tests.support.hosts import block, ds_config, make_engine, train_engine


class Owner:
    """Stands in for a session, which undoes its patches in reverse order."""

    def __init__(self) -> None:
        self.undo: list[Any] = []

    def at_detach(self, undo: Any) -> None:
        self.undo.append(undo)


class Base:
    def value(self, x: int) -> int:
        return x


class Own(Base):
    def value(self, x: int) -> int:
        return x + 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("what", ["class that inherits", "class", "instance"])
def test_patches_undone_in_any_order_leave_the_original(what: str, order: tuple[int, ...]) -> None:
    kind = type("Inherits", (Base,), {}) if what == "class that inherits" else type("Has", (), {"value": Own.value})
    target = kind() if what == "instance" else kind
    before = dict(vars(target))
    called: list[int] = []
    owners = [Owner() for _ in range(3)]
    for number, owner in enumerate(owners):

        def wrapper(original: Any, *args: Any, number: int = number) -> Any:
            called.append(number)
            return original(*args)

        patch(target, "value", wrapper, owner, "any")
    call = target.value if what == "instance" else target().value
    expected = 5 if what == "class that inherits" else 6
    assert call(5) == expected and called == [2, 1, 0]
    for done, number in enumerate(order, 1):
        owners[number].undo.pop()()
        called.clear()
        call = target.value if what == "instance" else target().value
        assert call(5) == expected
        assert called == [n for n in (2, 1, 0) if n not in order[:done]]
    assert dict(vars(target)) == before


@pytest.mark.parametrize("first", [0, 1])
def test_two_zero_3_engines_detach_in_any_order_and_leave_no_patch(cpu_engine: None, first: int) -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    before = Init._all_gather, Init._partition
    engines = [make_engine(ds_config(3, block(alpha=1))) for _ in range(2)]
    sessions = [memplug.attach(engine) for engine in engines]
    for engine in engines:
        train_engine(engine, 2)
    sessions[first].detach()
    train_engine(engines[first], 1)
    losses = train_engine(engines[1 - first], 1, first=2)
    sessions[1 - first].detach()
    assert (Init._all_gather, Init._partition) == before and not hasattr(Init._all_gather, ORIGINAL)
    assert losses == train_engine(make_engine(ds_config(3)), 3)[2:], "the other engine trains on as before"


def test_destroyed_engine_frees_recorder_and_arena_for_the_next(cpu_engine: None) -> None:
    memplug.install()
    for _ in range(2):
        engine = make_engine(ds_config(3, block()))
        session = memplug.attach(engine)
        train_engine(engine, 8)
        assert session.report().profiler == "operators" and session.report().arena.served > 0
        engine.destroy()
        assert session.stage is Stage.DETACHED


def test_detached_session_does_not_keep_its_model_alive() -> None:
    from tests.support.blocks import LAYERS, Stack

    model = Stack(2)
    session = memplug.attach(model, block(regions=LAYERS))
    gone = weakref.ref(model)
    session.detach()
    del model
    gc.collect()
    assert gone() is None and session.report().stage == "detached"
