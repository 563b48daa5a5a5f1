"""The host never waits for the device in a planned step, only to check an alpha, to plan or to start the arena."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memplug
from tests.cudasim import device
from tests.cudasim.device import Schedule, scheduled
from tests.cudasim.training import ALONE, block, model
from tests.support.beside_plain import ROWS, Training

pytestmark = pytest.mark.gpu

STEPS = 24  # enough for several observed steps: one step in eight is observed
CHECKED = 1  # at the end of this step memplug checks a fixed alpha
BEGINS: dict[str, list[str]] = {"alpha 0.5": [], "alpha 1, arena": ["serving"], "auto": ["stable", "serving"]}
CASES = {"alpha 0.5": block(0.5, **ALONE), "alpha 1, arena": block(1.0), "auto": block()}


def waits(used: dict[str, Any] | None) -> tuple[list[int], list[str]]:
    """Return how often the host waited in each step, and the states of session and arena after each step."""
    network, generator = model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    session = memplug.attach(network, used) if used else None
    found, states = [], []
    for _ in range(STEPS):
        tokens = torch.randint(0, 128, (2, 48), generator=generator).pin_memory().to("cuda", non_blocking=True)
        before = device.blocked()
        network(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step()
            states.append(f"{session.stage.value}, {session.report().arena.state}")
        found.append(device.blocked() - before)
    torch.cuda.synchronize()
    if session is not None:
        session.detach()
    return found, states


@pytest.mark.parametrize("case", CASES)
def test_host_waits_only_for_alpha_check_planning_and_arena_start(
    case: str,
) -> None:
    with scheduled(Schedule("lazy")):
        plain, _ = waits(None)
        ours, states = waits(CASES[case])
    added = {step: count - plain[step] for step, count in enumerate(ours) if count != plain[step]}
    first = {begins: next((i for i, state in enumerate(states) if begins in state), -1) for begins in BEGINS[case]}
    expected = {*first.values(), *([CHECKED] if "alpha" in case else [])}
    assert set(added) == expected and all(count > 0 for count in added.values()), (added, states)
    assert states[-1].startswith("stable") and max(added, default=0) < STEPS - 9


def test_host_stops_waiting_once_the_swap_list_has_settled() -> None:
    with torch.device("cuda"), scheduled(Schedule("lazy")):
        training = Training()
        x = training.inputs()
        training.inputs = lambda rows=ROWS: x  # the swap list was made from steps with these inputs
        training.until_it_swaps()
        former = training.report
        waited = []
        for _ in range(12):
            before = device.blocked()
            for network, optimizer in zip((training.model, training.plain), training.optimizers, strict=True):
                network(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            training.session.step()
            waited.append(device.blocked() - before)
        report = training.report
        training.session.detach()
    assert report["swap"] == "swapping"
    released = report["swap_released_bytes"] - former["swap_released_bytes"]
    assert released > 8 * report["swap_planned_bytes"] and report["swap_passive"] == former["swap_passive"]
    assert sum(waited[:4]) <= 1 and sum(waited[4:]) == 0, waited
