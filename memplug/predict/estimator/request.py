"""How trainings are estimated: as `memplug.estimate` and the command line are asked, made once and handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplug.config import MemplugConfig, load_config
from memplug.errors import EstimateError
from memplug.files import path_of
from memplug.predict.estimator.modes import MODES
from memplug.predict.virtual import Hardware

UNLIMITED_BYTES = float(1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """See `memplug.estimate`, whose arguments these are.

    Attributes:
        config: memplug's block.
        hardware: the GPU.
        modes: of `MODES`, in order.
        attention: the back end of it; None: the GPU's first one.
        host_bytes: memory of the host for one rank.
        plan_dir: the folder that memplug's plan is written to; None: it is not written.
        trace: the file of values that a real step read; None: there is none.

    Raises:
        EstimateError: a mode has no such name, none has the plan that is to be written, or host memory is negative.
    """

    config: MemplugConfig
    hardware: Hardware
    modes: tuple[str, ...] = MODES
    attention: str | None = None
    host_bytes: float = UNLIMITED_BYTES
    plan_dir: Path | None = None
    trace: str | Path | None = None

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise EstimateError(f"there is no mode {unknown[0]!r}", f"Choose of {', '.join(MODES)}.")
        if self.plan_dir is not None and "memplug" not in self.modes:
            raise EstimateError(
                "none of these modes has a plan to write", "Estimate mode memplug, or leave out plan_dir."
            )
        if not self.host_bytes >= 0:
            raise EstimateError(f"host memory is {self.host_bytes} bytes", "Give a number from 0.")

    @classmethod
    def of(
        cls,
        config: MemplugConfig | dict[str, Any] | str | Path | None,
        gpu: str | Path | Hardware,
        modes: Sequence[str],
        *,
        plan_dir: str | Path | None = None,
        **more: Any,
    ) -> Request:
        """Returns a request with the block, the GPU's profile and the folder read.

        Raises:
            ConfigError: the block cannot be used.
            EstimateError: see `Request`; or `plan_dir` is no path.
            HardwareError: there is no such GPU.
        """
        return cls(
            config=load_config({"enabled": True} if config is None else config),
            hardware=gpu if isinstance(gpu, Hardware) else Hardware.named(gpu),
            modes=tuple(modes),
            plan_dir=path_of(plan_dir, "folder of plans", EstimateError) if plan_dir is not None else None,
            **more,
        )
