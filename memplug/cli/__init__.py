"""The `memplug` command: one module for each subcommand, and modules that several of them use."""

from typing import Annotated

import typer

from memplug.cli.check import check
from memplug.cli.diff import diff
from memplug.cli.doctor import doctor
from memplug.cli.estimate import estimate
from memplug.cli.plan import plan
from memplug.cli.run import run
from memplug.cli.show import show
from memplug.cli.tune import tune
from memplug.cli.versions import echo_version

app = typer.Typer(
    help="Swap and recompute activations, to train with less GPU memory: a plugin for DeepSpeed and Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print memplug's version and exit.", is_eager=True, callback=echo_version)
    ] = False,
) -> None:
    """Handle the options of the command itself; typer calls it before any subcommand."""


app.command(epilog="Example: memplug check ds_config.json")(check)
app.command(epilog="Example: memplug doctor > doctor.txt, to paste into a bug report")(doctor)
app.command(epilog="Example: memplug estimate --model configs/models/7b.yaml --gpu h200 --seq-len 32768")(estimate)
app.command(
    epilog="Example: memplug run deepspeed train.py --deepspeed ds.json",
    context_settings={"allow_interspersed_args": False},  # options after COMMAND belong to COMMAND
)(run)
app.command(epilog="Example: memplug show trace.npz --html memory.html")(show)
app.command(epilog="Example: memplug plan trace.npz -o plan.json")(plan)
app.command(epilog="Example: memplug diff plan_of_rank0.json plan_of_rank1.json")(diff)
app.command(epilog="Example: memplug tune ds.json --model 7b.yaml --gpu h100 --gpus 8 --host-gib 1000 -o tuned.json")(
    tune
)

main = app
