"""`memplug estimate`: what a training step takes on a GPU that is not there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplug.cli import layouts
from memplug.cli.estimated import facts_of, table_of, unknown_of, write
from memplug.cli.output import collected_warnings, echo_warnings, print_table, progress, refusing

if TYPE_CHECKING:
    from memplug.config import MemplugConfig
    from memplug.predict.estimator import Estimate
    from memplug.predict.estimator.workload import Workload
    from memplug.predict.virtual import Hardware

_ALL = "all"


def estimate(
    ds_json: Annotated[
        Path | None,
        typer.Argument(metavar="DS_JSON", help='DeepSpeed JSON: its "memplug" block, dtype and micro-batch.'),
    ] = None,
    model: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Shape of the model, as YAML: fields of LlamaConfig, MixtralConfig or Qwen3Config."
        ),
    ] = ...,
    gpu: Annotated[str, typer.Option(help="A GPU that memplug has a profile of, or the file of a profile.")] = "h200",
    layers: Annotated[int | None, typer.Option(help="Decoder layers; by default all of the model's.", min=1)] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the most that the model is made for.", min=1)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences; by default as the DeepSpeed JSON says, else 1.", min=1)
    ] = None,
    head: Annotated[bool, typer.Option(help="With embedding, head and loss.")] = True,
    tiled_loss: Annotated[
        int,
        typer.Option(
            metavar="TILES", help="Logits and loss in so many parts, as the DeepSpeed recipe has them.", min=1
        ),
    ] = 1,
    optimizer: Annotated[bool, typer.Option(help="With AdamW, its states in the parameters' dtype.")] = True,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Ranks: of DeepSpeed's engine, with the DeepSpeed JSON's ZeRO, by default no engine; with the options "
            "below, of Megatron-Core, by default as few as they need: what they leave is data parallel.",
            min=1,
        ),
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Ranks that share each matrix product.", min=1)] = None,
    sequence: Annotated[
        bool, typer.Option("--sequence", help="They share the rest of a layer too, by tokens.")
    ] = False,
    pipeline: Annotated[
        int | None,
        typer.Option(
            help="Stages; twice as many micro-batches pass through them, or gradient_accumulation_steps of the JSON.",
            min=1,
        ),
    ] = None,
    expert: Annotated[int | None, typer.Option(help="Ranks that share the experts of a Mixtral.", min=1)] = None,
    context: Annotated[int | None, typer.Option(help="Ranks that share the tokens of a sequence.", min=1)] = None,
    mode: Annotated[str, typer.Option(help="keep, full, selective, memplug, or all of them.")] = _ALL,
    attention: Annotated[
        str | None, typer.Option(help="Back end: cudnn, flash; by default the profile's first.")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="Memory of the host for this GPU; by default as much as is asked for.", min=0)
    ] = None,
    limits: Annotated[
        bool,
        typer.Option(
            help="Find the longest sequence and the largest micro-batch that fit: of one rank, without --trace."
        ),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Values that a real step of the same model and sizes has read (`memplug.record_values`): with them a "
            "Mixtral from Hugging Face is estimated.",
        ),
    ] = None,
    plan_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write memplug's plan there, for a run of the same job; not of Megatron-Core.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a chart of each step as a page; needs plotly.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each step as a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers there, as one JSON object.")
    ] = None,
) -> None:
    """Predict the step time, device memory and host memory of a training step on a GPU; none is used.

    Modes: keep everything; recompute every layer in full; all of it but attention (selective); or as memplug plans.
    One rank's step, forward, backward and optimizer, of a Llama or Qwen3 from Hugging Face, or with --trace a Mixtral;
    with --tensor, --pipeline, --expert or --context, and of a Mixtral without --trace, from Megatron-Core, with tokens
    spread evenly over experts, and of a pipeline the slowest stage's step with the bubble, and the memory of the stage
    that needs most. All figures are predictions.
    Exit code 0: done; 1: something is not usable, or no mode fits.
    """
    with collected_warnings() as warnings, refusing():
        split = {"tensor": tensor, "sequence": sequence, "pipeline": pipeline, "expert": expert, "context": context}
        split = {name: each for name, each in split.items() if each}
        if gpus is not None and not split and (ds_json is None or not (head and optimizer)):
            raise typer.BadParameter("takes a DeepSpeed JSON, and all of the model", param_hint="--gpus")
        if trace is not None and (split or not head):
            raise typer.BadParameter("is of all of a model from Hugging Face", param_hint="--trace")
        workload, config, hardware, settings = _asked(
            ds_json,
            model,
            gpu,
            trace,
            gpus if not split else None,
            layers=layers,
            seq_len=seq_len,
            micro_batch=micro_batch,
            head=head,
            optimizer=optimizer,
            loss_tiles=tiled_loss,
        )
        layout = layouts.layout_of(workload, split, gpus) if trace is None else None
        if tiled_loss > 1 and (layout is not None or trace is not None or not head):
            raise typer.BadParameter("is of a head of Hugging Face's, without --trace", param_hint="--tiled-loss")
        micro_batches = layouts.micro_batches_of(layout, settings)
        modes = _modes(mode)
        options = {"attention": attention, "plan_dir": plan_dir}
        if host_gib is not None:
            options["host_bytes"] = host_gib * 2**30
        with progress("importing torch") as say:
            if layout is not None:
                from memplug.predict.estimator.stages import estimate_megatron

                found = estimate_megatron(workload, config, hardware, modes, layout, micro_batches, say=say, **options)
            else:
                engine = settings if gpus else None
                options |= {"trace": trace}
                found = _estimate(workload, config, hardware, modes, engine, gpus, tell=say, **options)
            largest = {}
            if limits and gpus is None and layout is None and trace is None:
                found_by = {name: options[name] for name in ("attention", "host_bytes") if name in options}
                largest = _limits(workload, config, hardware, modes, say=say, **found_by)
        facts = facts_of(found, workload, largest, settings, gpus)
        if layout is not None:
            facts |= layouts.facts_of(found, workload, layout, micro_batches)
        write(found, workload, facts, html, chrome, as_json)
    typer.echo(facts["title"])
    print_table(*table_of(facts))
    for line in unknown_of(facts):
        typer.echo(line, err=True)
    for name, error in found.impossible.items():
        typer.echo(f"{name}: {error}", err=True)
    echo_warnings(list(dict.fromkeys(warnings)))
    if not any(each["fits"] for each in facts["modes"].values()):
        raise typer.Exit(1)


def _asked(
    ds_json: Path | None, model: Path, gpu: str, trace: Path | None, engine_gpus: int | None, **given: Any
) -> "tuple[Workload, MemplugConfig, Hardware, dict[str, Any]]":
    """What trains, memplug's block, the GPU, and the DeepSpeed JSON."""
    from memplug.config import load_config, read_ds_config
    from memplug.ds_json.reading import read_json
    from memplug.predict.estimator.engine import dtype_of, micro_batch_of
    from memplug.predict.estimator.shapes import Shape
    from memplug.predict.estimator.values import Values
    from memplug.predict.estimator.workload import Workload
    from memplug.predict.virtual import Hardware

    hardware, shape = Hardware.named(gpu), Shape.read(model)
    settings = read_json(ds_json) if ds_json is not None else {}
    block = read_ds_config(settings) if "memplug" in settings else load_config({"enabled": True})
    workload = Workload(
        shape=shape,
        layers=given["layers"] or shape.layers,
        seq_len=given["seq_len"] or shape.fields.get("max_position_embeddings", 4096),
        micro_batch=given["micro_batch"] or micro_batch_of(settings, engine_gpus),
        dtype=dtype_of(settings),
        head=given["head"],
        optimizer=given["optimizer"],
        loss_tiles=given["loss_tiles"],
        values=Values.read(trace) if trace is not None else None,
    )
    return workload, block, hardware, settings


