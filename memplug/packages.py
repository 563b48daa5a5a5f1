"""The frameworks' packages: one entry for each framework that memplug hooks into."""

from __future__ import annotations

from typing import NamedTuple


class Package(NamedTuple):
    """The two names of a package."""

    name: str
    """Name under which the package is installed."""
    module: str
    """Name under which the package is imported."""


FRAMEWORKS = (
    Package("deepspeed", "deepspeed"),
    Package("transformers", "transformers"),
    Package("megatron-core", "megatron"),
)
