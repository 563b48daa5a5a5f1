"""A normalization, two linear layers and an activation between them in one Function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformer_engine_torch as tex
from stand_in_kernels import calls

from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes
from transformer_engine.pytorch.module import _common
from transformer_engine.pytorch.module._common import LinearArgs, WeightGradStore
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.layernorm_linear import (
    NormArgs,
    make_norm_parameters,
    mark_norm_parameters,
)
from transformer_engine.pytorch.module.linear import linear_args
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.utils import (
    cast_if_needed,
    clear_tensor_data,
    default_device,
    divide,
    get_default_init_method,
    init_method_constant,
    refuse,
)

_GATED = ("swiglu", "geglu", "reglu", "qgeglu", "sreglu")


class _LayerNormMLP(torch.autograd.Function):
    """Saves the same tensors as the real function, in its order.

    These are: the input, the norm's weight, the norm's output, the first weight in the product's type, the first
    weight, its bias, the first product, None (in place of that product without its bias), the activation's output, the
    second weight in the product's type, the second weight, its bias, means, and inverse deviations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        ln_weight: torch.Tensor,
        ln_bias: torch.Tensor | None,
        fc1_weight: torch.Tensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: torch.Tensor,
        fc2_bias: torch.Tensor | None,
        norm: NormArgs,
        activation: str,
        first: LinearArgs,
        second: LinearArgs,
    ) -> Any:
        calls.forward("_LayerNormMLP")
        dtype, inp_shape, inp_requires_grad = first.activation_dtype, inp.shape, inp.requires_grad
        inputmat = cast_if_needed(inp.view(-1, inp_shape[-1]), dtype)
        ln_made, mu, rsigma = norm.forward(inputmat, ln_weight, ln_bias, dtype)
        if first.fp8:
            _common.assert_dim_for_fp8_exec(inputmat, fc1_weight, fc2_weight)
        needs_first = first.is_grad_enabled and fc1_weight.requires_grad
        ln_out = _common.quantize_input(first, ln_made, needs_first) if first.fp8 else ln_made
        total = _common.gather_input(first, ln_made, columnwise=False)[0] if first.gathers_input else ln_out
        fc1_weightmat = _common.weight_for_products(first, fc1_weight, first.is_grad_enabled)
        fc1_out = _common.forward_product(first, fc1_weightmat, total, cast_if_needed(fc1_bias, dtype))
        if not first.is_grad_enabled or first.gathers_input:
            clear_tensor_data(total)
        act_made = tex.activation_fwd(fc1_out, activation)
        needs_second = first.is_grad_enabled and fc2_weight.requires_grad
        act_out = _common.quantize_input(second, act_made, needs_second) if first.fp8 else act_made
        fc2_weightmat = _common.weight_for_products(second, fc2_weight, first.is_grad_enabled)
        out = _common.forward_product(second, fc2_weightmat, act_out, cast_if_needed(fc2_bias, dtype))
        out = out.view(-1, *inp_shape[1:-1], out.shape[-1])
        if not first.is_grad_enabled:
            clear_tensor_data(act_out, fc1_out)
            return (out, ln_made.view(inp_shape)) if norm.returns else out
        if not needs_first and not norm.returns:
            clear_tensor_data(ln_out)
        if not needs_second:
            clear_tensor_data(act_out)
        tensors, ctx.tensor_objects = prepare_for_saving(
            inputmat,
            ln_weight,
            ln_out if needs_first else None,
            fc1_weightmat,
            fc1_weight,
            fc1_bias,
            fc1_out,
            None,
            act_out if needs_second else None,
            fc2_weightmat,
            fc2_weight,
            fc2_bias,
            mu,
            rsigma,
        )
        ctx.save_for_backward(*tensors)
        ctx.first, ctx.second, ctx.norm, ctx.activation = first, second, norm, activation
        ctx.inp_shape, ctx.requires_dgrad = inp_shape, inp_requires_grad
        ctx.main_grad_funcs = lambda: fc1_weight.main_grad, lambda: fc2_weight.main_grad
        ctx.reduce_and_update_bwd_fp8_tensors = _common.is_first_of_backward(
            first, inp, ln_weight, ln_bias, fc1_weight, fc2_weight, fc1_bias, fc2_bias
        )
        return (out, ln_made.view(inp_shape)) if norm.returns else out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, second = ctx.first, ctx.second
        saved = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        ctx.tensor_objects = None
        inputmat, ln_weight, ln_out, fc1_weightmat, fc1_weight, fc1_bias, fc1_out = saved[:7]
        _, act_out, fc2_weightmat, fc2_weight, fc2_bias, mu, rsigma = saved[7:]
        grad_output, fc2_bias_grad, _ = _common.prepare_grad_output(second, grad_outputs[0], fc2_bias is not None)
        dact, _ = _common.input_gradient(second, fc2_weightmat, grad_output)
        fc1_wgrad = fc2_wgrad = None
        if fc2_weight.requires_grad:
            main_grad = ctx.main_grad_funcs[1]() if second.fuse_wgrad_accumulation else None
            with_bias = fc2_bias is not None and fc2_bias_grad is None
            fc2_wgrad, its = _common.weight_gradient(second, act_out, grad_output, main_grad, with_bias, (act_out,))
            fc2_bias_grad = its if fc2_bias_grad is None else fc2_bias_grad
            fc2_wgrad = _common.returned_weight_gradient(second, fc2_weight, fc2_wgrad)
        dfc1 = tex.activation_bwd(dact, fc1_out, ctx.activation)
        clear_tensor_data(fc1_out, dact)
        dfc1, fc1_bias_grad, _ = _common.prepare_grad_output(first, dfc1, fc1_bias is not None)
        total, gathering = ln_out, None
        if fc1_weight.requires_grad and first.gathers_input:
            total, gathering = _common.gather_input(first, ln_out, columnwise=True, async_op=True)
        dgrad, reducing = _common.input_gradient(first, fc1_weightmat, dfc1)
        if fc1_weight.requires_grad:
            if gathering is not None:
                gathering.wait()
            main_grad = ctx.main_grad_funcs[0]() if first.fuse_wgrad_accumulation else None
            free = (dfc1,) if ctx.norm.returns_gathered else (dfc1, total)
            with_bias = fc1_bias is not None and fc1_bias_grad is None
            fc1_wgrad, its = _common.weight_gradient(first, total, dfc1, main_grad, with_bias, free)
            fc1_bias_grad = its if fc1_bias_grad is None else fc1_bias_grad
            fc1_wgrad = _common.returned_weight_gradient(first, fc1_weight, fc1_wgrad)
        if reducing is not None:
            reducing.wait()
        dgrad = dgrad.view(inputmat.shape)
        if ctx.norm.returns:
            dgrad = dgrad + grad_outputs[1].view_as(dgrad)
        dgrad, dgamma, dbeta = ctx.norm.backward(dgrad, inputmat, mu, rsigma, ln_weight)
        clear_tensor_data(mu, rsigma)
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        dgrad = dgrad.view(ctx.inp_shape) if ctx.requires_dgrad else None
        return dgrad, dgamma, dbeta, fc1_wgrad, fc1_bias_grad, fc2_wgrad, fc2_bias_grad, None, None, None, None


