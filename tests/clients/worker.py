"""Run cases with memplug and without, each in forks of a process that has imported everything.

`python -m tests.clients.worker FILE NAMES` runs the named cases (a JSON list), several at a time, and writes JSON to
FILE: for each case and each way, a list with one object per rank. The object has

- "losses" and "steps",
- "digest", of the weights,
- "reports", one per session, with the "history" of the session's stages,
- "told", the lines that memplug logged,
- and whatever else the case returns;
- or, if the case failed, only "error": a traceback and the end of the output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from memplug import native
from memplug.errors import MemplugError
from tests.clients import loops, trainers
from tests.clients.parts import Block, Case, Outcome

TIME_LIMIT_S = 300  # for one process, on a machine that also has other work
AT_ONCE = 2
IMPORTED = (
    "memplug.integrations.transformers",
    "memplug.integrations.lightning",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",  # compiles functions, which takes torch's inductor two seconds
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "peft",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "lightning.pytorch",
)


def known_cases() -> dict[str, Case]:
    """Return all cases, by name."""
    return dict([*trainers.cases(), *loops.cases()])


def import_clients() -> None:
    """Import the modules that the cases use, so that the cases' processes have the modules already.

    Packages that are missing are left out.
    """
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        with contextlib.suppress(ImportError, MemplugError):
            importlib.import_module(name)
    native.load()
    gc.freeze()  # the garbage collector of each process need not scan the imports
    # DeepSpeed would compile a shared-memory all-reduce first, which takes half a minute
    sys.modules["deepspeed"].ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Run:
    """One case in one way: processes that run one part after the other, until a part fails."""

    def __init__(self, folder: Path, case: Case, block: Block | None):
        self.folder, self.case, self.block = folder, case, block
        self._parts = iter(case.parts)
        self._running: set[int] = set()
        for rank in range(case.ranks):
            self._place(rank).mkdir(parents=True)

    def begin(self) -> set[int]:
        """Start the next part, and return its processes; none if all parts are done or a part has failed."""
        written = [self._place(rank) / "outcome.json" for rank in range(self.case.ranks)]
        part = next(self._parts, None)
        if part is None or any("error" in json.loads(file.read_text()) for file in written if file.exists()):
            return set()
        for stale in [*written, self.folder / "rendezvous"]:
            stale.unlink(missing_ok=True)
        self._running = {self._fork(part, rank) for rank in range(self.case.ranks)}
        return set(self._running)

    def ended(self, child: int) -> bool:
        """Note that a process has ended, and return whether it was the last of its part."""
        self._running.discard(child)
        return not self._running

    def outcomes(self) -> list[Outcome]:
        """Return what each rank of the last part wrote."""
        return [self._outcome(self._place(rank)) for rank in range(self.case.ranks)]

    def _place(self, rank: int) -> Path:
        return self.folder / str(rank)

    def _outcome(self, place: Path) -> Outcome:
        written = place / "outcome.json"
        outcome = (
            json.loads(written.read_text()) if written.exists() else {"error": "the process died or took too long"}
        )
        if "error" in outcome:
            outcome["error"] += "\n" + (place / "output.txt").read_text(errors="replace")[-4000:]
        return outcome

    def _fork(self, part: Callable[[Block | None], Outcome], rank: int) -> int:
        return os.fork() or self._child(part, rank)

    def _child(self, part: Callable[[Block | None], Outcome], rank: int) -> NoReturn:
        try:
            os.chdir(self._place(rank))
            with open("output.txt", "a") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            faulthandler.dump_traceback_later(TIME_LIMIT_S, exit=True)
            self._join(rank)
            outcome = run_part(part, self.block)
        except BaseException:
            outcome = {"error": traceback.format_exc()}
        try:
            Path("outcome.json").write_text(json.dumps(outcome))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(0)  # skip the exit handlers of the parent

    def _join(self, rank: int) -> None:
        import torch.distributed as dist

        ranks = self.case.ranks
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        os.environ.update({name: str(value) for name, value in where.items()})
        dist.init_process_group("gloo", f"file://{self.folder}/rendezvous", rank=rank, world_size=ranks)


def run_part(part: Callable[[Block | None], Outcome], block: Block | None) -> Outcome:
    """Train in the process of a part, then look at the weights and at the sessions that were made."""
    from memplug.hooks import attach as attach_module
    from tests.clients.parts import digest

    sessions: list[Any] = []
    original = attach_module._attach

    def attach(*args: Any) -> Any:
        sessions.append(original(*args))
        return sessions[-1]

    attach_module._attach = attach
    with listening() as told:
        outcome = part(block)
        outcome["digest"] = digest(outcome.pop("model"))
        reports = [
            {**one.report().as_dict(), "history": [stage.value for _, stage, _, _ in one.history]} for one in sessions
        ]
        return {**outcome, "reports": reports, "told": told}


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """Yield a list to which each line that memplug logs is appended."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("memplug")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def run_cases(folder: Path, cases: dict[str, Case]) -> dict[str, dict[str, list[Outcome]]]:
    """Run all cases in all their ways."""
    runs = {
        (name, way): Run(folder / f"{number}-{way}", case, block)
        for number, (name, case) in enumerate(cases.items())
        for way, block in case.ways.items()
    }
    waiting, running = list(runs.values()), {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            run = waiting.pop(0)
            running.update(dict.fromkeys(run.begin(), run))
        run = running.pop(child := os.wait()[0])
        if run.ended(child):
            running.update(dict.fromkeys(run.begin(), run))
    results: dict[str, dict[str, list[Outcome]]] = {name: {} for name in cases}
    for (name, way), run in runs.items():
        results[name][way] = run.outcomes()
    return results


def main() -> None:
    """Run the named cases."""
    file, names = Path(sys.argv[1]), json.loads(sys.argv[2])
    known = known_cases()
    import_clients()
    with tempfile.TemporaryDirectory() as folder:
        results = run_cases(Path(folder), {name: known[name] for name in names})
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
