"""Records collectives of a process group on tapes, ends it, and counts its threads before, during and after."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed as dist

from memplug.tokenwise.engine.core import core
from tests.support.collective_layers import COLLECTIVES, saving
from tests.support.native_forward import Run


def threads() -> int:
    """Return the number of threads of this process's process groups."""
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")


def main() -> None:
    """Write this rank's thread counts, and the errors of recompute passes without the group, to FOLDER/RANK.json."""
    counts = [threads()]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runs = [Run(core(), lambda of=of: saving(of, dist.group.WORLD)) for of in COLLECTIVES.values()]
    counts.append(threads())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    counts.append(threads())
    errors = []
    for run in runs:
        try:
            run.restored({}, lambda index: None)
        except core().GroupGone as gone:
            errors.append(str(gone).partition(" ")[0])
        except RuntimeError:
            pass  # torch's own error: no group has that name
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps([*counts, *errors]))


if __name__ == "__main__":
    main()
