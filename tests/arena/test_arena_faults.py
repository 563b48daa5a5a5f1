"""After any fault of the arena, losses equal those of a run without memplug, and no memory leaks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.arena import planning
from memplug.arena.technique import ArenaState
from memplug.errors import ArenaError
from tests.support.serving import ALONE, CHECKED, llama, nothing_leaks, owned, reserved_bytes, serving_of, train

OFF = {"enabled": False}
MODES = {"plain": ALONE, "checked": CHECKED}


@pytest.fixture(params=MODES)
def block(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the configuration of the arena, without or with its checks."""
    return MODES[request.param]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Assert that no test of this file leaks reserved memory."""
    with nothing_leaks():
        yield


# -- requests that differ from the plan --------------------------------------------------------------------------------


class Wandering(nn.Module):
    """A model with sixty requests for scratch memory, on which its results do not depend.

    A random share of the requests is missing, preceded by another request, or enlarged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.share = 0.0
        self.random = random.Random(3)

    def scratch(self, x: torch.Tensor, spot: int, kept: list[torch.Tensor]) -> torch.Tensor:
        numbers = 40 * (1 + spot % 7)
        if self.random.random() < self.share:
            change = self.random.choice(("missing", "inserted", "resized"))
            if change == "missing":
                return x
            if change == "inserted":
                kept.append(torch.ones(300 * self.random.randint(1, 9)))
            else:
                numbers *= 5
        return x + 0 * torch.ones(numbers).sum()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        kept: list[torch.Tensor] = []
        x = torch.nn.functional.one_hot(input_ids % 16, 16).float()
        for layer in self.layers:
            x = layer(x).tanh()
            for spot in range(20):
                x = self.scratch(x, spot, kept)
        assert all((scratch == 1).all() for scratch in kept)
        return SimpleNamespace(loss=(x - 0.1 * labels[..., None] / 64).square().mean())


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_requests_that_differ_from_the_plan_affect_no_other_requests(block: dict[str, Any], share: float) -> None:
    @contextlib.contextmanager
    def around(step: int, model: nn.Module) -> Iterator[None]:
        model.share = share if step >= 7 else 0.0
        yield

    regions = {"regions": ["layers.*"], "enabled": False}
    run = train({**block, "tokenwise": regions}, Wandering, steps=24, around=around)
    assert run.losses == train(OFF, Wandering, steps=24, around=around).losses
    assert run.states[5] is ArenaState.SERVING and max(run.mismatched[5:7]) == 0
    assert sum(run.mismatched[7:]) > 0
    assert run.served > 1 - 1.5 * share - 0.05, "an extra or missing request shifts no other"


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_arena_serves_although_another_thread_frees_blocks_late(block: dict[str, Any]) -> None:
    """Free each step's activations on another thread, at a random time during the next step."""
    held: list[Any] = []
    done = threading.Event()

    def free_held() -> None:
        while not done.is_set() or held:
            time.sleep(random.random() / 200)
            with contextlib.suppress(IndexError):
                held.pop(0)

    @contextlib.contextmanager
    def around(step: int, model: nn.Module) -> Iterator[None]:
        hook = model.model.layers[0].mlp.register_forward_hook(lambda m, i, out: held.append((out.detach(), i)))
        yield
        hook.remove()

    thread = threading.Thread(target=free_held)
    thread.start()
    try:
        run = train(block, steps=30, around=around)
    finally:
        done.set()
        thread.join()
    assert run.losses == train(OFF, steps=30).losses
    assert run.served > 0.9


def test_requests_of_other_threads_go_to_torchs_allocator(block: dict[str, Any]) -> None:
    strangers: list[torch.Tensor] = []
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(model, block) as session:
        for step in range(10):
            model(batch, labels=batch).loss.backward()
            if step >= 6:
                thread = threading.Thread(target=lambda: strangers.append(torch.ones(700)))
                thread.start()
                thread.join()
            session.step()
        assert serving_of(session).state is ArenaState.SERVING
        assert serving_of(session).counters.elsewhere >= 4
    assert not any(owned(tensor) for tensor in strangers)
    assert all((tensor == 1).all() for tensor in strangers)


