"""One rank of a DeepSpeed training on the virtual device, with the engine's own ZeRO, optimizer and collectives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn

from memplug.ds_json.keys import offloads_of, present
from memplug.errors import EstimateError
from memplug.predict.estimator.training import VirtualTraining, differentiable, unable
from memplug.predict.virtual.accelerator import accelerated
from memplug.predict.virtual.ranks import joined

ADAM = ("adam", "adamw")
PRECISIONS = ("bf16", "fp16")
"""Sections of a DeepSpeed JSON; each enables the dtype that it is named after."""
WATCHERS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "wall_clock_breakdown")
"""Keys of a DeepSpeed JSON that only monitor or profile training."""


@contextlib.contextmanager
def rank_of(gpus: int) -> Iterator[None]:
    """Make this process rank 0 of `gpus` ranks for DeepSpeed inside the context.

    The virtual device must exist.

    Args:
        gpus: The number of ranks.

    Raises:
        EstimateError: DeepSpeed is not installed.
    """
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise EstimateError(
            f"DeepSpeed cannot be imported: {error}", "Run `pip install 'memplug[deepspeed]'`."
        ) from None
    with mock.patch.dict(os.environ, names), joined(rank=0, world_size=gpus), accelerated():
        yield


def dtype_of(ds_config: Mapping[str, Any]) -> str:
    """Return the dtype that DeepSpeed gives to parameters and activations.

    If the JSON enables no precision, the dtype is "fp32", with two exceptions. A precision of "auto", or a JSON with no
    key except "memplug", gives "bf16".

    Args:
        ds_config: The contents of the DeepSpeed JSON.

    Returns:
        "bf16", "fp16" or "fp32".
    """
    known = present(ds_config)
    said = {dtype: _enabled(known[dtype]) for dtype in PRECISIONS if dtype in known}
    for dtype, value in said.items():
        if value is True:
            return dtype
    is_open = "auto" in said.values() or not set(ds_config) - {"memplug"}
    return "bf16" if is_open else "fp32"


def _enabled(section: Any) -> Any:
    return section.get("enabled") if isinstance(section, Mapping) else section


def micro_batch_of(ds_config: Mapping[str, Any], gpus: int | None) -> int:
    """Return the number of sequences in a rank's micro-batch; 1 if the JSON does not determine it.

    If the JSON has `train_batch_size` but no micro-batch, divide that batch by ranks and accumulation steps, as
    DeepSpeed does.

    Args:
        ds_config: The contents of the DeepSpeed JSON.
        gpus: The number of the engine's ranks; None: there is no engine, and `train_batch_size` is ignored.

    Raises:
        EstimateError: `train_batch_size` is not a multiple of the ranks times the accumulation steps.
    """
    given, total = (ds_config.get(name) for name in ("train_micro_batch_size_per_gpu", "train_batch_size"))
    if isinstance(given, int):
        return given
    if gpus is None or not isinstance(total, int):
        return 1
    accumulation = ds_config.get("gradient_accumulation_steps")
    parts = gpus * (accumulation if isinstance(accumulation, int) else 1)
    if total % parts:
        raise EstimateError(
            f"train_batch_size is {total}, which cannot be split into {parts} micro-batches",
            "Give a multiple of --gpus times gradient_accumulation_steps.",
        )
    return total // parts


def settings_of(ds_config: Mapping[str, Any], micro_batch: int, gpus: int) -> dict[str, Any]:
    """Return the settings that DeepSpeed gets in an estimate, made from the user's JSON.

    torch's fused Adam replaces DeepSpeed's: both take the same memory, and both are bound by memory bandwidth. The
    settings omit "auto" values, memplug's block, and keys that only monitor training.

    Args:
        ds_config: The contents of the DeepSpeed JSON.
        micro_batch: Sequences in a rank's micro-batch.
        gpus: The number of the engine's ranks.

    Raises:
        ConfigError: The JSON has a setting under both its deprecated and its current name.
        EstimateError: The JSON offloads optimizer or parameters, so DeepSpeed would compute on the CPU.
    """
    for offload in offloads_of(ds_config):
        raise EstimateError(
            f"{offload} leaves work to the host, which an estimate cannot predict",
            "`memplug tune` predicts a step with offload.",
        )
    known = present(ds_config)
    kept = _without_auto({key: value for key, value in known.items() if key not in ("memplug", *WATCHERS)})
    optimizer = kept.get("optimizer", {"type": "AdamW"})
    params = optimizer.get("params", {})
    if str(optimizer.get("type")).lower() in ADAM and not params.get("torch_adam"):  # DeepSpeed's own Adam
        optimizer = {**optimizer, "params": {**params, "torch_adam": True, "fused": True}}
    dtype = dtype_of(ds_config)
    if dtype in PRECISIONS and _enabled(kept.get(dtype)) is not True:  # the JSON has "auto" or no value
        kept[dtype] = {**(kept[dtype] if isinstance(kept.get(dtype), Mapping) else {}), "enabled": True}
    kept = {**_accumulation(kept, micro_batch, gpus), **kept}
    kept.pop("train_batch_size", None)
    return {**kept, "optimizer": optimizer, "train_micro_batch_size_per_gpu": micro_batch}


def _accumulation(kept: Mapping[str, Any], micro_batch: int, gpus: int) -> dict[str, int]:
    """Return `gradient_accumulation_steps` as DeepSpeed derives it from `train_batch_size`.

    The result is empty if the JSON has no `train_batch_size`, or if the JSON's micro-batch is not `micro_batch`.
    """
    total = kept.get("train_batch_size")
    if not isinstance(total, int) or kept.get("train_micro_batch_size_per_gpu") != micro_batch:
        return {}
    return {"gradient_accumulation_steps": max(1, total // (micro_batch * gpus))}


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value != "auto"
    }


def _refuse_as_deepspeed(settings: Mapping[str, Any]) -> None:
    """Raise an EstimateError with DeepSpeed's message if DeepSpeed rejects the settings."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(settings))
    except Exception as error:  # pydantic, assertions and mistyped values raise many classes
        said = " ".join(str(error).split()) or type(error).__name__
        raise EstimateError(
            f"DeepSpeed refuses the configuration: {said}", "Correct the DeepSpeed JSON: training would fail too."
        ) from error


