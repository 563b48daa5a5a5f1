"""One rank of a DeepSpeed training on the virtual device: the engine's own ZeRO, optimizer and collectives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn

from memplug.device.virtual.accelerator import accelerated
from memplug.device.virtual.ranks import joined
from memplug.errors import EstimateError
from memplug.estimator.training import Training, differentiable, unable

ADAM = ("adam", "adamw")
WATCHERS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "wall_clock_breakdown")
"""Of a DeepSpeed JSON, what tells how training goes."""


@contextlib.contextmanager
def rank_of(gpus: int) -> Iterator[None]:
    """Within, this process is rank 0 of as many, for DeepSpeed. There is a virtual device already.

    Raises:
        EstimateError: DeepSpeed is not installed.
    """
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus)}
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise EstimateError(f"DeepSpeed cannot be imported: {error}", "Run `pip install deepspeed`.") from None
    with mock.patch.dict(os.environ, names), joined(rank=0, world_size=gpus), accelerated():
        yield


def settings_of(ds_config: Mapping[str, Any], micro_batch: int, gpus: int) -> dict[str, Any]:
    """A DeepSpeed JSON as it is estimated: with torch's fused Adam in place of DeepSpeed's kernel, which takes as much
    memory and is bound by it alike; without "auto" values, memplug's block, and what watches training.

    Raises:
        EstimateError: optimizer or parameters are offloaded, for which DeepSpeed computes on the host.
    """
    kept = _without_auto({key: value for key, value in ds_config.items() if key not in ("memplug", *WATCHERS)})
    zero = kept.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device", "none") != "none":
            raise EstimateError(
                f"zero_optimization.{name} leaves work to the host, which is not run",
                "`memplug tune` predicts a step with offload.",
            )
    optimizer = kept.get("optimizer", {"type": "AdamW"})
    params = optimizer.get("params", {})
    if str(optimizer.get("type")).lower() in ADAM and not params.get("torch_adam"):  # else it is torch's own already
        optimizer = {**optimizer, "params": {**params, "torch_adam": True, "fused": True}}
    kept = {**_accumulation(kept, micro_batch, gpus), **kept}
    kept.pop("train_batch_size", None)
    return {**kept, "optimizer": optimizer, "train_micro_batch_size_per_gpu": micro_batch}


def _accumulation(kept: Mapping[str, Any], micro_batch: int, gpus: int) -> dict[str, int]:
    """What DeepSpeed makes of the batch of all ranks, where that is of these micro-batches."""
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


class EngineTraining(Training):
    """Trains by a DeepSpeed engine, which marks the ends of its steps itself; within `rank_of`.

    Args:
        settings: of the engine, see `settings_of`.
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
        return self.engine

    def _train(self) -> None:
        """All micro-batches of a step."""
        for _ in range(self.engine.gradient_accumulation_steps()):
            outputs = differentiable(self.engine(*self._args, **self._kwargs))
            self.engine.backward(outputs[0] if outputs[0].dim() == 0 else outputs[0].sum())
            self.engine.step()

    def close(self) -> None:
        """The engine's hooks and groups go."""
        self.engine.destroy()
