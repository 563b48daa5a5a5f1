"""Runs the recipes end to end on one GPU, without memplug and with it: `python -m tests.bench.trained`.

The recipe's own script trains a model of a 7B's width and few layers under torchrun: first without memplug, then with
memplug, whose device budget is `--budget` times the device memory that the first run reserved. The losses of each step
are compared. A GPU's kernels add in any order, so losses may differ by `TOLERANCE`. Exits with 1 if a run failed, or
losses differ more. Bytes are the most that torch's allocator reserved in the whole run, its warm-up included; seconds
are medians over all steps.

`--tiny` trains the recipes' tiny models, for rehearsals on simulated CUDA (tests/cudasim) and on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.bench.table import Row, figures, render, write_rows
from tests.support.folders import ROOT
from tests.support.launching import launch

BENCH = "trained"
TOLERANCE = 0.02  # relative
HEADERS = (
    "recipe",
    "mode",
    "step s",
    "tokens/s",
    "allocated GB",
    "reserved GB",
    "arena GB",
    "efficiency",
    "last loss",
    "apart",
)
METRICS = {"step_s": "s", "tokens_per_s": "1/s", "first_loss": "1", "last_loss": "1", "validation_loss": "1"}


@dataclass(frozen=True)
class Recipe:
    """A script, and the model that it trains.

    Attributes:
        script: A file of examples.
        model: A file of configs/models.
        tiny: A file of configs/models with a tiny model.
        cut: Fields that replace fields of `model`: as many layers and experts as fit on a GPU of 80 GB with their
            optimizer.
    """

    script: str
    model: str
    tiny: str
    cut: dict[str, int]

    @property
    def is_megatron(self) -> bool:
        """Return whether Megatron-Core trains the model, not DeepSpeed."""
        return "megatron" in self.script


LLAMA = ("7b.yaml", "tiny.yaml", {"num_hidden_layers": 4})
MIXTRAL = ("mixtral_8x7b.yaml", "mixtral_tiny.yaml", {"num_hidden_layers": 2, "num_local_experts": 4})
RECIPES = {
    "llama_deepspeed": Recipe("examples/llama2/train.py", *LLAMA),
    "llama_megatron": Recipe("examples/megatron_llama2/train.py", *LLAMA),
    "mixtral_deepspeed": Recipe("examples/mixtral/train_deepspeed.py", *MIXTRAL),
    "mixtral_megatron": Recipe("examples/mixtral/train_megatron.py", *MIXTRAL),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which recipe, and its sizes."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("recipe", nargs="?", choices=list(RECIPES), help="[all, one after the other]")
    add("--tokens", type=int, help="of a sequence [16384; tiny: 256]")
    add("--steps", type=int, default=30, help="of the optimizer [30]")
    add(
        "--budget",
        type=float,
        default=0.88,
        metavar="B",
        help="memplug's budget over the plain run's reserved memory [0.88]",
    )
    add("--tiny", action="store_true", help="the recipe's tiny model")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (256 if args.tiny else 16384)
    return args


def arguments(recipe: Recipe, args: argparse.Namespace, folder: Path, budget_bytes: int | None) -> list[str]:
    """Return the recipe's command line; write the files that it names to `folder`.

    Args:
        recipe: The recipe.
        args: This benchmark's command line.
        folder: An empty folder.
        budget_bytes: memplug's device budget; None: a run without memplug.
    """
    model, config = folder / "model.yaml", folder / "config.json"
    if args.tiny:
        shape, asked = (ROOT / "configs/models" / recipe.tiny).read_text(), ROOT / "configs/ds_tiny.json"
    else:
        full = yaml.safe_load((ROOT / "configs/models" / recipe.model).read_text())
        shape, asked = yaml.safe_dump({**full, **recipe.cut}), ROOT / "configs/ds_zero2.json"
    model.write_text(shape)
    block = {"enabled": True, "plan_dir": False, "profiler": {"wait_for_plans": True}}
    if args.tiny:
        block["tokenwise"] = {"min_offload_bytes": 1024}
    if budget_bytes is not None:
        block["device_budget_gib"] = budget_bytes / 2**30
    config.write_text(json.dumps({**json.loads(asked.read_text()), "memplug": block}))
    given = ["--model", model, "--steps", args.steps, "--seq-len", args.tokens, "--loss-log", folder / "losses.jsonl"]
    if recipe.is_megatron:
        given += ["--micro-batch", 1, "--micro-batches", 1, "--memplug-config", config, "--attention", attention()]
        given += ["--no-memplug"] if budget_bytes is None else []
    else:
        given += ["--deepspeed_config", config, "--memplug", "none" if budget_bytes is None else "install"]
    return [str(ROOT / recipe.script), *map(str, given)]


def attention() -> str:
    """Return "te" for Transformer Engine's modules if it is installed, else "sdpa" for torch's operators."""
    return "te" if importlib.util.find_spec("transformer_engine") is not None else "sdpa"


def train(name: str, args: argparse.Namespace, budget_bytes: int | None) -> dict[str, Any]:
    """Run the recipe; return its report, its losses, and the outcome: "ok", or what failed."""
    import torch

    cuda = torch.cuda.is_available()
    mode = "plain" if budget_bytes is None else "memplug"
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        command = arguments(RECIPES[name], args, folder, budget_bytes)
        # One connection: copies and matmuls run in the order in which Megatron-Core launches them.
        environment = {"DS_ACCELERATOR": "cuda" if cuda else "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        began = time.monotonic()
        done = launch(command, processes=1, env=environment, check=False, time_limit_s=600)
        print(f"{BENCH}: {name}: {mode}: {time.monotonic() - began:.0f} s\n{done.stdout}", file=sys.stderr, flush=True)
        if done.returncode != 0:
            return {"outcome": f"exit status {done.returncode}"}
        entries = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    report = next(entry["report"] for entry in entries if "report" in entry)
    return {**report, "outcome": "ok", "losses": [entry["loss"] for entry in entries if "step" in entry]}


def apart(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two runs' losses, over the first run's; infinite if a loss is not a number."""
    pairs = list(zip(one, other, strict=True))
    return max(abs(a - b) / abs(a) if abs(a) + abs(b) < float("inf") else float("inf") for a, b in pairs)


