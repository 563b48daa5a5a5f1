"""Train a tiny Llama with DeepSpeed on this rank, once for every case, and write the results to a file per rank.

Started by a launcher: `torchrun --nproc-per-node 2 -m tests.support.training_worker FOLDER CASES`. `CASES` is a JSON
object: name -> {"stage": ZeRO's stage, "memplug": the block or null}. These optional keys have a list with an entry for
each rank:

* "host_budget_gib", "device_budget_gib": a number;
* "lengths": the length of the sequences in each micro-batch; by default 12 in 5 micro-batches;
* "operators": a number for each micro-batch; a stand-in for the recorder then reports 100 operators of this number.

Other optional keys:

* "fields": further fields of the DeepSpeed configuration;
* "layers": the number of layers;
* "schedules": on simulated CUDA, a policy and a seed for each micro-batch;
* "ways": a list of "by alpha" (the plans to try certainly differ) and "keeps nothing" (a plan keeps no output on the
  device).

`FOLDER/RANK.json` gets name -> {"losses", "gathered": parameters that are whole after training, "digest": of the
optimizer's state, "violations": how often the simulator saw a wrong order, "report" and "history": memplug's, "stages":
memplug's stage after each micro-batch, "served": how many requests the arena served, by micro-batch}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

STEPS = 5


def run_case(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Run a case in the ways that it names."""
    from tests.support.stepping import solve_by_alpha

    ways = {
        "by alpha": mock.patch("memplug.tokenwise.candidates._solve_around", solve_by_alpha),
        "keeps nothing": mock.patch("memplug.tokenwise.budgets.DeviceBudget.room_bytes", lambda *args: 0),
    }
    with contextlib.ExitStack() as stack:
        for way in case.get("ways", []):
            stack.enter_context(ways[way])
        if "schedules" not in case:
            return run_engine(case, rank)
        from tests.cudasim import device

        before = device.violations()
        return {**run_engine(case, rank), "violations": device.violations() - before}


def run_engine(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train with the case's stage and block; memplug attaches through `memplug.install`."""
    import memplug
    from memplug.errors import BudgetError
    from tests.support.hosts import ds_config, make_engine, tiny_llama
    from tests.support.stepping import Played, played

    # cases share a folder, and must not resume from each other
    block = case["memplug"] and {"plan_dir": False, **case["memplug"]}
    for name in ("host_budget_gib", "device_budget_gib"):
        if name in case:
            block = {**block, name: case[name][rank]}
    recorder = Played()
    operators = case["operators"][rank] if "operators" in case else None
    with contextlib.nullcontext() if operators is None else played(recorder):
        memplug.install()
        config = ds_config(case["stage"], block, **case.get("fields", {}))
        engine = make_engine(config, tiny_llama(case.get("layers", 3)))
        memplug.uninstall()
        session = memplug.attach(engine)
        lengths = case["lengths"][rank] if "lengths" in case else [12] * STEPS
        try:
            losses, stages, served = train(engine, session, lengths, operators, recorder, rank, case.get("schedules"))
        except BudgetError as error:
            session.detach()
            return {"refused": str(error), "stage": session.stage.value}
    result = {
        "losses": losses,
        "gathered": [name for name, parameter in engine.module.named_parameters() if parameter.numel()],
        "digest": digest(engine.optimizer),
        "report": session.report().as_dict(),
        "history": [(step, stage.value, index) for step, stage, index, _ in getattr(session, "history", [])],
        "stages": stages,
        "served": served,
    }
    session.detach()  # frees this process's recorder for the next case's session
    return result


def train(
    engine: Any,
    session: Any,
    lengths: list[int],
    operators: list[int] | None,
    recorder: Any,
    rank: int,
    schedules: list[tuple[str, int]] | None = None,
) -> tuple[list[float], list[str], list[int]]:
    """Train, and return for each micro-batch its loss, the stage after it, and how many requests the arena served."""
    from tests.support.hosts import tokens

    losses, stages, served, schedule = [], [], [], contextlib.ExitStack()
    for step, length in enumerate(lengths):
        if schedules and (step == 0 or schedules[step] != schedules[step - 1]):
            from tests.cudasim import device

            schedule.close()
            schedule.enter_context(device.scheduled(device.Schedule(*schedules[step])))
        x = tokens(rank * 1000 + step, length=length).to(engine.device)
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        recorder.ran += [] if operators is None else [operators[step]] * 100
        engine.step()
        losses.append(loss.detach())
        stages.append(session.stage.value)
        serving = session._attached.boundary.followers.find("arena") if hasattr(session, "_attached") else None
        served.append(serving.step.from_arena if serving is not None else 0)
    losses = [loss.item() for loss in losses]
    schedule.close()
    return losses, stages, served


def digest(optimizer: Any) -> str:
    """Return a digest of this rank's parameters and moments, to the bit."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    total = hashlib.sha256()
    for parameter, moments in optimizer.state.items():
        for value in (parameter, *moments.values()):
            total.update(bytes(value.detach().cpu().float().numpy()))
    return total.hexdigest()


def main() -> None:
    """Join the other ranks and run all cases."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    import deepspeed
    import torch
    import torch.distributed as dist

    # DeepSpeed would first compile a shared-memory all-reduce, which takes half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    on_cuda = os.environ.get("DS_ACCELERATOR") == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl" if on_cuda else "gloo")
    rank = int(os.environ["RANK"])
    results = {name: run_case(case, rank) for name, case in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
