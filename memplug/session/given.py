"""The values and functions that a session provides to its techniques when it makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memplug.beside import Beside
from memplug.config import MemplugConfig
from memplug.device.device import Device
from memplug.device.reserved import Reserved
from memplug.profile.trace import Trace
from memplug.session.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The values and functions that a session provides to every technique.

    Attributes:
        config: the block; a technique reads its own section, and fields outside sections.
        device: the device that trains.
        reserved: measures the device memory that a step reserves beyond the bytes of its tensors.
        beside: makes a `Beside`, which runs tasks in another process; if the block says so, training waits for them.
    """

    config: MemplugConfig
    device: Device
    reserved: Reserved
    beside: Callable[[], Beside]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Common):
    """The values and functions that a session provides to a technique that each rank applies by itself.

    Attributes:
        tell: logs one line for the user, at a level of `logging`.
        folder: the folder of kept plans; None if none are kept.
        host_bytes: returns the bytes of the host budget that the agreed technique (`AgreedTechnique`) does not hold.
        explain: returns memplug's note for the error of a failed device memory request; any thread may call it.
        has_regions: True if the block asks for the agreed technique, which then swaps the tensors of layers.
        layer_bytes: returns for each layer the bytes that its last forward offloaded, and its backward prefetched.
        tensors: returns the parameters and buffers of the model.
    """

    tell: Callable[[str, int], None]
    folder: Path | None
    host_bytes: Callable[[], int]
    explain: Callable[[], str]
    has_regions: bool
    layer_bytes: Callable[[], Mapping[str, int]]
    tensors: Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedGiven(Common):
    """The values and functions that a session provides to the technique whose decisions all ranks agree on.

    Attributes:
        regions: the regions of this rank's model, in forward order.
        has_regions: True if this or another rank has regions.
        ranks: the ranks that train the model.
        regathers: True if forward gathers parameters (ZeRO 3).
        explain: adds memplug's note to a device out-of-memory error of a region's forward or recompute pass; called
            with (phase, region, error).
        own: `with own():` surrounds memplug's own operators, which are no part of the program.
        step_peak: returns the largest memory in use during the last step, in bytes; None if it was not recorded.
        step_trace: returns the last step recorded in detail; None if there is none.
        is_served: True if the block asks for a technique that serves requests for memory.
        is_relieved: True if the block asks for a technique that makes a step fit if no plan for the regions can.
    """

    regions: Sequence[Any]
    has_regions: bool
    ranks: Ranks
    regathers: bool
    explain: Callable[[str, Any, BaseException], None]
    own: Callable[[], AbstractContextManager[Any]]
    step_peak: Callable[[], int | None]
    step_trace: Callable[[], Trace | None]
    is_served: bool
    is_relieved: bool
