"""Runs cases with memplug and without, each in a fork of a process that has imported everything; writes what came of them.

`python -m tests.clients.worker FOLDER NAMES` runs the named cases (a JSON list), several at a time. Under torchrun, each
rank forks in turn with the others. `FOLDER/RANK.json` gets case -> "with" or "without" -> {"losses", "digest", "reports":
one a session, "seconds": of the processor, or "error": a traceback}, and what else the case gives.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TIME_LIMIT_S = 120
AT_ONCE = 2


def import_clients() -> None:
    """All that the cases import, the parts that are imported late included; what is not installed is left out."""
    import importlib

    import torch

    torch.set_num_threads(1)
    late = (
        "memplug.hooks.attach",
        "deepspeed",
        "transformers.models.llama.modeling_llama",
        "transformers.trainer",
        "trl.trainer.sft_trainer",
        "trl.trainer.dpo_trainer",
        "trl.trainer.grpo_trainer",
        "peft",
        "accelerate",
        "lightning.pytorch",
    )
    for name in late:
        try:
            importlib.import_module(name)
        except ImportError:
            logging.getLogger(__name__).info("not installed: %s", name)
    deepspeed = sys.modules["deepspeed"]
    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def run_part(run: Callable[..., Any], memplug: bool) -> dict[str, Any]:
    """One process's part of a case; the sessions that it makes are reported."""
    from memplug.hooks import attach as attach_module
    from tests.clients.parts import digest

    sessions: list[Any] = []
    original = attach_module._attach

    def attach(*args: Any) -> Any:
        sessions.append(original(*args))
        return sessions[-1]

    attach_module._attach = attach
    outcome = run(memplug)
    outcome["digest"] = digest(outcome.pop("model"))
    return {**outcome, "reports": [session.report() for session in sessions]}


def in_fork(run: Callable[..., Any], memplug: bool, folder: Path, group: Callable[[Path], None]) -> int:
    """Starts a part in a fork; returns its process id. `folder/outcome.json` is there when it ends."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.chdir(folder)
        with open("output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        logging.getLogger("memplug").setLevel(logging.INFO)
        logging.getLogger("memplug").addHandler(logging.StreamHandler())
        group(folder)
        outcome = run_part(run, memplug)
        outcome["seconds"] = time.process_time() - STARTED
        status = 0
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    try:
        Path("outcome.json").write_text(json.dumps(outcome))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


STARTED = 0.0


def join_alone(folder: Path) -> None:
    """A group of this process, for DeepSpeed."""
    import torch.distributed as dist

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)


def join_others(folder: Path) -> None:
    """A group of all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder.parent}/rendezvous", rank=rank(), world_size=world())


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def variant(folder: Path, runs: list[Callable[..., Any]], memplug: bool) -> Iterator[int]:
    """Starts the parts of a case one after the other, in the same folder; yields the process id of each."""
    for run in runs:
        for stale in ("outcome.json", "rendezvous"):
            (folder / stale).unlink(missing_ok=True)
        yield in_fork(run, memplug, folder, join_alone if world() == 1 else join_others)


def outcome_of(folder: Path) -> dict[str, Any]:
    """What the last part of a case wrote, with the end of its output where it failed."""
    written = folder / "outcome.json"
    outcome = json.loads(written.read_text()) if written.exists() else {"error": "the process died, or took too long"}
    if "error" in outcome:
        outcome["error"] += "\n" + (folder / "output.txt").read_text(errors="replace")[-4000:]
    return outcome


def run_cases(folder: Path, cases: dict[str, Any], at_once: int) -> dict[str, dict[str, Any]]:
    """Runs all cases in both ways."""
    waiting, running, results = [], {}, {name: {} for name in cases}
    for number, (name, runs) in enumerate(cases.items()):
        for way in ("without", "with"):
            place = folder / f"{number}-{way}" / str(rank())
            place.mkdir(parents=True)
            runs = runs if isinstance(runs, list) else [runs]
            waiting.append((name, way, place, variant(place, runs, way == "with")))
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < at_once:
            _begin(waiting.pop(), running)
        child, _, usage = os.wait4(-1, 0)
        case = running.pop(child)
        name, way, place, _ = case
        results[name][way] = outcome = outcome_of(place)
        outcome["seconds"] = usage.ru_utime + usage.ru_stime
        if "error" not in outcome:
            _begin(case, running)
    return results


def _begin(case: tuple[Any, ...], running: dict[int, Any]) -> None:
    child = next(case[3], None)
    if child is not None:
        running[child] = case


def main() -> None:
    """Runs the named cases."""
    from tests.clients import loops, trainers, wrapped

    folder, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    known = dict([*trainers.cases(), *loops.cases(), *wrapped.cases()])
    import_clients()
    results = run_cases(folder / "runs", {name: known[name] for name in names}, AT_ONCE if world() == 1 else 1)
    results["imports"] = {"seconds": time.process_time()}
    (folder / f"{rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