class EngineTraining(VirtualTraining):
    """Training by a DeepSpeed engine; make and run it inside `rank_of`.

    Args:
        make_model: See `VirtualTraining`.
        example_inputs: See `VirtualTraining`.
        settings: The engine's settings, from `settings_of`.
    """

    marks_steps = True

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        example_inputs: Callable[[], Any],
        settings: Mapping[str, Any],
    ):
        import deepspeed

        partitioned = settings.get("zero_optimization", {}).get("stage") == 3

        _refuse_as_deepspeed(settings)

        def make() -> nn.Module:
            with deepspeed.zero.Init(config_dict_or_path=dict(settings)) if partitioned else contextlib.nullcontext():
                return make_model()

        super().__init__(make, example_inputs)
        try:
            self.engine, *_ = deepspeed.initialize(model=self.model, config=dict(settings))
        except RuntimeError as error:
            raise unable("DeepSpeed's engine", error) from error

    @property
    def target(self) -> Any:
        """Return the engine: memplug attaches to it, not to the model."""
        return self.engine

    def _train(self) -> None:
        """Run all micro-batches of a step."""
        for _ in range(self.engine.gradient_accumulation_steps()):
            outputs = differentiable(self.engine(*self._args, **self._kwargs))
            self.engine.backward(outputs[0] if outputs[0].dim() == 0 else outputs[0].sum())
            self.engine.step()

    def close(self) -> None:
        """Remove the engine's hooks and groups."""
        self.engine.destroy()
