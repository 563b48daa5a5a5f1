"""Compares the tapes of Megatron-Core's layers on this rank with the reference tapes, for every layout.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.tape_worker FOLDER LAYOUTS`. `LAYOUTS`: name -> a
layout of tests.support.megatron_worker. `FOLDER/RANK.json` gets name -> for each forward of a layer {"operators": their
names in order, "drawing": the names of those that draw random numbers, "opaque": the reasons, as bits}, or instead the
text of the first difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memplug.tokenwise.engine import core as native
from memplug.tokenwise.engine.tape import records_of
from tests.support.compared_tapes import compare_layers
from tests.support.megatron_worker import SEQUENCES, SHAPE, TOKENS, prepare


def run(core: Any, layout: dict[str, Any]) -> list[dict[str, Any]] | str:
    """Run one forward of a new model, and return the results of its layers."""
    import model as recipe

    fields = {"tensor", "sequence", "expert", "dispatcher"} & set(layout)
    parallel = recipe.Parallel(**{field: layout[field] for field in fields})
    recipe.initialize(parallel, seed=0)
    experts = {"num_local_experts": layout["experts"], "num_experts_per_tok": 2} if "experts" in layout else {}
    shape = {**SHAPE, **experts, "num_hidden_layers": 2}
    config = recipe.transformer_config(shape, parallel, torch.float32, **layout.get("fields", {}))
    (chunk,) = recipe.build_chunks(config, shape, TOKENS, False)
    generator = torch.Generator().manual_seed(dist.get_rank() if parallel.tensor == 1 else 0)
    tokens = torch.randint(0, SHAPE["vocab_size"], (SEQUENCES, TOKENS), generator=generator)
    positions = torch.arange(TOKENS)[None].expand(SEQUENCES, -1)

    def forward() -> None:
        chunk(tokens, positions, None, labels=tokens)

    forward()  # the first forward makes buffers that later ones write to
    try:
        tapes = compare_layers(core, chunk.module.decoder.layers, forward)
    except AssertionError as difference:
        return str(difference)
    found = []
    for tape in tapes:
        drawing = [record.func._schema.name for record in records_of(tape) if record.draws]
        names = [record.func._schema.name for record in records_of(tape)]
        found.append({"operators": names, "drawing": drawing, "opaque": tape.opaque})
    return found


def main() -> None:
    """Run all layouts on this rank."""
    prepare()
    from megatron.core import parallel_state

    folder, layouts = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    core, results = native.core(), {}
    for name, layout in layouts.items():
        results[name] = run(core, layout)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
