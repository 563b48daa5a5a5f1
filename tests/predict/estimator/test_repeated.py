"""An estimate depends on its request alone, whatever its process estimated before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import launch_forked

SOME = ["impossible", "all modes", "failing", "swapped", "all modes"]
PAIRS = [
    *("swapped", "all modes", "swapped", "impossible", "swapped", "failing", "all modes", "impossible", "all modes"),
    *("failing", "impossible", "failing", "swapped"),
]
"""Each request follows each other one."""


def estimated(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return the results of these estimates, all made in one process."""
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps(names))
    launch_forked(["tests.support.repeated_worker", folder], processes=1, module=True)
    return [json.loads(line) for line in (folder / "found.json").read_text().splitlines()]


def differing(found: dict[str, Any], fresh: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the modes and fields that differ."""
    if found.keys() != fresh.keys():
        return [("modes", str(list(found)))]
    different = [mode for mode in fresh if found[mode] != fresh[mode]]
    return [
        (mode, field if field == "spans" else f"{field}: {value}, {fresh[mode][field]} in a fresh process")
        for mode in different
        for field, value in found[mode].items()
        if value != fresh[mode][field]
    ]


@pytest.mark.long
@pytest.mark.parametrize("names", [SOME, pytest.param(PAIRS, marks=pytest.mark.long)], ids=["some", "pairs"])
def test_estimate_does_not_depend_on_earlier_ones_in_its_process(names: list[str], tmp_path: Path) -> None:
    fresh = {name: estimated([name], tmp_path / name)[0] for name in sorted({*names} - {"failing"})}
    assert fresh["impossible"]["impossible"]["memplug"] > 1 and fresh["swapped"]["memplug"]["to_host_bytes"] > 0
    for place, (name, found) in enumerate(zip(names, estimated(names, tmp_path / "all"), strict=True)):
        if name == "failing":
            assert "a backward that fails" in found["error"]
        else:
            assert found == fresh[name], (place, name, differing(found, fresh[name]))