class LayerNormMLP(TransformerEngineBaseModule):
    """Takes the real module's arguments, and refuses those that it does not support."""

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
    ) -> None:
        super().__init__()
        refuse(
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
            return_layernorm_output_gathered=return_layernorm_output_gathered,
        )
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        self.take_tensor_parallel_group(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.set_parallel_mode, self.activation, self.name = set_parallel_mode, activation, name
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.gemm_bias_unfused_add = set_parallel_mode and self.apply_bias and self.tp_size > 1
        self.fuse_wgrad_accumulation, self.get_rng_state_tracker = fuse_wgrad_accumulation, get_rng_state_tracker
        self.parallel_mode = None
        self.wgrad_store = WeightGradStore()
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        options = {"device": default_device() if device is None else device, "dtype": dtype}
        make_norm_parameters(self, hidden_size, dtype, options["device"])
        ffn = divide(ffn_hidden_size, self.tp_size) if set_parallel_mode else ffn_hidden_size
        shapes = {"fc1": (ffn * (2 if activation in _GATED else 1), hidden_size), "fc2": (hidden_size, ffn)}
        fills = {"fc1": init_method, "fc2": output_layer_init_method}
        for name, shape in shapes.items():
            fill = fills[name] or get_default_init_method()
            weight = torch.nn.Parameter(torch.empty(*shape, **options))
            self.register_parameter(f"{name}_weight", weight, init_fn=fill, get_rng_state_tracker=get_rng_state_tracker)
            if bias:
                made = torch.nn.Parameter(torch.empty(shape[0], **options))
                self.register_parameter(f"{name}_bias", made, init_fn=init_method_constant(0.0))
            else:
                setattr(self, f"{name}_bias", torch.empty(0, **options))
        self.reset_parameters(defer_init=str(options["device"]) == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters, and mark how they are split."""
        super().reset_parameters(defer_init=defer_init)
        if defer_init:
            return
        mark_norm_parameters(self)
        set_tensor_model_parallel_attributes(self.fc1_weight, True, 0, 1)
        set_tensor_model_parallel_attributes(self.fc2_weight, True, 1, 1)
        if self.use_bias:
            set_tensor_model_parallel_attributes(self.fc1_bias, True, 0, 1)
            if self.set_parallel_mode:
                self.fc2_bias.sequence_parallel = self.sequence_parallel

    def _args(self, is_first_microbatch: bool | None) -> tuple[LinearArgs, LinearArgs]:
        first = linear_args(self, is_first_microbatch, names=("fc1_weight", "fc1_bias"))
        second = replace(first, names=("fc2_weight", "fc2_bias"))
        if self.fp8:
            second.input_quantizer, second.weight_quantizer = self.quantizers["scaling_fwd"][3:5]
            second.grad_output_quantizer = self.quantizers["scaling_bwd"][2]
        if self.set_parallel_mode:
            first.parallel_mode, second.parallel_mode = "column", "row"
        return first, second

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Run the MLP on [..., hidden]; return the same shape, and if asked for, second bias and normalized input."""
        with self.around_forward(inp, num_gemms=2) as inp:
            first, second = self._args(is_first_microbatch)
            fc2_bias = self.fc2_bias if self.apply_bias and not self.gemm_bias_unfused_add else None
            tensors = (
                inp,
                self.layer_norm_weight,
                self.layer_norm_bias,
                self.fc1_weight,
                self.fc1_bias if self.use_bias else None,
                self.fc2_weight,
                fc2_bias,
            )
            arguments = NormArgs(self), self.activation, first, second
            if torch.is_grad_enabled():
                out = _LayerNormMLP.apply(*tensors, *arguments)
            else:
                out = _LayerNormMLP.forward(None, *tensors, *arguments)
        normalized = ()
        if self.return_layernorm_output:
            out, *normalized = out
        if self.gemm_bias_unfused_add:
            out = out + cast_if_needed(self.fc2_bias, self.activation_dtype)
        returned = (cast_if_needed(self.fc2_bias, self.activation_dtype),) if self.return_bias else ()
        return (out, *returned, *normalized) if returned or normalized else out
