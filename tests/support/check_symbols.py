"""Checks that a package's sources have the names that memplug relies on (tests.support.symbols).

    python -m tests.support.check_symbols                                    # the newest of each on the package index
    python -m tests.support.check_symbols transformer-engine==2.9.0 megatron-core
    python -m tests.support.check_symbols flash-attn-3 --source flash-attention
    python -m tests.support.check_symbols transformer-engine --stand-ins     # and what tests/support/stand_ins imitates

Transformer Engine and flash-attn cannot be imported without a GPU, so nothing is imported: files are parsed. The output
has a line for each symbol:

| line | the symbol |
|---|---|
| there | is where memplug looks for it, or one of its alternatives is |
| moved | is elsewhere in the package: memplug does not find it |
| gone | is nowhere in the package, or without a parameter that memplug passes |

Keys of dictionaries, registered operators and decorators are looked for as text. Exit status 1: a symbol moved or is
gone. If the sources of a package cannot be downloaded, its line says so. The last line names all packages that were not
checked, including those that the command line did not name.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.package_sources import NoSources, unpacked
from tests.support.source_tree import SourceTree
from tests.support.symbols import PACKAGES, Package, Symbol, Text, Use

THERE, MOVED, GONE = "there", "moved", "gone"
_SYMBOL = re.compile(r"(?P<module>[\w.]+)(:(?P<name>[\w.]+)(\((?P<parameters>[^)]*)\))?)?")


@dataclass(frozen=True)
class Verdict:
    """The state of a symbol in a package's sources.

    Attributes:
        status: THERE, MOVED or GONE.
        symbol: the symbol as the sources have it; if no alternative is there, the first alternative.
        note: where the symbol is now, which parameters are missing, or that text was looked for.
    """

    status: str
    symbol: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.status}  {self.symbol}{f': {self.note}' if self.note else ''}"


def verdict(tree: SourceTree, use: Use) -> Verdict:
    """Return the verdict on a symbol, or on the best of its alternatives."""
    each = [_verdict_of(tree, symbol) for symbol in (use if isinstance(use, tuple) else (use,))]
    for status in (THERE, MOVED):
        for found in each:
            if found.status == status:
                return found
    notes = [found.note or "not there" for found in each[:1]] + [f"nor is there {found.symbol}" for found in each[1:]]
    return each[0] if len(each) == 1 else Verdict(GONE, each[0].symbol, "; ".join(notes))


def check(root: Path, package: Package, *, stand_ins: bool = False) -> list[tuple[str, Verdict]]:
    """Return each file that relies on a symbol of the package, with the verdict on that symbol.

    Args:
        root: the folder that contains the package's folder.
        package: the package to check.
        stand_ins: also check the symbols that the stand-ins imitate.
    """
    tree = SourceTree(root, package.folder)
    uses = {**package.uses, **({"tests/support/stand_ins": package.imitated} if stand_ins else {})}
    return [(file, verdict(tree, use)) for file, its in uses.items() for use in its]


def root_of(folder: Path, package: Package) -> Path | None:
    """Return `folder` or its subfolder, whichever contains the package's folder; None if neither does."""
    below = sorted(path for path in folder.iterdir() if path.is_dir())
    return next((each for each in (folder, *below) if (each / package.folder).is_dir()), None)


def _verdict_of(tree: SourceTree, symbol: Symbol) -> Verdict:
    if isinstance(symbol, Text):
        return _verdict_of_text(tree, symbol)
    match = _SYMBOL.fullmatch(symbol)
    assert match is not None, symbol
    module, name = match["module"], match["name"]
    parameters = [each.strip() for each in (match["parameters"] or "").split(",") if each.strip()]
    try:
        if name is None:
            return Verdict(THERE if tree.file_of(module) else GONE, symbol)
        found = tree.find(module, name)
        if found is None:
            others = tree.elsewhere(name, but=module)
            return Verdict(MOVED, symbol, f"in {', '.join(others)}") if others else Verdict(GONE, symbol)
        known, takes_others = tree.parameters(found)
    except SyntaxError as error:
        return Verdict(GONE, symbol, f"this Python cannot parse {error.filename}, line {error.lineno}")
    missing = [each for each in parameters if each not in known]
    if missing and not takes_others:
        return Verdict(GONE, symbol, f"without {', '.join(missing)}")
    return Verdict(THERE, symbol, f"{', '.join(missing)} by **kwargs" if missing else "")


def _verdict_of_text(tree: SourceTree, symbol: Text) -> Verdict:
    shown = f"{symbol.file or tree.package} {symbol.text!r}"
    files = [symbol.file] if symbol.file and tree.contains(symbol.file, symbol.text) else tree.files_with(symbol.text)
    if not files:
        return Verdict(GONE, shown, "looked for as text")
    if not symbol.file or symbol.file in files:
        return Verdict(THERE, shown, "as text")
    return Verdict(MOVED, shown, f"as text in {', '.join(files)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the lines and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.check_symbols", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("packages", nargs="*", metavar="PACKAGE[==VERSION]", help=f"of {', '.join(PACKAGES)}")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="sources that are there already")
    parser.add_argument("--stand-ins", action="store_true", help="also what tests/support/stand_ins imitates")
    given = parser.parse_args(arguments)
    names = [each.partition("==")[0] for each in given.packages]
    unknown = [name for name in names if name not in PACKAGES]
    if unknown:
        parser.error(f"not known: {', '.join(unknown)}")
    asked_for = given.packages or list(_all(given.source))
    if not asked_for:
        parser.error(f"none of {', '.join(PACKAGES)} is in {given.source}")
    lost: dict[str, int | None] = {}
    for asked in asked_for:
        with tempfile.TemporaryDirectory() as folder:
            found = _check_one(asked, given.source or Path(folder), given.source is None, given.stand_ins)
            lost[asked.partition("==")[0]] = found
    unchecked = [name for name in PACKAGES if lost.get(name) is None]
    if unchecked:
        whys = {name: "no sources" if name in lost else "not given" for name in unchecked}
        sys.stdout.write(f"not checked: {', '.join(f'{name} ({why})' for name, why in whys.items())}\n")
    return 1 if any(lost.values()) else 0


def _all(source: Path | None) -> Iterator[str]:
    for name, package in PACKAGES.items():
        if package.distribution if source is None else root_of(source, package) is not None:
            yield name


def _check_one(asked: str, folder: Path, is_fetched: bool, stand_ins: bool) -> int | None:
    """Write the lines of one package; return how many of its symbols moved or are gone, or None without sources."""
    name, _, version = asked.partition("==")
    package, title = PACKAGES[name], asked.replace("==", " ")
    try:
        if is_fetched:
            if not package.distribution:
                raise NoSources("the package index has none: get them by hand, and give --source")
            folder = unpacked(package.distribution, version or None, folder)
            title = f"{name} {folder.name.rpartition(' ')[2]}"
        root = root_of(folder, package)
        if root is None:
            raise NoSources(f"there is no folder {package.folder} in {folder}")
    except NoSources as error:
        sys.stdout.write(f"{title}: could not get the sources: {error}\n")
        return None
    found = check(root, package, stand_ins=stand_ins)
    counts = {status: sum(each.status == status for _, each in found) for status in (THERE, MOVED, GONE)}
    others = "".join(f", {counts[status]} {status}" for status in (MOVED, GONE) if counts[status])
    sys.stdout.write(f"{title}: {counts[THERE]} of {len(found)} there{others}\n")
    sys.stdout.writelines(f"  {each}  ({file})\n" for file, each in found)
    return counts[MOVED] + counts[GONE]


if __name__ == "__main__":
    sys.exit(main())
