"""Compares steps predicted by the virtual device with measured ones: `python -m tests.bench.against_h200`.

Forward and backward of layers of a 7B Llama in bfloat16: measured on an H200 (tests/data/h200.csv), and predicted on
the virtual device with an H200's profile. The profile was fitted to the rows marked "(fitted)". Means exclude rows
whose attention back end was not recorded.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from tests.bench.table import Row, figures, render, write_rows
from tests.support.h200 import BY_DEFAULT, GIGABYTE, Measured, Predicted, measured, predicted

BENCH = "against_h200"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line: where the rows go."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.bench.{BENCH}", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


def over_keep(found: list[tuple[Measured, Predicted]]) -> list[tuple[Measured, float, float]]:
    """Return, for each recomputing step, its time over that of the keep-all step of its size: measured, predicted."""
    keeps = {}
    for row, ours in found:
        if row.mode == "keep":
            keeps.setdefault((row.layer, row.tokens, row.layers, row.attention), (row, ours))
    return [
        (row, row.step_s / keep.step_s, ours.step_s / kept.step_s)
        for row, ours in found
        if row.mode != "keep" and (row.layer, row.tokens, row.layers, row.attention) in keeps
        for keep, kept in [keeps[row.layer, row.tokens, row.layers, row.attention]]
    ]


def main(argv: list[str] | None = None) -> None:
    """Predict and print."""
    args = parse_args(argv)
    found = [(row, predicted(row)) for row in measured()]
    rows, lines, errors = [], [], []
    ratios = {str(row): (was, ours) for row, was, ours in over_keep(found)}
    for row, ours in found:
        error = ours.step_s / row.step_s - 1
        peak, reserved = row.peak_allocated_bytes, row.peak_reserved_bytes
        peak_error = None if peak is None else ours.peak_allocated_bytes / peak - 1
        if row.attention != BY_DEFAULT:
            errors.append((abs(error), None if peak_error is None else abs(peak_error)))
        was, now = ratios.get(str(row), (None, None))
        lines.append(
            [
                f"{row}{' (fitted)' if row.is_calibrated else ''}",
                figures(row.step_s),
                figures(ours.step_s),
                f"{error:+.1%}",
                "-" if peak is None else figures(peak / GIGABYTE),
                "-" if peak_error is None else f"{peak_error:+.1%}",
                "-" if reserved is None else f"{ours.peak_reserved_bytes / reserved - 1:+.1%}",
                "-" if was is None else f"{was:.3f}",
                "-" if now is None else f"{now:.3f}",
            ]
        )
        rows.append(Row(BENCH, str(row), "predicted", "step_s", "s", ours.step_s, 1))
        rows.append(Row(BENCH, str(row), "measured", "step_s", "s", row.step_s, 1))
        for mode, nbytes in (("predicted", ours.peak_allocated_bytes), ("measured", peak)):
            if nbytes is not None:
                rows.append(Row(BENCH, str(row), mode, "peak_allocated_bytes", "bytes", nbytes, 1))
    headers = ["step", "s", "predicted", "error", "peak GB", "error", "of reserved", "over keep", "predicted"]
    print(render(headers, lines, left=0))
    for name, values in zip(("step", "peak"), zip(*errors, strict=True), strict=True):
        known = [value for value in values if value is not None]
        print(f"{name}: mean error {statistics.fmean(known):.1%}, worst {max(known):.1%}")
    worst = max(abs(was - now) for name, (was, now) in ratios.items() if BY_DEFAULT not in name)
    print(f"over keep: worst {worst * 100:.1f} points")
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
