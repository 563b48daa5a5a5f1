"""A tuned JSON trains on two processes like DeepSpeed with the same settings without memplug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memplug.predict.tune.deepspeed import deepspeed_json
from memplug.predict.tune.estimate import Chunk
from memplug.predict.tune.profiled import ProfiledPart
from memplug.predict.tune.search import Configuration, Offload, StepLayout
from memplug.sizes import GIB
from tests.support.forking import launch_forked

pytestmark = [pytest.mark.distributed, pytest.mark.long]
TORCH_ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def chunks() -> list[Chunk]:
    """Return the chunks of the tiny Llama that trains: embedding, layers and head."""
    from tests.support.hosts import tiny_llama

    def part(*modules: torch.nn.Module) -> ProfiledPart:
        parameters = tuple(each.numel() for module in modules for each in module.parameters())
        numbers = dict.fromkeys(ProfiledPart.__dataclass_fields__, 1)
        return ProfiledPart(**{**numbers, "parameters": parameters})

    model = tiny_llama()
    layers = [Chunk((part(layer),), range(index, index + 1)) for index, layer in enumerate(model.model.layers)]
    ends = part(model.model.embed_tokens), part(model.model.norm, model.lm_head)
    return [Chunk(ends[:1], range(0)), *layers, Chunk(ends[1:], range(0))]


def tuned(stage: int, offload: Offload) -> dict[str, Any]:
    """Return a tuned JSON for two ranks; the optimizer is torch's, as DeepSpeed's would have to be compiled."""
    layout = StepLayout(stage=stage, offload=offload, micro_batch=2, accumulation=2)
    at = Configuration(layout=layout, n_persist=0, n_buffer=2, n_swap=1, n_checkpoint=1)
    return deepspeed_json(
        {"optimizer": TORCH_ADAM, "zero_force_ds_cpu_optimizer": False},
        at,
        chunks(),
        gpus=2,
        hidden_size=1,
        device_budget_bytes=GIB,
        host_budget_bytes=GIB,
    )


CASES: dict[str, tuple[int, Offload]] = {
    "ZeRO 2": (2, "none"),
    "ZeRO 3": (3, "none"),
    "ZeRO 3, all on the host": (3, "parameters"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("tuned")
    cases = {}
    for name, (stage, offload) in CASES.items():
        made = tuned(stage, offload)
        block = {**made["memplug"], "plan_dir": False, "profiler": {"wait_for_plans": True}}
        cases[f"{name}: plain"] = {key: value for key, value in made.items() if key != "memplug"}
        cases[f"{name}: tuned"] = {**made, "memplug": block}
        cases[f"{name}: swapped"] = {**made, "memplug": {**block, "tokenwise": {"alpha": 1, "min_offload_bytes": 1}}}
    launch_forked(["tests.support.tune_worker", folder, json.dumps(cases)], module=True, time_limit_s=400)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("way", ["tuned", "swapped"])
@pytest.mark.parametrize("name", CASES)
def test_tuned_training_equals_deepspeed_without_memplug(name: str, way: str, ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        plain, ours = results[f"{name}: plain"], results[f"{name}: {way}"]
        assert ours["losses"] == plain["losses"] and ours["digest"] == plain["digest"]
        assert plain["losses"][-1] < plain["losses"][0]
        assert ours["report"]["regions"] == 3 and (ours["report"]["offloaded_bytes"] > 0 or way == "tuned")
