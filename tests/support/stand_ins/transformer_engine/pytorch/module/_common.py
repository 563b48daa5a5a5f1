"""The common parts of linear modules: settings of one call, products, and delayed weight gradients."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine_torch as tex

from transformer_engine.pytorch._quantization_state import qstate
from transformer_engine.pytorch.distributed import (
    allreduce,
    gather_along_first_dim,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import QuantizedTensorStorage, Quantizer
from transformer_engine.pytorch.utils import clear_tensor_data, requires_grad


class WeightGradStore:
    """Weight gradients that are computed when the user calls `backward_dw`, not in backward."""

    def __init__(self, delay_wgrad_compute: bool = False):
        self.enabled = delay_wgrad_compute
        self.context: queue.Queue | None = queue.Queue() if delay_wgrad_compute else None

    def delay_wgrad_compute(self) -> bool:
        """Return whether weight gradients are delayed."""
        return self.enabled

    def put(self, tensors: list[Any], function: Callable) -> None:
        """Store a product for later."""
        assert self.context is not None
        self.context.put((tensors, function))

    def pop(self) -> Any:
        """Compute the oldest product."""
        assert self.context is not None
        tensors, function = self.context.get()
        return function(*tensors), tensors


@dataclass(slots=True, kw_only=True)
class LinearArgs:
    """The arguments of a linear module's Function, except for tensors, in one forward."""

    module: Any
    names: tuple[str, str] = ("weight", "bias")
    """Names of the parameters; the first names the cached workspace."""
    is_first_microbatch: bool | None
    fp8: bool
    input_quantizer: Quantizer | None
    weight_quantizer: Quantizer | None
    grad_output_quantizer: Quantizer | None
    wgrad_store: WeightGradStore
    fuse_wgrad_accumulation: bool
    tp_group: Any
    tp_size: int
    sequence_parallel: bool
    parallel_mode: str | None
    activation_dtype: torch.dtype
    is_grad_enabled: bool
    save_original_input: bool = False

    @property
    def gathers_input(self) -> bool:
        """Return whether each rank has only some of the tokens, so that a column-parallel module gathers its input."""
        return self.parallel_mode == "column" and self.sequence_parallel


def assert_dim_for_fp8_exec(*tensors: torch.Tensor) -> None:
    """Assert the sizes that the real FP8 products need."""
    for tensor in tensors:
        rows = tensor.numel() // tensor.shape[-1]
        assert rows % 8 == 0 and tensor.shape[-1] % 16 == 0, (
            f"FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last "
            f"dimension to be divisible by 16, but got tensor with dims={list(tensor.size())}"
        )


def weight_for_products(args: LinearArgs, weight: torch.Tensor, columnwise: bool) -> Any:
    """Return the weight in the products' type; micro-batches after the first take a quantized one from the cache."""
    if not args.fp8:
        return weight if weight.dtype == args.activation_dtype else weight.to(args.activation_dtype)
    will_recompute = is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
    args.weight_quantizer.set_usage(rowwise=True, columnwise=columnwise or will_recompute)
    weightmat = args.module.get_weight_workspace(
        tensor=weight,
        quantizer=args.weight_quantizer,
        cache_name=None if args.is_first_microbatch is None else args.names[0],
        update_workspace=args.is_first_microbatch is not False,
        workspace_dtype=args.activation_dtype,
    )
    weightmat.update_usage(rowwise_usage=True)
    return weightmat


def quantize_input(args: LinearArgs, x: torch.Tensor, needed_in_backward: bool) -> Any:
    """Quantize this rank's rows, for saving and, if nothing is gathered, for the product."""
    gathered_by_rows = args.gathers_input and args.input_quantizer.supports_only_rowwise_all_gather()
    columnwise = needed_in_backward and not args.save_original_input and not gathered_by_rows
    args.input_quantizer.set_usage(rowwise=True, columnwise=columnwise)
    return args.input_quantizer(x)


def gather_input(args: LinearArgs, x: torch.Tensor, columnwise: bool, async_op: bool = False) -> tuple[Any, Any]:
    """Return all ranks' rows, and the collective's work."""
    if not args.fp8:
        return gather_along_first_dim(x, args.tp_group, async_op)
    args.input_quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
    return gather_along_first_dim(x, args.tp_group, quantizer=args.input_quantizer)