def test_forked_child_reads_the_arena_but_allocates_outside_of_it(block: dict[str, Any]) -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(model, block) as session:
        for _ in range(8):
            out = model(batch, labels=batch)
            out.loss.backward()
            session.step()
        assert owned(out.logits)
        expected = out.logits.sum().item()
        child = os.fork()
        if child == 0:  # the child reports by its exit code, since pytest must not go on in it
            fine = out.logits.sum().item() == expected and not owned(torch.ones(64))
            del out
            os._exit(0 if fine else 1)
        assert os.waitpid(child, 0)[1] == 0
        out.loss.item()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_a_step_leaves_later_losses_unchanged(block: dict[str, Any], where: str) -> None:
    def run(block: dict[str, Any]) -> tuple[list[float], memplug.Session]:
        torch.manual_seed(0)
        model, losses = llama(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with memplug.attach(model, block) as session:
            for step in range(16):
                batch = torch.randint(0, 64, (2, 16))
                if step in (7, 10):
                    with pytest.raises(ZeroDivisionError), failing(model.model.layers[1].mlp, where):
                        model(batch, labels=batch).loss.backward()
                    optimizer.zero_grad()
                    continue
                loss = model(batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                session.step()
        return losses, session

    losses, session = run(block)
    assert losses == run(OFF)[0]
    assert serving_of(session).step.mismatched == 0


@contextlib.contextmanager
def failing(module: nn.Module, where: str) -> Iterator[None]:
    """Make the module raise in its forward or its backward."""

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def fail_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    hook = module.register_forward_hook(fail if where == "forward" else fail_in_backward)
    try:
        yield
    finally:
        hook.remove()


def test_failed_arena_reservation_warns_once_and_training_continues(
    block: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, before = planning.tables_of, reserved_bytes()
    monkeypatch.setattr(planning, "tables_of", lambda plan: replace(made(plan), reused_bytes=2**50))
    run = train(block)
    assert run.losses == train(OFF).losses
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "goes on without the arena" in warnings[0] and "GiB" in warnings[0]
    assert "GiB for the arena" in run.report["arena_off_because"]
    assert run.report["arena"] == "off" and run.report["arena_served"] == 0
    assert run.report["arena_bytes"] <= before, "no more than earlier tests still hold"


def test_second_attached_model_trains_without_arena_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    first = llama()
    batch = torch.randint(0, 64, (2, 16))
    with memplug.attach(first, ALONE):
        first(batch, labels=batch).loss.backward()
        run = train(ALONE)
    assert run.report["arena"] == "off"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "without the profiler and the arena" in warning and "another model that trains" in warning


def test_arena_serves_and_logs_if_the_plan_folder_is_unwritable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text(json.dumps(1))
    run = train({**ALONE, "plan_dir": str(tmp_path / "file")})
    assert run.report["arena_served"] > 0
    assert any("the plan is not kept" in record.getMessage() for record in caplog.records)
    caplog.clear()  # the logged error keeps its callers' local variables alive


# -- stray writes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "how"), [("freed", "after it was freed"), ("beyond", "beyond its end")], ids=["freed", "beyond"]
)
def test_arena_checks_detect_stray_writes(spoil: str, how: str) -> None:
    model = llama()
    batch = torch.randint(0, 64, (2, 16))
    session = memplug.attach(model, CHECKED)
    with pytest.raises(ArenaError, match=how), session:
        for step in range(12):
            model(batch, labels=batch).loss.backward()
            if step == 8:
                assert serving_of(session).state is ArenaState.SERVING
                scratch = torch.empty(100, dtype=torch.uint8)
                assert owned(scratch)
                address = scratch.data_ptr()
                if spoil == "freed":
                    del scratch
                ctypes.memset(address + (100 if spoil == "beyond" else 0), 7, 1)
                scratch = None
            model.zero_grad()
            session.step()
