"""`memplug plan`: finds addresses for the requests of a recorded step, a memory snapshot or a CSV."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplug import planners
from memplug.cli.output import (
    AsJson,
    DeviceOfSnapshot,
    collected_warnings,
    echo_warnings,
    print_facts,
    progress,
    refuse_step_of_snapshot,
    refusing,
)

if TYPE_CHECKING:
    from memplug.arena.plan.part import AddressPlan
    from memplug.arena.plan.problem import Problem
    from memplug.profile.allocator_history import History
    from memplug.profile.trace import Trace

_LIVE_AT_MOST = 10
# Keys of the JSON that come first, in this order.
_FIRST = ("height_bytes", "live_peak_bytes", "efficiency", "lower_bound_bytes", "requests", "fragmentation", "fits")


def plan(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A recorded trace (.npz), a memory snapshot of torch's allocator, or a CSV: id,lower,upper,size.",
        ),
    ],
    planner: Annotated[
        str, typer.Option(help=f"auto, or one of {planners.listed()}; auto keeps the best.")
    ] = planners.AUTO,
    time_limit_s: Annotated[
        float | None,
        typer.Option(
            "--time-limit", metavar="SECONDS", help="Time for planning; by default 10, or 50 with --capacity.", min=0.0
        ),
    ] = None,
    capacity_bytes: Annotated[
        int | None,
        typer.Option("--capacity", metavar="BYTES", help="Stop as soon as the plan fits into this many bytes.", min=1),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the plan (.json), or the requests with their offsets (.csv)."
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the trace, from 0; by default its last.", min=0)] = None,
    device: DeviceOfSnapshot = None,
    as_json: AsJson = False,
) -> None:
    """Plan addresses for the requests of one training step, in the smallest arena; no GPU is used.

    For a memory snapshot of torch's allocator, plans its whole history, and compares the result with the memory that
    torch reserved.

    Exit code 0: planned, and within --capacity if that is given; 1: it does not fit, or a file is not usable.
    """
    if planner not in planners.names():
        raise typer.BadParameter(f"{planner!r} is none of {', '.join(planners.names())}", param_hint="--planner")
    if time_limit_s is None:
        time_limit_s = 10.0 if capacity_bytes is None else 50.0
    with collected_warnings() as warnings:
        with refusing():
            _refuse_without_arena()
            problem, recorded, history = _read(source, step, device)
            made, served = _planned(problem, recorded, planner, time_limit_s, capacity_bytes)
            if output is not None:
                _write(made, output)
    facts, rows = _facts(made, served, capacity_bytes), []
    if history is not None:
        from memplug.show import history_summary

        facts |= history_summary.beside(history, made.problem.lower_bound)
        rows = history_summary.rows_beside(facts)
    print_facts(facts, [*_rows(made, facts), *rows], as_json=as_json)
    echo_warnings(warnings)
    if facts["fits"] is False:
        typer.echo("\n".join(_why(made.problem, facts, capacity_bytes)), err=True)
        raise typer.Exit(1)


def _refuse_without_arena() -> None:
    from memplug.block import has_technique
    from memplug.errors import MemplugError

    if not has_technique("arena"):
        raise MemplugError(
            "addresses are planned for the arena, and the folder memplug/arena is missing",
            "Install a memplug that has it.",
        )


def _read(source: Path, step: int | None, device: int | None) -> "tuple[Problem, Trace | None, History | None]":
    """Return (requests, step, history); the step only for a trace, the history only for a memory snapshot."""
    from memplug.arena.plan.from_trace import last_step, problem_of, problem_of_all
    from memplug.arena.plan.problem_file import read_csv
    from memplug.profile import allocator_history
    from memplug.profile.trace_file import load

    if source.suffix.lower() == ".csv":
        return read_csv(source), None, None
    if allocator_history.is_snapshot(source):
        refuse_step_of_snapshot(step)
        history = allocator_history.load(source, device)
        return problem_of_all(history.trace), None, history
    recorded = last_step(load(source), step)
    return problem_of(recorded), recorded, None


def _planned(
    problem: "Problem",
    recorded: "Trace | None",
    planner: str,
    time_limit_s: float,
    capacity_bytes: int | None,
) -> "tuple[AddressPlan, tuple[int, int]]":
    """Return the plan, and bytes of dynamic requests: of those that would have found room in the arena, and of all.

    Dynamic requests are those of experts, whose sizes depend on the data.
    """
    from memplug.arena.plan import auto, dynamic
    from memplug.arena.plan.part import address_plan
    from memplug.arena.planning import plan_with_spaces
    from memplug.sizes import BLOCK_BYTES, rounded_up

    with progress(f"planning {len(problem):,} requests", time_limit_s) as say:
        solution = auto.plan(problem, planner, time_limit_s=time_limit_s, capacity_bytes=capacity_bytes, progress=say)
        if recorded is None:
            return address_plan(problem, solution), (0, 0)
        say("dynamic spaces")
        made = plan_with_spaces(recorded, problem, solution)
        asked = dynamic.dynamic_requests(recorded)["nbytes"]
        _, served_bytes = dynamic.served(recorded, made.dynamic)
        return made, (served_bytes, int(rounded_up(asked, BLOCK_BYTES).sum()))


def _write(made: "AddressPlan", output: Path) -> None:
    from memplug.arena.plan.problem_file import write_csv
    from memplug.plans import plan_file

    if output.suffix.lower() == ".csv":
        write_csv(made.problem, made.solution, output)
    else:
        plan_file.save(made.alone(), output)


def _facts(made: "AddressPlan", served: tuple[int, int], capacity_bytes: int | None) -> dict[str, Any]:
    from memplug.arena.picture.summary import addresses

    return {
        **dict.fromkeys(_FIRST),
        **addresses(made),
        "fits": None if capacity_bytes is None else made.solution.height <= capacity_bytes,
        "dynamic_served_bytes": served[0],
        "dynamic_bytes": served[1],
    }


def _rows(made: "AddressPlan", facts: dict[str, Any]) -> list[tuple[str, str]]:
    from memplug.arena.picture.summary import efficiency_row, ending
    from memplug.words import size

    rows = [
        ("height", f"{size(facts['height_bytes'])} ({facts['height_bytes']:,} bytes)"),
        ("lower bound", f"{size(facts['lower_bound_bytes'])} ({facts['lower_bound_bytes']:,} bytes)"),
        efficiency_row(facts),
        ("requests", f"{facts['requests']:,}"),
        ("fragmentation", f"{facts['fragmentation']:.4%}"),
        ("planner", f"{facts['planner']}, {ending(facts)}"),
        ("seconds", f"{facts['seconds']:.2f}"),
    ]
    if made.dynamic:
        groups = f"{facts['dynamic_requests']:,} requests in {len(made.dynamic):,} groups"
        most = f"at most {size(facts['dynamic_peak_bytes'])} in use, not counted in the height"
        share = facts["dynamic_served_bytes"] / max(1, facts["dynamic_bytes"])
        rows.append(("dynamic", f"{groups}, {most}; {share:.0%} of their bytes would have found room in the arena"))
    if facts["fits"] is not None:
        rows.append(("fits", "yes" if facts["fits"] else "no"))
    return rows


def _why(problem: "Problem", facts: dict[str, Any], capacity_bytes: int) -> list[str]:
    """Return lines on why the plan does not fit; if no plan fits, the lines list the largest requests at the peak."""
    from memplug.words import size

    missing = facts["lower_bound_bytes"] - capacity_bytes
    if missing <= 0:
        over = size(facts["height_bytes"] - capacity_bytes)
        return [f"The lowest plan that was found is {over} above the capacity. What to do: raise --time-limit."]
    rows = problem.live_at_peak()
    lines = [
        f"No plan fits: {len(rows):,} requests of {size(facts['lower_bound_bytes'])} are in use at once, "
        f"{size(missing)} more than the capacity. The largest of them:"
    ]
    for row in rows[:_LIVE_AT_MOST].tolist():
        buffer = problem.buffer(row)
        layer = f", {problem.layers[buffer.lower_layer].name}" if buffer.lower_layer >= 0 else ""
        lifetime = f"in use from {buffer.lower} up to {buffer.upper}"
        lines.append(f"  request {problem.ids[row]}: {size(buffer.size)}, {lifetime}{layer}")
    rest = rows[_LIVE_AT_MOST:]
    if len(rest):
        lines.append(f"  and {len(rest):,} more, of {size(int(problem.buffers['size'][rest].sum()))}")
    return [*lines, "What to do: swap or recompute some of them, or raise the capacity."]
