"""A tape knows the process groups of its collectives, and keeps none of them alive."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memplug.errors import RecomputeError
from memplug.tokenwise.engine import core as native
from tests.support.blocks import Stack, assert_clean, assert_same, gradients, tokenwise, twin
from tests.support.collective_layers import COLLECTIVES, filling, saving
from tests.support.forking import launch_forked
from tests.support.native_forward import Run


@pytest.fixture(scope="module")
def core() -> Any:
    return native.core()


@pytest.fixture
def init(tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Return a function that makes a new process group; the last one is destroyed at the end."""
    stores = iter(range(100))

    def new() -> Any:
        store = dist.FileStore(str(tmp_path / f"store{next(stores)}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return dist.group.WORLD

    yield new
    if dist.is_initialized():
        dist.destroy_process_group()


def destroy() -> None:
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.distributed
def test_tape_keeps_no_process_group_alive(tmp_path: Path) -> None:
    """If a tape held its group, a thread of that group that frees the tape would wait for itself."""
    launch_forked(["tests.support.group_worker", tmp_path], module=True)
    for rank in (0, 1):
        before, meanwhile, after, *errors = json.loads((tmp_path / f"{rank}.json").read_text())
        assert before == after < meanwhile
        assert errors == ["c10d::allreduce_", "_c10d_functional::all_reduce"], (
            "the collectives that a recompute pass cannot launch"
        )


@pytest.mark.parametrize("name", COLLECTIVES)
def test_forward_on_another_process_group_departs_from_the_template(
    core: Any, init: Callable[[], Any], name: str
) -> None:
    first = init()
    second = dist.new_group([0])
    tapes = [Run(core, lambda group=group: saving(COLLECTIVES[name], group)).tape for group in (first, second)]
    for group, tape in zip((first, second), tapes, strict=True):
        run = Run(core, lambda group=group: saving(COLLECTIVES[name], group), tuple(tapes))
        assert run.follows and run.tape is tape
    assert not Run(core, lambda: saving(COLLECTIVES[name], second), (tapes[0],)).follows


@pytest.mark.parametrize("name", ["of c10d", "functional, by the group"])
def test_new_group_is_not_mistaken_for_a_destroyed_one(core: Any, init: Callable[[], Any], name: str) -> None:
    """The tape blocks the destroyed group's address; otherwise the new group could get the same one."""
    tapes: tuple[Any, ...] = ()
    for _ in range(8):
        init()
        run = Run(core, lambda: saving(COLLECTIVES[name], dist.group.WORLD), tapes)
        assert not run.follows
        tapes = (*tapes, run.tape)
        assert Run(core, lambda: saving(COLLECTIVES[name], dist.group.WORLD), tapes).tape is run.tape
        del run
        destroy()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_recompute_pass_relaunches_the_collective_on_its_group(core: Any, init: Callable[[], Any], name: str) -> None:
    group = init()
    run = Run(core, lambda: saving(COLLECTIVES[name], group))
    (restored,) = run.restored({}, pytest.fail).values()
    assert torch.equal(restored, torch.full((4,), 6.0))


@pytest.mark.parametrize("name", ["of c10d", "functional, by the group"])
def test_recompute_pass_raises_if_its_process_group_was_destroyed(
    core: Any, init: Callable[[], Any], name: str
) -> None:
    init()
    run = Run(core, lambda: saving(COLLECTIVES[name], dist.group.WORLD))
    destroy()
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(core.GroupGone, match="c10d::allreduce_|_c10d_functional::all_reduce"):
            run.restored({}, pytest.fail)
    init()
    with pytest.raises(core.GroupGone):
        run.restored({}, pytest.fail)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_after_group_destruction_raises_and_new_group_trains(init: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = Stack(2, filling(dist.all_gather_into_tensor, torch.zeros(2, 6, 16)))
    reference = twin(model)
    executor = tokenwise(model, 1.0)
    x = torch.randn(2, 6, 16)
    init()
    model(x).backward()
    loss = model(x)
    destroy()
    with pytest.raises(RecomputeError, match="_allgather_base_ was destroyed before backward") as raised:
        loss.backward()
    assert "after the last backward" in raised.value.advice
    del loss, raised
    model.zero_grad()
    init()
    model(x).backward()
    reference(x).backward()
    assert_same(gradients(model), gradients(reference))
    assert_clean(executor)
