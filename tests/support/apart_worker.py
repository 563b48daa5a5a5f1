"""Train a model, with memplug and without, on ranks, some of which do not train or take fewer steps.

Started by a launcher: `torchrun --nproc-per-node 3 -m tests.support.apart_worker FOLDER CASE`. `CASE` is a JSON object:

* "kind": a function of this file;
* "block": the "memplug" block;
* "timeout_s": the timeout of the default group;
* "limit_s": how long a rank waits for others at the end of a step, in place of memplug's own limit;
* "patience_s": how long a rank waits before it warns, in place of memplug's own limit;
* "backend": the groups' backend, gloo by default; with NCCL the ranks train on the device.

`FOLDER/RANK.json` gets the function's result, with memplug's "warnings".
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import gc
import hashlib
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from tests.support.turns import kinds_of

Case = dict[str, Any]
BATCHES = 9  # number of rank 0's batches in an epoch
MORE = 3  # by how many batches each rank exceeds the rank before it


def device(case: Case) -> torch.device:
    return torch.device("cuda", dist.get_rank()) if case.get("backend") == "nccl" else torch.device("cpu")


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    return nn.Sequential(*layers).to(device(case))


def wrapped(case: Case, group: dist.ProcessGroup | None = None, model: nn.Module | None = None) -> nn.Module:
    """Wrap a model, by default a new one, in DistributedDataParallel.

    On simulated CUDA a Python hook reduces the gradients: the reducer's own hook needs futures, which the stand-in of
    NCCL lacks.
    """
    model = DistributedDataParallel(model_of(case) if model is None else model, process_group=group)

    def reduce(group, bucket):  # untyped: torch compares annotations with types, and here they would be text
        total = bucket.buffer()
        dist.all_reduce(total, group=group)
        done = torch.futures.Future(devices=[total.device])
        done.set_result(total.div_(dist.get_world_size(group)))
        return done

    if case.get("backend") == "nccl":
        model.register_comm_hook(group, reduce)
    return model


class Training:
    """One model in training, with memplug if a block is given."""

    def __init__(self, case: Case, model: nn.Module, block: dict[str, Any] | None, **attaching: Any):
        import memplug

        self.model, self.losses, self.device = model, [], device(case)
        self.longest_s = 0.0  # the longest that a step's end has taken so far
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = {"enabled": False} if block is None else {"enabled": True, "plan_dir": False, **block}
        if block is not None:
            regions = [name for name, _ in model.named_modules() if name.removeprefix("module.") in "012" and name]
            config["tokenwise"] = {"regions": regions, "min_offload_bytes": 256, **config.get("tokenwise", {})}
        self.session = memplug.attach(model, config, **attaching)

    @property
    def regions(self) -> list[Any]:
        attached = getattr(self.session, "_attached", None)
        return attached.regions if attached is not None else []

    def step(self, rows: int = 4) -> None:
        batch = torch.Generator().manual_seed(1000 * dist.get_rank() + len(self.losses))
        loss = self.model(torch.randn(rows, 32, generator=batch).to(self.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        began = time.monotonic()
        self.session.step()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.losses.append(loss.detach())

    def result(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        report = self.session.report().as_dict()
        return {
            "losses": [loss.item() for loss in self.losses],
            "digest": digest.hexdigest(),
            "longest_s": self.longest_s,
            "stage": report["stage"],
            "stopped": report.get("planning_stopped_because"),
            "planned_steps": report.get("planned_steps"),
            "replans": report.get("replans"),
            "offloaded": report.get("offloaded_bytes"),
            "settings": [repr((region.is_plain, region.setting.rows)) for region in self.regions],
        }


def twice(case: Case, make: Callable[[dict[str, Any] | None], Training], train: Callable[[Training], None]) -> Case:
    """Train without memplug, then with it."""
    found = {}
    for name, block in {"without": None, "with": case["block"]}.items():
        training = make(block)
        with training.session:
            train(training)
            found[name] = training.result()
    return found


# -- kinds -------------------------------------------------------------------------------------------------------------


def join(case: Case) -> Case:
    """Train in `DistributedDataParallel.join`, each rank with more batches than the one before it.

    If the case is "even", all ranks have the same number of batches. If "late", the model is wrapped after memplug was
    attached to it.
    """

    def make(block: dict[str, Any] | None) -> Training:
        if not case.get("late"):
            return Training(case, wrapped(case), block)
        training = Training(case, model_of(case), block)
        training.model = wrapped(case, model=training.model)
        return training

    def train(training: Training) -> None:
        more = 0 if case.get("even") else MORE * dist.get_rank()
        for _ in range(case["epochs"]):
            with training.model.join():
                for _ in range(BATCHES + more):
                    training.step()

    return twice(case, make, train)


def uneven(case: Case) -> Case:
    """Train a separate model on each rank, with more batches than the rank before; all ranks wait at the end."""

    def train(training: Training) -> None:
        for _ in range(BATCHES + MORE * dist.get_rank()):
            training.step()
        dist.barrier()

    return twice(case, lambda block: Training(case, model_of(case), block), train)


def late(case: Case) -> Case:
    """Keep the first rank busy in one step for longer than the others wait, then let it go on."""

    def train(training: Training) -> None:
        for step in range(BATCHES):
            if step == case["step"] and dist.get_rank() == 0:
                time.sleep(2 * case["limit_s"])
            training.step()
        dist.barrier()

    return twice(case, lambda block: Training(case, model_of(case), block), train)


def leaves(case: Case) -> Case:
    """Detach the last rank before the others; then all ranks attach again."""
    model, last = model_of(case), dist.get_rank() == dist.get_world_size() - 1
    training = Training(case, model, case["block"])
    for _ in range(BATCHES - (2 if last else 0)):
        training.step()
    first = training.result()
    training.session.detach()
    again = Training(case, model, case["block"])
    for _ in range(BATCHES):
        again.step()
    return {"first": first, "again": again.result()}


def dies(case: Case) -> Case:
    """End the last rank's process between two steps."""
    training = Training(case, model_of(case), case["block"])
    began = time.monotonic()
    for step in range(BATCHES):
        if step == case["step"] and dist.get_rank() == dist.get_world_size() - 1:
            os._exit(0)
        training.step()
    return {**training.result(), "seconds": time.monotonic() - began}


