"""Steps that repeat under a swap list are followed: memplug sees only their memory requests, not their operators.

A followed step departs by a request that the repeated step did not make. From there on memplug sees all operators.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import memplug
from tests.support.beside_plain import ROWS, WIDTH, Deep, Training, budget_gib
from tests.support.swapped import block

pytestmark = pytest.mark.device


def test_repeated_steps_are_followed_until_one_differs() -> None:
    training = Training()
    training.until_it_swaps()
    # memplug follows a step once three steps in a row equalled the step before them
    for repeated in (0, 0, 0, 0, 1, 2):
        training.step()
        assert training.report["swap_repeated"] == repeated
    tensors, found = training.report["swap_tensors"], training.report["swap_found"]
    assert found == 6 * tensors
    training.step(ROWS // 2)
    training.step(ROWS // 2)
    assert training.report["swap_repeated"] == 2
    # after a departure memplug needs six alike steps; the first of them equals the step that it learnt last
    for repeated in (
        2,
        2,
        2,
        2,
        2,
        2,
        3,
        4,
    ):
        training.step()
        assert training.report["swap_repeated"] == repeated
    assert training.report["swap_found"] == found + 8 * tensors and training.report["swap_demanded"] == 0


def test_late_prefetch_requests_memory_no_earlier_in_followed_steps() -> None:
    model = Deep()
    with memplug.attach(model, block(budget_gib())) as session:

        def requests() -> list[tuple[int, int]]:
            """Record a step, and return its memory events in order: malloc or free, and bytes."""
            session.record()
            for _ in range(2):
                step()
            return session.trace.events[["kind", "nbytes"]].tolist()

        def step() -> None:
            model(torch.ones(ROWS, WIDTH)).backward()
            model.zero_grad()
            session.step()

        for _ in range(5):
            step()
        technique = session._attached.boundary.followers.find("swap")
        late = tuple(replace(target, prefetch=target.next_use) for target in technique.part.targets)
        technique.install(replace(technique.part, targets=late))
        session.step()
        seen = requests()
        assert session.report().swap.state == "swapping" and session.report().swap.repeated == 0
        for _ in range(6):
            step()
        repeated = session.report().swap.repeated
        assert repeated > 0 and requests() == seen and session.report().swap.repeated > repeated


class Positions(torch.autograd.Function):
    """A function whose backward makes a tensor of indices before the peak of memory, and uses it after the peak."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(8 * grad.numel(), device=grad.device, dtype=grad.dtype)
        for _ in range(3):
            grad = grad.repeat(64, 1).view(64, *grad.shape).mean(0)
        return grad * positions[: grad.numel()].view_as(grad)


@pytest.mark.cpu("a device has more memory than requested")
def test_output_that_gets_its_memory_inside_an_operator_is_found() -> None:
    model, swap = Deep(), {"enabled": True, "min_bytes": 8 * ROWS * WIDTH * 4}
    with memplug.attach(model, block(budget_gib(76 * ROWS * WIDTH * 4), swap=swap)) as session:
        for _ in range(12):
            model(Positions.apply(torch.ones(ROWS, WIDTH, requires_grad=True))).backward()
            session.step()
        targets, report = session._attached.boundary.followers.find("swap").part.targets, session.report().swap
    assert any("arange" in target.operator and target.output for target in targets)
    assert report.missed == 0 < report.repeated


@pytest.mark.cpu("a device has more memory than requested")
def test_earlier_tensors_cannot_be_offloaded_once_a_followed_step_differs() -> None:
    training = Training()
    training.until_it_swaps()
    training.until_it_repeats()
    x = training.inputs()
    loss = training.model(x)
    with pytest.raises(torch.OutOfMemoryError, match="memplug: out of memory"):
        for _ in range(8):
            loss = loss + training.plain(x)
    del loss
    training.session.step()
    loss = training.model(x)  # memplug sees this step's operators, so it can offload their tensors
    for _ in range(8):
        loss = loss + training.plain(x)
    loss.backward()


@pytest.mark.cpu("a device has more memory than requested")
def test_no_tensor_is_offloaded_inside_a_kernel_where_the_step_differs() -> None:
    """Let a followed step depart inside a kernel whose beginning memplug did not see.

    The kernel may hold addresses after its operators have ended.
    """
    x, training = torch.ones(ROWS, 8), Training()
    training.until_it_swaps()
    training.until_it_repeats()
    left_inside: list[int] = []

    def short() -> int:
        """Return how many tensors are offloaded for a request that fails anyway."""
        before = training.report["swap_passive"]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 40)
        return training.report["swap_passive"] - before

    @torch.library.custom_op("memplug_tests::kernel", mutates_args=())
    def kernel(x: torch.Tensor) -> torch.Tensor:
        torch.empty(12345)  # a request that the repeated step did not make
        copy = x.clone()
        left_inside.append(short())
        return copy

    loss = training.model(training.inputs())
    assert training.away_bytes() > 0
    copy = kernel(x)
    assert left_inside == [0]
    copy = copy + 1  # an operator after the kernel
    assert short() > 0
    assert torch.equal(copy, torch.full((ROWS, 8), 2.0))
    loss.backward()
