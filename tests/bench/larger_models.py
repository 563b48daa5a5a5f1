"""Measures how much larger a model or a batch may be in the same memory: `python -m tests.bench.larger_models`.

After Chameleon, section 7; on the virtual device, so all figures are predicted.

A Llama with head, loss and AdamW trains in bfloat16 on one GPU. Each of its sizes is raised alone until a step runs out
of memory: with all tensors kept, with every layer recomputed, and with memplug. All modes have the settings that help
most when memory is short: expandable segments, and an optimizer that updates one parameter at a time. Then step times
with recomputation and with memplug are compared, at the largest size that fits with recomputation.

| column | what it is |
|---|---|
| keep, full, memplug | the largest value of the size that fits in this mode |
| over keep | the value of memplug over the value of keep |
| s over full | step seconds of memplug over step seconds of full, at the largest value that fits with full |
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memplug
from memplug.errors import BudgetError
from memplug.predict.virtual import GpuProfile, VirtualDevice
from tests.bench.table import Row, figures, render, write_rows
from tests.support.folders import ROOT

BENCH = "larger_models"
GIB = 2**30
MODES = ("keep", "full", "memplug")
STEPS = 16  # for memplug: two are observed, one is recorded, some try plans
HOST_GIB = 2000.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model and its batch."""

    batch: int = 1
    tokens: int = 4096
    layers: int = 16
    hidden: int = 4096


STEPS_OF = {"batch": 1, "tokens": 4096, "layers": 1, "hidden": 128}
"""The least amount by which each size is raised."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of one step."""

    step_s: float
    peak_bytes: int


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which sizes are raised, and on which device."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--hardware", type=Path, default=ROOT / "configs" / "hardware" / "h200.json", help="a profile [h200]")
    add("--memory-gib", type=float, help="memory of the device, instead of the profile's")
    add("--raise", dest="raised", nargs="+", choices=list(STEPS_OF), default=list(STEPS_OF), help="sizes [all]")
    for field in dataclasses.fields(Shape):
        add(
            f"--{field.name}",
            type=int,
            default=field.default,
            help=f"its value while another size is raised [{field.default}]",
        )
    add("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


def train(device: VirtualDevice, shape: Shape, mode: str) -> Result | None:
    """Return the figures of the last of a few steps, or None if one ran out of memory."""
    device.restart()
    try:
        return _train(device, shape, mode)
    except (torch.OutOfMemoryError, BudgetError):
        return None


def _train(device: VirtualDevice, shape: Shape, mode: str) -> Result:
    model = _model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    if mode == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    session = memplug.attach(model, _block()) if mode == "memplug" else None
    ids = torch.zeros(shape.batch, shape.tokens, dtype=torch.long, device="virtual")
    try:
        for _ in range(2 if session is None else STEPS):
            began_s = device.synchronize()
            device.reset_peaks()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session is not None:
                session.step()
            result = Result(device.synchronize() - began_s, device.usage().allocated_peak)
    finally:
        if session is not None:
            session.detach()
    return result


def _block() -> dict[str, Any]:
    return {
        "enabled": True,
        "plan_dir": False,
        "host_budget_gib": HOST_GIB,
        "arena": {"enabled": False},
        "swap": {"enabled": True, "states": True},
        "profiler": {"wait_for_plans": True},
    }


def _model(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11008 // 4096 // 128 * 128,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 128,
        num_key_value_heads=shape.hidden // 128,
        vocab_size=32000,
        max_position_embeddings=shape.tokens,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("virtual"):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def largest(device: VirtualDevice, base: Shape, raised: str, mode: str) -> int:
    """Return the largest value of one size that fits, in multiples of its step; 0: none fits."""
    step = STEPS_OF[raised]

    def fits(count: int) -> bool:
        return train(device, dataclasses.replace(base, **{raised: count * step}), mode) is not None

    low, high = 0, max(1, getattr(base, raised) // step)
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse_args(argv)
    hardware = GpuProfile.read(args.hardware)
    if args.memory_gib is not None:
        hardware = dataclasses.replace(hardware, memory_bytes=args.memory_gib * GIB)
    device = VirtualDevice(hardware, expandable_segments=True)
    base = Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)})
    case = f"{hardware.name}, {hardware.memory_bytes / GIB:.0f} GiB; {base}"
    print(case)
    rows, lines = [], []
    for raised in args.raised:
        most = {mode: largest(device, base, raised, mode) for mode in MODES}
        at = dataclasses.replace(base, **{raised: most["full"]})
        full, ours = (train(device, at, mode) for mode in ("full", "memplug"))
        over_s = ours.step_s / full.step_s if full and ours else None
        over = most["memplug"] / most["keep"] if most["keep"] else None
        rows += [Row(BENCH, case, mode, f"largest {raised}", "1", most[mode], 1) for mode in MODES]
        rows += [Row(BENCH, case, "memplug", f"{raised}: s over full", "1", over_s or 0, 1)]
        lines.append([raised, *(str(most[mode]) for mode in MODES), figures(over, 3), figures(over_s, 3)])
        print(lines[-1], flush=True)
    print(render(["raised", *MODES, "over keep", "s over full"], lines, left=0))
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    logging.getLogger("memplug").setLevel(logging.ERROR)
    main()
