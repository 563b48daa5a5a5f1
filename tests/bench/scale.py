"""Predicts Llama-3, Qwen3 and Mixtral on eight GPUs, the table of examples/README.md: `python -m tests.bench.scale`.

A recipe trains each configuration. `memplug estimate` predicts one rank of a configuration. `memplug tune` finds and
predicts a configuration that leaves work to the host, whose DeepSpeed JSON is written to configs/tuned. Predictions are
kept in tests/data/scale.json: a run makes only the missing ones, and prints the table of all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.table import render
from tests.support.folders import ROOT

BENCH = "scale"
MODES = ("memplug", "full", "keep")
GPUS = 8
GPU_GB = {"h100": 80, "h200": 141}
MACHINE_GB = 2000
"""Host memory, as the recipe's command names it."""
HOST_GIB = 1800
"""The part of the host memory that training may use."""
BLOCKS: dict[str, dict[str, Any]] = {"full": {"alpha": 0}, "keep": {"enabled": False}, "memplug": {}}
"""For `memplug tune`: the section "tokenwise" of memplug's block in each mode."""
FOUND = ROOT / "tests" / "data" / "scale.json"
README = ROOT / "examples" / "README.md"
BEGIN, END = "<!-- scale -->\n", "<!-- /scale -->\n"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A training on one machine.

    Attributes:
        title: The model's name for readers.
        model: A file of configs/models.
        gpu: A profile of configs/hardware.
        launch: The script that starts the recipe.
        seq_len: Tokens of a sequence; each data-parallel rank has one at a time.
        ds_json: A file of configs.
        layout: Options that the recipe shares with `memplug estimate`.
        accumulation: Micro-batches of a step, if `memplug tune` finds the configuration; 0: `memplug estimate` predicts
            the configuration.
    """

    title: str
    model: str
    gpu: str
    launch: str
    seq_len: int
    ds_json: str = "ds_zero3.json"
    layout: str = ""
    accumulation: int = 0

    @property
    def name(self) -> str:
        """Return the name of the configuration in files."""
        return f"{self.model}_{self.gpu}"

    @property
    def is_tuned(self) -> bool:
        """Return whether `memplug tune` finds the configuration."""
        return self.accumulation > 0

    @property
    def command(self) -> str:
        """Return the command that trains the configuration."""
        megatron = "megatron" in self.launch
        config = f"tuned/{self.name}.json" if self.is_tuned else self.ds_json
        parts = [
            f"launch/{self.launch}",
            f"--model configs/models/{self.model}.yaml",
            f"{'--memplug-config' if megatron else '--deepspeed_config'} configs/{config}",
            *([self.layout] if self.layout else []),
            *(["--distributed-optimizer --micro-batch 1 --micro-batches 1"] if megatron else []),
            f"--seq-len {self.seq_len}",
        ]
        return " ".join(parts)

    @property
    def machine(self) -> str:
        """Return the machine, as in the comment beside a command."""
        host = f", {MACHINE_GB} GB of host memory" if self.is_tuned else ""
        return f"{GPUS} GPUs of {GPU_GB[self.gpu]} GB{host}"


LLAMA, MEGATRON = "llama2_torchrun.sh", "megatron_torchrun.sh"
OFFLOADING = {"ds_json": "ds_zero3_offload.json", "accumulation": 8}
TILED, SPLIT = "--tiled-loss 16", "--tensor 4 --sequence"
CONFIGURATIONS = (
    Configuration(title="Llama-3 8B", model="llama3_8b", gpu="h100", launch=MEGATRON, seq_len=65536, layout=SPLIT),
    Configuration(title="Llama-3 8B", model="llama3_8b", gpu="h200", launch=MEGATRON, seq_len=131072, layout=SPLIT),
    Configuration(title="Qwen3 8B", model="qwen3_8b", gpu="h100", launch=LLAMA, seq_len=32768, layout=TILED),
    Configuration(title="Qwen3 8B", model="qwen3_8b", gpu="h200", launch=LLAMA, seq_len=65536, layout=TILED),
    Configuration(title="Llama-3 70B", model="llama3_70b", gpu="h100", launch=LLAMA, seq_len=16384, **OFFLOADING),
    Configuration(title="Llama-3 70B", model="llama3_70b", gpu="h200", launch=LLAMA, seq_len=32768, **OFFLOADING),
    Configuration(
        title="Mixtral 8x7B",
        model="mixtral_8x7b",
        gpu="h100",
        launch="mixtral_torchrun.sh",
        seq_len=32768,
        **OFFLOADING,
    ),
    Configuration(
        title="Mixtral 8x7B",
        model="mixtral_8x7b",
        gpu="h200",
        launch="mixtral_megatron.sh",
        seq_len=32768,
        layout="--tensor 2 --sequence --expert 8",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One mode of a configuration. No figure is known if `memplug tune` finds nothing, or no plan fits.

    Attributes:
        fits: Whether the training fits the GPU and the host memory.
        tokens_per_s: Throughput of all GPUs.
        device_bytes: Bytes that torch reserves on the fullest GPU, with the arena if it serves.
        host_bytes: Bytes of host memory for one GPU.
        took_s: Seconds that the prediction took.
    """

    fits: bool
    tokens_per_s: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    took_s: float = 0.0


