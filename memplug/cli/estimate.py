"""`memplug estimate`: predicts the time and memory of a training step without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplug.cli import layouts
from memplug.cli.estimated import facts_of, table_of, unknown_of, write
from memplug.cli.output import collected_warnings, echo_warnings, print_table, progress, refusing

if TYPE_CHECKING:
    from memplug.predict.estimator import Estimate
    from memplug.predict.estimator.layout import RankLayout
    from memplug.predict.estimator.request import EstimateRequest
    from memplug.predict.estimator.workload import Workload

_ALL = "all"


def estimate(
    ds_json: Annotated[
        Path | None,
        typer.Argument(metavar="DS_JSON", help='DeepSpeed JSON, for its "memplug" block, dtype and micro-batch.'),
    ] = None,
    model: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Shape of the model, as YAML: fields of LlamaConfig, MixtralConfig or Qwen3Config."
        ),
    ] = ...,
    gpu: Annotated[str, typer.Option(help="A GPU that memplug has a profile for, or a profile's file.")] = "h200",
    layers: Annotated[int | None, typer.Option(help="Decoder layers; by default all of the model's.", min=1)] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a sequence; by default the model's maximum.", min=1)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences in a micro-batch; by default the DeepSpeed JSON's, else 1.", min=1)
    ] = None,
    head: Annotated[bool, typer.Option(help="Include embedding, head and loss.")] = True,
    tiled_loss: Annotated[
        int,
        typer.Option(
            metavar="TILES", help="Compute logits and loss in this many parts, as the DeepSpeed recipe does.", min=1
        ),
    ] = 1,
    optimizer: Annotated[bool, typer.Option(help="Include AdamW, with its states in the parameters' dtype.")] = True,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Number of ranks. Without the options below, DeepSpeed trains, with the JSON's ZeRO stage (by default "
            "one rank trains without DeepSpeed). With them, Megatron-Core trains: by default on as few ranks as they "
            "need; further ranks are data parallel.",
            min=1,
        ),
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Tensor parallel ranks: share each matrix product.", min=1)] = None,
    sequence: Annotated[
        bool, typer.Option("--sequence", help="The tensor parallel ranks share the rest of a layer too, by tokens.")
    ] = False,
    pipeline: Annotated[
        int | None,
        typer.Option(
            help="Pipeline stages. A step has the JSON's gradient_accumulation_steps micro-batches, else twice as many "
            "as stages.",
            min=1,
        ),
    ] = None,
    expert: Annotated[
        int | None, typer.Option(help="Expert parallel ranks: share the experts of a Mixtral.", min=1)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Context parallel ranks: share the tokens of a sequence.", min=1)
    ] = None,
    mode: Annotated[str, typer.Option(help="keep, full, selective, memplug, or all (all four).")] = _ALL,
    attention: Annotated[
        str | None, typer.Option(help="Attention back end: cudnn or flash; by default the profile's first.")
    ] = None,
    host_gib: Annotated[
        float | None, typer.Option(help="Host memory for this GPU, in GiB; by default unlimited.", min=0)
    ] = None,
    limits: Annotated[
        bool,
        typer.Option(
            help="Find the longest sequence and the largest micro-batch that fit (one rank only, without --trace)."
        ),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The values that a real step of the same model and sizes read, as `memplug.record_values` wrote them. "
            "A Mixtral from Hugging Face needs them, or --routing.",
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="ROUTING",
            help="How tokens spread over a Mixtral's experts: even (each gets as many, in every step); uniform (each "
            "token draws its experts, so that steps differ); zipf or zipf:EXPONENT (likewise; the first experts are "
            "the most likely, and of expert parallel ranks the one with them is estimated). By default the experts are "
            "as likely as in the trace, else even.",
        ),
    ] = None,
    plan_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write memplug's plan to this folder, for a run of the same job; not for Megatron-Core.",
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a chart of each step as a page; needs plotly.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each step as a Chrome trace, for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers to FILE, as one JSON object.")
    ] = None,
) -> None:
    """Predict the time, device memory and host memory of a training step on a GPU; no GPU is used.

    Modes: keep everything (keep); recompute every layer (full); recompute all but attention (selective); follow
    memplug's plan (memplug).
    Estimates one rank's step (forward, backward, optimizer) of a Llama or Qwen3 from Hugging Face, or with --trace of a
    Mixtral. With --tensor, --pipeline, --expert or --context, and for a Mixtral without --trace, estimates the model of
    Megatron-Core, with tokens spread over experts by --routing. With --routing and --gpus alone, DeepSpeed trains a
    Mixtral from Hugging Face whose experts run one after the other. For a pipeline, shows the step of the slowest
    stage, bubble included, and the memory of the stage that needs most. All figures are predictions.
    Exit code 0: done; 1: an input is not usable, or no mode fits.
    """
    with collected_warnings() as warnings, refusing():
        split = {"tensor": tensor, "sequence": sequence, "pipeline": pipeline, "expert": expert, "context": context}
        asked = _asked(
            ds_json,
            model,
            {name: each for name, each in split.items() if each},
            gpus,
            request={
                "gpu": gpu,
                "modes": _modes(mode),
                "attention": attention,
                "plan_dir": plan_dir,
                "trace": trace,
                "routing": routing,
                **({"host_bytes": host_gib * 2**30} if host_gib is not None else {}),
            },
            layers=layers,
            seq_len=seq_len,
            micro_batch=micro_batch,
            head=head,
            optimizer=optimizer,
            loss_tiles=tiled_loss,
        )
        with progress("importing torch") as say:
            found = asked.run(say)
            largest = asked.limits(say) if limits else {}
        facts = facts_of(found, asked.workload, largest, asked.settings, gpus)
        if asked.layout is not None:
            facts |= layouts.facts_of(found, asked.workload, asked.layout, asked.micro_batches)
        write(found, asked.workload, facts, html, chrome, as_json)
    typer.echo(facts["title"])
    print_table(*table_of(facts))
    for line in unknown_of(facts):
        typer.echo(line, err=True)
    for name, error in found.impossible.items():
        typer.echo(f"{name}: {error}", err=True)
    echo_warnings(list(dict.fromkeys(warnings)))
    if not any(each["fits"] for each in facts["modes"].values()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Asked:
    """The estimate that the command line asks for.

    Attributes:
        settings: The DeepSpeed JSON; empty if there is none.
        gpus: Number of ranks, from `--gpus`; without it None, and the estimate is without DeepSpeed's engine.
        layout: Layout of Megatron-Core; None: the estimate is without Megatron-Core.
        micro_batches: Micro-batches in a step of Megatron-Core.
    """

    workload: "Workload"
    request: "EstimateRequest"
    settings: dict[str, Any]
    gpus: int | None
    layout: "RankLayout | None"
    micro_batches: int

    def run(self, say: Callable[[str], None]) -> "Estimate":
        """Run the estimate and return it."""
        from memplug.predict.estimator.estimate import estimate_workload
        from memplug.predict.estimator.ranks import estimate_rank
        from memplug.predict.estimator.stages import estimate_megatron

        if self.layout is not None:
            return estimate_megatron(self.workload, self.request, self.layout, self.micro_batches, say)
        if self.gpus is not None:
            return estimate_rank(self.workload, self.request, self.settings, self.gpus, say)
        return estimate_workload(self.workload, self.request, say)

    def limits(self, say: Callable[[str], None]) -> dict[str, dict[str, int]]:
        """Return the longest sequence and largest micro-batch that fit, by mode; empty if no search is possible."""
        from memplug.predict.estimator.limits import LimitSearch

        if self.gpus is not None or self.layout is not None or self.request.trace is not None:
            return {}
        searches = {mode: LimitSearch(self.workload, self.request, mode, say) for mode in self.request.modes}
        return {
            mode: {"longest_seq_len": search.longest(), "largest_micro_batch": search.largest_batch()}
            for mode, search in searches.items()
        }


def _asked(
    ds_json: Path | None,
    model: Path,
    split: dict[str, Any],
    gpus: int | None,
    request: dict[str, Any],
    **given: Any,
) -> _Asked:
    """Read the files, and return the estimate that they and the options describe.

    Raises a usage error if options contradict each other.

    Args:
        ds_json: The DeepSpeed JSON, if any.
        model: The file with the model's shape.
        split: The options of Megatron-Core's layout on the command line, by the names of `RankLayout`'s fields.
        gpus: Number of ranks, from `--gpus`; None without it.
        request: Arguments of `EstimateRequest.of`.
        given: Fields of `Workload`; a field that is None gets its value from the files.
    """
    from memplug.config import read_ds_config
    from memplug.ds_json.reading import read_json
    from memplug.predict.estimator.engine import dtype_of, micro_batch_of
    from memplug.predict.estimator.request import EstimateRequest
    from memplug.predict.estimator.shapes import Shape
    from memplug.predict.estimator.values import Values
    from memplug.predict.estimator.workload import Workload

    trace, head = request["trace"], given["head"]
    if gpus is not None and not split and (ds_json is None or not (head and given["optimizer"])):
        raise typer.BadParameter(
            "needs a DeepSpeed JSON, and neither --no-head nor --no-optimizer", param_hint="--gpus"
        )
    if trace is not None and (split or not head):
        raise typer.BadParameter("works only for a whole model from Hugging Face", param_hint="--trace")
    if trace is not None and request["routing"] is not None:
        raise typer.BadParameter("a trace has a routing of its own", param_hint="--routing")
    shape, settings = Shape.read(model), read_json(ds_json) if ds_json is not None else {}
    block = read_ds_config(settings) if "memplug" in settings else None
    defaults = {
        "layers": shape.layers,
        "seq_len": shape.fields.get("max_position_embeddings", 4096),
        "micro_batch": given["micro_batch"] or micro_batch_of(settings, gpus if not split else None),
    }
    if request["routing"] is not None and not shape.is_mixture:
        raise typer.BadParameter("works only for a mixture of experts", param_hint="--routing")
    values = Values.read(trace) if trace is not None else None
    asked = EstimateRequest.of(block, **request)
    fields = {**given, **{name: given[name] or default for name, default in defaults.items()}}
    workload = Workload(shape=shape, dtype=dtype_of(settings), values=values, routing=asked.routing, **fields)
    layout = layouts.layout_of(workload, split, gpus) if trace is None else None
    if given["loss_tiles"] > 1 and (layout is not None or trace is not None or not head):
        raise typer.BadParameter("works only for a head of Hugging Face's, without --trace", param_hint="--tiled-loss")
    micro_batches = layouts.micro_batches_of(layout, settings)
    return _Asked(workload, asked, settings, gpus, layout, micro_batches)


def _modes(asked: str) -> tuple[str, ...]:
    from memplug.predict.estimator import MODES

    if asked not in (*MODES, _ALL):
        raise typer.BadParameter(f"{asked!r} is none of {', '.join(MODES)}, {_ALL}", param_hint="--mode")
    return MODES if asked == _ALL else (asked,)
