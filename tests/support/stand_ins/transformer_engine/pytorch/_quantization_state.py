"""The state that FP8 modules share, under the names of each version of Transformer Engine."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from transformer_engine import stand_in
from transformer_engine.common.recipe import Recipe


@dataclass(slots=True)
class FP8GlobalState:
    """The state that all modules of the process share."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque] = field(default_factory=list)
    autocast_arguments: dict[str, tuple[Recipe, Any]] = field(default_factory=dict)
    skip_fp8_weight_update_tensor: torch.Tensor | None = None


class Holder(type):
    """Gives a class the state as its attribute `quantization_state`, since 2.15.

    Before 2.15 each field of the state is an attribute of the class: `FP8_ENABLED`, `IS_FIRST_FP8_MODULE`,
    `global_amax_buffer` and so on.
    """

    _state = FP8GlobalState()

    def __getattr__(cls, name: str) -> Any:
        if name == "quantization_state" and SINCE_2_15:
            return Holder._state
        if not SINCE_2_15 and name in _FIELDS:
            return getattr(Holder._state, _FIELDS[name])
        raise AttributeError(f"FP8GlobalStateManager has no attribute {name!r}")

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "quantization_state" and SINCE_2_15:
            Holder._state = value
        elif not SINCE_2_15 and name in _FIELDS:
            setattr(Holder._state, _FIELDS[name], value)
        else:
            super().__setattr__(name, value)


SINCE_2_9, SINCE_2_15 = stand_in.version >= (2, 9), stand_in.version >= (2, 15)
_LOWER = ("global_", "fp8_tensors_", "autocast_arguments", "skip_")
_FIELDS = {
    one.name if one.name.startswith(_LOWER) else one.name.upper(): one.name
    for one in dataclasses.fields(FP8GlobalState)
}
if not SINCE_2_9:
    _FIELDS["FP8_AUTOCAST_DEPTH"] = _FIELDS.pop("AUTOCAST_DEPTH")


def qstate() -> FP8GlobalState:
    """Return the current state."""
    return Holder._state


def set_qstate(state: FP8GlobalState) -> None:
    """Replace the state."""
    Holder._state = state
