"""Measures the host's time under a swap list: `python -m tests.bench.under_a_list`.

One process of one thread trains 16 Hugging Face Llama layers of hidden size 64 on 128 tokens. Turns under a list, with
69 % of a step's memory, alternate with turns that have space for everything. Times are processor time: the median of a
turn's steps, and the median ratio of the turns. Each session begins with the plan of an earlier session. Steps under a
list are measured once the native core recognises them by their requests.

On the CPU the processor makes the copies, while a device has engines for them. So the same number of copies of the mean
size is timed alone, between buffers too large for a core's cache.

| row | what it is |
|---|---|
| none | space for everything |
| list | tensors leave and return |
| less copies | `list`, less the time of the list's copies alone |
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import memplug
from tests.bench import modes
from tests.bench.host_training import Training, call, fields_of
from tests.bench.table import Row, figures, render, write_rows
from tests.support.swapped import GIB, block

BENCH = "under_a_list"
LAYERS, HIDDEN, TOKENS = 16, 64, 128
SHARE = 0.69  # of a step's memory, for a list of some 100 tensors
WARM_UP = 16  # steps until there is a plan; a session that begins with a plan recognises steps after half as many
CACHE_BYTES = 32 << 20  # more than the cache of a core
PARTS = ("forward", "backward", "step")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: how long to measure."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--layers", type=int, default=LAYERS, help=f"[{LAYERS}]")
    add("--steps", type=int, default=30, help="measured in each turn [30]")
    add("--rounds", type=int, default=20, help="turns of each kind [20]")
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


class Turns:
    """One model that trains by turns with and without a list.

    Args:
        layers: Layers of the model.
        folder: Folder for plans.
    """

    def __init__(self, layers: int, folder: Path):
        model = modes.Stack(fields_of(HIDDEN, layers), TOKENS, "cpu").train()
        self._training, self._folder = Training(model, call, None), folder
        self._budget_gib = {"none": 1.0, "list": SHARE * self._peak_bytes() / GIB}
        self.tensors = self.nbytes = 0
        """The list's tensors, and their bytes."""
        for mode in self._budget_gib:
            self.measure(mode, 1)

    def measure(self, mode: str, steps: int) -> dict[str, float]:
        """Return the processor seconds of each part of a step: medians over `steps` steps."""
        session = self._attached(mode)
        for _ in range(WARM_UP):
            self._training.timed_step()
        before = session.report().swap.repeated
        measured = [self._training.timed_step() for _ in range(steps)]
        report = session.report().swap
        if mode == "list":
            followed = report.repeated - before
            assert followed == steps, f"of {steps} steps {followed} were followed: {report.state}"
            self.tensors, self.nbytes = report.tensors, report.planned_bytes
        self._detach()
        return {part: statistics.median(step[part] for step in measured) for part in PARTS}

    def _attached(self, mode: str) -> Any:
        config = block(self._budget_gib[mode], plan_dir=str(self._folder / mode))
        self._training.session = memplug.attach(self._training.model, config)
        return self._training.session

    def _detach(self) -> None:
        self._training.session.detach()
        self._training.session = None

    def _peak_bytes(self) -> int:
        """Return the device memory of a step with space for everything, as recorded."""
        self._training.session = memplug.attach(self._training.model, block(1.0))
        for step in range(5):
            if step == 3:
                self._training.session.record()
            self._training.timed_step()
        peak_bytes = int(self._training.session.trace.live_bytes.max())
        self._detach()
        return peak_bytes


def copies_s(tensors: int, nbytes: int, times: int) -> float:
    """Return the processor seconds of a step's copies, out and in again; the median of `times` runs."""
    beside = np.empty(CACHE_BYTES, np.uint8)
    device, host = (np.ones((tensors, nbytes // tensors), np.uint8) for _ in range(2))
    out, back = list(zip(host, device, strict=True)), list(zip(device, host, strict=True))

    def seconds(copies: list[tuple[np.ndarray, np.ndarray]]) -> float:
        beside.fill(0)
        begin = time.process_time()
        for destination, source in copies:
            np.copyto(destination, source)
        return time.process_time() - begin

    return statistics.median(seconds(out) + seconds(back) for _ in range(times))


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(args.layers, Path(folder))
        measured = [{mode: turns.measure(mode, args.steps) for mode in ("none", "list")} for _ in range(args.rounds)]
    alone_s = copies_s(turns.tensors, turns.nbytes, args.steps)
    print(f"{turns.tensors} tensors, {turns.nbytes} bytes; their copies alone: {figures(alone_s * 1e3, 3)} ms")
    for turn in measured:
        turn["less copies"] = {**turn["list"], "step": turn["list"]["step"] - alone_s}
    case = f"{args.layers} layers, hidden {HIDDEN}, {TOKENS} tokens"
    rows = [Row(BENCH, case, "copies alone", "step_s", "s", alone_s, args.steps)]
    lines = []
    for mode in ("none", "list", "less copies"):
        cells, ratios = [], []
        for part in PARTS if mode != "less copies" else ("step",):  # the list decides how many copies each part has
            own = statistics.median(turn[mode][part] for turn in measured)
            over = statistics.median(turn[mode][part] / turn["none"][part] for turn in measured)
            rows.append(Row(BENCH, case, mode, f"{part}_s", "s", own, args.rounds))
            rows.append(Row(BENCH, case, mode, f"{part}_over_none", "1", over, args.rounds))
            cells.append(figures(own * 1e3, 3))
            ratios.append(f"{over:.3f}")
        missing = ["-"] * (len(PARTS) - len(cells))
        lines.append([mode, *missing, *cells, *missing, *ratios])
    headers = ["mode", *(f"{part} ms" for part in PARTS), *(f"{part} over none" for part in PARTS)]
    print(render(headers, lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("memplug").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    main()
