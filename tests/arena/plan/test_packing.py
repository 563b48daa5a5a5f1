"""The compiled placement and search agree with slow ones in Python, and a missing compiler gives a clear error."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplug.arena.native import packing
from memplug.arena.plan.first_fit import Placer
from memplug.arena.plan.problem import Problem, buffers
from memplug.arena.plan.small import Small
from memplug.errors import NativeError
from tests.support.folders import ROOT
from tests.support.layouts import first_fit, is_valid, problem_of, problems


def random_table(count: int, seed: int, *, longest: int = 40) -> np.ndarray:
    random = np.random.default_rng(seed)
    lower = random.integers(0, count, count)
    table = buffers(
        np.stack([lower, lower + random.integers(1, longest, count), random.integers(1, 99, count)], axis=1)
    )
    table["alignment"] = random.choice([1, 1, 8], count)
    return table


def placed_in_python(placer: Placer, order: list[int], tightest: bool) -> np.ndarray:
    """Place buffers in Python as `Placer.place` does without a limit."""
    offsets = np.zeros(len(placer.size), np.int64)
    # placed buffers by offset: the first `count` entries of each array are in use
    starts, ends = np.zeros(len(order), np.int64), np.zeros(len(order), np.int64)
    lowers, uppers = np.zeros(len(order), np.int32), np.zeros(len(order), np.int32)
    for count, row in enumerate(order):
        size, alignment = int(placer.size[row]), int(placer.alignment[row])
        meets = (lowers[:count] < placer.upper[row]) & (placer.lower[row] < uppers[:count])
        taken = starts[:count][meets]
        below = np.concatenate([[0], np.maximum.accumulate(ends[:count][meets])])
        free = -(-below // alignment) * alignment
        gaps = taken - free[:-1]
        fits = np.flatnonzero(gaps >= size)
        chosen = (fits[gaps[fits].argmin()] if tightest else fits[0]) if fits.size else len(taken)
        offset = offsets[row] = int(free[chosen])
        at = int(np.searchsorted(starts[:count], offset, "right"))
        new = (offset, offset + size, placer.lower[row], placer.upper[row])
        for array, value in zip((starts, ends, lowers, uppers), new, strict=True):
            array[at + 1 : count + 1] = array[at:count]
            array[at] = value
    return offsets


@given(problems(most=14, fewest=1), st.data())
def test_compiled_placement_matches_python_and_first_fit(problem, data):
    order = data.draw(st.permutations(range(len(problem))))
    placer = Placer.of(problem.buffers)
    for tightest in (False, True):
        offsets = placer.place(np.array(order), tightest=tightest)
        assert offsets.tolist() == placed_in_python(placer, rooms_first(problem, order), tightest).tolist()
    assert placer.place(np.array(order)).tolist() == first_fit(problem, rooms_first(problem, order)).offsets.tolist()


def rooms_first(problem, order):
    """Return the order in which `Placer` places the buffers: rooms come first, in the order of the table."""
    room = problem.buffers["room"]
    return [*np.flatnonzero(room).tolist(), *(row for row in order if not room[row])]


@pytest.mark.parametrize("tightest", [False, True])
@pytest.mark.parametrize("longest", [20, 3000])
def test_compiled_placement_of_thousands_of_buffers_matches_python(tightest, longest):
    # More buffers than fit into one block of a `Shelf` (place.cpp), in more than one of the shelf's stretches of time.
    placer = Placer.of(random_table(3000, seed=longest, longest=longest))
    order = np.random.default_rng(1).permutation(3000)
    offsets = placer.place(order, tightest=tightest)
    assert offsets.tolist() == placed_in_python(placer, order.tolist(), tightest).tolist()


@given(problems(most=10, fewest=1))
def test_placement_that_reaches_the_limit_is_abandoned(problem):
    placer, order = Placer.of(problem.buffers), np.arange(len(problem))
    height = int((placer.place(order) + problem.buffers["size"]).max())
    assert placer.place(order, limit_bytes=height) is None
    assert placer.place(order, limit_bytes=height + 1) is not None


@given(problems(most=6, fewest=1, latest=8, largest=6))
@settings(max_examples=60)
def test_search_succeeds_exactly_from_the_optimal_height_up(problem):
    # First fit reaches the optimum in some order: by rising offsets of an optimal solution.
    orders = itertools.permutations(range(len(problem)))
    lowest = min(first_fit(problem, list(order)).height for order in orders)
    small = Small.of(problem)
    for threads in (1, 2):
        for height in range(max(1, lowest // small.unit - 2), lowest // small.unit + 2):
            fits, offsets = packing.decide(
                (small.lower, small.upper), small.size, small.alignment, height, seconds=20, threads=threads
            )
            assert fits is (height * small.unit >= lowest)
            if fits:
                found = first_fit(problem, np.argsort(offsets, kind="stable").tolist())
                assert found.height <= height * small.unit and is_valid(problem, found)
                assert (offsets * small.unit + problem.buffers["size"]).max() <= height * small.unit


def test_search_on_one_thread_is_deterministic():
    small = Small.of(Problem(buffers=random_table(60, seed=3)))
    height = int(Problem(buffers=random_table(60, seed=3)).lower_bound / small.unit * 1.1)
    answers = [
        packing.decide((small.lower, small.upper), small.size, small.alignment, height, seconds=20, threads=1)
        for _ in range(2)
    ]
    assert answers[0][0] is True and answers[0][1].tolist() == answers[1][1].tolist()


def test_search_with_no_time_left_returns_unknown():
    small = Small.of(Problem(buffers=random_table(400, seed=5, longest=300)))
    height = Problem(buffers=random_table(400, seed=5, longest=300)).lower_bound // small.unit
    fits, _ = packing.decide((small.lower, small.upper), small.size, small.alignment, height, seconds=0.0, threads=2)
    assert fits is None


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


PLANS = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from memplug.arena.plan import auto
from memplug.arena.plan.problem import Problem
from tests.support.layouts import problem_of
problem = problem_of((0, 4, 3), (1, 3, 2), (2, 6, 5), (4, 8, 4))
for name in ("search", "spatiotemporal", "exact", "auto"):
    solution = auto.plan(problem, name, time_limit_s=1)
    print(name, solution.height, solution.optimal)
print("torch" in sys.modules)
"""


