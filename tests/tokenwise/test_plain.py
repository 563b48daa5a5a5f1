"""Plain regions run as without memplug; regions are plain exactly while the device has room for all they save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import memplug
from memplug.session.boundary import WATCHED_STEPS
from memplug.session.table import Stage
from memplug.tokenwise import candidates
from memplug.tokenwise.plan import plain
from memplug.tokenwise.plan import solver as plan
from memplug.tokenwise.predictions import TOLERANCE
from tests.support.blocks import LAYERS, Block, Layer, Stack, assert_same, gradients, twin
from tests.support.plans import BUDGET, REGION

pytestmark = pytest.mark.device


def test_plan_that_keeps_everything_has_the_step_time_without_memplug() -> None:
    solution = plain.solve([REGION], BUDGET)
    assert solution is not None and solution.step_s == 4 * 3.0
    assert (solution.host_bytes, solution.device_bytes) == (0, 400)


def test_plain_plan_needs_room_for_every_byte_and_known_saved_bytes() -> None:
    assert plain.solve([REGION], replace(BUDGET, device_bytes=399)) is None
    assert plain.solve([REGION, replace(REGION, key="other", saved_bytes=0)], BUDGET) is None


@pytest.mark.parametrize(("room", "plain_instances"), [(399, 3), (200, 2), (100, 1)])
def test_last_layers_are_plain_while_the_device_has_room(room: int, plain_instances: int) -> None:
    solution = plain.solve_partly([REGION], replace(BUDGET, device_bytes=room))
    assert solution is not None and not plain.is_plain(solution)
    *others, last = solution.regions["layer"].groups
    assert last.plain and last.instances == plain_instances and not any(group.plain for group in others)
    assert sum(group.instances for group in others) == 4 - plain_instances
    assert 100 * plain_instances <= solution.device_bytes <= room
    assert solution.host_bytes >= 10 * (4 - plain_instances), "only the inputs of the other instances are offloaded"


def test_same_share_of_each_kind_of_layer_runs_as_without_memplug() -> None:
    other = replace(REGION, key="other", instances=8, saved_bytes=50)
    solution = plain.solve_partly([REGION, other], replace(BUDGET, device_bytes=400))
    assert solution is not None
    assert [region.groups[-1].instances for region in solution.regions.values()] == [2, 4]


def test_partly_plain_plan_needs_some_room_and_known_saved_bytes() -> None:
    assert plain.solve_partly([REGION], replace(BUDGET, device_bytes=99)) is None
    assert plain.solve_partly([REGION, replace(REGION, key="other", saved_bytes=0)], BUDGET) is None


class Training:
    """A model with a session, and its twin without one."""

    def __init__(self, layer: type[Layer] | Any = Block, layers: int = 4, **block: Any):
        torch.manual_seed(0)
        self.model = Stack(layers, layer)
        self.reference = twin(self.model)
        config = {"tokenwise": {"regions": LAYERS, "min_offload_bytes": 1}, "profiler": {"policy_steps": 1}, **block}
        config |= {"enabled": True, "plan_dir": False, "arena": {"enabled": False}}
        self.session = memplug.attach(self.model, config)

    def step(self, tokens: int = 6) -> int:
        """Run one step, compare gradients with the twin's, and return how many region forwards memplug ran."""
        before = self.session._attached.executor.flow.forwards
        x = torch.randn(2, tokens, 16)
        self.model(x).backward()
        self.reference(x).backward()
        assert_same(gradients(self.model), gradients(self.reference))
        self.session.step()
        return self.session._attached.executor.flow.forwards - before

    def reach_stable(self) -> None:
        for _ in range(20):
            if self.session.stage is Stage.STABLE:
                break
            self.step()
        assert self.session.stage is Stage.STABLE


def test_all_regions_are_plain_if_the_device_has_room() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        moved = session._attached.executor.transfer.offloaded_total_bytes
        assert session.report().tokenwise.plain_regions == 4
        assert [training.step() for _ in range(3)] == [0, 0, 0]
        assert set(session._attached.agreed.layer_bytes().values()) == {0}
        assert session.stage is Stage.STABLE and session._attached.executor.transfer.offloaded_total_bytes == moved
        assert session.report().tokenwise.predicted_host_bytes == 0 < session.report().tokenwise.predicted_kept_bytes


