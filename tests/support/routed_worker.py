"""Find the arena of a looped Mixtral by training it on the CPU, or by an estimate, and write its bytes.

    python -m tests.support.routed_worker cpu FOLDER WAY
    python -m tests.support.routed_worker virtual FOLDER WAY
    python -m tests.support.routed_worker traced FOLDER WAY

`FOLDER/DEVICE.json` is the number of bytes. On the CPU an untrained router routes random tokens, and `values.json` gets
the values of one forward. The estimate draws uniformly, or around that forward's numbers of tokens (`traced`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug

TOKENS, WORDS, STEPS = 512, 512, 30
WAYS = {"kept": {"enabled": False}, "token-wise": {"alpha": 1}, "planned": {"alpha": "auto"}}


def looped_mixtral() -> nn.Module:
    """Return a mixture of four layers whose experts run in a loop."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = MixtralConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **sizes, **experts)
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    return model.train()


def block(way: str) -> dict[str, Any]:
    """Return memplug's block, with the arena, for a key of `WAYS`."""
    fixed = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}, "swap": {"enabled": False}}
    return {**fixed, "tokenwise": WAYS[way]}


def estimated(routing: str | None, way: str = "kept", mode: str = "keep", **options: Any) -> Any:
    """Return the estimate of one mode of the mixture; token-wise, of mode memplug."""

    def inputs() -> dict[str, torch.Tensor]:
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    mode = mode if way == "kept" else "memplug"
    model = options.pop("model", looped_mixtral)
    options.setdefault("make_optimizer", adam if "engine" not in options else None)
    return memplug.estimate(model, inputs, block(way), "h200", [mode], routing=routing, **options)[mode]


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of the training and of the estimate."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def trained(way: str, values: Path) -> int:
    """Return the bytes of the arena after a training on the CPU; write the values of a forward before it."""
    torch.manual_seed(0)
    model, tokens = looped_mixtral(), torch.Generator().manual_seed(1)
    with memplug.record_values(model, values):
        ids = torch.randint(0, WORDS, (1, TOKENS), generator=tokens)
        model(input_ids=ids, labels=ids)
    optimizer = adam(model.parameters())
    with memplug.attach(model, block(way)) as session:
        for _ in range(STEPS):
            ids = torch.randint(0, WORDS, (1, TOKENS), generator=tokens)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
        report = session.report().arena
    assert report.state == "serving" and report.room_bytes > 0, "the sizes of the experts' requests differ"
    return report.bytes


def main() -> None:
    """Write the bytes."""
    device, folder, way = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    values = folder / "values.json"
    if device == "cpu":
        found = trained(way, values)
    elif device == "virtual":
        found = estimated("uniform", way).arena_bytes
    else:
        estimate = estimated(None, way, trace=values)
        assert estimate.arena_room_bytes > 0, "steps differ around the trace"
        found = estimate.arena_bytes
    (folder / f"{device}.json").write_text(json.dumps(found))