Found = dict[str, dict[str, Predicted]]
"""Predictions by name of the configuration and mode."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which configurations, and where the table goes."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    names = [each.name for each in CONFIGURATIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="configurations [all]")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="ways of training [all]")
    parser.add_argument("--again", action="store_true", help="predict what is there already, too")
    parser.add_argument("--readme", action="store_true", help=f"write the table to {README.relative_to(ROOT)}")
    return parser.parse_args(argv)


def read() -> Found:
    """Return the predictions of earlier runs."""
    if not FOUND.exists():
        return {}
    kept = json.loads(FOUND.read_text())
    return {name: {mode: Predicted(**each) for mode, each in modes.items()} for name, modes in kept.items()}


def write(found: Found) -> None:
    """Write the predictions for the next run, in the order of `CONFIGURATIONS`."""
    kept = {
        name: {mode: dataclasses.asdict(found[name][mode]) for mode in MODES if mode in found[name]}
        for name in (each.name for each in CONFIGURATIONS)
        if name in found
    }
    FOUND.write_text(json.dumps(kept, indent=1) + "\n")


def predict(configuration: Configuration, mode: str) -> Predicted:
    """Predict one mode of a configuration by memplug's command, in a process of its own."""
    began_s = time.monotonic()
    found = (_tuned if configuration.is_tuned else _estimated)(configuration, mode)
    return dataclasses.replace(found, took_s=round(time.monotonic() - began_s, 1))


