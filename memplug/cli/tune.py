"""`memplug tune`: finds a DeepSpeed configuration that fits and is the fastest by ProTrain's estimators."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplug.cli.output import collected_warnings, echo_warnings, print_table, progress, refusing

if TYPE_CHECKING:
    from memplug.predict.tune.search import Configuration, Prediction
    from memplug.predict.tune.tuning import Tuned

_GIB = 2**30
_HEADINGS = [
    "ZeRO",
    "on the host",
    "micro-batch",
    "persist",
    "buffer",
    "swap",
    "checkpoint",
    "tokens/s",
    "device GiB",
    "host GiB",
]


def tune(
    ds_json: Annotated[
        Path,
        typer.Argument(metavar="DS_JSON", help='DeepSpeed JSON; tune finds values for keys that are "auto" or absent.'),
    ],
    model: Annotated[Path, typer.Option(metavar="YAML", help="Fields of LlamaConfig, MixtralConfig or Qwen3Config.")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="A profile of configs/hardware, such as h100, or its path.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the machine; each is a rank.", min=1)],
    host_gib: Annotated[float, typer.Option(help="Host memory for training on the machine, in GiB.", min=0.0)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Write the best DeepSpeed JSON to FILE.")
    ],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the model's max_position_embeddings.", min=1)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences in a GPU's micro-batch; by default the JSON's, else searched.", min=1)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the best configurations and all counts to FILE."),
    ] = None,
) -> None:
    """Find the fastest DeepSpeed configuration that fits; no GPU is used, and all figures are predicted.

    Chooses the ZeRO stage, offloading, the micro-batch, and the model's blocks that swap and that recompute.
    Exit code 0: found and written; 1: nothing fits, or a file is not usable.
    """
    with collected_warnings() as warnings:
        with refusing(), progress("running the model's parts on the virtual device"):
            tuned = _tuned(ds_json, model, gpu, gpus, host_gib, seq_len, micro_batch)
            _write(output, tuned.ds_config)
            if json_file is not None:
                _write(json_file, _facts(tuned))
    print_table(_HEADINGS, [_row(at, made) for at, made in tuned.best])
    typer.echo("\n".join(["", *_counts(tuned), "", f"The best one is in {output}."]))
    echo_warnings(warnings)


def _tuned(
    ds_json: Path,
    model: Path,
    gpu: str,
    gpus: int,
    host_gib: float,
    seq_len: int | None,
    micro_batch: int | None,
) -> "Tuned":
    from memplug.ds_json.reading import read_json
    from memplug.predict.estimator.shapes import Shape
    from memplug.predict.tune import tuning
    from memplug.predict.tune.machine import Machine
    from memplug.predict.virtual import GpuProfile

    ds_config = read_json(ds_json)
    shape, machine = Shape.read(model), Machine(hardware=GpuProfile.named(gpu), gpus=gpus)
    return tuning.tune(ds_config, shape, machine, host_gib * _GIB, seq_len=seq_len, micro_batch=micro_batch)


def _write(file: Path, content: dict[str, Any]) -> None:
    from memplug.errors import TuneError

    try:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise TuneError(f"{file}: the configuration cannot be written: {error}", "Give another path.") from None


def _facts(tuned: "Tuned") -> dict[str, Any]:
    return {
        "best": [{**asdict(at), "tokens_per_s": made.tokens_per_s, **asdict(made)} for at, made in tuned.best],
        "fits_too": tuned.fits,
        "ruled_out": dict(tuned.ruled_out),
        "limits": asdict(tuned.limits),
    }


def _row(at: "Configuration", made: "Prediction") -> list[str]:
    layout = at.layout
    offload = {"none": "nothing", "optimizer": "optimizer", "parameters": "optimizer, parameters"}
    return [
        str(layout.stage),
        offload[layout.offload],
        f"{layout.micro_batch} x {layout.accumulation}",
        *map(str, (at.n_persist, at.n_buffer, at.n_swap, at.n_checkpoint)),
        f"{made.tokens_per_s:,.0f}",
        f"{made.device_bytes / _GIB:.1f}",
        f"{made.host_bytes / _GIB:.1f}",
    ]


def _counts(tuned: "Tuned") -> list[str]:
    limits = tuned.limits
    lines = [f"Limits: {limits.device_bytes / _GIB:.1f} GiB of a GPU, {limits.host_bytes / _GIB:.1f} of the host."]
    lines += [f"Ruled out: {count:,} configurations: {reason}." for reason, count in tuned.ruled_out.most_common()]
    return [*lines, f"Of the configurations that were examined one by one, {tuned.fits:,} more fit."]
