"""The `memplug` command: one module for each of its commands, and what they print with."""

import typer

from memplug.cli.check import check
from memplug.cli.diff import diff
from memplug.cli.doctor import doctor
from memplug.cli.plan import plan
from memplug.cli.show import show

app = typer.Typer(
    help="Training memory as cheap as the hardware allows: a plugin for DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog="Example: memplug check ds_config.json")(check)
app.command(epilog="Example: memplug doctor > doctor.txt, to paste into a bug report")(doctor)
app.command(epilog="Example: memplug show trace.npz --html memory.html")(show)
app.command(epilog="Example: memplug plan trace.npz -o plan.json")(plan)
app.command(epilog="Example: memplug diff plan_of_rank0.json plan_of_rank1.json")(diff)


def main() -> None:
    """Entry point of the `memplug` command."""
    app()