def _modes(asked: str) -> tuple[str, ...]:
    from memplug.predict.estimator import MODES

    if asked not in (*MODES, _ALL):
        raise typer.BadParameter(f"{asked!r} is none of {', '.join(MODES)}, {_ALL}", param_hint="--mode")
    return MODES if asked == _ALL else (asked,)


def _estimate(
    workload: "Workload",
    config: "MemplugConfig",
    hardware: "Hardware",
    modes: tuple[str, ...],
    settings: dict[str, Any] | None,
    gpus: int | None,
    **options: Any,
) -> "Estimate":
    from memplug.predict.estimator import estimate as run
    from memplug.predict.estimator.ranks import estimate_rank

    if settings is not None:
        return estimate_rank(workload, config, hardware, modes, settings, gpus, **options)
    optimizer = workload.make_optimizer if workload.optimizer else None
    return run(workload.make_model, workload.inputs, config, hardware, modes, make_optimizer=optimizer, **options)


def _limits(
    workload: "Workload",
    config: "MemplugConfig",
    hardware: "Hardware",
    modes: tuple[str, ...],
    **options: Any,
) -> dict[str, dict[str, int]]:
    from memplug.predict.estimator.limits import Limits

    searches = {mode: Limits(workload, config, hardware, mode, **options) for mode in modes}
    return {
        mode: {"longest_seq_len": search.longest(), "largest_micro_batch": search.largest_batch()}
        for mode, search in searches.items()
    }
