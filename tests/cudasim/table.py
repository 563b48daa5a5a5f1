"""The table of tests and the schedules that they ran under, as Markdown, and its place in a file."""

from __future__ import annotations

import collections
import re
from pathlib import Path

POLICIES = ["eager", "lazy", "copyfirst", "computefirst"]


def of(tests: list[tuple[str, dict[str, int]]]) -> str:
    """Return a table with a line for each file: how many of its tests passed, and how often under each schedule.

    Args:
        tests: For each name ("file::test[case]"), how often it ran under each schedule ("random 3" has seed 3).
    """
    files: dict[str, list[dict[str, int]]] = collections.defaultdict(list)
    for name, schedules in tests:
        files[name.split("::")[0]].append(schedules)
    lines = ["| tests | passed | " + " | ".join(POLICIES) + " | random (seeds) |", "|---" * (len(POLICIES) + 3) + "|"]
    for file, ran in sorted(files.items()):
        counts = sum((collections.Counter(schedules) for schedules in ran), collections.Counter())
        seeds = [schedule for schedule in counts if schedule.startswith("random")]
        random = f"{sum(counts[schedule] for schedule in seeds)} ({len(seeds)})" if seeds else "0"
        cells = [
            file.removeprefix("tests/").removesuffix(".py"),
            len(ran),
            *(counts[policy] for policy in POLICIES),
            random,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write(file: str, place: str, rows: str) -> None:
    """Write the rows between the file's comments `<!-- place -->` and `<!-- /place -->`."""
    path = Path(file)
    between = re.compile(f"(?<=<!-- {place} -->\n).*?(?=<!-- /{place} -->)", re.DOTALL)
    text, times = between.subn(lambda _: rows + "\n", path.read_text())
    if times != 1:
        raise ValueError(f"{file} has no place for the table: <!-- {place} --> and <!-- /{place} -->")
    path.write_text(text)
