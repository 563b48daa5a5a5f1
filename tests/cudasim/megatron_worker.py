"""`tests.support.megatron_worker` on simulated CUDA: the same trainings, with Megatron-Core's unchanged CUDA code.

It takes the same arguments, but a case is a block and a schedule (policy and seed). `FOLDER/RANK.json` maps each case's
name to {"losses", "digests", "violations", "report"}.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.cudasim import device
from tests.support import megatron_worker


def _on_device(micro_batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tokens in micro_batches:
        yield tokens.cuda()


def main() -> None:
    """Run all cases on this rank."""
    sys.path.insert(0, str(megatron_worker.RECIPE))
    importlib.import_module("model")
    from megatron.core import parallel_state

    torch.compiler.set_stance("force_eager")  # compiled kernels are not simulated
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    folder, layout, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    batches, digest = megatron_worker._micro_batches, megatron_worker._digest
    changed = {
        "_micro_batches": lambda *asked: _on_device(batches(*asked)),
        "_digest": lambda tensors: digest([tensor.cpu() for tensor in tensors]),
    }
    results = {}
    with (
        mock.patch.multiple(megatron_worker, **changed),
        mock.patch.object(torch, "arange", functools.partial(torch.arange, device="cuda")),  # the model's positions
    ):
        for name, (block, schedule) in cases.items():
            before = device.violations()
            with device.scheduled(device.Schedule(*schedule)):
                found = megatron_worker.run(layout, block)
            results[name] = {key: found.get(key) for key in ("losses", "digests", "report")}
            results[name]["violations"] = device.violations() - before
            dist.barrier()
            parallel_state.destroy_model_parallel()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
