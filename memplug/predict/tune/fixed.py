"""What a DeepSpeed JSON fixes for the search: "auto" and absent keys are free."""

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
"""Of those that are tried where nothing is fixed."""
_OFFLOADS: dict[int, tuple[Offload, ...]] = {
    0: ("none",),
    1: ("none", "optimizer"),
    2: ("none", "optimizer"),
    3: ("none", "optimizer", "parameters"),
}


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """None: free.

    Attributes:
        stage: of ZeRO.
        optimizer_on_host, parameters_on_host: whether they are.
        ratio: of optimizer states that are on the host, from 0 to 1.
        max_reuse_distance: DeepSpeed's `stage3_max_reuse_distance`, in elements.
        train_batch, micro_batch, accumulation: in sequences, sequences and micro-batches.
        swaps, checkpoints: whether blocks may; memplug's block says so.
        swapped_gib: the most that a rank may swap, of that block.
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
        """What a whole DeepSpeed configuration and its block fix, and the command line.

        Raises:
            ConfigError: A setting has its former and its present name.
            TuneError: it trains in another precision than 16 bits, offloads to NVMe, or a value is none of DeepSpeed's.
        """
        ds_config = present(ds_config)
        zero = _section(ds_config, "zero_optimization")
        if all(_section(ds_config, each).get("enabled") is False for each in ("bf16", "fp16")) or (
            _section(ds_config, "bf16").get("enabled") is False and not _section(ds_config, "fp16").get("enabled")
        ):
            raise TuneError(
                "the DeepSpeed JSON trains in 32 bits, and predictions are of 16",
                'Leave "bf16" out, or set it to {"enabled": true}.',
            )
        train_batch, micro, accumulation = (_number(ds_config, key, 1) for key in BATCH_KEYS)
        if micro_batch is not None and micro not in (None, micro_batch):
            raise TuneError(
                f"--micro-batch is {micro_batch}, and train_micro_batch_size_per_gpu of the DeepSpeed JSON is {micro}",
                "Leave one of them out.",
            )
        tokenwise, on = block.tokenwise, block.enabled or "memplug" not in ds_config
        stays = _has_torch_adam(ds_config) or (on and block.swap.states)  # which is refused beside offloading
        acts = tokenwise.enabled and on
        stage = _number(zero, "stage", 0)
        if stage is not None and stage not in _OFFLOADS:
            raise TuneError(f"zero_optimization.stage is {stage}", f"DeepSpeed has {', '.join(map(str, _OFFLOADS))}.")
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
        """To search; ZeRO 0, which trains differently in bfloat16, only where it is asked for."""
        return (1, 2, 3) if self.stage is None else (self.stage,)

    def offloads(self, stage: int) -> list[Offload]:
        """To search at a stage: those that DeepSpeed has and that nothing speaks against. Parameters are offloaded
        together with the optimizer.
        """
        return [
            each
            for each in _OFFLOADS[stage]
            if self.optimizer_on_host in (None, each != "none")
            and self.parameters_on_host in (None, each == "parameters")
        ]

    def layouts(self) -> list[tuple[int, Offload]]:
        """Stages and offloads to search.

        Raises:
            TuneError: there are none.
        """
        found = [(stage, each) for stage in self.stages() for each in self.offloads(stage)]
        if not found:
            raise TuneError(
                "what the DeepSpeed JSON fixes does not go together: no configuration has all of it",
                "Offloaded parameters need ZeRO 3 and an offloaded optimizer, and that ZeRO 1 or more, DeepSpeed's own "
                "Adam and no swap.states: leave one out.",
            )
        return found

    def batches(self, gpus: int) -> list[tuple[int, int]]:
        """Micro-batches and accumulations to search: those whose product with the ranks is the training batch; where
        that is free, the accumulation is the given one, or 1, and micro-batches are powers of two.

        Raises:
            TuneError: the numbers do not divide.
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
                f"a train_batch_size of {self.train_batch} is not divided by {' and '.join(given)}",
                "train_batch_size is the product of GPUs, micro-batch and accumulation: change one of them.",
            )
        return found


def micro_batches() -> list[int]:
    """Those that are tried where nothing is fixed."""
    return [1 << power for power in range(LARGEST_MICRO_BATCH.bit_length())]


def all_layouts() -> list[tuple[int, Offload]]:
    """Stages and offloads of a search in which nothing is fixed."""
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
        raise TuneError(f"{key} is to NVMe, which no prediction is made for", 'Set its "device" to "cpu" or "auto".')
    return None if device is None else device == "cpu"


def _has_torch_adam(ds_config: Mapping[str, Any]) -> bool:
    """DeepSpeed refuses to offload it, unless told not to force its own."""
    forced = ds_config.get("zero_force_ds_cpu_optimizer", True)
    return bool(forced and _section(_section(ds_config, "optimizer"), "params").get("torch_adam"))