def test_plain_plan_releases_the_pinned_memory_of_other_plans() -> None:
    training = Training(device_budget_gib=1, profiler={"policy_steps": 3})
    with training.session as session:
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 4 and session._attached.executor.pool.slabs == []


def test_plain_region_runs_the_forward_of_its_own_class() -> None:
    """Expect one exception: the first region of each kind, which checks the size of its inputs."""
    training = Training(device_budget_gib=1)
    with training.session as session:
        assert all(type(layer) is not Block for layer in training.model.layers)
        training.reach_stable()
        first, *others = training.model.layers
        assert type(first) is not Block and all(type(layer) is Block for layer in others)
        assert not any("_memplug_region" in layer.__dict__ or "forward" in layer.__dict__ for layer in others)
        assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in others)
        assert memplug.attach(training.model, session.config) is session
        assert training.step(tokens=18) == 4
        while session.stage is not Stage.STABLE:
            training.step(tokens=18)
        assert type(training.model.layers[3]) is Block
    assert all(type(layer) is Block for layer in training.model.layers)


def test_programs_are_distinguished_while_regions_are_plain() -> None:
    """Plain regions show no operators, so programs differ only in the sizes of the first region's inputs.

    The step's peak is unknown too: CUDA has only counts of the whole process, which include earlier tests.
    """
    training = Training(device_budget_gib=64, profiler={"policy_steps": 1, "enabled": False})
    with training.session as session:
        training.reach_stable()
        for _ in range(3):
            training.step()
        assert session.stage is Stage.STABLE and session.report().programs == 1
        assert session.report().tokenwise.expected_step_bytes == session.report().tokenwise.offloaded_step_bytes == 0
        for _ in range(2):
            training.step(tokens=3)  # shorter inputs fit: no region has to change at once
        assert session.report().programs == 2
        while session.stage is not Stage.STABLE:
            training.step(tokens=3)
        assert [training.step(tokens) for tokens in (6, 6, 3, 6, 6)] == [0] * 5, "each step is known by its inputs"


class Branches(Block):
    """A block with two branches of equally many autograd nodes."""

    tanh = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(24):
            y = y.tanh() if self.tanh else y.sigmoid()
        return y


def freeze(layers: list[Branches]) -> None:
    for layer in layers[:2]:
        layer.requires_grad_(False)


def turn(layers: list[Branches]) -> None:
    for layer in layers:
        layer.tanh = True


