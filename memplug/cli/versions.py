"""Versions of memplug and of what it builds on, from the installed metadata."""

import sys

import typer

from memplug.packages import FRAMEWORKS

PACKAGES = ("torch", *(each.name for each in FRAMEWORKS), "transformer-engine", "flash-attn")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of Python, memplug and others, "absent" where a package is not installed.

    Read from the metadata: importing some of these takes seconds, prints, or fails without a GPU.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for package in ("memplug", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def echo_version(wanted: bool) -> None:
    """The option `--version`: one line, as in "memplug 0.1.0 (Python 3.11.2, torch 2.13.0)"."""
    if wanted:
        found = versions(("torch",))
        typer.echo(f"memplug {found['memplug']} (Python {found['python']}, torch {found['torch']})")
        raise typer.Exit
