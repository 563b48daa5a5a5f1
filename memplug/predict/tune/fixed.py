"""The values that a DeepSpeed JSON and the command line fix; the search chooses "auto" and absent values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memplug.block import MemplugConfig
from memplug.ds_json.keys import present
from memplug.errors import TuneError
from memplug.predict.tune.search import Offload

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
LARGEST_MICRO_BATCH = 32
"""Largest micro-batch that is tried if nothing is fixed."""
_OFFLOADS: dict[int, tuple[Offload, ...]] = {
    0: ("none",),
    1: ("none", "optimizer"),
    2: ("none", "optimizer"),
    3: ("none", "optimizer", "parameters"),
}


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """The values that a DeepSpeed JSON and the command line fix; None: the search is free to choose.

    Attributes:
        stage: The ZeRO stage.
        optimizer_on_host: Whether the optimizer is offloaded.
        parameters_on_host: Whether parameters are offloaded.
        ratio: The fraction of the optimizer's states that is on the host, from 0 to 1.
        max_reuse_distance: DeepSpeed's `stage3_max_reuse_distance`, in elements.
        train_batch: Sequences that all ranks together train in a step.
        micro_batch: Sequences in a micro-batch of one rank.
        accumulation: Micro-batches in a step.
        swaps: Whether memplug's configuration lets blocks (decoder layers) swap.
        checkpoints: Whether memplug's configuration lets blocks checkpoint.
        swapped_gib: Host memory for one rank's swapped activations, from memplug's configuration, in GiB.
    """

    stage: int | None = None
    optimizer_on_host: bool | None = None
    parameters_on_host: bool | None = None
    ratio: float | None = None
    max_reuse_distance: int | None = None
    train_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    swaps: bool = True
    checkpoints: bool = True
    swapped_gib: float | None = None

    @classmethod
    def of(cls, ds_config: Mapping[str, Any], block: MemplugConfig, micro_batch: int | None = None) -> Fixed:
        """Read the fixed values from a DeepSpeed JSON, its memplug block and the command line.

        Args:
            ds_config: The whole DeepSpeed JSON.
            block: The memplug block of this JSON.
            micro_batch: The command line's micro-batch; None: the command line has none.

        Raises:
            ConfigError: The JSON has a setting under both its deprecated and its current name.
            TuneError: The JSON trains in a precision other than 16 bits or offloads to NVMe, or DeepSpeed does not
                accept a value.
        """
        ds_config = present(ds_config)
        zero = _section(ds_config, "zero_optimization")
        if all(_section(ds_config, each).get("enabled") is False for each in ("bf16", "fp16")) or (
            _section(ds_config, "bf16").get("enabled") is False and not _section(ds_config, "fp16").get("enabled")
        ):
            raise TuneError(
                "the DeepSpeed JSON trains in 32 bits, but predictions are made for 16 bits",
                'Set "bf16" to {"enabled": true}, or remove it: the tuned configuration then has it.',
            )
        train_batch, micro, accumulation = (_number(ds_config, key, 1) for key in BATCH_KEYS)
        if micro_batch is not None and micro not in (None, micro_batch):
            raise TuneError(
                f"--micro-batch is {micro_batch}, but train_micro_batch_size_per_gpu of the DeepSpeed JSON is {micro}",
                "Leave one of them out.",
            )
        tokenwise, on = block.tokenwise, block.enabled or "memplug" not in ds_config
        stays = _has_torch_adam(ds_config) or (on and block.swap.states)  # neither allows an offloaded optimizer
        acts = tokenwise.enabled and on
        stage = _number(zero, "stage", 0)
        if stage is not None and stage not in _OFFLOADS:
            raise TuneError(
                f"zero_optimization.stage is {stage}", f"DeepSpeed has stages {', '.join(map(str, _OFFLOADS))}."
            )
        return cls(
            stage=stage,
            optimizer_on_host=False if stays else _on_host(zero, "offload_optimizer"),
            parameters_on_host=_on_host(zero, "offload_param"),
            ratio=_given(_section(zero, "offload_optimizer"), "ratio"),
            max_reuse_distance=_number(zero, "stage3_max_reuse_distance", 0),
            train_batch=train_batch,
            micro_batch=micro_batch or micro,
            accumulation=accumulation,
            swaps=acts and tokenwise.alpha != 0,
            checkpoints=acts and tokenwise.alpha != 1,
            swapped_gib=None if block.host_budget_gib == "auto" else block.host_budget_gib,
        )

    def stages(self) -> Sequence[int]:
        """Return the ZeRO stages to search.

        ZeRO 0 is searched only if the JSON asks for it, because it trains differently in bfloat16.
        """
        return (1, 2, 3) if self.stage is None else (self.stage,)

    def offloads(self, stage: int) -> list[Offload]:
        """Return the offloads to search at a stage; leave out those that a fixed value excludes.

        Parameters are offloaded only together with the optimizer.

        Args:
            stage: The ZeRO stage.
        """
        return [
            each
            for each in _OFFLOADS[stage]
            if self.optimizer_on_host in (None, each != "none")
            and self.parameters_on_host in (None, each == "parameters")
        ]

    def layouts(self) -> list[tuple[int, Offload]]:
        """Return the pairs of ZeRO stage and offload to search.

        Raises:
            TuneError: No stage and offload agree with the fixed values.
        """
        found = [(stage, each) for stage in self.stages() for each in self.offloads(stage)]
        if not found:
            raise TuneError(
                "no configuration has all settings of the DeepSpeed JSON: its ZeRO stage and offloads contradict each "
                "other",
                "Offloaded parameters need ZeRO 3 and an offloaded optimizer. An offloaded optimizer needs ZeRO 1 or "
                "more, DeepSpeed's own Adam, and swap.states off. Remove one of the settings.",
            )
        return found

    def batches(self, gpus: int) -> list[tuple[int, int]]:
        """Return the pairs of micro-batch and accumulation to search.

        The product of micro-batch, accumulation and ranks is the training batch. If no training batch is fixed, the
        accumulation is the fixed one, or else 1; the micro-batch is the fixed one, or else each of `micro_batches()`.

        Args:
            gpus: The number of ranks.

        Raises:
            TuneError: The fixed training batch is not divisible by ranks, micro-batch and accumulation.
        """
        if self.train_batch is None:
            micro = [self.micro_batch] if self.micro_batch else micro_batches()
            return [(each, self.accumulation or 1) for each in micro]
        of_rank, rest = divmod(self.train_batch, gpus)
        found = [
            (micro, of_rank // micro)
            for micro in range(1, of_rank + 1)
            if rest == 0
            and of_rank % micro == 0
            and self.micro_batch in (None, micro)
            and self.accumulation in (None, of_rank // micro)
            and (self.micro_batch or self.accumulation or micro <= LARGEST_MICRO_BATCH)
        ]
        if not found:
            given = [f"{gpus} GPUs"]
            given += [f"a micro-batch of {self.micro_batch}"] if self.micro_batch else []
            given += [f"{self.accumulation} accumulation steps"] if self.accumulation else []
            raise TuneError(
                f"a train_batch_size of {self.train_batch} is not divisible by {' and '.join(given)}",
                "train_batch_size is the product of GPUs, micro-batch and accumulation: change one of them.",
            )
        return found


def micro_batches() -> list[int]:
    """Return the micro-batches that are tried if nothing is fixed: powers of two up to `LARGEST_MICRO_BATCH`."""
    return [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]


def all_layouts() -> list[tuple[int, Offload]]:
    """Return the pairs of ZeRO stage and offload of a search in which nothing is fixed."""
    return [(stage, each) for stage in Fixed().stages() for each in _OFFLOADS[stage]]


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def _given(config: Mapping[str, Any], key: str) -> Any:
    found = config.get(key)
    return None if found == "auto" else found


def _number(config: Mapping[str, Any], key: str, least: int) -> int | None:
    found = _given(config, key)
    if found is None:
        return None
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)
    if not is_number or found < least or found != int(found):
        raise TuneError(f"{key} is {found!r} in the DeepSpeed JSON", f'Give it a whole number from {least}, or "auto".')
    return int(found)


def _on_host(zero: Mapping[str, Any], key: str) -> bool | None:
    device = _given(_section(zero, key), "device")
    if device == "nvme":
        raise TuneError(f"{key} is to NVMe, which cannot be predicted", 'Set its "device" to "cpu" or "auto".')
    return None if device is None else device == "cpu"


def _has_torch_adam(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the JSON uses torch's Adam, which DeepSpeed does not offload unless the JSON allows it."""
    forced = ds_config.get("zero_force_ds_cpu_optimizer", True)
    return bool(forced and _section(_section(ds_config, "optimizer"), "params").get("torch_adam"))
