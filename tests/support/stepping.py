"""A session that a test leads from step to step, with models, a recorder and plans under the test's control."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import memplug
from memplug.profile.recorder import Detail
from memplug.profile.trace import Fingerprint, Layer
from memplug.session.session import Session
from memplug.session.table import Stage
from memplug.tokenwise import candidates
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.plan.decisions import Setting
from tests.support.blocks import LAYERS, Stack, assert_same, gradients, twin
from tests.support.hosts import block

ALPHAS = dict(zip(candidates.LINK_FACTORS, (0.5, 0.25, 1.0, 0.125, 0.75, 0.0), strict=False))


class Played:
    """A recorder of operators that a test names, and that never ran."""

    device = torch.device("cpu")
    suspended = contextlib.nullcontext()
    names = collections.defaultdict(lambda: "played")  # names of operators, by number
    place_hooks = staticmethod(lambda: mock.Mock(layer_hooks=lambda index: 2 * (lambda *forward: None,)))

    def __init__(self) -> None:
        self.recording = False
        self.ran: list[int] = []
        self.nodes = 0
        self.peaks: list[int | None] = []
        self.watches: list[bool] = []
        self.stopped = False

    def take(self) -> np.ndarray | None:
        """Return the operators added since the last call, whether watched or not; None if there were none."""
        taken, self.ran = np.array(self.ran, dtype=np.int32), []
        return taken if len(taken) else None

    def take_nodes(self) -> int:
        """Return the nodes added since the last call."""
        taken, self.nodes = self.nodes, 0
        return taken

    def begin_program(self) -> None:
        """Forget the operators and nodes that were added before."""
        self.take()
        self.take_nodes()

    def watch(self, on: bool) -> None:
        """Record the call."""
        self.watches.append(on)

    def forget(self) -> None:
        """Forget places; there are none."""

    def begin(self, detail: Detail) -> None:
        """Begin a recording; operators that never ran make no requests."""
        self.recording = True

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak that a test set for this recorded step, or None."""
        return self.peaks.pop(0) if self.peaks else None

    def drop(self) -> None:
        """End a recording without a trace."""
        self.recording = False

    def end(self, fingerprint: Fingerprint, layers: Sequence[Layer]) -> None:
        """End a recording; there is no trace."""
        self.recording = False

    def stop(self) -> None:
        """Record the call; nothing runs."""
        self.stopped = True


class Led:
    """Trains a stack and, without memplug, its twin on the same data; the gradients must agree in every step.

    Args:
        session: memplug's session.
        model: the stack that trains with memplug.
    """

    def __init__(self, session: Session, model: Stack, recorder: Played):
        self.session, self.model, self.reference = session, model, twin(model)
        self.recorder = recorder
        self.stages: list[Stage] = []
        self.plans: list[Any] = []  # settings of the regions in each step

    def step(self, length: int = 6, operators: Sequence[int] = (), times: int = 1, exact: bool = False) -> Stage:
        """Train steps that run these operators, on sequences of this length; return the stage after the last step."""
        for _ in range(times):
            self.plans.append(settings(self.session))
            x = torch.randn(2, length, 16, generator=torch.Generator().manual_seed(len(self.stages)))
            losses = [network(x) for network in (self.model, self.reference)]
            assert losses[0].item() == losses[1].item()
            for loss in losses:
                loss.backward()
            assert_same(gradients(self.model), gradients(self.reference), exact)
            self.recorder.ran += operators
            self.session.step()
            self.stages.append(self.session.stage)
        return self.session.stage

    def reach_stable(self, length: int = 6, operators: Sequence[int] = ()) -> None:
        """Train until there is a plan, for 20 steps at most."""
        for _ in range(20):
            if self.step(length, operators) is Stage.STABLE:
                return
        raise AssertionError(f"no plan after 20 steps: {self.session.history}")


@contextlib.contextmanager
def led(layers: int = 3, model: Stack | None = None, **profiler: Any) -> Iterator[Led]:
    """Attach a session to a stack of blocks; by default it plans as soon as it can, and takes the first plan."""
    torch.manual_seed(0)
    model = Stack(layers) if model is None else model
    config = {**block(regions=LAYERS), "profiler": {"warmup_steps": 0, "policy_steps": 0, **profiler}}
    recorder = Played()
    with played(recorder), memplug.attach(model, config) as session:
        yield Led(session, model, recorder)


@contextlib.contextmanager
def played(recorder: Played) -> Iterator[None]:
    """Make sessions that attach within this context use this recorder."""
    with mock.patch("memplug.hooks.attach.Recorder", return_value=recorder):
        yield


def settings(session: Session) -> list[Setting]:
    """Return the regions' settings."""
    return [region.setting for region in session._attached.regions]


def is_safest(session: Session) -> bool:
    """Return whether every region swaps only its input and attention."""
    return settings(session) == [Setting(region.kind) for region in session._attached.regions]


@pytest.fixture
def plans_by_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `solve_by_alpha` solve the plans to choose from."""
    monkeypatch.setattr(candidates, "_solve_around", solve_by_alpha)


def solve_by_alpha(regions: list[plan.PlannedRegion], budget: plan.Budget, factor: float) -> plan.TokenwisePlan:
    """Return a plan that differs for each link factor: it swaps that factor's own fraction of rows (`ALPHAS`)."""
    return plan.solve(regions, budget, ALPHAS[factor])
