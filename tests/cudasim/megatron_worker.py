"""`tests.support.megatron_worker` on simulated CUDA: the same trainings, with Megatron-Core's unchanged CUDA code.

It takes the same arguments, but a case is a block and a schedule (policy and seed). `FOLDER/RANK.json` maps each case's
name to {"losses", "digests", "violations", "report"}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.cudasim import device
from tests.support import megatron_worker


def main() -> None:
    """Run all cases on this rank."""
    megatron_worker.use_cuda()
    from megatron.core import parallel_state

    dist.init_process_group("nccl")
    folder, layout, cases = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    results = {}
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