@pytest.mark.parametrize(
    ("change", "tokens"), [(freeze, 6), (turn, 6), (lambda layers: None, 9), (lambda layers: None, 3), (None, 6)]
)
def test_changed_step_is_detected_while_regions_are_plain(change: Any, tokens: int) -> None:
    training = Training(Branches, device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        for model in (training.model, training.reference) if change is not None else ():
            change([module for module in model.modules() if isinstance(module, Branches)])
        for _ in range(2 * WATCHED_STEPS):
            training.step(tokens)
        assert session.report().programs == (2 if change is not None else 1)
        assert session.stage is Stage.STABLE


def test_plain_region_with_key_value_cache_keeps_its_subclass() -> None:
    """Use Hugging Face's default key-value cache: each run of a region gets a copy of it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    own = type(model.model.layers[0])
    block = {"enabled": True, "plan_dir": False, "device_budget_gib": 1, "arena": {"enabled": False}}
    for use_cache in (True, False):
        with memplug.attach(model, {**block, "tokenwise": {"min_offload_bytes": 1}}) as session:
            for _ in range(20):
                tokens = torch.arange(6)[None]
                model(input_ids=tokens, labels=tokens, use_cache=use_cache).loss.backward()
                session.step()
            assert session.report().tokenwise.plain_regions == 3
            assert (type(model.model.layers[2]) is own) is not use_cache


def test_module_changed_while_plain_is_not_managed_again(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(device_budget_gib=1)
    with training.session:
        training.reach_stable()
        layer = training.model.layers[2]
        layer.forward = layer.forward
        assert training.step(tokens=18) == 3
        assert "module layers.2 was compiled, or its forward replaced" in caplog.text
    assert type(layer) is Block


def test_class_set_by_a_wrapper_after_attach_is_kept() -> None:
    """Change the class after attaching, as FSDP2's `fully_shard` does."""
    training = Training(device_budget_gib=1)
    with training.session as session:
        layer = training.model.layers[2]
        wrapper = layer.__class__ = type("Wrapper", (type(layer),), {})
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 4 and training.step() == 0
        assert type(layer) is wrapper and type(training.model.layers[3]) is Block


def test_some_regions_are_plain_while_others_follow_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the device room for the saved tensors of half of the regions."""

    def solve(task: candidates.SolveTask) -> list[plan.TokenwisePlan | None]:
        everything = sum((region.instances + region.staying) * region.saved_bytes for region in task.regions)
        return [plain.solve_partly(task.regions, replace(task.budget, device_bytes=everything // 2))] * 2

    monkeypatch.setattr(candidates, "solve", solve)
    monkeypatch.setattr(candidates.plain, "solve", lambda *_: None)
    training = Training(layers=6, device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 3
        assert [type(layer) is Block for layer in training.model.layers] == [False] * 4 + [True] * 2
        moved = session._attached.executor.transfer.offloaded_total_bytes
        assert training.step() == 3
        assert session._attached.executor.transfer.offloaded_total_bytes > moved
        training.step()
        sent, expected = session.report().tokenwise.offloaded_step_bytes, session.report().tokenwise.expected_step_bytes
        assert sent == pytest.approx(expected, rel=TOLERANCE) and sent > 0  # attention's random seeds are not sent
        assert training.step(tokens=18) == 6


def test_partly_plain_plan_is_a_candidate_if_some_regions_fit() -> None:
    own = [REGION], replace(BUDGET, device_bytes=200)
    task = candidates.agree(own, lambda value: [value], most=3)
    found = candidates.choose(task, candidates.solve(task), lambda value: [value])
    assert any(one.regions["layer"].groups[-1].plain for one in found) and not any(map(plain.is_plain, found))


def test_functions_compiled_inside_a_plain_region_run_compiled() -> None:
    compiled_calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        def run(*args: Any) -> Any:
            compiled_calls.append(1)
            return graph(*args)

        return run

    @torch.compile(backend=backend)
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    class Compiles(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(activation(self.inner(x)))

    training = Training(Compiles, device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 4
        before = len(compiled_calls)
        training.step()
        assert len(compiled_calls) - before == 8, "4 calls in the model and 4 in its twin"
    torch.compiler.reset()


def test_longer_sequence_ends_plain_mode_in_the_same_step() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        assert training.step(tokens=18) == 4, "already the first longer step runs under memplug"
        assert training.step(tokens=18) == 4
        assert session.stage is not Stage.STABLE and session.report().tokenwise.plain_regions == 0
        while session.stage is not Stage.STABLE:
            training.step(tokens=18)
        assert session.report().tokenwise.plain_regions == 4 and training.step(tokens=18) == 0


def test_plain_regions_that_communicate_stay_plain_for_longer_inputs() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        training.reach_stable()
        for region in session._attached.regions:
            region.native.communicates = True  # only this rank would run a recompute pass, which communicates
        assert training.step(tokens=18) == 0


def test_every_region_runs_under_memplug_if_the_device_keeps_nothing(keeps_nothing: None) -> None:
    training = Training()
    with training.session as session:
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 0 and training.step() == 4


def test_backward_of_a_graph_from_before_plain_mode_is_exact() -> None:
    training = Training(device_budget_gib=1)
    with training.session as session:
        x = torch.randn(2, 6, 16)
        before, expected = training.model(x), training.reference(x)
        training.model.zero_grad()
        training.reach_stable()
        assert session.report().tokenwise.plain_regions == 4
        before.backward()
        expected.backward()
        assert_same(gradients(training.model), gradients(training.reference))
