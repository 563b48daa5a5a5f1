"""The list of messages in examples/README.md has every one that memplug logs or raises, and no other."""

from __future__ import annotations

import re
from functools import cache
from itertools import chain

import pytest

from memplug import errors
from tests.support.folders import ROOT
from tests.support.messages import FILLED, Source

# Texts around other messages, which have their own entries: a stage's line, a problem of the block, a file's path.
FRAMES = {"…", "…: …", "memplug: …: …", "step …: …", "region …: …", "buffer … …"}


@cache
def messages() -> tuple:
    return tuple(Source().messages())


@cache
def section() -> str:
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    return re.search(r"^## Troubleshooting\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def table_rows() -> list[list[str]]:
    rows = [line.strip("|").split(" | ") for line in section().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def entries() -> list[str]:
    """The first column's code spans."""
    return list(chain.from_iterable(re.findall(r"`([^`]+)`", row[0]) for row in table_rows()))


def pattern(entry: str) -> re.Pattern[str]:
    """Whatever the entry leaves open may be anything; the name of the package in front is left out of the list."""
    return re.compile("(?:memplug: )?" + ".*".join(map(re.escape, entry.split(FILLED))))


def shown(text: str) -> str:
    return text if len(text) < 120 else text[:117] + "..."


def test_every_message_has_an_entry():
    known = [pattern(entry) for entry in entries()]
    missing = {
        f"{message.where}: {shown(message.text)}"
        for message in messages()
        if message.text not in FRAMES and not any(each.fullmatch(message.text) for each in known)
    }
    assert not missing, "add these to examples/README.md, ## Troubleshooting:\n" + "\n".join(sorted(missing))


def test_no_entry_is_stale():
    texts = {message.text for message in messages()}
    stale = [entry for entry in entries() if not any(pattern(entry).fullmatch(text) for text in texts)]
    assert not stale, "memplug has no such message any more:\n" + "\n".join(stale)
    assert texts >= FRAMES


def test_no_entry_is_so_vague_that_it_covers_what_it_does_not_mean():
    for entry in entries():
        assert sum(map(str.isalpha, entry)) >= 6, entry
    assert len(entries()) == len(set(entries()))


def test_every_entry_says_what_it_means_and_what_to_do():
    for row in table_rows():
        assert len(row) == 3 and all(row), row


def test_the_inventory_sees_every_call_that_logs_or_raises():
    """Compared with a plain search of the lines, so that the inventory cannot go blind."""
    kinds = "|".join(name for name in vars(errors) if name.endswith("Error") and name != "PatchError")
    call = re.compile(rf"\b_?log\.(?:info|warning|error|log)\(|\braise (?:{kinds})\(|\._?tell\([^)]|\._note\(Stage")
    seen = {message.where for message in messages()}
    for path in sorted((ROOT / "memplug").rglob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if call.search(line):
                assert f"{path.relative_to(ROOT)}:{number}" in seen, line


EXAMPLE = """
def attach(name, count):
    log.warning("memplug: %s has %d %%", name, count)
    log.debug("not a message")
    words = f"lasts {count:.2f} s" if count else "never ends"
    self.tell(f"the step {words}" + ", at last", logging.INFO)
    raise RegionError(f"no `{name}` in {_named(name)}; " "look again", "Advice is no message.")
    raise RuntimeError("cannot happen")

def _named(name) -> str:
    return f"the module {name}" if name else "the model"

def refuse(problems):
    problems.append(f"{name}: unknown")
    self._note(Stage.STABLE, "; ".join(filter(None, [_named(1), self.how])))
    self.how = "slowly"
    lines = [f"first line of {name}", "  second line"]
    self.tell("\\n".join(lines))
    parts = ["only part"]
    parts += ["part added", str(name)]
    self.tell("; ".join(parts))
"""


def test_the_inventory_has_every_branch_of_a_text(tmp_path):
    (tmp_path / "memplug").mkdir()
    (tmp_path / "memplug" / "example.py").write_text(EXAMPLE)
    assert [(each.kind, each.text) for each in Source(tmp_path / "memplug").messages()] == [
        ("warning", "memplug: … has … %"),
        ("tell", "the step lasts … s, at last"),
        ("tell", "the step never ends, at last"),
        ("RegionError", "no … in the module …; look again"),
        ("RegionError", "no … in the model; look again"),
        ("ConfigError", "…: unknown"),
        ("_note", "the module …"),
        ("_note", "the model"),
        ("_note", "slowly"),
        ("tell", "first line of … second line"),
        ("tell", "only part"),
        ("tell", "part added"),
    ]


@pytest.mark.parametrize(
    ("entry", "text", "matches"),
    [
        ("off: … says so", "memplug: off: the block says so", True),
        ("off: … says so", "memplug: off: the block says so twice", False),
        ("planned: …", "planned: … GiB", True),
        ("planned", "planned: …", False),
        ("a (b) + c?", "a (b) + c?", True),
    ],
)
def test_an_entry_stands_for_texts_that_differ_in_what_it_leaves_open(entry, text, matches):
    assert bool(pattern(entry).fullmatch(text)) is matches
