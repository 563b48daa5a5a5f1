"""Checks a long run whose steps differ: `python -m tests.bench.stability` (Chameleon, section 7.4).

Trains a tiny Llama for 5,000 steps twice, with memplug and without, and compares every loss. Steps differ in these
ways:

* layers compute in fp16 and the loss scale is dynamic: a step whose gradients overflow skips the optimizer;
* every 200 steps a validation follows;
* gradients are accumulated over four micro-batches, and at the end of each epoch the last micro-batch is smaller;
* for a fifth of the run sequences are longer.

Exits with 1 if a loss is off, or the session's stages are wrong: the session must plan once for each sequence length.

Then measures the time that remembered programs save: steps of four and of two micro-batches take turns, every 20 steps,
in one run whose session remembers programs, and in one whose session forgets a program as soon as another begins.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import memplug
from memplug.session.programs import Programs
from memplug.session.remembered import Remembered
from memplug.session.table import Stage
from tests.bench.table import Row, figures, render, write_rows

BENCH = "stability"
HEADERS = ("step", "stage", "program", "why")
MICRO_BATCHES = 4
STEPS_OF_AN_EPOCH = 70
STEPS_BETWEEN_VALIDATIONS = 200
STEPS_BETWEEN_SCALE_GROWTH = 30
STEPS_OF_A_TURN = 20
BLOCK = {"enabled": True, "tokenwise": {"min_offload_bytes": 1024}}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: how long to run, and where to write."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=5000, help="optimizer steps [5000]")
    add("--tokens", type=int, default=64, help="of a sequence; longer ones have half as many more [64]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


@dataclass
class Log:
    """The results of a run."""

    losses: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    history: list[tuple[int, Stage, int, str]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


class Training:
    """The training, the same in every run: weights, data, and the events of each step."""

    def __init__(self, steps: int, tokens: int):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=STEPS_BETWEEN_SCALE_GROWTH)
        self.steps, self.tokens = steps, tokens
        self.generator = torch.Generator().manual_seed(1)

    def long(self, step: int) -> bool:
        """Return whether the sequences of this step, counted from 1, are the longer ones."""
        return self.steps * 3 // 5 < step <= self.steps * 4 // 5

    def micro_batches(self, step: int) -> int:
        """Return the number of micro-batches of this step."""
        return MICRO_BATCHES

    def train(self, step: int, log: Log) -> None:
        """Run one step of the optimizer, and the validation if one follows it."""
        tokens = self.tokens * 3 // 2 if self.long(step) else self.tokens
        total, count = 0.0, self.micro_batches(step)
        for index in range(count):
            short = index == count - 1 and step % STEPS_OF_AN_EPOCH == 0
            batch = self._batch(1 if short else 2, tokens)
            with torch.autocast("cpu", torch.float16):
                loss = self.model(input_ids=batch, labels=batch).loss / count
            self.scaler.scale(loss).backward()
            total += loss.item()
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        log.skipped += self.scaler.get_scale() < before
        log.losses.append(total)
        if step % STEPS_BETWEEN_VALIDATIONS == 0:
            log.validations.append(self._validate(tokens))

    @torch.no_grad()
    def _validate(self, tokens: int) -> float:
        self.model.eval()
        batch = torch.arange(4 * tokens).reshape(4, tokens) % 64
        loss = self.model(input_ids=batch, labels=batch).loss.item()
        self.model.train()
        return loss

    def _batch(self, sequences: int, tokens: int) -> torch.Tensor:
        first = torch.randint(0, 64, (sequences, 1), generator=self.generator)
        return (first + torch.arange(tokens) * 3) % 64


def run(steps: int, tokens: int, with_memplug: bool) -> Log:
    """Train from the beginning, with memplug or without, and return the log."""
    training, log = Training(steps, tokens), Log()
    session = None
    if with_memplug:
        session = memplug.attach(training.model, BLOCK)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        training.train(step, log)
        if session is not None:
            session.step()
    log.seconds = time.perf_counter() - begin
    if session is not None:
        log.history, log.report = session.history, session.report().as_dict()
        session.detach()
    return log


def only_current(programs: Programs, mask: int, *_: Any, **__: Any) -> Remembered | None:
    """Replace `Programs.agreed` in a session that knows only the current program."""
    current = programs.current
    return current if current is not None and mask >> current.index & 1 else None


def alternate(steps: int, tokens: int, remembering: bool) -> tuple[int, float]:
    """Train with micro-batches whose number changes every 20 steps; return the steps under a plan, and the seconds."""
    training, planned = Training(steps, tokens), 0
    training.micro_batches = lambda step: MICRO_BATCHES // (1 + step // STEPS_OF_A_TURN % 2)
    forgetting = mock.patch.multiple(
        Programs, agreed=only_current, beginning_with=lambda programs, inputs: [], covering=lambda programs, one: one
    )
    with contextlib.nullcontext() if remembering else forgetting, memplug.attach(training.model, BLOCK) as session:
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            planned += session.solution is not None
            training.train(step, Log())
            session.step()
        return planned, time.perf_counter() - begin


def problems(plain: Log, watched: Log) -> list[str]:
    """Return the problems of a run, in words."""
    found = []
    if plain.skipped != watched.skipped or not plain.skipped:
        found.append(f"{watched.skipped} steps skipped the optimizer, {plain.skipped} without memplug")
    largest = largest_difference(plain, watched)
    if largest > 1e-3 * max(plain.losses):
        found.append(f"losses differ by up to {largest:.3g}")
    if watched.report["replans"] != 2:
        found.append(f"{watched.report['replans']} plans were made for two sequence lengths")
    if watched.report["stage"] != "stable":
        found.append(f"the run ended in {watched.report['stage']}")
    return found


def largest_difference(plain: Log, watched: Log) -> float:
    """Return the largest difference of two losses of one step, validations included."""
    pairs = [*zip(plain.losses, watched.losses, strict=True)]
    pairs += zip(plain.validations, watched.validations, strict=True)
    return max(abs(one - other) for one, other in pairs)


def main(argv: list[str] | None = None) -> int:
    """Run, compare and print; return 1 if something is wrong."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    plain, watched = run(args.steps, args.tokens, False), run(args.steps, args.tokens, True)
    print(render(HEADERS, [[str(s), stage.value, str(p), why] for s, stage, p, why in watched.history], left=3))
    case = f"{args.steps} steps of {MICRO_BATCHES} micro-batches"
    measured = {
        "largest_loss_difference": ("1", largest_difference(plain, watched)),
        "skipped_steps": ("1", float(watched.skipped)),
        "programs": ("1", float(watched.report["programs"])),
        "plans": ("1", float(watched.report["replans"])),
        "changes": ("1", float(len(watched.history))),
        "run_s_over_plain": ("1", watched.seconds / plain.seconds),
    }
    turns = max(2, args.steps // 500) * 2 * STEPS_OF_A_TURN
    for way in ("remembering", "forgetting"):
        planned, seconds = alternate(turns, args.tokens, way == "remembering")
        measured[f"share_of_steps_with_a_plan_{way}"] = ("1", planned / turns)
        measured[f"alternating_run_s_{way}"] = ("s", seconds)
    for name, (_, value) in measured.items():
        print(f"{name}: {figures(value)}")
    if args.json:
        write_rows(args.json, [Row(BENCH, case, "memplug", *item, 1) for item in _flat(measured)])
    wrong = problems(plain, watched)
    print("\n".join(wrong) if wrong else f"{case}: losses equal, stages as expected")
    return 1 if wrong else 0


def _flat(measured: dict[str, tuple[str, float]]) -> list[tuple[str, str, float]]:
    return [(name, unit, value) for name, (unit, value) in measured.items()]


if __name__ == "__main__":
    logging.getLogger("memplug").setLevel(logging.ERROR)
    sys.exit(main())
