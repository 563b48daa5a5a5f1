"""Trains small models whose layers launch kernels of their own, with memplug and without, for `FOLDER/results.pt`.

`python -m tests.support.opaque_layers_worker FOLDER CASES [--installed]` uses the stand-ins of Transformer Engine and
flash-attn, or with `--installed` these packages themselves on a GPU, in bfloat16. `CASES` is a JSON object: name ->
case. For "refusals" and "errors" the case is a block, passed to the function of that name, whose docstring describes
the result. Any other case has these fields:

* "layer": a class of this module; "steps": how many; "memplug": a block, or null;
* "recipe": FP8's recipe, or null; "around_backward": a recipe that is on around backward alone;
* "micro_batches": how many a step has; their forwards all run before the first backward; "dropped": how many of them
  have no backward;
* "device": "cpu" by default; "schedules": a list of [policy, seed] for simulated CUDA, of which the steps take one each
  in turn; "missing": the name of a `Wait` to leave out;
* "checkpoint": whether torch's `checkpoint` is around each layer.

The results of each case: {"losses": of each micro-batch, "gradients": a digest of each step's gradients, "scales":
FP8's at the end, "report": memplug's, "functions": counts of each Function's forwards in the last step (for the
packages themselves, see tests/support/attention_kernels.py), "flops": by kernel, in the last step, "violations": how
often simulated CUDA saw a wrong order, "queued": FP8 states that are left over at the end, "histories": the amax
histories of the last step (see `TwiceLinear`)}.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memplug
from memplug.device.device import CudaDevice
from tests.support import attention_kernels, stand_in
from tests.support.digests import digest
from tests.support.extension import Wait, leaving_out_of

INSTALLED = "--installed" in sys.argv
if not INSTALLED:
    stand_in.use()

import transformer_engine.pytorch as te  # noqa: E402
from flash_attn import flash_attn_func  # noqa: E402
from transformer_engine.common import recipe as recipes  # noqa: E402

if INSTALLED:
    # attention kernels do not support float32, and FP8 kernels need this many features
    calls, WIDTH, TOKENS = attention_kernels.Calls(), 256, 64
    torch.set_default_dtype(torch.bfloat16)
else:
    from transformer_engine.stand_in import calls

    WIDTH, TOKENS = 32, 12
HEADS, SEQUENCES, LAYERS = 4, 2, 3


class Parts(nn.Module):
    """A decoder layer of Transformer Engine's modules, with residuals and dropout; [tokens, sequences, width]."""

    def __init__(self, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(width, 3 * width, normalization="RMSNorm", bias=False)
        self.core = te.DotProductAttention(HEADS, width // HEADS, attention_dropout=dropout)
        self.projection = te.Linear(width, width, bias=False)
        self.mlp = te.LayerNormMLP(width, 2 * width, activation="swiglu", normalization="RMSNorm", bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(x, is_first_microbatch=first).chunk(3, -1))
        attended = self.core(q.contiguous(), k.contiguous(), v.contiguous())
        y = self.projection(attended, is_first_microbatch=first)
        x = x + nn.functional.dropout(y, self.dropout)
        return x + self.mlp(x, is_first_microbatch=first)


class Drops(Parts):
    """A layer that draws random numbers inside of attention and outside."""

    def __init__(self) -> None:
        super().__init__(0.1)


class Flash(Parts):
    """A layer that calls flash-attn itself."""

    def __init__(self) -> None:
        super().__init__()
        self.core = FlashAttention()


class FlashAttention(nn.Module):
    """Runs flash-attn's function on [tokens, sequences, heads, size]; returns [tokens, sequences, heads * size]."""

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        out = flash_attn_func(*(x.transpose(0, 1) for x in qkv), causal=True, deterministic=True)
        return out.transpose(0, 1).flatten(-2)


class QuantizedLinear(te.Linear):
    """A module with an autocast of its own, as Megatron-Core's modules have if each has its own recipe."""

    def will_execute_quantized(self, is_context_quantized: bool) -> bool:
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.Float8CurrentScaling()):
            return super().forward(*args, **kwargs)


class Mixed(Parts):
    """A layer in which one module is quantized by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = QuantizedLinear(WIDTH, WIDTH, bias=False)


class TwiceLinear(te.Linear):
    """A module that runs twice per call and records its amax histories.

    It can fail between the two runs, in a forward or in a recompute pass (`fails`).
    """

    histories: ClassVar[dict[str, list[list[float]]]] = {"forward": [], "again": []}
    fails = ""

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        phase = "again" if te.distributed.in_fp8_activation_recompute_phase() else "forward"
        self.histories[phase].append([])
        y = super().forward(x, **options)
        if self.fails == phase:
            raise RuntimeError(f"it fails, {phase}")
        return super().forward(y, **options)

    @contextlib.contextmanager
    def prepare_forward(self, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
        """Record the amax history; Transformer Engine calls this since 2.10."""
        with super().prepare_forward(*args, **kwargs) as x:
            phase = "again" if te.distributed.in_fp8_activation_recompute_phase() else "forward"
            self.histories[phase][-1] += self.fp8_meta["scaling_fwd"].amax_history[0].tolist()
            yield x


class Twice(Parts):
    """A layer in which one module runs twice per call."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = TwiceLinear(WIDTH, WIDTH, bias=False)


class Whole(nn.Module):
    """Transformer Engine's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(WIDTH, 2 * WIDTH, HEADS, hidden_dropout=0.0, attention_dropout=0.0)

    def forward(self, x: torch.Tensor, first: bool | None = None) -> torch.Tensor:
        return self.layer(x, is_first_microbatch=first)


class Model(nn.Module):
    """Layers in a row, and a loss."""

    def __init__(self, layer: type[nn.Module], recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer() for _ in range(LAYERS)])
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor, first: bool | None) -> torch.Tensor:
        x = x * 1.0  # region inputs are not leaves
        for layer in self.layers:
            x = checkpoint(layer, x, first, use_reentrant=False) if self.recomputes else layer(x, first)
        return x.float().square().mean()


def scales(model: nn.Module) -> list[torch.Tensor]:
    """Return scales and amax histories of all modules, of forward and of backward."""
    metas = [part.fp8_meta for part in model.modules() if getattr(part, "fp8_meta", None)]
    states = [meta[key] for meta in metas for key in ("scaling_fwd", "scaling_bwd") if key in meta]
    fields = [getattr(state, name, None) for state in states for name in ("scale", "amax_history")]
    return [field.clone().cpu() for field in fields if field is not None]


def queued() -> int:
    """Count the FP8 states that wait for a module of Transformer Engine to run again, over all modules so far."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as manager

    queues = getattr(manager, "quantization_state", manager).fp8_tensors_recompute_buffer
    return sum(map(len, queues)) + len(te.distributed.activation_recompute_forward._is_first_fp8_module)


def losses_of(model: Model, micro_batches: int, recipe: Any, around: Any, dropped: int = 0) -> list[float]:
    """Run one step's forwards and backwards, each under its recipe, and return the losses.

    The first `dropped` micro-batches have no backward.
    """
    losses = []
    for number, x in enumerate(torch.randn(micro_batches, TOKENS, SEQUENCES, WIDTH)):
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            losses.append(model(x, number == 0 if micro_batches > 1 else None))
    with te.fp8_autocast(enabled=around is not None, fp8_recipe=around):
        for loss in losses[dropped:]:
            loss.backward()
    return [loss.item() for loss in losses]


def schedules(case: dict[str, Any]) -> Callable[[int], AbstractContextManager[None]]:
    """Return a function that makes the context of a step, by its number."""
    if "schedules" not in case:
        return lambda step: contextlib.nullcontext()
    from tests.cudasim.device import Schedule, scheduled

    chosen = [Schedule(*each) for each in case["schedules"]]
    return lambda step: scheduled(chosen[step % len(chosen)])


def waits(case: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return a context in which a session's streams leave out the kind of wait that the case names."""
    if "missing" not in case:
        return contextlib.nullcontext()
    return mock.patch.object(CudaDevice, "streams", leaving_out_of(CudaDevice, Wait[case["missing"]]))


def violations(case: dict[str, Any]) -> int:
    """Return how often simulated CUDA has seen a wrong order in this process; 0 without schedules."""
    if "schedules" not in case:
        return 0
    from tests.cudasim import device

    return device.violations()


def trained(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case, and return its results."""
    before = violations(case)
    with torch.device(case.get("device", "cpu")), waits(case):
        found = _trained(case)
    return {**found, "violations": violations(case) - before}


def _trained(case: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(globals()[case["layer"]], case.get("checkpoint", False))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    recipe, around = (getattr(recipes, case[key])() if case.get(key) else None for key in ("recipe", "around_backward"))
    block = case.get("memplug")
    attached = memplug.attach(model, block) if block is not None else contextlib.nullcontext()
    found: dict[str, Any] = {"losses": [], "gradients": []}
    schedule, steps, before = schedules(case), case.get("steps", 10), queued()
    with attached as session:
        for step in range(steps):
            with schedule(step):
                if step == steps - 1:
                    calls.clear()
                    TwiceLinear.histories = {"forward": [], "again": []}
                torch.manual_seed(step)
                found["losses"] += losses_of(
                    model, case.get("micro_batches", 1), recipe, around, case.get("dropped", 0)
                )
                found["gradients"].append(digest(model))
                optimizer.step()
                optimizer.zero_grad()
                if session is not None:
                    session.step()
        found["functions"], found["flops"] = dict(calls.functions), dict(calls.flops)
        found["report"] = session.report().as_dict() if session is not None else None
    found["scales"], found["queued"] = scales(model), queued() - before
    found["histories"], TwiceLinear.histories = TwiceLinear.histories, {"forward": [], "again": []}
    return found


def errors(block: dict[str, Any]) -> dict[str, Any]:
    """Train layers whose module runs twice per call and fails in some steps.

    Returns:
        "raised": the error's message by step, "" if none; "queued": FP8 states left over after all steps.
    """
    model, raised, before = Model(Twice), [], queued()
    with memplug.attach(model, block) as session:
        for fails in ("", "again", "forward", ""):
            TwiceLinear.fails = fails
            try:
                losses_of(model, 1, recipes.DelayedScaling(), None)
                raised.append("")
            except RuntimeError as error:
                raised.append(str(error))
            model.zero_grad()
            session.step()
    return {"raised": raised, "queued": queued() - before}


def refusals(block: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the errors of Transformer Engine's own recomputation and offloading, during a session and after it.

    Returns:
        For "during" and "behind" (after the session), by call: class and message of its error, "" if it raised none.
    """
    model, x = Model(Parts), torch.randn(TOKENS, SEQUENCES, WIDTH, requires_grad=True)
    calls_by_name: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: te.checkpoint(model.layers[0], x),
        "distributed.checkpoint": lambda: te.distributed.checkpoint(model.layers[0], x),
        "offload": lambda: te.get_cpu_offload_context(enabled=True),
        "offload by position": lambda: te.get_cpu_offload_context(True, 2),
        "cpu_offload.offload": lambda: te.cpu_offload.get_cpu_offload_context(True),
        "no offload": lambda: te.get_cpu_offload_context(enabled=False),
        "no offload by position": lambda: te.get_cpu_offload_context(False, 2),
        "no offload by default": te.get_cpu_offload_context,
    }

    def raised() -> dict[str, str]:
        found = {}
        for name, call in calls_by_name.items():
            try:
                call()
                found[name] = ""
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        return found

    with memplug.attach(model, block):
        during = raised()
    return {"during": during, "behind": raised()}


OTHERS = {"refusals": refusals, "errors": errors}

if __name__ == "__main__":
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    others = {name: function(cases.pop(name)) for name, function in OTHERS.items() if name in cases}
    torch.save({**others, **{name: trained(case) for name, case in cases.items()}}, folder / "results.pt")