def forward_product(args: LinearArgs, weightmat: Any, x: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x times the transposed weight; a row-parallel module sums it over the ranks."""
    out, _ = tex.gemm(weightmat, x, "TN", args.activation_dtype, bias=bias)
    if args.parallel_mode == "row" and args.tp_size > 1:
        reduce = reduce_scatter_along_first_dim if args.sequence_parallel else allreduce
        out, _ = reduce(out, args.tp_group)
    return out


def is_first_of_backward(args: LinearArgs, *tensors: torch.Tensor | None) -> bool:
    """Return whether this is an autocast's first FP8 module, whose backward ends FP8's backward step.

    Call it once per forward.
    """
    if not args.fp8 or not requires_grad(*tensors):
        return False
    before = qstate().is_first_fp8_module
    first = FP8GlobalStateManager.is_first_fp8_module()
    if in_fp8_activation_recompute_phase():
        qstate().is_first_fp8_module = before
    return first


def prepare_grad_output(
    args: LinearArgs, grad_output: torch.Tensor, use_bias: bool
) -> tuple[Any, torch.Tensor | None, bool]:
    """Prepare the output's gradient for the products.

    Returns:
        The gradient as the products read it; the bias's gradient, if it is computed here; and whether this function
            gathered the gradient, into memory of its own.
    """
    matrix = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
    gathers = args.parallel_mode == "row" and args.sequence_parallel
    grad_bias = None
    if args.fp8:
        grad_bias = matrix.sum(dim=0) if use_bias else None
        args.grad_output_quantizer.set_usage(rowwise=True, columnwise=True)
    if gathers:
        matrix, _ = gather_along_first_dim(matrix, args.tp_group, quantizer=args.grad_output_quantizer)
    elif args.fp8:
        matrix = args.grad_output_quantizer(matrix)
    return matrix, grad_bias, gathers


def input_gradient(args: LinearArgs, weightmat: Any, grad_output: Any) -> tuple[torch.Tensor, Any]:
    """Return the gradient of this rank's rows, and the work of the collective that sums it over ranks."""
    if isinstance(weightmat, QuantizedTensorStorage):
        weightmat.update_usage(columnwise_usage=True)
    dgrad, _ = tex.gemm(weightmat, grad_output, "NN", args.activation_dtype)
    if args.parallel_mode != "column" or args.tp_size == 1:
        return dgrad, None
    reduce = reduce_scatter_along_first_dim if args.sequence_parallel else allreduce
    return reduce(dgrad, args.tp_group, async_op=True)


def weight_gradient(
    args: LinearArgs, x: Any, grad_output: Any, main_grad: torch.Tensor | None, with_bias_grad: bool, free: tuple
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of weight and bias, then free the memory of the tensors `free`.

    A `main_grad` gets the weight's gradient, or has it added. If weight gradients are delayed, only store the product.
    """
    for tensor in (x, grad_output):
        if isinstance(tensor, QuantizedTensorStorage):
            tensor.update_usage(columnwise_usage=True)
    accumulate = args.fuse_wgrad_accumulation and args.is_first_microbatch is not True
    dtype = main_grad.dtype if main_grad is not None else args.activation_dtype

    def product(x: Any, dy: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return tex.gemm(x, dy, "NT", dtype, out=main_grad, accumulate=accumulate, with_bias_grad=with_bias_grad)

    if args.wgrad_store.delay_wgrad_compute():
        args.wgrad_store.put([x, grad_output], product)
        return None, None
    wgrad, grad_bias = product(x, grad_output)
    clear_tensor_data(*free)
    return wgrad, grad_bias


_dummy_wgrads: dict[Any, torch.Tensor] = {}


def returned_weight_gradient(args: LinearArgs, weight: torch.Tensor, wgrad: torch.Tensor | None) -> torch.Tensor | None:
    """Return the weight's gradient for autograd.

    If `main_grad` has the gradient, return memory without values for Megatron's hooks, or None without their mark.
    """
    if not args.fuse_wgrad_accumulation:
        return wgrad
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    key = tuple(weight.main_grad.shape), weight.dtype, weight.device
    if key not in _dummy_wgrads:
        _dummy_wgrads[key] = torch.empty(key[0], dtype=weight.dtype, device=weight.device)
    if getattr(weight, "zero_out_wgrad", False):
        _dummy_wgrads[key].fill_(0)
    return _dummy_wgrads[key].detach()
