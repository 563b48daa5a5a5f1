"""Measures how the arena serves mixtures of experts, with new tokens in each step: `python -m tests.bench.experts`.

Each case trains in processes of its own (tests/bench/experts_worker.py). Of several ranks, the row is the one with the
lowest efficiency. tests/bench/experts_trainings.py says what the models and their experts are.

| model | what it is |
|---|---|
| `mixtral`, `qwen3_moe` | Hugging Face's, with 8 and 128 experts, without a framework |
| `deepspeed` | the same Mixtral under DeepSpeed's ZeRO 2 |
| `megatron`, `megatron-ep2`, `megatron-ep4` | Megatron-Core's GPTModel with 8 experts on one, two and four ranks |

| way | what it is |
|---|---|
| `kept` | the arena alone |
| `token-wise` | layers swap and recompute by rows, as memplug chooses |
| `recomputed` | the same with alpha 0: only what cannot be recomputed is swapped |

| column | meaning |
|---|---|
| varying | share of the bytes that a plan has no addresses for, since they vary, over the last half of the steps |
| served | share of the bytes that the arena served, over the last half of the steps |
| plans, grown | address plans made in all steps, and how often one was amended, as for more room |
| live | MiB, the most bytes in use at once in a recorded step |
| most | MiB, the same of all steps under the last plan, as far as the arena served them |
| largest | MiB of the largest request |
| arena | MiB reserved by the arena |
| beside | MiB of all requests that torch's allocator served in the step with the most of them, of the last half |
| efficiency | most over arena and beside, as if the latter were in use all at once; "-" if served is less than 0.97 |
| native, expandable | live over what torch's CUDA allocator reserves, simulated over all recorded steps in turn |
| CPU time | of a step, over that with torch's allocator, all else alike: medians of blocks that take turns |

The host is the CPU, so the arena is compared with a simulation of CUDA's allocator (tests/bench/caching_allocator.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.experts_trainings import EXPERTS
from tests.bench.experts_worker import WAYS
from tests.bench.table import Measured, tabulate
from tests.support.forking import Libraries, launch_forked

BENCH = "experts"
RANKS = {"mixtral": 1, "qwen3_moe": 1, "deepspeed": 1, "megatron": 1, "megatron-ep2": 2, "megatron-ep4": 4}
IN_FLIGHT = {"mixtral": (1, 4), "qwen3_moe": (1, 4)}  # the other models' backwards follow their forwards: 1
HEADERS = {
    "varying": "varying",
    "served": "served",
    "plans": "plans",
    "grown": "grown",
    "live_bytes": "live",
    "largest_bytes": "largest",
    "most_bytes": "most",
    "arena_bytes": "arena",
    "beside_bytes": "beside",
    "efficiency": "efficiency",
    "native": "native",
    "expandable": "expandable",
    "cpu_time": "CPU time",
}
LONGEST_S = 3600  # of a case


@dataclasses.dataclass(frozen=True)
class Case:
    """A training to measure: a model, how its experts run, and how many forwards come before the first backward."""

    model: str
    experts: str
    way: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.model}, {self.experts}, {self.way}, {self.micro_batches} in flight"

    @property
    def libraries(self) -> Libraries:
        """Return the libraries that its processes import."""
        if not self.model.startswith("megatron"):
            return "deepspeed"
        return "transformer_engine" if self.experts == "grouped" else "megatron"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which cases, and their sizes."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=RANKS, default=list(RANKS), help="[all]")
    add("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS), help="[both]")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="[all]")
    add("--micro-batches", type=int, nargs="+", default=[1, 4], help="forwards before the first backward [1 4]")
    add("--layers", type=int, default=16, help="Qwen3-MoE has a quarter of them [16]")
    add("--hidden", type=int, default=64, help="hidden size [64]")
    add("--tokens", type=int, default=512, help="of a micro-batch [512]")
    add("--steps", type=int, default=300, help="[300]")
    add("--recorded", type=int, default=6, help="steps that are recorded at the end [6]")
    add("--rounds", type=int, default=2, help="timed blocks of steps, of each allocator; 0 for no times [2]")
    add("--block", type=int, default=15, help="steps of a timed block [15]")
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases that the command line asks for."""
    for model, *others, micro_batches in itertools.product(args.models, args.experts, args.ways, args.micro_batches):
        if micro_batches in IN_FLIGHT.get(model, (1,)):
            yield Case(model, *others, micro_batches)


def measure(case: Case, args: argparse.Namespace) -> dict[str, float | None]:
    """Return the figures of a case, of its worst rank."""
    names = ("layers", "hidden", "tokens", "steps", "recorded", "rounds", "block")
    given = json.dumps({**dataclasses.asdict(case), **{name: getattr(args, name) for name in names}})
    with tempfile.TemporaryDirectory() as folder:
        launch_forked(
            ["tests.bench.experts_worker", folder, given],
            libraries=case.libraries,
            processes=RANKS[case.model],
            module=True,
            time_limit_s=LONGEST_S,
        )
        found = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
    return min(found, key=lambda figures: (figures["efficiency"] or 0, figures["served"]))


def main(argv: list[str] | None = None) -> None:
    """Measure every case and print the table."""
    args = parse_args(argv)
    measured = (Measured(str(case), measure(case, args), args.steps) for case in cases(args))
    tabulate(BENCH, "arena", HEADERS, measured, args.json)


if __name__ == "__main__":
    main()
