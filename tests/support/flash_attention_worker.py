"""Trains a tiny Hugging Face Llama with flash-attn, with memplug and without, and writes `FOLDER/results.pt`.

`python -m tests.support.flash_attention_worker FOLDER CASES [--installed]` uses the stand-ins of flash-attn, or
flash-attn itself on a GPU, in bfloat16. `CASES`: a JSON object, name -> {"implementation": of attention, "batch":
"whole", "padded", "packed" (sequences in a row, separated by position_ids) or "lengths" ("packed", and the sequences'
starts too, as a collator passes them), "memplug": a block, or null}.

The results of each case: {"losses", "gradients": a digest of each step's gradients, "functions": counts of each
Function's forwards in the last step (for flash-attn itself, see tests/support/attention_kernels.py), "report"}.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import memplug
from tests.support import attention_kernels, stand_in
from tests.support.digests import digest

if "--installed" in sys.argv:
    calls = attention_kernels.Calls()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
else:
    stand_in.use()
    stand_in.let_transformers_use_flash_attention()
    from stand_in_kernels import calls

LAYERS, TOKENS, WORDS, STEPS = 3, 24, 64, 14
PACKED = [[10, 14], [5, 12, 7]]  # tokens of each sequence; the steps take the two lists in turn


def llama(implementation: str) -> transformers.LlamaForCausalLM:
    """Return a Llama with grouped queries, and the same weights at every call."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**shape, **heads, attn_implementation=implementation)
    ).train()


def batch(kind: str, step: int) -> dict[str, Any]:
    """Return the arguments of the model's forward."""
    if kind in ("whole", "padded"):
        tokens = torch.randint(0, WORDS, (2, TOKENS))
        mask = torch.ones_like(tokens)
        mask[1, -7:] = 0
        return {"input_ids": tokens, "labels": tokens, **({"attention_mask": mask} if kind == "padded" else {})}
    lengths = PACKED[step % len(PACKED)]
    tokens = torch.randint(0, WORDS, (1, sum(lengths)))
    given = {"input_ids": tokens, "labels": tokens, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if kind == "lengths":
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        given |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), starts)
        given |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    return given


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case and return its results."""
    model = llama(case["implementation"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    block = case.get("memplug")
    attached = memplug.attach(model, block) if block is not None else contextlib.nullcontext()
    found: dict[str, Any] = {"losses": [], "gradients": [], "report": None}
    with attached as session:
        for step in range(STEPS):
            if step == STEPS - 1:
                calls.clear()
            torch.manual_seed(step)
            loss = model(**batch(case["batch"], step), use_cache=False).loss
            loss.backward()
            found["losses"].append(loss.item())
            found["gradients"].append(digest(model))
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
        found["functions"] = dict(calls.functions)
        if session is not None:
            found["report"] = session.report().as_dict()
    return found


if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.save({name: trained(case) for name, case in cases.items()}, folder / "results.pt")
