"""What a session makes its techniques with."""

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
    """What every technique is made with.

    Attributes:
        config: the block, of which a technique reads its own section, and what stands in none.
        device: that trains.
        reserved: beside the tensors of a step.
        beside: makes a place for work beside training, which waits for it where the block says so.
    """

    config: MemplugConfig
    device: Device
    reserved: Reserved
    beside: Callable[[], Beside]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given(Common):
    """What a technique is made with that each rank applies by itself.

    Attributes:
        tell: the user, in one line of a level of logging.
        folder: that plans are kept in; None: they are not.
        host_bytes: host memory that nothing else of the session holds, within its budget.
        explain: what is known as a request for device memory fails for good, for people; on any thread.
        has_regions: layers are regions, whose tensors another technique swaps.
        layer_bytes: that the last forward of each layer sent to the host, and its backward got back.
        tensors: parameters and buffers of the model.
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
    """What the technique is made with that all ranks agree on.

    Attributes:
        regions: the modules' regions, in forward order.
        ranks: that train the model.
        regathers: forward gathers parameters (ZeRO 3).
        explain: an error of the device's memory passes, in a phase of a region.
        own: `with own():` around operators that are no part of the program.
        step_peak: returns the largest allocation total of the device since it was called last, in bytes; None: unknown.
        step_trace: returns the last step that was recorded in detail, None where none was.
        is_served: the block asks for a technique that serves requests for memory.
        is_relieved: the block asks for a technique that makes steps fit where no plan for regions does.
    """

    regions: Sequence[Any]
    ranks: Ranks
    regathers: bool
    explain: Callable[[str, Any, BaseException], None]
    own: Callable[[], AbstractContextManager[Any]]
    step_peak: Callable[[], int | None]
    step_trace: Callable[[], Trace | None]
    is_served: bool
    is_relieved: bool
