"""The state of FP8: contexts, the state that all modules share, and a module's scales and amaxes in one direction.

Names, places and timing are those of the real package.
"""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import transformer_engine_torch as tex

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch._quantization_state import SINCE_2_9, FP8GlobalState, Holder, qstate, set_qstate
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
)


def get_default_fp8_recipe() -> Recipe:
    """Return the default recipe of a Hopper GPU."""
    return DelayedScaling()


get_default_recipe = get_default_fp8_recipe


def is_fp8_available(return_reason: bool = False) -> Any:
    """Return True: the stand-in computes FP8 everywhere."""
    return (True, "") if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available


def is_nvfp4_available(return_reason: bool = False) -> Any:
    """Return False: the stand-in has no FP4."""
    return (False, "the stand-in has no FP4") if return_reason else False


def check_fp8_support() -> tuple[bool, str]:
    """Return whether FP8 is available, and why not."""
    return True, ""


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """Return the type of a recipe's tensors in forward, or in backward."""
    small = fp8_recipe.fp8_format is Format.E4M3 or (fp8_recipe.fp8_format is Format.HYBRID and fprop_tensor)
    return torch.float8_e4m3fn if small else torch.float8_e5m2


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Return the largest number of the type of a recipe's tensors in forward, or in backward."""
    return torch.finfo(get_fp8_torch_dtype(fp8_recipe, fprop_tensor)).max


_OF_AUTOCAST = (
    "fp8_enabled",
    "fp8_calibration",
    "fp8_recipe",
    "fp8_distributed_group",
    "is_first_fp8_module",
    "fp8_graph_capturing",
)
_autocast_of = operator.attrgetter(*_OF_AUTOCAST)


class FP8GlobalStateManager(metaclass=Holder):
    """Reads and updates the state that all modules share.

    Attributes:
        quantization_state: the state, since 2.15; before, its fields are attributes of this class.
    """

    quantization_state: FP8GlobalState

    @classmethod
    def reset(cls) -> None:
        """Reset the state to that of a new process."""
        set_qstate(FP8GlobalState())

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return whether the caller is inside an autocast."""
        return qstate().fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Return whether FP8 calibrates; the stand-in refuses it."""
        return qstate().fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Return whether parameters are in FP8; the stand-in refuses it."""
        return qstate().fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Return whether initial values are kept in high precision; the stand-in refuses it."""
        return qstate().high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Return whether a graph is captured; the stand-in refuses it."""
        return qstate().fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return True to the first module of an outermost autocast; its backward ends FP8's backward step."""
        first, qstate().is_first_fp8_module = qstate().is_first_fp8_module, False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe of the innermost autocast."""
        recipe = qstate().fp8_recipe
        return recipe if recipe is not None else get_default_fp8_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the group over which amaxes are reduced."""
        return qstate().fp8_distributed_group

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Return whether FP8 is available, and why not."""
        return True, ""

    @classmethod
    def get_autocast_state(cls) -> tuple:
        """Return the state that the end of an autocast restores."""
        return _autocast_of(qstate())

    @classmethod
    def set_autocast_state(cls, fp8_state: tuple) -> None:
        """Restore the state."""
        for name, value in zip(_OF_AUTOCAST, fp8_state, strict=True):
            setattr(qstate(), name, value)

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """Return the key of a recipe and a group."""
        return f"{recipe}:{hash(group)}"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Add a module's amaxes and scales, once, to the buffers that the end of a step updates."""
        if not fp8_meta["recipe"].delayed() or "buffer_index_and_autocast_key" in fp8_meta:
            return
        fp8_meta["buffer_index_and_autocast_key"] = places = []
        autocast_key = cls.get_unique_autocast_key(fp8_meta["recipe"], fp8_meta["fp8_group"])
        for direction, name in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            key, state = f"{direction}_{autocast_key}", fp8_meta[name]
            qstate().global_amax_buffer.setdefault(key, []).append(state.amax_history[0])
            qstate().global_amax_history_buffer.setdefault(key, []).append(state.amax_history)
            qstate().global_scale_buffer.setdefault(key, []).append(state.scale)
            places += [len(qstate().global_amax_buffer[key]) - 1, key]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """End a step of one direction: reduce amaxes over ranks, and update histories and scales."""
        for key, amaxes in qstate().global_amax_buffer.items():
            direction, autocast_key = key.split("_", 1)
            if (direction == "forward") != forward or not amaxes:
                continue
            recipe, group = qstate().autocast_arguments[autocast_key]
            contiguous = torch.cat(amaxes)
            distributed = torch.distributed
            if recipe.reduce_amax and distributed.is_initialized() and distributed.get_world_size(group) > 1:
                distributed.all_reduce(contiguous, op=distributed.ReduceOp.MAX, group=group)
            tex.fused_amax_and_scale_update_after_reduction(
                contiguous,
                qstate().global_amax_history_buffer[key],
                qstate().global_scale_buffer[key],
                recipe.amax_compute_algo,
                get_fp8_max(recipe, forward),
                recipe.margin,
            )

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter an autocast; after entering the outermost one, the next module counts as the first."""
        if calibrating or _graph:
            raise NotImplementedError("the stand-in neither calibrates nor captures graphs")
        recipe = get_default_fp8_recipe() if fp8_recipe is None else fp8_recipe
        qstate().autocast_arguments[cls.get_unique_autocast_key(recipe, fp8_group)] = (recipe, fp8_group)
        state = qstate()
        state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group = enabled, recipe, fp8_group
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Leave an autocast; the outermost ends the forward's step if gradients are recorded."""
        qstate().autocast_depth -= 1
        if enabled and qstate().autocast_depth == 0 and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Queue copies of a module's scales and amaxes, before a forward that will run again."""
        if not fp8_meta["recipe"].delayed():
            return
        state, key = fp8_meta["scaling_fwd"], "global_fp8_buffer_pos_fwd_recompute"
        if key not in fp8_meta:
            qstate().fp8_tensors_recompute_buffer.append(deque())
            fp8_meta[key] = len(qstate().fp8_tensors_recompute_buffer) - 1
        copies = [state.amax_history.clone(), state.scale.clone()]
        qstate().fp8_tensors_recompute_buffer[fp8_meta[key]].append(copies)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Use the module's oldest copies for a second run, and keep the current values aside."""
        if not fp8_meta["recipe"].delayed():
            return
        state = fp8_meta["scaling_fwd"]
        fp8_meta["updated_amax_history_fwd"] = state.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = state.scale.clone()
        place = fp8_meta["global_fp8_buffer_pos_fwd_recompute"]
        amax_history, scale = qstate().fp8_tensors_recompute_buffer[place].popleft()
        state.amax_history.copy_(amax_history)
        state.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Restore the values that were kept aside, after a second run."""
        if not fp8_meta["recipe"].delayed():
            return
        fp8_meta["scaling_fwd"].amax_history.copy_(fp8_meta["updated_amax_history_fwd"])
        fp8_meta["scaling_fwd"].scale.copy_(fp8_meta["updated_scale_fwd"])


_get, _set, _enter, _exit = (
    getattr(FP8GlobalStateManager, name)
    for name in ("get_autocast_state", "set_autocast_state", "autocast_enter", "autocast_exit")
)
if not SINCE_2_9:
    for _method in (_get, _set, _enter, _exit):
        _name = _method.__name__
        setattr(FP8GlobalStateManager, _name.replace("autocast", "fp8_autocast"), _method)
        delattr(FP8GlobalStateManager, _name)


@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Let modules inside the `with` quantize by the recipe."""
    state = _get()
    _enter(enabled, calibrating, recipe, amax_reduction_group, _graph)
    try:
        yield
    finally:
        _set(state)
        _exit(enabled, _graph=_graph)


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Enter an autocast under the old names of function and arguments."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph):
        yield


