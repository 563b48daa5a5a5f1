"""Predicts the recipes with `memplug estimate`: `python -m tests.bench.recipes` (all figures are predicted).

Each prediction is for a configuration that the recipe's README names for GPUs of 80 GB, by the command that a user
runs. The recipe for a Mixtral under DeepSpeed leaves work to the host, so `memplug tune` predicts this recipe.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.table import Row, render, write_rows
from tests.support.folders import ROOT

BENCH = "recipes"
GPU = "h100"
RECIPES = {
    "llama2, 7B": "configs/ds_zero3.json --model configs/models/7b.yaml --gpus 8 --seq-len 32768",
    "megatron_llama2, 13B": "configs/ds_zero3.json --model configs/models/13b.yaml --gpus 8 --tensor 4 --sequence "
    "--seq-len 65536",
    "mixtral, Megatron-Core": "configs/ds_zero3.json --model configs/models/mixtral_8x7b.yaml --gpus 16 --tensor 2 "
    "--sequence --pipeline 2 --expert 8 --seq-len 32768",
}
TUNED = (
    "configs/ds_zero3_offload.json --model configs/models/mixtral_8x7b.yaml --gpus 8 --host-gib 2000 --seq-len 32768"
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which recipes, and where the rows go."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES, "tune"], default=[*RECIPES, "tune"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


def facts_of(command: str, words: str, *more: object) -> dict[str, Any]:
    """Return the output of a memplug command with `--json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "facts.json"
        given = [command, *words.split(), "--gpu", GPU, *more, "--json", file]
        program = [sys.executable, "-c", "from memplug.cli import main; main()", *map(str, given)]
        done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        if not file.exists():
            raise RuntimeError(f"memplug {' '.join(map(str, given))} ended with {done.returncode}")
        return json.loads(file.read_text())


def main(argv: list[str] | None = None) -> None:
    """Predict and print."""
    args = parse_args(argv)
    rows, lines = [], []
    for name in (each for each in args.recipes if each in RECIPES):
        facts = facts_of("estimate", RECIPES[name], "--no-limits")
        for mode, each in facts["modes"].items():
            reserved = each["arena_reserved_bytes"] or each["peak_reserved_bytes"]
            over, host = each["over_keep"], f"{each['host_bytes'] / 1e9:.1f}"
            cells = [f"{each['step_s']:.3f}", "-" if over is None else f"{over:.3f}", f"{reserved / 1e9:.1f}"]
            lines.append([f"{name}: {mode}", *cells, host, "yes" if each["fits"] else "no"])
            rows.append(Row(BENCH, name, mode, "step_s", "s", each["step_s"], 1))
            rows.append(Row(BENCH, name, mode, "reserved_bytes", "bytes", reserved, 1))
    print(render(["recipe", "step s", "over keep", "reserved GB", "host GB", "fits"], lines, left=0), flush=True)
    if "tune" in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            best = facts_of("tune", TUNED, "-o", Path(folder) / "tuned.json")["best"][0]
        gigabytes = ", ".join(f"{best[f'{where}_bytes'] / 1e9:.1f} GB of the {where}" for where in ("device", "host"))
        print(f"mixtral, DeepSpeed: {best['tokens_per_s']:,.0f} tokens/s, {gigabytes}")
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
