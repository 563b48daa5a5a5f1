"""Plans a recorded step of a small Mixtral, and serves steps whose experts ask for other sizes.

The step has 4 layers (hidden size 256, 8 experts of which 2, 1,024 tokens, grouped matmuls). Expert parallelism is
imitated: in each step and layer one factor, normal with a deviation of `--deviations`, scales all that is asked for
inside of the experts, their weights' gradients too. With the popularity `zipf` the rank has two of the eight experts,
whose popularity falls as in Zipf's law, each layer's in another order; the factor's mean is then their share of the
tokens, over an even share. Some steps are recorded, the plan is made, and others are served by a model of the arena
(tests/support/routed.py). After two steps that lack room, the room grows, as in training.

| column | meaning |
|---|---|
| missed | share of the experts' bytes for which the arena had no room |
| amended | how often the room grew |
| efficiency | the most bytes in use at once in any step, over the last arena and the most that torch served beside it |
| of a step | the same of each step by itself, at the arena that it had: the 1st percentile, and the median |
"""

from __future__ import annotations

import argparse
import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

from memplug.arena.amending import Lack
from memplug.arena.planning import amended, planned
from memplug.profile.trace import Pass, Trace
from tests.bench.table import Measured, tabulate
from tests.support.folders import DATA
from tests.support.routed import Served, serve
from tests.support.traces import Recording

BENCH = "routing"
STEPS = {"kept": "experts/kept.npz", "token-wise": "experts/tokenwise.npz"}
LAYERS, EXPERTS, OWN = 4, 8, 2  # of the step, of a layer, and of the rank
POPULARITY = {"even": np.ones(EXPERTS), "zipf": 1 / np.arange(1, EXPERTS + 1)}
HEADERS = {
    "missed": "missed",
    "amended": "amended",
    "efficiency": "efficiency",
    "of_a_step": "of a step",
    "median": "median",
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: which steps, and how they vary."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="[both]")
    add("--deviations", type=float, nargs="+", default=[0.0, 0.05, 0.15], help="of the factors [0 0.05 0.15]")
    add("--popularity", nargs="+", choices=POPULARITY, default=list(POPULARITY), help="of the experts [both]")
    add("--recorded", type=int, default=4, help="steps that the plan is made from [4]")
    add("--served", type=int, default=100, help="steps that are served [100]")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the rows here")
    return parser.parse_args(argv)


def shares_of(popularity: np.ndarray, layers: int, random: np.random.Generator) -> np.ndarray:
    """Return for each layer the tokens that the rank's experts get on average, over an even share. float64[layers]."""
    orders = np.array([random.permutation(popularity) for _ in range(layers)])
    return orders[:, :OWN].mean(axis=1) / popularity.mean()


def step_of(file: Path, shares: np.ndarray, deviation: float, random: np.random.Generator) -> Trace:
    """Return a recorded step with sizes inside of the experts drawn anew."""
    with np.load(file) as record:
        inside, layer, nbytes = record["inside"], record["layer"], record["nbytes"].copy()
        events = list(zip(record["malloc"].tolist(), record["request"].tolist(), strict=True))
    for each, share in zip(np.unique(layer[inside]), shares, strict=True):
        factor = share * np.clip(1 + deviation * random.standard_normal(), 0.5, 2)
        nbytes[inside & (layer == each)] = (nbytes[inside & (layer == each)] * factor).astype(int)
    recording = Recording()
    recording.step()
    deepest, in_backward = layer.max(), False
    recording.phase(Pass.FORWARD, 0)
    numbers: dict[int, int] = {}
    for malloc, request in events:
        if not nbytes[request]:
            continue
        if not malloc:
            recording.free(numbers[request])
            continue
        # the record has no passes: backward begins once the deepest layer has been left
        if not in_backward and layer[request] != deepest and any(layer[each] == deepest for each in numbers):
            in_backward = True
            recording.phase(Pass.BACKWARD, 0)
        recording.layer(None if layer[request] < 0 else f"{layer[request]}", dynamic=bool(inside[request]))
        recording.op("mm")
        numbers[request] = recording.malloc(int(nbytes[request]))
    return recording.trace()


def measure(name: str, popularity: str, deviation: float, args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one step, popularity of its experts and deviation."""
    random = np.random.default_rng(args.seed)
    shares = shares_of(POPULARITY[popularity], LAYERS, random)
    drawn = functools.partial(step_of, DATA / STEPS[name], shares, deviation, random)
    recorded = [drawn() for _ in range(args.recorded)]
    plan, _ = planned(recorded[-1], recorded[:-1], "auto", False)
    served: list[Served] = []
    share, amendments, lack = [], 0, Lack()
    for _ in range(args.served):
        found = serve(plan, drawn())
        served.append(found)
        share.append(found.live_bytes / (plan.solution.height + found.beside_bytes))
        lack.end_step(found)
        if lack.lasts and plan.problem.room_bytes:
            plan, _ = amended(replace(plan, problem=lack.with_more_room(plan.problem)), "auto")
            amendments, lack = amendments + 1, Lack()
    reserved = plan.solution.height + max(each.beside_bytes for each in served)
    return {
        "missed": float(np.mean([each.missed for each in served])),
        "amended": amendments,
        "efficiency": max(each.live_bytes for each in served) / reserved,
        "of_a_step": float(np.percentile(share, 1)),
        "median": float(np.median(share)),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every step and deviation, and print the table."""
    args = parse_args(argv)
    measured = (
        Measured(
            f"{name}, {popularity}, deviation {deviation}", measure(name, popularity, deviation, args), args.served
        )
        for name, popularity, deviation in itertools.product(args.steps, args.popularity, args.deviations)
    )
    tabulate(BENCH, "arena", HEADERS, measured, args.json)


if __name__ == "__main__":
    main()