@contextlib.contextmanager
def quantized_model_init(enabled: bool = True, **kwargs: Any) -> Iterator[None]:
    """Raise NotImplementedError if enabled: the stand-in has no parameters in FP8."""
    if enabled:
        raise NotImplementedError("the stand-in has no parameters in FP8")
    yield


fp8_model_init = quantized_model_init


class RecipeState:
    """The state that one direction of a module keeps between steps; the base keeps none."""

    def __init__(self, recipe: Recipe, mode: str, num_quantizers: int):
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = get_fp8_torch_dtype(recipe, mode == "forward")

    @staticmethod
    def create(recipe: Recipe, *, mode: str, num_quantizers: int, device: torch.device) -> RecipeState:
        """Create the state of a recipe's kind."""
        if recipe.delayed():
            return DelayedScalingRecipeState(recipe, mode, num_quantizers, device)
        return {
            Float8CurrentScaling: Float8CurrentScalingRecipeState,
            MXFP8BlockScaling: MXFP8BlockScalingRecipeState,
            Float8BlockScaling: Float8BlockScalingRecipeState,
        }[type(recipe)](recipe, mode, num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        """Return one quantizer for each tensor of the module."""
        return [self.quantizer(self.dtype) for _ in range(self.num_quantizers)]


class DelayedScalingRecipeState(RecipeState):
    """Scales, and the largest magnitudes of earlier steps; row 0 is the current step's."""

    def __init__(self, recipe: Recipe, mode: str, num_quantizers: int, device: torch.device):
        super().__init__(recipe, mode, num_quantizers)
        self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, dtype=torch.float32, device=device)

    def make_quantizers(self) -> list[Quantizer]:
        """Return quantizers that read and write views of the state."""
        return [
            Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), self.dtype)
            for i in range(self.num_quantizers)
        ]


class Float8CurrentScalingRecipeState(RecipeState):
    """Keeps no state."""

    quantizer = Float8CurrentScalingQuantizer


class MXFP8BlockScalingRecipeState(RecipeState):
    """Keeps no state."""

    quantizer = MXFP8Quantizer


class Float8BlockScalingRecipeState(RecipeState):
    """Keeps no state."""

    quantizer = Float8BlockQuantizer