def modes_of(name: str, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and results of both modes, those of the second only if the first succeeded."""
    plain = train(name, args, None)
    yield "plain", plain
    if plain["outcome"] != "ok":
        return
    memory_gib = plain["memory_gib"]
    reserved_gib = memory_gib.get("reserved") or memory_gib["resident"]
    result = train(name, args, int(args.budget * reserved_gib * 2**30))
    if result["outcome"] == "ok":
        result["apart"] = apart(plain["losses"], result["losses"])
        if not result["apart"] <= TOLERANCE:
            result["outcome"] = f"losses are apart by {result['apart']:.3g}"
    yield "memplug", result


def rows_of(case: str, results: dict[str, dict[str, Any]]) -> list[Row]:
    """Return one row per number; "outcome" says "ok", or what failed."""
    rows = []
    for mode, result in results.items():
        n = len(result.get("losses", []))
        rows.append(Row(BENCH, case, mode, "outcome", "text", result["outcome"], n))
        if n == 0:
            continue
        rows += [Row(BENCH, case, mode, name, unit, float(result[name]), n) for name, unit in METRICS.items()]
        for kind, gib in result["memory_gib"].items():
            rows.append(Row(BENCH, case, mode, f"peak_{kind}_bytes", "bytes", gib * 2**30, n))
        of_memplug = result["memplug"] or {}
        for name in (
            "arena_bytes",
            "offloaded_bytes",
            "planned_steps",
            "replans",
            "arena_efficiency",
            "arena_step_served",
        ):
            if of_memplug.get(name) is not None:
                unit = "bytes" if name.endswith("bytes") else "1"
                rows.append(Row(BENCH, case, mode, name, unit, float(of_memplug[name]), n))
        if "apart" in result:
            rows.append(Row(BENCH, case, mode, "losses_apart", "1", result["apart"], n))
    return rows


def table_of(name: str, results: dict[str, dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for mode, result in results.items():
        if "memory_gib" not in result:
            lines.append((name, mode, *["-"] * 7, result["outcome"]))
            continue
        memory, of_memplug = result["memory_gib"], result["memplug"] or {}
        arena, efficiency = of_memplug.get("arena_bytes"), of_memplug.get("arena_efficiency")
        sizes = [memory.get(kind, memory.get("resident")) * 2**30 / 1e9 for kind in ("allocated", "reserved")]
        numbers = [
            result["step_s"],
            result["tokens_per_s"],
            *sizes,
            arena and arena / 1e9,
            efficiency,
            result["last_loss"],
        ]
        difference = figures(result.get("apart")) + (" WRONG" if result["outcome"] != "ok" else "")
        lines.append((name, mode, *map(figures, numbers), difference))
    return render(HEADERS, lines)


def main(argv: list[str] | None = None) -> int:
    """Train, print the table and write the rows; return 1 if a run failed or losses differ."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that torchrun's processes end as well
    args = parse_args(argv)
    rows, failed = [], False
    for name in [args.recipe] if args.recipe else RECIPES:
        case, results = f"{name} {'tiny' if args.tiny else '7b width'} {args.tokens}", {}
        for mode, result in modes_of(name, args):
            results[mode] = result
            if args.json:
                write_rows(args.json, [*rows, *rows_of(case, results)])
        rows += rows_of(case, results)
        failed = failed or any(result["outcome"] != "ok" for result in results.values())
        print(table_of(name, results), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