def test_planning_without_a_compiler_raises_native_error(tmp_path):
    result = python(PLANS, CXX="/nonexistent/c++", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert result.returncode == 1 and not result.stdout
    error = result.stderr.splitlines()[-2:]
    assert "NativeError" in result.stderr and "/nonexistent/c++" in result.stderr and "What to do" in error[-1]


def test_planning_imports_no_torch(tmp_path):
    code = PLANS.replace(
        "from tests.support.layouts import problem_of",
        "import tests.support.layouts as layouts; problem_of = layouts.problem_of",
    )
    result = python(code)
    assert result.stdout.splitlines()[-1] == "False", result.stderr


def test_native_error_quotes_the_compiler(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    packing.load.cache_clear()
    try:
        with pytest.raises(NativeError, match="no such luck"):
            packing.load()
        assert not list(tmp_path.glob("*/*")), "no partial build is left"
    finally:
        packing.load.cache_clear()


@pytest.mark.long
def test_concurrent_processes_build_and_load_one_library(tmp_path):
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    code = "from memplug.arena.native import packing; packing.load(); print('loaded')"
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0] for process in started] == ["loaded\n"] * 2
    assert [path.name for path in tmp_path.glob("*/*")] == ["memplug_packing.so"]


def test_search_fits_a_single_buffer_into_its_own_size_and_no_less():
    small = Small.of(problem_of((0, 1, 7)))
    assert small.unit == 7
    for height, expected in ((1, True), (0, False)):
        fits, _ = packing.decide((small.lower, small.upper), small.size, small.alignment, height, seconds=1, threads=1)
        assert fits is expected
