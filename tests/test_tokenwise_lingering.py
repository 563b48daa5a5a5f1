"""Regions whose backward follows at once keep their tensors: their copies out start only when they have to go."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.blocks import Block, Stack, assert_clean, assert_same, gradients, tokenwise, twin
from tests.forwards import WritesAfterUse, WritesInput, WritesOutput, WritesSlices
from tests.simulated import Adversary, adversarial_device

pytestmark = pytest.mark.device


def trained(device: Adversary, alpha: float, block: type[nn.Module] = Block, **settings: int):
    """A stack after one step, whose last layer lingers; its twin, its executor."""
    torch.manual_seed(0)
    model = Stack(4, block)
    reference = twin(model)
    executor = tokenwise(model, alpha, device, **settings)
    step(model, reference, alpha)
    end_step(model)
    assert [region.lingers for region in model.regions][::3] == [False, True]
    return model, reference, executor


def step(model: Stack, reference: Stack, alpha: float, times: int = 1, seed: int = 0) -> None:
    """Backward `times` through one graph of each."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(seed))
    for network in (model, reference):
        loss = network(x)
        for turn in range(times):
            loss.backward(retain_graph=turn < times - 1)
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1) and times == 1)


def end_step(model: Stack) -> None:
    for region in model.regions:
        region.end_step()


@pytest.fixture(params=["late", "early"])
def device(request: pytest.FixtureRequest):
    one = adversarial_device(request.param)
    with one:
        yield one
    one.synchronize()
    assert not one.violations, one.violations


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_nothing_of_the_last_layer_is_copied_any_more(device, alpha):
    model, reference, executor = trained(device, alpha)
    first = executor.transfer.offloads
    step(model, reference, alpha, seed=1)
    assert 0 < executor.transfer.offloads - first < first
    assert_clean(executor)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_a_second_backward_through_the_graph_finds_the_tensors(device, alpha):
    model, reference, executor = trained(device, alpha)
    step(model, reference, alpha, times=2, seed=1)
    assert_clean(executor)


@pytest.mark.parametrize("budget_bytes", [1 << 30, 0])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_a_forward_that_follows_after_all_makes_them_go_or_stay_where_the_host_is_full(device, alpha, budget_bytes):
    model, reference, executor = trained(device, alpha)
    executor.pool.budget_bytes = min(executor.pool.budget_bytes, budget_bytes)
    if not budget_bytes:
        executor.pool.rows.limit_bytes = 0
    first, second = torch.randn(2, 2, 6, 16)
    for network in (model, reference):
        (network(first) + network(second)).backward()
    assert_same(gradients(model), gradients(reference), exact=alpha in (0, 1))
    end_step(model)
    assert not any(region.lingers for region in model.regions)
    assert_clean(executor)


@pytest.mark.parametrize("block", [WritesOutput, WritesAfterUse, WritesSlices, WritesInput])
@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
def test_what_is_written_in_place_after_it_was_captured_is_kept_where_the_host_is_full(device, alpha, block):
    model, reference, executor = trained(device, alpha, block)
    executor.pool.rows.limit_bytes = 0
    for seed in (1, 2):
        step(model, reference, alpha, seed=seed)
    assert_clean(executor)


def test_a_graph_that_is_dropped_leaves_nothing(device):
    model, _, executor = trained(device, 1.0)
    loss = model(torch.randn(2, 6, 16))
    del loss
    assert_clean(executor)
