"""A normalization and a linear layer in one Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine_torch as tex
from stand_in_kernels import calls

from transformer_engine.pytorch.constants import GemmParallelModes
from transformer_engine.pytorch.module import _common
from transformer_engine.pytorch.module._common import LinearArgs, WeightGradStore
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.linear import _make_parameters, linear_args, mark_parameters
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.utils import (
    cast_if_needed,
    clear_tensor_data,
    default_device,
    divide,
    init_method_constant,
    refuse,
)


class _LayerNormLinear(torch.autograd.Function):
    """Saves its input, the weight in the product's type, the weight, the bias and the norm's weight.

    It also saves the norm's output (under FP8 in eight bits), means and inverse deviations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        ln_weight: torch.Tensor,
        ln_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: NormArgs,
        args: LinearArgs,
    ) -> Any:
        calls.forward("_LayerNormLinear")
        inp_shape, inp_requires_grad = inp.shape, inp.requires_grad
        inp = inp.view(-1, inp_shape[-1])
        inputmat = cast_if_needed(inp, args.activation_dtype)
        needs_input = args.is_grad_enabled and weight.requires_grad
        ln_made, mu, rsigma = norm.forward(inputmat, ln_weight, ln_bias, args.activation_dtype)
        if args.fp8:
            _common.assert_dim_for_fp8_exec(inputmat, weight)
        ln_out = _common.quantize_input(args, ln_made, needs_input) if args.fp8 else ln_made
        total, returned = ln_out, ln_made
        if args.gathers_input:
            total, _ = _common.gather_input(args, ln_made, columnwise=False)
            if norm.returns_gathered:
                returned = total if not args.fp8 else _common.gather_along_first_dim(ln_made, args.tp_group)[0]
        weightmat = _common.weight_for_products(args, weight, args.is_grad_enabled)
        out = _common.forward_product(args, weightmat, total, cast_if_needed(bias, args.activation_dtype))
        if not weight.requires_grad and not norm.returns:
            clear_tensor_data(ln_out, total)
            ln_out = None
        elif args.gathers_input and not norm.returns_gathered:
            clear_tensor_data(total)
        out = out.view(-1, *inp_shape[1:-1], out.shape[-1])
        if args.is_grad_enabled:
            if args.fp8 and needs_input and not args.gathers_input:
                ln_out.update_usage(rowwise_usage=False)
            tensors, ctx.tensor_objects = prepare_for_saving(
                inputmat, weightmat, weight, bias, ln_weight, ln_out, mu, rsigma
            )
            ctx.save_for_backward(*tensors)
            ctx.args, ctx.norm, ctx.inp_shape, ctx.use_bias = args, norm, inp_shape, bias is not None
            ctx.requires_dgrad, ctx.requires_wgrad = inp_requires_grad, weight.requires_grad
            if args.fuse_wgrad_accumulation and weight.requires_grad:
                ctx.main_grad_func = lambda: weight.main_grad
            ctx.reduce_and_update_bwd_fp8_tensors = _common.is_first_of_backward(
                args, inp, ln_weight, ln_bias, weight, bias
            )
        if not norm.returns:
            return out
        rows = -1 if norm.returns_gathered else inp_shape[0]
        return out, returned.view(rows, *inp_shape[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        args, norm = ctx.args, ctx.norm
        inputmat, weightmat, weight, _, ln_weight, ln_out, mu, rsigma = restore_from_saved(
            ctx.tensor_objects, ctx.saved_tensors
        )
        ctx.tensor_objects = None
        main_grad = ctx.main_grad_func() if args.fuse_wgrad_accumulation and ctx.requires_wgrad else None
        grad_output, grad_bias, owns_grad = _common.prepare_grad_output(args, grad_outputs[0], ctx.use_bias)
        total, gathering, wgrad = ln_out, None, None
        if ctx.requires_wgrad and args.gathers_input:
            total, gathering = _common.gather_input(args, ln_out, columnwise=True, async_op=True)
        dgrad, reducing = _common.input_gradient(args, weightmat, grad_output)
        if ctx.requires_wgrad:
            if gathering is not None:
                gathering.wait()
            free = [] if norm.returns and not norm.returns_gathered else [ln_out]
            free += [total] if args.gathers_input else []
            free += [grad_output] if owns_grad else []
            with_bias = ctx.use_bias and grad_bias is None
            wgrad, its = _common.weight_gradient(args, total, grad_output, main_grad, with_bias, tuple(free))
            grad_bias = its if grad_bias is None else grad_bias
            wgrad = _common.returned_weight_gradient(args, weight, wgrad)
        if reducing is not None:
            reducing.wait()
        dgrad = dgrad.view(inputmat.shape)
        if norm.returns:
            dgrad = dgrad + norm.returned_gradient(grad_outputs[1], args).view_as(dgrad)
        dgrad, dgamma, dbeta = norm.backward(dgrad, inputmat, mu, rsigma, ln_weight)
        clear_tensor_data(mu, rsigma)
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        dgrad = dgrad.view(ctx.inp_shape) if ctx.requires_dgrad else None
        return dgrad, dgamma, dbeta, wgrad, grad_bias, None, None


class NormArgs:
    """The arguments of a normalization within a Function."""

    def __init__(self, module: Any):
        self.eps, self.zero_centered = module.eps, module.zero_centered_gamma
        self.rms = module.normalization == "RMSNorm"
        self.returns = module.return_layernorm_output or module.return_layernorm_output_gathered
        self.returns_gathered = module.return_layernorm_output_gathered

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
        """Return the normalized rows, means and inverse deviations."""
        weight, bias = cast_if_needed(weight, dtype), cast_if_needed(bias, dtype)
        return tex.norm_fwd(x, weight, bias, self.eps, self.zero_centered, self.rms)

    def backward(self, dy: torch.Tensor, x: torch.Tensor, mu: Any, rsigma: torch.Tensor, weight: torch.Tensor) -> Any:
        """Return gradients of the rows, weight and bias."""
        dx, dgamma, dbeta = tex.norm_bwd(dy.contiguous(), x, mu, rsigma, weight, self.zero_centered, self.rms)
        return dx.reshape(x.size()), dgamma, dbeta

    def returned_gradient(self, grad: torch.Tensor, args: LinearArgs) -> torch.Tensor:
        """Return the gradient of the norm's output, for this rank's rows."""
        if self.returns_gathered and args.gathers_input:
            return _common.reduce_scatter_along_first_dim(grad, args.tp_group)[0]
        return grad


def make_norm_parameters(module: Any, in_features: int, dtype: torch.dtype, device: Any) -> None:
    """Make `layer_norm_weight`, and `layer_norm_bias` for a layer norm."""
    options = {"device": device, "dtype": dtype}
    fill = init_method_constant(float(not module.zero_centered_gamma))
    module.register_parameter(
        "layer_norm_weight", torch.nn.Parameter(torch.empty(in_features, **options)), init_fn=fill
    )
    if module.normalization == "RMSNorm":
        module.layer_norm_bias = None
    else:
        bias = torch.nn.Parameter(torch.empty(in_features, **options))
        module.register_parameter("layer_norm_bias", bias, init_fn=init_method_constant(0.0))


def mark_norm_parameters(module: Any) -> None:
    """Mark the parameters whose gradients sequence-parallel ranks have to sum."""
    for parameter in (module.layer_norm_weight, module.layer_norm_bias):
        if parameter is not None:
            parameter.sequence_parallel = module.sequence_parallel


class LayerNormLinear(TransformerEngineBaseModule):
    """Takes the real module's arguments, and refuses those that it does not support."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse(
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            symmetric_ar_type=symmetric_ar_type,
        )
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        assert parallel_mode in GemmParallelModes, f"parallel_mode {parallel_mode} not supported"
        self.take_tensor_parallel_group(tp_group, tp_size)
        self.parallel_mode, self.ub_name, self.name = parallel_mode, ub_name, name
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = divide(in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = divide(out_features, self.tp_size) if parallel_mode == "column" else out_features
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        device = default_device() if device is None else device
        make_norm_parameters(self, self.in_features, dtype, device)
        _make_parameters(self, init_method, dtype, device)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters, and mark how they are split."""
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            mark_norm_parameters(self)
            mark_parameters(self)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Normalize and multiply [..., in]; return [..., out], then the bias and the normalized input, if asked for."""
        refuse(fp8_output=fp8_output, fp8_grad=fp8_grad)
        with self.around_forward(inp) as inp:
            bias = self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None
            args = linear_args(self, is_first_microbatch)
            tensors = inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, bias
            if torch.is_grad_enabled():
                out = _LayerNormLinear.apply(*tensors, NormArgs(self), args)
            else:
                out = _LayerNormLinear.forward(None, *tensors, NormArgs(self), args)
        normalized = ()
        if self.return_layernorm_output:
            out, *normalized = out
        if self.gemm_bias_unfused_add:
            out = out + cast_if_needed(self.bias, self.activation_dtype)
        returned = (cast_if_needed(self.bias, self.activation_dtype),) if self.return_bias else ()
        return (out, *returned, *normalized) if returned or normalized else out
