"""A fixed alpha is checked against link and host memory; if it does not fit, memplug warns once and keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memplug
from memplug.device.device import Device
from memplug.session.session import Session
from memplug.sizes import HOST_ROW_BYTES
from memplug.tokenwise import checking
from memplug.tokenwise.budgets import DeviceBudget
from memplug.tokenwise.checking import AlphaCheck, fitting, unhindered_s
from memplug.tokenwise.engine.executor import Executor
from memplug.tokenwise.engine.tape import Form, Record
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin
from tests.support.hosts import block
from tests.support.plans import budget, operator, region
from tests.support.simulated import ScriptedDevice

MATMUL = operator("mm", (0,), (1,), time_s=4.0, size=1000)
ATTENTION = operator("attention", (0,), (2,), time_s=5.0, size=50, capture="whole", always_swapped=True)
RATE = 1e6  # rate of the slow link, bytes per second


# -- which fractions fit -----------------------------------------------------------------------------------------------


def layer(**fields: Any) -> Any:
    return region(MATMUL, ATTENTION, saved={1, 2}, input_bytes=100, instances=4, **fields)


@pytest.mark.parametrize(
    ("d2h", "host", "fractions"),
    [
        (55.0, 3400, (0.4, 0.7)),
        (1000.0, 10**6, (1.0, 1.0)),
        (10.0, 3400, (0.0, 0.7)),
        (55.0, 500, (0.4, 0.0)),
        (55.0, 300, (0.4, 0.0)),
    ],
    ids=["some of both", "everything", "input exceeds link", "host holds only inputs", "host holds less than inputs"],
)
def test_alpha_check_finds_the_largest_fractions_for_link_and_host(
    d2h: float, host: int, fractions: tuple[float, float]
) -> None:
    """Each layer has 150 bytes of input and attention, and 1000 of the matmul.

    At 55 bytes/s a forward's 10 s carry 150 + 400 bytes; 3400 host bytes hold 150 + 700 for each of four layers.
    """
    assert fitting([layer()], budget(d2h=d2h, host=host)) == pytest.approx(fractions)


def test_shortest_forward_and_total_host_bytes_limit_the_fractions() -> None:
    layers = [layer(key="long"), layer(key="short", forward_s=5.0)]
    assert fitting(layers, budget(d2h=55.0, host=3400)) == pytest.approx((0.125, 0.275))


# -- how long a forward takes without waits ----------------------------------------------------------------------------

MM, ADD, ADD_, GATHER = (
    torch.ops.aten.mm.default,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.add_.Tensor,
    torch.ops.c10d._allgather_base_.default,
)


def timed(*entries: tuple[Any, float, float], end: float) -> Any:
    """Return a tape of (operator, begin, end); the forward begins at 0."""
    forms = {MM: Form.PURE, ADD: Form.PURE, ADD_: Form.WRITE, GATHER: Form.EXCHANGE}
    records = [
        Record(func, forms[func], False, False, 0, (), (), (0,) if func is ADD_ else (), (), ()) for func, *_ in entries
    ]
    return SimpleNamespace(records=records, stamps=[stamp for _, *stamp in entries], span=(0.0, end))


def seconds(begin: float, end: float) -> float:
    return end - begin


@pytest.mark.parametrize(
    ("tape", "expected"),
    [
        (timed((ADD, 1, 2), (ADD, 3, 4), (ADD, 5, 6), end=7), 7),
        (timed((ADD, 1, 2), (MM, 3, 4), (ADD, 55, 56), end=57), 7),
        (timed((ADD, 1, 2), (ADD, 3, 4), (ADD_, 55, 56), end=57), 7),
        (timed((ADD, 1, 2), (ADD, 3, 4), (ADD, 5, 6), end=57), 7),
        (timed((ADD, 1, 2), (ADD, 53, 54), (ADD, 55, 56), end=57), 57),
        (timed((GATHER, 1, 2), (ADD, 53, 54), (ADD, 55, 56), end=57), 57),
        (timed((ADD, 3, 4), (MM, 7, 8), (ADD, 8, 9), end=10), 10),
        (timed(end=7), 0),
    ],
    ids=[
        "no wait",
        "after a capture",
        "before a write",
        "at the end",
        "an idle device",
        "an exchange",
        "a shorter gap stays",
        "no operators, so all of it may be a wait",
    ],
)
def test_forward_time_excludes_waits_for_copies(tape: Any, expected: float) -> None:
    assert unhindered_s(tape, seconds) == pytest.approx(expected)


# -- a session ---------------------------------------------------------------------------------------------------------


class SlowLink(ScriptedDevice):
    """A device with its own clock: a stamp takes one tick, and a copy takes its bytes divided by `RATE` in seconds.

    Nothing else runs during a copy.
    """

    def __init__(self) -> None:
        self.tick_s, self.clock_s, self.stamps = 1.0, 0.0, 0

    def stamp(self) -> float:
        self.stamps += 1
        self.clock_s += self.tick_s
        return self.clock_s

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(stream, destination, source)
        self.clock_s += source.nbytes / RATE


TOKENS = 96
# bytes of a block's matmul outputs, without the last one, which backward does not need
ROW_BYTES = 4 * TOKENS * (48 + 16 + 32 + 32)
INPUT_BYTES = 4 * TOKENS * 16
WHOLE_BYTES = 4 * TOKENS * (16 + 16 + 2)  # a block's input, attention's output, and the softmax's sums
HOST_TENSORS = 7


class Run:
    """Trains a stack with memplug and its twin without, and compares their gradients.

    From the second step on, a forward takes exactly as long as its copies at alpha `by_link`.
    """

    def __init__(self, session: Session, model: Stack, reference: Stack, by_link: float):
        self.session, self.model, self.reference, self.by_link = session, model, reference, by_link

    def step(self, times: int = 1) -> dict[str, Any]:
        for _ in range(times):
            x = torch.randn(2, TOKENS // 2, 16, requires_grad=True)
            self.model(x).backward()
            self.reference(x.detach()).backward()
            assert_same(gradients(self.model), gradients(self.reference), exact=False)
            self.session.step()
            tape = self.session._attached.regions[0].native.last
            # the input is copied while the operator that reads it runs, and on this clock nothing else runs during
            # copies
            forward_s = (WHOLE_BYTES + self.by_link * ROW_BYTES - INPUT_BYTES) / RATE
            self.session._attached.device.tick_s = forward_s / (2 * len(tape) + 1)
        return self.session.report().as_dict()


@contextlib.contextmanager
def training(
    monkeypatch: pytest.MonkeyPatch, alpha: float | str, by_link: float, host_bytes: int | None = None
) -> Iterator[Run]:
    """Train a stack of four blocks on the slow link."""
    monkeypatch.setattr("memplug.hooks.attach.device_of", lambda device: SlowLink())
    monkeypatch.setattr("memplug.device.device.Device.link_rates", lambda device: (RATE, RATE))
    torch.manual_seed(0)
    model = Stack(4)
    reference = twin(model)
    host = {} if host_bytes is None else {"host_budget_gib": host_bytes / 2**30}
    config = {**block(regions=LAYERS, alpha=alpha), "arena": {"enabled": False}, **host}
    with memplug.attach(model, config) as session:
        yield Run(session, model, reference, by_link)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "asks for more than fits" in record.getMessage()]


def rows_bytes(alpha: float) -> int:
    """Return the bytes of matmul outputs that one forward offloads."""
    return round(alpha * TOKENS) * ROW_BYTES // TOKENS


def figures(report: dict[str, Any]) -> tuple[Any, Any]:
    return report["alpha_by_link"], report["alpha_by_host"]


def host_bytes_of(session: Session, alpha: float) -> int:
    """Return the host bytes that a step at this alpha needs for the layers that offload."""
    sending = sum(not each.native.offloads_late for each in session._attached.regions)
    return int(sending * (WHOLE_BYTES + alpha * ROW_BYTES + HOST_TENSORS * (HOST_ROW_BYTES - 1)))


def test_alpha_above_the_link_limit_warns_once_and_stays_in_force(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(monkeypatch, alpha=0.9, by_link=0.415) as run:
        assert figures(run.step()) == (None, None) and not warnings(caplog)
        assert figures(run.step()) == (pytest.approx(0.415, abs=1e-3), 1.0)
        report = run.step(times=3)
        assert figures(report) == (pytest.approx(0.415, abs=1e-3), 1.0) and report["swapped_share"] == 1.0
        assert all(each.setting.rows == 0.9 and each.setting.plan is None for each in run.session._attached.regions)
        assert run.session._attached.agreed.layer_bytes() == {
            each.name: 0 if each.native.offloads_late else WHOLE_BYTES + rows_bytes(0.9)
            for each in run.session._attached.regions
        }
    (line,) = warnings(caplog)
    assert "alpha 0.9 asks" in line and "the link hides 0.41 of" in line and "the host budget holds 1.00." in line
    assert "the forward waits for copies. " in line


@pytest.mark.parametrize("alpha", [0.3, 0.42])
def test_alpha_that_fits_gives_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, alpha: float
) -> None:
    with training(monkeypatch, alpha, by_link=0.415) as run:
        assert figures(run.step(times=3)) == (pytest.approx(0.415, abs=1e-3), 1.0)
    assert not warnings(caplog)


def test_alpha_above_the_host_limit_warns_with_the_limit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(monkeypatch, alpha=1.0, by_link=2.0) as run:
        run.step(times=2)
        limit = host_bytes_of(run.session, 0.5)
    with training(monkeypatch, alpha=1.0, by_link=2.0, host_bytes=limit) as run:
        assert figures(run.step(times=3)) == (1.0, pytest.approx(0.5, abs=1 / TOKENS))
        assert run.session.report().tokenwise.host_refusals > 0
    (line,) = warnings(caplog)
    assert "the link hides 1.00 of" in line and "memplug does not change it, so rows without room on the host" in line


def test_host_holds_the_fraction_that_the_alpha_check_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(monkeypatch, alpha=0.5, by_link=2.0) as run:
        run.step(times=2)
        limit = host_bytes_of(run.session, 0.5)
        run.session._attached.executor.pool.rows.peak_bytes = 0
        run.step()
        assert 0.9 * limit < run.session._attached.executor.pool.peak_bytes <= limit


def test_link_and_host_limits_share_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(monkeypatch, alpha=1.0, by_link=0.2, host_bytes=TOKENS * 4 * 16 * 8) as run:
        run.step(times=3)
    (line,) = warnings(caplog)
    assert "the forward waits for copies and rows without room on the host are recomputed. " in line


@pytest.mark.parametrize("alpha", [0, "auto", "memo"])
def test_alpha_0_or_automatic_alpha_is_not_checked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, alpha: float | str
) -> None:
    with training(monkeypatch, alpha, by_link=0.0) as run:
        assert figures(run.step(times=5)) == (None, None)
        assert run.session._attached.executor.on_timed is None
    assert not warnings(caplog)


def test_alpha_check_times_only_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(monkeypatch, alpha=0.5, by_link=1.0) as run:
        stamps = []
        for _ in range(5):
            before = run.session._attached.device.stamps
            run.step()
            stamps.append(run.session._attached.device.stamps - before)
        assert [count > 0 for count in stamps] == [False, True, False, False, False]
        assert run.session._attached.executor.on_timed is None


# -- ranks -------------------------------------------------------------------------------------------------------------


class Ranks:
    """Two ranks: this one, and another that gives a different answer in each call."""

    def __init__(self, *others: Any, first: bool = True):
        self.others, self.first, self.gathered = list(others), first, []

    def gather(self, value: Any) -> list[Any]:
        self.gathered.append(value)
        return [value, self.others.pop(0)]


def checked(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, own: Any, steps: int, alpha: float = 0.5) -> AlphaCheck:
    """Return the check after `steps` steps, in each of which this rank finds the limits `own`."""
    executor = Executor(Device(), 1 << 20, min_offload_bytes=1)
    monkeypatch.setattr(AlphaCheck, "_fitting", lambda self: own)
    check = AlphaCheck(alpha, DeviceBudget(executor.device), [], executor, ranks)
    for _ in range(steps):
        check.end_step()
    return check


def test_alpha_limits_are_the_smallest_of_all_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks((0.3, 0.9))
    check = checked(monkeypatch, ranks, own=(0.8, 0.7), steps=4)
    assert (check.by_link, check.by_host) == (0.3, 0.7)
    assert ranks.gathered == [(0.8, 0.7)], "the check takes one collective"
    (line,) = warnings(caplog)
    assert "hides 0.30 of" in line and "holds 0.70." in line and "rows without room" not in line


def test_only_the_first_rank_warns_about_alpha(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(monkeypatch, Ranks((0.3, 0.9), first=False), own=(0.8, 0.7), steps=4).by_link == 0.3
    assert not warnings(caplog)


def test_alpha_check_times_the_next_step_if_a_rank_ran_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(None, (0.3, 0.9))
    assert checked(monkeypatch, ranks, own=(0.8, 0.7), steps=2).by_link is None
    ranks = Ranks(None, (0.3, 0.9))
    assert checked(monkeypatch, ranks, own=(0.8, 0.7), steps=3).by_link == 0.3


def test_alpha_check_ends_on_all_ranks_if_one_never_runs_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, other in ((None, (0.3, 0.9)), ((0.3, 0.9), None)):
        ranks = Ranks(*[other] * 20)
        check = checked(monkeypatch, ranks, own, steps=20)
        assert (check.by_link, check.by_host) == (None, None)
        assert len(ranks.gathered) == checking.LAST_STEP - 1
        assert check._executor.on_timed is None


def test_step_without_forwards_postpones_the_alpha_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(monkeypatch, alpha=0.5, by_link=1.0) as run:
        run.session.step()
        run.session.step()
        assert figures(run.session.report().as_dict()) == (None, None)
        assert None not in figures(run.step())
