"""The doctor's rows on the three libraries that memplug compiles, if one of them cannot be built."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from memplug import native
from memplug.arena.native import packing
from memplug.cli import app
from memplug.tokenwise.plan import rules

run = CliRunner().invoke

LIBRARIES = {
    "native core": ("native core", native.load),
    "address search": ("address search", packing.load),
    "planner's rules": ("planner rules", rules.load),
}


@pytest.mark.parametrize("row", LIBRARIES)
def test_doctor_names_a_library_that_cannot_be_built_and_says_not_ready(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, missing = LIBRARIES[row]
    absent = {"ready": False, "problem": "no compiler", "advice": "Install one."}

    def built(load: Callable[[], object]) -> dict[str, object]:
        return absent if load is missing else {"ready": True}

    module = sys.modules["memplug.cli.doctor"]
    monkeypatch.setattr(module, "_built", built)
    monkeypatch.setattr("memplug.native.cuda_calls.not_handed_on", list)
    monkeypatch.setattr(module, "_hardware", lambda: HARDWARE)
    monkeypatch.setattr(module, "_conflicts", lambda settings: [])
    found = run(app, ["doctor"])
    assert found.exit_code == 1
    lines = dict(line.split("  ", 1) for line in found.stdout.splitlines())
    assert lines[row].strip() == "absent: no compiler"
    assert lines["ready"].strip() == f"no: see the {name} above. Install one."
    facts = json.loads(run(app, ["doctor", "--json"]).stdout)
    ready = {each: facts[each.replace(" ", "_")]["ready"] for each, _ in LIBRARIES.values()}
    assert ready == {each: each != name for each in ready}


HARDWARE = {
    "device": "cpu",
    "device_name": "",
    "matmul_flops_per_s": 1e12,
    "memlock_limit_bytes": None,
    **dict.fromkeys(("d2h_bytes_per_s", "h2d_bytes_per_s", "pinned_alloc_bytes_per_s"), 1e9),
    **dict.fromkeys(("host_available_bytes", "device_free_bytes", "device_total_bytes"), 2**30),
}
