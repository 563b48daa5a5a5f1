"""The results of the cases that the selected tests need, run once by the first pytest process that asks."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import launch

Results = Callable[[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return a function that gives the results of a case on each rank.

    The function takes the name of the case and the way to run it, "with", "without" or "planned". It fails the test if
    the case failed.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base
    file = shared / "clients.json"
    own = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    items = [item for item in own if "results" in getattr(item, "fixturenames", ())]
    items = [item for item in items if item.get_closest_marker("skip") is None]
    cases = sorted({item.callspec.params["case"] for item in items})
    with (shared / "clients.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            launch(["tests.clients.worker", file, json.dumps(cases)], launcher="python", module=True, time_limit_s=900)
    known = json.loads(file.read_text())

    def get(case: str, way: str) -> list[dict[str, Any]]:
        ranks = known[case][way]
        errors = [rank["error"] for rank in ranks if "error" in rank]
        if errors:
            pytest.fail(f"{case}, {way}:\n{errors[0]}", pytrace=False)
        return ranks

    return get
