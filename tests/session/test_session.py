"""One attached model over its steps: its stages, the calls that count as a step, and the steps that plans rest on."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.session.table import Stage
from tests.support.blocks import LAYERS, Block, Layer, Stack, assert_same, gradients, train_stacks, twin
from tests.support.hosts import QUICK, block, ds_config, make_engine, tiny_llama, tokens, train, train_engine

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("keeps_nothing")]


@pytest.mark.cpu("the arena of another device is planned later")
def test_auto_alpha_makes_a_plan_and_logs_one_line_per_stage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memplug")
    model = tiny_llama()
    session = memplug.attach(model, block())
    stages = [session.stage]
    for _ in range(4):
        train(model)
        session.step()
        stages.append(session.stage)
    session.detach()
    assert stages == [Stage.WARM_UP, Stage.GEN_POLICY, Stage.STABLE, Stage.STABLE, Stage.STABLE]
    lines = [record.getMessage() for record in caplog.records if record.name == "memplug"]
    assert [line.split(":")[1].strip() for line in lines] == ["warm-up", "gen-policy", "stable", "stable", "detached"]
    assert "3 regions" in lines[0] and "planned" in lines[2] and "arena: " in lines[3]


def test_only_the_first_rank_logs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "memplug")
    monkeypatch.setattr("memplug.session.ranks.Ranks.first", False)
    memplug.attach(tiny_llama(), block()).detach()
    assert not caplog.records


@pytest.mark.parametrize("alpha", [0, 0.25, 1])
def test_session_with_numeric_alpha_starts_stable_and_times_at_most_1_step(alpha: float) -> None:
    model = tiny_llama()
    with memplug.attach(model, block(alpha=alpha)) as session:
        assert session.stage is Stage.STABLE
        for step in range(4):
            is_timed = alpha > 0 and step == 1
            assert (session._attached.executor.on_timed is not None) is is_timed
            train(model)
            session.step()
        assert session.solution is None
        assert session.report().tokenwise.swapped_fraction == alpha


def test_steps_without_forwards_postpone_the_plan() -> None:
    # as if attached long before training: the first steps run no forward
    model = Stack()
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for _ in range(4):
            session.step()
        assert session.stage is Stage.GEN_POLICY and session.report().replans == 0
        stages = []
        for seed in range(4):
            train_stacks(model, reference, seed)
            session.step()
            stages.append(session.stage)
        assert stages == [Stage.GEN_POLICY, Stage.STABLE, Stage.STABLE, Stage.STABLE], (
            "steps with forwards are another program than steps without"
        )
        train_stacks(model, reference, 3, exact=False)


class Drops(Stack):
    """A stack that skips the layers in `dropped`, as LayerDrop does."""

    dropped: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for index, layer in enumerate(self.layers):
            x = x if index in self.dropped else layer(x)
        return x.square().mean()


def test_region_absent_from_the_observed_step_stays_at_the_safest_setting() -> None:
    model = Drops()
    reference = twin(model)
    tolerant = {**block(regions=LAYERS), "profiler": {**QUICK, "length_tolerance": 1}}  # one layer less is no change
    with memplug.attach(model, tolerant) as session:
        train_stacks(model, reference, 0)
        session.step()
        model.dropped = reference.dropped = frozenset({1})
        train_stacks(model, reference, 1)
        session.step()
        assert session.stage is Stage.STABLE
        assert [region.setting.plan is None for region in session._attached.regions] == [False, True, False, False]
        model.dropped = reference.dropped = frozenset()
        for seed in range(2, 5):
            train_stacks(model, reference, seed, exact=False)
            session.step()
        assert session.report().tokenwise.recomputed_in_full == 0


class Fickle(Block):
    """A layer that runs other operators if `odd` is set."""

    odd = False

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.odd:
            return x + self.down(nn.functional.gelu(self.gate(self.norm2(x)) + 1.0))
        return super().forward(x, scale)


def test_gradients_are_correct_if_a_regions_operators_change_every_step() -> None:
    model = Stack(4, Fickle)
    reference = twin(model)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for seed in range(30):
            for layer in (*model.layers[1:], *reference.layers[1:]):
                layer.odd = seed % 2 == 0
            train_stacks(model, reference, seed, exact=False)
            session.step()
        assert session.stage is Stage.STABLE
        assert len(session.solution.regions) == 2, "the first layer ran other operators than the rest"
        assert session.report().tokenwise.recomputed_in_full == 0


@pytest.mark.parametrize("alpha", [0, 1, "auto"])
def test_tiny_host_budget_is_respected_and_gradients_are_correct(alpha: Any) -> None:
    model = Stack()
    reference = twin(model)
    config = {**block(alpha=alpha, regions=LAYERS), "host_budget_gib": 1e-6}
    with memplug.attach(model, config) as session:
        assert session.report().tokenwise.host_budget_bytes == int(1e-6 * 2**30)
        for seed in range(4):
            train_stacks(model, reference, seed)
            session.step()
        report = session.report().tokenwise
        assert session.stage is Stage.STABLE
        assert max(report.host_peak_bytes, report.host_pool_bytes) <= report.host_budget_bytes
        assert report.host_refusals > 0
        if alpha == "auto":
            assert report.predicted_host_bytes <= report.host_budget_bytes


@pytest.mark.parametrize(("variable", "processes"), [("LOCAL_WORLD_SIZE", 4), ("LOCAL_SIZE", 8), (None, 1)])
def test_processes_of_a_machine_share_its_host_memory(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, processes: int
) -> None:
    # torchrun and DeepSpeed's launcher each set a variable with the number of processes
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    monkeypatch.setattr("memplug.device.device.host_available_bytes", lambda: 80 << 30)
    if variable:
        monkeypatch.setenv(variable, str(processes))
    with memplug.attach(tiny_llama(), block()) as session:
        assert session.report().tokenwise.host_budget_bytes == pytest.approx(0.8 * (80 << 30) / processes)


@pytest.mark.cpu("its engine is on the CPU")
def test_session_counts_optimizer_steps_under_gradient_accumulation(cpu_engine: None) -> None:
    config = ds_config(1, gradient_accumulation_steps=3)
    expected = train_engine(make_engine(config), 4)
    memplug.install()
    engine = make_engine({**config, "memplug": block()})
    session = memplug.attach(engine)
    losses = train_engine(engine, 1)
    assert (session.steps, session.stage) == (1, Stage.GEN_POLICY)
    losses += train_engine(engine, 3, first=3)
    assert (session.steps, session.stage) == (4, Stage.STABLE)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert session.report().tokenwise.forwards == 4 * 3 * 3


@pytest.mark.cpu("its engine is on the CPU")
def test_caller_may_manage_gradient_accumulation(cpu_engine: None) -> None:
    # without `managed_gradient_accumulation`, DeepSpeed knows the boundary only while `step` runs
    engine = make_engine(ds_config(1, block(), managed_gradient_accumulation=False))
    session = memplug.attach(engine)
    for seed in range(6):
        x = tokens(seed)
        engine.backward(engine(input_ids=x, labels=x).loss)
        if seed % 2:
            engine.step()
    assert (session.steps, session.stage) == (3, Stage.STABLE)


@pytest.mark.cpu("its engine is on the CPU")
def test_steps_are_counted_with_plain_backward_calls(cpu_engine: None) -> None:
    # newer DeepSpeed needs no `engine.backward`
    expected = train_engine(make_engine(ds_config(1)), 3)
    engine = make_engine(ds_config(1, block(alpha=1)))
    session = memplug.attach(engine)
    losses = []
    for seed in range(3):
        x = tokens(seed)
        loss = engine(input_ids=x, labels=x).loss
        loss.backward()
        engine.step()
        losses.append(loss.item())
    assert losses == expected
    assert session.steps == 3


def test_class_defined_in_a_function_is_freed_with_its_model() -> None:
    def train() -> list[weakref.ref[Any]]:
        class Own(Layer):
            """A class whose closure refers to the model."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.out(self.inner(x).sigmoid()) * len(model.layers)

        model = Stack(2, Own)
        with memplug.attach(model, block(regions=LAYERS)) as session:
            model(torch.randn(2, 6, 16)).backward()
            session.step()
        return [weakref.ref(model), weakref.ref(Own), weakref.ref(session)]

    left = train()
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_pipeline_engine_marks_its_steps(cpu_engine: None) -> None:
    from deepspeed.pipe import PipelineModule

    def losses(memplug_block: dict[str, Any] | None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        layers = [Block() for _ in range(3)]
        module = PipelineModule(layers, num_stages=1, loss_fn=lambda y, target: (y - target).square().mean())
        engine = make_engine(ds_config(0, memplug_block, gradient_accumulation_steps=2), module)
        session = memplug.attach(engine)
        batches = iter(torch.randn(16, 2, 2, 6, 16, generator=torch.Generator().manual_seed(1)))
        return [engine.train_batch(batches).item() for _ in range(4)], session

    expected, _ = losses(None)
    measured, session = losses(block(alpha="auto", regions=["[0-9]"]))
    assert measured == pytest.approx(expected, rel=1e-5)
    assert (session.steps, session.stage) == (4, Stage.STABLE)
    assert session.report().tokenwise.forwards == 4 * 2 * 3


def test_plan_counts_both_forwards_in_flight_before_one_backward() -> None:
    model = Stack()
    reference = twin(model)
    x, y = torch.randn(2, 2, 6, 16)
    with memplug.attach(model, block(regions=LAYERS)) as session:
        for _ in range(4):
            (model(x) + model(y)).backward()
            (reference(x) + reference(y)).backward()
            assert_same(gradients(model), gradients(reference), exact=False)
            session.step()
        (planned,) = session.solution.regions.values()
        assert sum(group.instances for group in planned.groups) == 2 * 4
