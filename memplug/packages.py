"""The frameworks' packages: one entry for each framework that memplug hooks into."""

from __future__ import annotations

from typing import NamedTuple


class Package(NamedTuple):
    """A package by its two names."""

    name: str
    """As it is installed."""
    module: str
    """As it is imported."""


FRAMEWORKS = (
    Package("deepspeed", "deepspeed"),
    Package("transformers", "transformers"),
    Package("megatron-core", "megatron"),
)
