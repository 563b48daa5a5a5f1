"""The properties that tell training jobs apart."""

from __future__ import annotations

from importlib import metadata

import pytest

from memplug.hooks import job


def test_different_builds_of_one_package_version_are_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.1+cpu"):
        monkeypatch.setattr(metadata, "version", lambda package, version=version: version)
        found.append(job._versions.__wrapped__())
    assert found[0] == found[1] == found[2] != found[3]