def _facts(*words: object) -> dict[str, Any] | None:
    """Return the facts that a memplug command writes with `--json`; None if nothing fits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "facts.json"
        program = [sys.executable, "-c", "from memplug.cli import main; main()", *map(str, words), "--json", str(file)]
        done = subprocess.run(program, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        if done.returncode == 1:
            return json.loads(file.read_text()) if file.exists() else None
        done.check_returncode()
        return json.loads(file.read_text())


def _estimated(this: Configuration, mode: str) -> Predicted:
    model, config = f"configs/models/{this.model}.yaml", f"configs/{this.ds_json}"
    options = ["--gpu", this.gpu, "--gpus", GPUS, "--seq-len", this.seq_len, *this.layout.split(), "--mode", mode]
    options += ["--host-gib", HOST_GIB / GPUS, "--no-limits"]
    facts = _facts("estimate", config, "--model", model, *options)
    assert facts is not None, f"{this.name} cannot be estimated"
    if mode not in facts["modes"]:
        return Predicted(fits=False)
    each, ranks = facts["modes"][mode], facts.get("layout", {"data": GPUS, "micro_batches": 1})
    return Predicted(
        fits=each["fits"],
        tokens_per_s=ranks["data"] * ranks["micro_batches"] * this.seq_len / each["step_s"],
        device_bytes=each["arena_reserved_bytes"] or each["peak_reserved_bytes"],
        host_bytes=each["host_bytes"],
    )


def _tuned(this: Configuration, mode: str) -> Predicted:
    """Predict by ProTrain's equations; write memplug's configuration to configs/tuned."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.json", Path(folder) / "made.json"
        settings = json.loads((ROOT / "configs" / this.ds_json).read_text())
        settings["gradient_accumulation_steps"] = this.accumulation
        settings["memplug"] = {"enabled": True, **({"tokenwise": BLOCKS[mode]} if BLOCKS[mode] else {})}
        given.write_text(json.dumps(settings))
        options = ["--gpu", this.gpu, "--gpus", GPUS, "--host-gib", HOST_GIB, "--seq-len", this.seq_len]
        facts = _facts("tune", given, "--model", f"configs/models/{this.model}.yaml", *options, "-o", made)
        if facts is None:
            return Predicted(fits=False)
        if mode == "memplug":
            (ROOT / "configs" / "tuned" / f"{this.name}.json").write_text(made.read_text())
    best = facts["best"][0]
    return Predicted(
        fits=True,
        tokens_per_s=best["tokens_per_s"],
        device_bytes=best["device_bytes"],
        host_bytes=best["host_bytes"] / GPUS,
    )


def _gigabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e9:.1f}"


def _cells(this: Configuration, modes: dict[str, Predicted]) -> list[str]:
    """Return one line of the table."""
    ours = modes["memplug"]

    def speed(each: Predicted) -> str:
        return f"{each.tokens_per_s:,.0f}" if each.fits else "does not fit"

    others = [speed(modes[mode]) if mode in modes else "not predicted" for mode in ("full", "keep")]
    full = modes.get("full")
    over = f"{ours.tokens_per_s / full.tokens_per_s:.2f}" if ours.fits and full is not None and full.fits else ""
    way = "by `memplug tune`" if this.is_tuned else "by `memplug estimate`"
    memory = [_gigabytes(ours.device_bytes), _gigabytes(ours.host_bytes)]
    gpus = f"{GPUS} × {this.gpu.upper()}"
    return [this.title, gpus, f"{this.seq_len:,}", way, speed(ours), *memory, others[0], over, others[1]]


def table(found: Found) -> str:
    """Return the table of all predicted configurations."""
    headers = ["model", "GPUs", "tokens of a sequence", "predicted", "tokens/s", "GB of a GPU", "GB of host for each"]
    headers += ["full: tokens/s", "memplug over it", "keep: tokens/s"]
    lines = [_cells(each, found[each.name]) for each in CONFIGURATIONS if "memplug" in found.get(each.name, {})]
    return render(headers, lines, left=0)


def section(found: Found) -> str:
    """Return the section of `README`: commands, and the table."""
    lines = []
    for each in CONFIGURATIONS:
        words = textwrap.wrap(each.command, 112, break_long_words=False, break_on_hyphens=False)
        lines += [f"# {each.machine}: {each.title}, {each.gpu.upper()}", " \\\n    ".join(words)]
    body = "\n".join(lines)
    return f"{BEGIN}```bash\n{body}\n```\n\n{table(found)}\n{END}"


def main(argv: list[str] | None = None) -> None:
    """Predict the missing configurations, and print."""
    args, found = parse_args(argv), read()
    for this in (each for each in CONFIGURATIONS if each.name in args.only):
        for mode in (mode for mode in args.modes if args.again or mode not in found.get(this.name, {})):
            found.setdefault(this.name, {})[mode] = predict(this, mode)
            print(f"{this.name}, {mode}: {found[this.name][mode]}", flush=True)
            write(found)
    print(table(found))
    if args.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(before + section(found) + rest.partition(END)[2])


if __name__ == "__main__":
    main()
