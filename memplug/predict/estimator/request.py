"""The arguments of an estimate, which `memplug.estimate` and the command line read and check once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplug.config import MemplugConfig, load_config
from memplug.errors import EstimateError
from memplug.files import path_of
from memplug.predict.estimator.modes import MODES
from memplug.predict.virtual import GpuProfile
from memplug.predict.virtual.routing import Routing

UNLIMITED_BYTES = float(1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateRequest:
    """The arguments of `memplug.estimate`, read and checked.

    Attributes:
        config: memplug's block.
        hardware: The GPU's profile.
        modes: Names from `MODES`, in the order in which they are estimated.
        attention: The attention back end; None: the GPU's first one.
        host_bytes: Host memory available to one rank.
        plan_dir: The folder for memplug's plan; None: the plan is not written.
        trace: The file of a trace of values, which `record_values` wrote; None: no trace.
        routing: How tokens spread over the experts of a mixture; None: as likely as in the trace, or evenly.

    Raises:
        EstimateError: A mode's name is unknown, a folder for plans is given without mode "memplug", host memory is
            negative, or there are both a trace and a routing.
    """

    config: MemplugConfig
    hardware: GpuProfile
    modes: tuple[str, ...] = MODES
    attention: str | None = None
    host_bytes: float = UNLIMITED_BYTES
    plan_dir: Path | None = None
    trace: str | Path | None = None
    routing: Routing | None = None

    def __post_init__(self) -> None:
        """Check modes, folder and host memory."""
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise EstimateError(f"there is no mode {unknown[0]!r}", f"Choose from {', '.join(MODES)}.")
        if self.plan_dir is not None and "memplug" not in self.modes:
            raise EstimateError(
                "none of these modes makes a plan to write", "Estimate mode memplug, or leave out plan_dir."
            )
        if self.trace is not None and self.routing is not None:
            raise EstimateError("a trace of values has a routing of its own", "Leave out the trace or the routing.")
        if not self.host_bytes >= 0:
            raise EstimateError(f"host memory is {self.host_bytes} bytes", "Give 0 or a positive number.")

    @classmethod
    def of(
        cls,
        config: MemplugConfig | dict[str, Any] | str | Path | None,
        gpu: str | Path | GpuProfile,
        modes: Sequence[str],
        *,
        plan_dir: str | Path | None = None,
        routing: str | None = None,
        **more: Any,
    ) -> EstimateRequest:
        """Read the block, the GPU's profile and the folder, and return the request.

        Args:
            config: See `memplug.attach`; None: the default block, enabled.
            gpu: See `memplug.estimate`.
            modes: Names from `MODES`, in the order in which they are estimated.
            plan_dir: The folder for memplug's plan; None: the plan is not written.
            routing: See `Routing.of`; None: as likely as in the trace, or evenly.
            **more: The other fields of `EstimateRequest`.

        Raises:
            ConfigError: The block cannot be used.
            EstimateError: See `EstimateRequest` and `Routing.of`; or `plan_dir` is not a path.
            HardwareError: The GPU is unknown.
        """
        return cls(
            config=load_config({"enabled": True} if config is None else config),
            hardware=gpu if isinstance(gpu, GpuProfile) else GpuProfile.named(gpu),
            modes=tuple(modes),
            plan_dir=path_of(plan_dir, "folder of plans", EstimateError) if plan_dir is not None else None,
            routing=Routing.of(routing) if routing is not None else None,
            **more,
        )
