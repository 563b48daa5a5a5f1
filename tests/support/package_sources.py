"""Downloads and unpacks a package's sources; nothing is installed and no code of the package runs.

`pip download` would run a source distribution's build code, which needs a GPU's tools for some of these packages. `pip`
has no command that only fetches the archive, so this calls pip's internal modules.
"""

from __future__ import annotations

import logging
import tarfile
import zipfile
from pathlib import Path
from typing import Any


class NoSources(Exception):
    """An error that says why the sources could not be downloaded."""


def unpacked(name: str, version: str | None, into: Path) -> Path:
    """Download a package and return the folder, named by package and version, that it was unpacked to.

    Args:
        name: the package.
        version: the version; None for the newest.
        into: the folder that gets the archive and the unpacked folder.

    Raises:
        NoSources: the index cannot be reached or has no such archive, or this pip works differently.
    """
    try:
        archive, version = _download(name, version, into)
        folder = into / f"{name} {version}"
        folder.mkdir()
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
        else:
            with tarfile.open(archive) as source:
                source.extractall(folder, filter="data")
    except NoSources:
        raise
    except Exception as error:  # pip, the network and the archive can fail in any way
        raise NoSources(f"{type(error).__name__}: {error}") from error
    return folder


def _download(name: str, version: str | None, into: Path) -> tuple[Path, str]:
    """Download an archive and return it with its version; prefer a source distribution to a wheel for this machine."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.specifiers import SpecifierSet

    logging.getLogger("pip").addHandler(logging.NullHandler())  # silences pip's messages about the index
    command: Any = create_command("download")
    with command.main_context():
        options, _ = command.parse_args([name, "--no-deps", "--retries", "1", "--timeout", "10"])
        session = command.get_default_session(options)
        finder = command._build_package_finder(options=options, session=session, ignore_requires_python=True)
        wanted = SpecifierSet(f"=={version}" if version else "")
        found = [
            each
            for each in finder.find_all_candidates(name)
            if wanted.contains(each.version) and (version or not each.link.is_yanked)
        ]
        if not found:
            raise NoSources(f"the package index has no {name} {version or ''}".rstrip() + ", or cannot be reached")
        best = max(found, key=lambda each: (each.version, not each.link.is_wheel))
        answer = session.get(best.link.url_without_fragment, headers={"Accept-Encoding": "identity"})
        answer.raise_for_status()
        archive = into / best.link.filename
        archive.write_bytes(answer.content)
        return archive, str(best.version)