def turns(case: Case) -> Case:
    """Train on batches of kinds that take turns, by this rank's entry in "patterns"; see also `storeless` ("talks")."""
    model = nn.Sequential(*map(Talking, model_of(case))) if case["talks"] else None
    start = {name: value.clone() for name, value in model.state_dict().items()} if model is not None else {}
    own: dict[str, list[tuple[bool, float]]] = collections.defaultdict(list)
    found: Case = {}

    def make(block: dict[str, Any] | None) -> Training:
        if model is not None:
            model.load_state_dict(start)
        return Training(case, wrapped(case) if model is None else model, block)

    def train(training: Training) -> None:
        attached = getattr(training.session, "_attached", None)
        for kind in itertools.islice(kinds_of(case["patterns"][dist.get_rank()], seed=3), case["steps"]):
            training.step({"A": 4, "B": 6, "C": 9}[kind])
            if attached is not None:
                step = attached.boundary.followers.find("arena").step
                asked = step.from_arena + step.fallback
                own[kind].append(step.from_arena / asked if asked else 0.0)
        if attached is not None:
            report = training.session.report()
            found["history"] = [(step, stage.value, index) for step, stage, index, _ in training.session.history]
            found["programs"], found["served"] = report.programs, own

    return {**twice(case, make, train), **found}


class Talking(nn.Module):
    """A layer whose output is summed over all ranks."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.layer(hidden))


def storeless(case: Case) -> Case:
    """Kill the process that holds torch's store after some steps; if the case "talks", layers communicate."""
    from memplug.errors import MemplugError

    model = model_of(case)
    if case["talks"]:
        model = nn.Sequential(*map(Talking, model))
    training = Training(case, model, case["block"])
    error = None
    for step in range(BATCHES):
        if step == case["step"]:
            time.sleep(0.5)  # until all ranks have read the last votes
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(case["host"], signal.SIGKILL)
        try:
            training.step()
        except MemplugError as found:
            error = str(found)
            break
    return {**training.result(), "error": error, "together": all_reduce(torch.ones(1)).item()}


def host_store() -> int | None:
    """Start the process that holds torch's store, as torchrun does, and return its process id on the first rank."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    if os.environ["RANK"] != "0":
        return None
    process = os.fork()
    if process == 0:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        time.sleep(60)
        os._exit(int(store is None))
    return process


def subset(case: Case) -> Case:
    """Train on some ranks while the others wait for them."""
    group = dist.new_group(case["ranks"]) if case["by"] in ("group", "wrapper") else case["ranks"]
    found = {}
    if dist.get_rank() in case["ranks"]:
        arguments = {} if case["by"] == "wrapper" else {"group": group}

        def make(block: dict[str, Any] | None) -> Training:
            model = wrapped(case, group) if case["by"] == "wrapper" else model_of(case)
            return Training(case, model, block, **({} if block is None else arguments))

        found = twice(case, make, lambda training: [training.step() for _ in range(BATCHES)])
    dist.barrier()
    return found


def roles(case: Case) -> Case:
    """Train each rank alone in a group of its own, one with far fewer steps."""
    training = Training(case, model_of(case), case["block"], group=[dist.get_rank()])
    for _ in range(BATCHES + 20 * dist.get_rank()):
        training.step()
    return training.result()


def alone(case: Case) -> Case:
    """Attach on all ranks without naming a group; all but the first rank attach too late."""
    from memplug.errors import MemplugError

    if dist.get_rank() > 0:
        time.sleep(case["after_s"])
    began = time.monotonic()
    try:
        Training(case, model_of(case), case["block"]).session.detach()
    except MemplugError as error:
        seconds = time.monotonic() - began
        time.sleep(case["after_s"] if dist.get_rank() == 0 else 0)  # the other ranks need the first rank's store
        return {"error": str(error), "seconds": seconds}
    return {"error": None}


def outsider(case: Case) -> Case:
    """Attach on every rank with a group that does not contain the last rank."""
    from memplug.errors import MemplugError

    group = dist.new_group([0])
    try:
        Training(case, model_of(case), case["block"], group=group).session.detach()
    except MemplugError as error:
        return {"error": str(error)}
    return {"error": None}


# -- running -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect memplug's warnings inside the `with`."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("memplug")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def main() -> None:
    """Run the case and write its results."""
    case = json.loads(sys.argv[2])
    if case.get("backend") == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if case["kind"] == "storeless":
        case["host"] = host_store()
    dist.init_process_group(case.get("backend", "gloo"), timeout=datetime.timedelta(seconds=case.get("timeout_s", 60)))
    waits = {"limit_s": "memplug.session.ranks.LIMIT_S", "patience_s": "memplug.session.ballots.PATIENCE_S"}
    with contextlib.ExitStack() as stack:
        for name in waits.keys() & case.keys():
            stack.enter_context(mock.patch(waits[name], case[name]))
        warnings = stack.enter_context(logged())
        found = globals()[case["kind"]](case)
    result = {**found, "warnings": warnings}
    (Path(sys.argv[1]) / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    gc.collect()  # frees wrappers that hold the group: else its threads may abort the process as Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
