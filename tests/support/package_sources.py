"""The sources of a package from the package index, unpacked: nothing is installed, and nothing of the package runs.

`pip download` runs what a source distribution builds itself with, which needs a GPU's tools for some of these packages.
So pip is asked for the archive alone, through its own modules: `pip` has no command for that.
"""

from __future__ import annotations

import logging
import tarfile
import zipfile
from pathlib import Path
from typing import Any


class NoSources(Exception):
    """Why they could not be had."""


def unpacked(name: str, version: str | None, into: Path) -> Path:
    """The folder that a package was unpacked to, by its name and version.

    Args:
        version: None: the newest.

    Raises:
        NoSources: the index cannot be reached, or has no such archive; or pip is not as known.
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
    except Exception as error:  # of pip, of the network, of archives
        raise NoSources(f"{type(error).__name__}: {error}") from error
    return folder


def _download(name: str, version: str | None, into: Path) -> tuple[Path, str]:
    """An archive and its version: a source distribution; where the index has none, a wheel for this machine."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.specifiers import SpecifierSet

    logging.getLogger("pip").addHandler(logging.NullHandler())  # an index's own remarks
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
