"""Versions of memplug and of the packages that it builds on, from the installed metadata."""

import sys

import typer

from memplug.packages import FRAMEWORKS

PACKAGES = ("torch", *(each.name for each in FRAMEWORKS), "transformer-engine", "flash-attn")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python, memplug and `packages`; "absent" for a package that is not installed.

    Reads metadata, because importing some of these packages takes seconds, prints, or fails without a GPU.
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
    """Print one line such as "memplug 0.1.0 (Python 3.11.2, torch 2.13.0)" for `--version`, and exit."""
    if wanted:
        found = versions(("torch",))
        typer.echo(f"memplug {found['memplug']} (Python {found['python']}, torch {found['torch']})")
        raise typer.Exit
