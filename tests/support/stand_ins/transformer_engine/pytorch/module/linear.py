"""A linear layer, with its ranks' collectives inside of its Function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stand_in_kernels import calls

from transformer_engine.pytorch.constants import GemmParallelModes
from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes
from transformer_engine.pytorch.module import _common
from transformer_engine.pytorch.module._common import LinearArgs, WeightGradStore
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.utils import (
    cast_if_needed,
    default_device,
    divide,
    get_default_init_method,
    init_method_constant,
    refuse,
)


class _Linear(torch.autograd.Function):
    """Saves its input (under FP8 in eight bits), the weight in the product's type, the weight and the bias."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None, args: LinearArgs
    ) -> torch.Tensor:
        calls.forward("_Linear")
        assert inp.shape[-1] == weight.shape[1], "GEMM not possible"
        needs_input = args.is_grad_enabled and weight.requires_grad
        if args.fp8:
            _common.assert_dim_for_fp8_exec(inp, weight)
            delayed = args.save_original_input and isinstance(args.input_quantizer, Float8Quantizer)
            assert not delayed, "DelayedScaling recipe is not supported with save_original_input"
            inputmat = _common.quantize_input(args, inp, needs_input)
        else:
            inputmat = cast_if_needed(inp, args.activation_dtype)
        total = inputmat
        if args.gathers_input:
            total, _ = _common.gather_input(args, inp if args.fp8 else inputmat, columnwise=False)
        weightmat = _common.weight_for_products(args, weight, args.is_grad_enabled and inp.requires_grad)
        out = _common.forward_product(args, weightmat, total, cast_if_needed(bias, args.activation_dtype))
        if args.gathers_input:
            _common.clear_tensor_data(total)
        if not args.is_grad_enabled:
            return out
        if args.save_original_input:
            inputmat = inp
        elif args.fp8 and needs_input and inputmat.columnwise is not None:
            inputmat.update_usage(rowwise_usage=False)
        saved_input = inputmat if needs_input else None
        tensors, ctx.tensor_objects = prepare_for_saving(saved_input, weightmat, weight, bias)
        ctx.save_for_backward(*tensors)
        ctx.args, ctx.inp_shape = args, inp.shape
        ctx.owns_input = saved_input is not inp
        ctx.use_bias = bias is not None
        ctx.requires_dgrad, ctx.requires_wgrad = inp.requires_grad, weight.requires_grad
        if args.fuse_wgrad_accumulation and weight.requires_grad:
            ctx.main_grad_func = lambda: weight.main_grad
        ctx.reduce_and_update_bwd_fp8_tensors = _common.is_first_of_backward(args, inp, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        args = ctx.args
        inputmat, weightmat, weight, _ = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        ctx.tensor_objects = None
        main_grad = ctx.main_grad_func() if args.fuse_wgrad_accumulation and ctx.requires_wgrad else None
        grad_output, grad_bias, owns_grad = _common.prepare_grad_output(args, grad_output, ctx.use_bias)
        total, gathering = inputmat, None
        if ctx.requires_wgrad and args.gathers_input:
            total, gathering = _common.gather_input(args, inputmat, columnwise=True, async_op=True)
        elif ctx.requires_wgrad and args.fp8 and args.save_original_input:
            args.input_quantizer.set_usage(rowwise=False, columnwise=True)
            total = args.input_quantizer(inputmat)
        dgrad, reducing, wgrad = None, None, None
        if ctx.requires_dgrad:
            dgrad, reducing = _common.input_gradient(args, weightmat, grad_output)
        if ctx.requires_wgrad:
            if gathering is not None:
                gathering.wait()
            free = [total] if ctx.owns_input or args.gathers_input else []
            free += [grad_output] if owns_grad else []
            with_bias = ctx.use_bias and grad_bias is None
            wgrad, its = _common.weight_gradient(args, total, grad_output, main_grad, with_bias, tuple(free))
            grad_bias = its if grad_bias is None else grad_bias
            wgrad = _common.returned_weight_gradient(args, weight, wgrad)
        if reducing is not None:
            reducing.wait()
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return wgrad, dgrad.view(ctx.inp_shape) if ctx.requires_dgrad else None, grad_bias, None


class Linear(TransformerEngineBaseModule):
    """Computes y = x A^T + b. Takes the real module's arguments, and refuses those that it does not support."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse(
            parameters_split=parameters_split,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            symmetric_ar_type=symmetric_ar_type,
        )
        assert parallel_mode in GemmParallelModes, f"parallel_mode {parallel_mode} not supported"
        self.take_tensor_parallel_group(tp_group, tp_size)
        self.parallel_mode, self.ub_name, self.name = parallel_mode, ub_name, name
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = divide(in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = divide(out_features, self.tp_size) if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        # ranks sum their rows' products before they add the bias
        self.gemm_bias_unfused_add = parallel_mode == "row" and self.apply_bias
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.wgrad_store = WeightGradStore(delay_wgrad_compute)
        self.weight_names, self.bias_names = ["weight"], ["bias"]
        _make_parameters(self, init_method, params_dtype, device)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters, and mark how they are split."""
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            mark_parameters(self)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Multiply [..., in]; return [..., out], and the bias if asked for."""
        refuse(fp8_output=fp8_output, fp8_grad=fp8_grad)
        with self.around_forward(inp) as inp:
            bias = self.bias if self.apply_bias and not self.gemm_bias_unfused_add else None
            args = linear_args(self, is_first_microbatch, save_original_input=self.save_original_input)
            if torch.is_grad_enabled():
                out = _Linear.apply(self.weight, inp, bias, args)
            else:
                out = _Linear.forward(None, self.weight, inp, bias, args)
        if self.gemm_bias_unfused_add:
            out = out + cast_if_needed(self.bias, self.activation_dtype)
        return (out, cast_if_needed(self.bias, self.activation_dtype)) if self.return_bias else out


def linear_args(module: Any, is_first_microbatch: bool | None, **others: Any) -> LinearArgs:
    """Return the arguments of a module with one product."""
    forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
    return LinearArgs(
        module=module,
        is_first_microbatch=is_first_microbatch,
        fp8=module.fp8,
        input_quantizer=forward[0] if module.fp8 else None,
        weight_quantizer=forward[1] if module.fp8 else None,
        grad_output_quantizer=backward[0] if module.fp8 else None,
        wgrad_store=module.wgrad_store,
        fuse_wgrad_accumulation=module.fuse_wgrad_accumulation,
        tp_group=module.tp_group,
        tp_size=module.tp_size,
        sequence_parallel=module.sequence_parallel,
        parallel_mode=module.parallel_mode,
        activation_dtype=module.activation_dtype,
        is_grad_enabled=torch.is_grad_enabled(),
        **others,
    )


def _make_parameters(module: Any, init_method: Callable | None, dtype: torch.dtype | None, device: Any) -> None:
    options = {
        "device": default_device() if device is None else device,
        "dtype": torch.get_default_dtype() if dtype is None else dtype,
    }
    weight = torch.nn.Parameter(torch.empty(module.out_features, module.in_features, **options))
    fill = get_default_init_method() if init_method is None else init_method
    module.register_parameter("weight", weight, init_fn=fill, get_rng_state_tracker=module.get_rng_state_tracker)
    if module.use_bias:
        bias = torch.nn.Parameter(torch.empty(module.out_features, **options))
        module.register_parameter("bias", bias, init_fn=init_method_constant(0.0))
    else:
        module.bias = torch.empty(0, **options)
    module.reset_parameters(defer_init=str(options["device"]) == "meta")
    if module.wgrad_store.delay_wgrad_compute():
        for param in module.parameters():
            param.skip_backward_post_hook = True


def mark_parameters(module: Any) -> None:
    """Mark how weight and bias are split over ranks, or that sequence-parallel ranks sum the bias's gradient."""
    set_tensor_model_parallel_attributes(module.weight, True, 1 if module.parallel_mode == "row" else 0, 1)
    if module.use_bias and module.parallel_mode == "row":
        module.bias.sequence_parallel = module.sequence_parallel
    elif module.use_bias and module.parallel_mode == "column":
        set_tensor_model_parallel_attributes(module.bias, True, 0, 1)
