"""Mixtures whose experts get drawn numbers of tokens: the arena's room, recompute passes, and refused requests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplug
from memplug.errors import EstimateError
from memplug.predict.virtual import VirtualDevice
from memplug.predict.virtual.experts import _counted
from memplug.predict.virtual.routing import Draws, Routing
from tests.support.routed_worker import TOKENS, WORDS, estimated, looped_mixtral


def test_room_is_predicted_only_if_steps_differ() -> None:
    even, uniform, zipf = (estimated(routing) for routing in ("even", "uniform", "zipf"))
    assert even.arena_room_bytes == 0 < even.arena_bytes
    for each in (uniform, zipf):
        assert 0 < each.arena_room_bytes < each.arena_bytes and even.arena_bytes < each.arena_bytes
    assert estimated("uniform").arena_bytes == uniform.arena_bytes, "draws are reproducible"


def test_routing_of_a_trace_varies_around_it_in_every_mode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, ids = looped_mixtral(), torch.randint(0, WORDS, (1, TOKENS))
    with memplug.record_values(model, tmp_path / "values.json"):
        model(input_ids=ids, labels=ids)
    uniform = estimated("uniform")
    for mode in ("keep", "full"):
        found = estimated(None, mode=mode, trace=tmp_path / "values.json")
        assert 0 < found.arena_room_bytes < found.arena_bytes
        if mode == "keep":
            assert found.flops == uniform.flops and found.arena_bytes == pytest.approx(uniform.arena_bytes, rel=0.05)


def test_arenas_memory_before_its_room_grew_does_not_stay_reserved() -> None:
    found = estimated("zipf")
    assert found.arena_reserved_bytes < found.peak_reserved_bytes + found.arena_bytes // 2


def test_recompute_passes_get_the_tokens_of_their_forward() -> None:
    assert estimated("uniform", mode="full").flops == pytest.approx(1.25 * estimated("even").flops, rel=0.1)


def test_dispatcher_gets_the_draws_of_micro_batches_in_their_order(device: VirtualDevice) -> None:
    class Dispatcher:
        drop_and_pad, num_experts, num_local_experts, local_expert_indices = False, 4, 2, [2, 3]
        ep_size, tp_size, tp_rank = 2, 1, 0
        config = SimpleNamespace(moe_router_topk=2)

    class Preprocess(torch.autograd.Function):
        """Count in a backward, as a recompute pass does."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, into: list) -> torch.Tensor:
            ctx.into = into
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            ctx.into.append(run(dispatcher, routing).tolist())
            return gradient, None

    run = _counted(lambda self, routing: None, Draws(Routing.of("uniform")), 2)
    dispatcher, routing = Dispatcher(), torch.empty(64, 4)
    for _ in range(3):
        forwards = [run(dispatcher, routing).tolist() for _ in range(2)]
        assert forwards[0] != forwards[1]
        assert sum(dispatcher.input_splits) == 64 * 2 and len(dispatcher.output_splits) == 2
        assert sum(dispatcher.output_splits) == sum(forwards[1]) == dispatcher.output_splits_tp.sum()
        assert dispatcher.num_global_tokens_per_local_expert.sum(0).tolist() == forwards[1]
        recomputed: list[list[int]] = []
        for _ in range(2):
            Preprocess.apply(torch.ones(1, device="virtual", requires_grad=True), recomputed).backward()
        assert recomputed == forwards


def test_zipf_gives_the_first_expert_parallel_rank_the_most_tokens() -> None:
    counts = Draws(Routing.of("zipf")).counts(4096, 2, 8).reshape(4, 2).sum(1)
    assert counts.argmax() == 0


def test_routing_without_experts_or_beside_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EstimateError, match="has no experts"):
        estimated("uniform", model=lambda: nn.Linear(4, 4))
    with pytest.raises(EstimateError, match="routing of its own"):
        estimated("uniform", trace=tmp_path / "values.json")
    with pytest.raises(EstimateError, match="there is no routing 'zippy'"):
        estimated("zippy")


def test_mixture_under_zero_3_has_a_room_in_mode_memplug_too() -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("transformers.models.mixtral.modeling_mixtral")  # before ZeRO 3 patches torch
    engine = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    found = estimated("zipf", "planned", engine=engine, gpus=2)
    assert 0 < found.arena_room_bytes < found.arena_bytes
