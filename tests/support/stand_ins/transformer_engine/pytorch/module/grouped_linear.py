"""Linear layers of experts; the rows of each expert lie together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stand_in_kernels import calls

from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes
from transformer_engine.pytorch.module import _common
from transformer_engine.pytorch.module._common import LinearArgs, WeightGradStore
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
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


class _GroupedLinear(torch.autograd.Function):
    """Saves each expert's rows (views of the input, or in eight bits), weights in the product's type, weights, biases.

    `args` has lists of quantizers.
    """

    @staticmethod
    def forward(
        ctx: Any, inp: torch.Tensor, m_splits: list[int], use_bias: bool, args: LinearArgs, *parameters: torch.Tensor
    ) -> torch.Tensor:
        calls.forward("_GroupedLinear")
        count, dtype = len(m_splits), args.activation_dtype
        weights, biases = parameters[:count], parameters[count:]
        needs_input = args.is_grad_enabled and weights[0].requires_grad
        rows = cast_if_needed(inp.reshape(-1, weights[0].size(-1)), dtype)
        inputmats = list(torch.split(rows, m_splits))
        weightmats = [cast_if_needed(weight, dtype) for weight in weights]
        if args.fp8:
            quantizers = args.input_quantizer
            for quantizer in quantizers:
                quantizer.set_usage(rowwise=True, columnwise=needs_input and not args.save_original_input)
            inputmats = [quantizer(part) for quantizer, part in zip(quantizers, inputmats, strict=True)]
            weightmats = [_weight(args, i, weight, inp.requires_grad) for i, weight in enumerate(weights)]
        out = torch.empty([sum(m_splits), weights[0].size(0)], dtype=dtype, device=inp.device)
        applied = [cast_if_needed(bias, dtype) for bias in biases] if use_bias else None
        general_grouped_gemm(weightmats, inputmats, out.split(m_splits), dtype, layout="TN", bias=applied)
        if args.is_grad_enabled:
            if not needs_input:
                inputmats = [None] * count
            elif args.save_original_input:
                inputmats = [inp] + [None] * (count - 1)
            elif args.fp8:
                for inputmat in inputmats:
                    inputmat.update_usage(rowwise_usage=False, columnwise_usage=True)
            tensors, ctx.tensor_objects = prepare_for_saving(*inputmats, *weightmats, *weights, *biases)
            ctx.save_for_backward(*tensors)
            ctx.args, ctx.m_splits, ctx.use_bias, ctx.inp_shape = args, m_splits, use_bias, inp.shape
            ctx.requires_dgrad, ctx.requires_wgrad = inp.requires_grad, weights[0].requires_grad
            ctx.main_grad_funcs = [lambda weight=weight: weight.main_grad for weight in weights]
            ctx.reduce_and_update_bwd_fp8_tensors = (
                args.fp8 and _common.requires_grad(inp, weights[0]) and FP8GlobalStateManager.is_first_fp8_module()
            )
        return out.view(-1, *inp.shape[1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        args, m_splits, count = ctx.args, ctx.m_splits, len(ctx.m_splits)
        saved = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        inputmats, weightmats, weights = (saved[i * count : (i + 1) * count] for i in range(3))
        rows = cast_if_needed(grad_output.contiguous().view(-1, grad_output.shape[-1]), args.activation_dtype)
        grads = list(rows.split(m_splits))
        bias_grads: list[Any] = [None] * count
        if args.fp8:
            if ctx.use_bias:
                bias_grads = [part.sum(dim=0) for part in grads]
            for quantizer in args.grad_output_quantizer:
                quantizer.set_usage(rowwise=True, columnwise=True)
            grads = [quantizer(part) for quantizer, part in zip(args.grad_output_quantizer, grads, strict=True)]
        dgrad = None
        if ctx.requires_dgrad:
            shape = sum(m_splits), weights[0].shape[1]
            dgrad = torch.empty(shape, dtype=args.activation_dtype, device=grad_output.device)
            general_grouped_gemm(weightmats, grads, dgrad.split(m_splits), args.activation_dtype, layout="NN")
        wgrads: list[Any] = [None] * count
        if ctx.requires_wgrad:
            wgrads, found = _weight_gradients(ctx, inputmats, weights, grads)
            bias_grads = bias_grads if args.fp8 else found
        if ctx.reduce_and_update_bwd_fp8_tensors:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        dgrad = dgrad.view(ctx.inp_shape) if dgrad is not None else None
        return dgrad, None, None, None, *wgrads, *(bias_grads if ctx.use_bias else [None] * count)


def _weight(args: LinearArgs, i: int, weight: torch.Tensor, columnwise: bool) -> Any:
    quantizer = args.weight_quantizer[i]
    quantizer.set_usage(rowwise=True, columnwise=args.is_grad_enabled and columnwise)
    return args.module.get_weight_workspace(
        tensor=weight,
        quantizer=quantizer,
        cache_name=None if args.is_first_microbatch is None else f"weight{i}",
        update_workspace=args.is_first_microbatch is not False,
    )


def _weight_gradients(ctx: Any, inputmats: list[Any], weights: list[torch.Tensor], grads: list[Any]) -> tuple[Any, Any]:
    args, own = ctx.args, not ctx.args.save_original_input
    if args.save_original_input:
        inputmats = list(
            cast_if_needed(inputmats[0].reshape(-1, weights[0].shape[1]), args.activation_dtype).split(ctx.m_splits)
        )
        if args.fp8:
            for quantizer in args.input_quantizer:
                quantizer.set_usage(rowwise=False, columnwise=True)
            inputmats = [quantizer(part) for quantizer, part in zip(args.input_quantizer, inputmats, strict=True)]
    outs = [get() for get in ctx.main_grad_funcs] if args.fuse_wgrad_accumulation else [None] * len(weights)
    accumulate = args.fuse_wgrad_accumulation and args.is_first_microbatch is not True
    with_bias = ctx.use_bias and not args.fp8
    dtype = outs[0].dtype if outs[0] is not None else args.activation_dtype
    results = general_grouped_gemm(
        inputmats, grads, outs, dtype, layout="NT", accumulate=accumulate, with_bias_grad=with_bias
    )
    if own:
        clear_tensor_data(*inputmats)
    pairs = zip(weights, results, strict=True)
    wgrads = [_common.returned_weight_gradient(args, weight, result[0]) for weight, result in pairs]
    return wgrads, [result[1] for result in results]


class GroupedLinear(TransformerEngineBaseModule):
    """Takes the real module's arguments, and refuses those that it does not support."""

    def __init__(
        self,
        num_gemms: int,
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
        device: Any = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
    ) -> None:
        super().__init__()
        refuse(ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag, delay_wgrad_compute=delay_wgrad_compute)
        refuse(single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias)  # newer arguments
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.apply_bias = bias and not return_bias
        self.take_tensor_parallel_group(tp_group, tp_size)
        self.parallel_mode, self.sequence_parallel = parallel_mode, self.tp_size > 1 and sequence_parallel
        self.in_features = divide(in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = divide(out_features, self.tp_size) if parallel_mode == "column" else out_features
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, save_original_input
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.wgrad_store = WeightGradStore()
        dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        options = {"device": default_device() if device is None else device, "dtype": dtype}
        fill = get_default_init_method() if init_method is None else init_method
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **options))
            self.register_parameter(f"weight{i}", weight, init_fn=fill, get_rng_state_tracker=get_rng_state_tracker)
        for i in range(num_gemms):
            if bias:
                made = torch.nn.Parameter(torch.empty(self.out_features, **options))
                self.register_parameter(f"bias{i}", made, init_fn=init_method_constant(0.0))
            else:
                setattr(self, f"bias{i}", torch.empty(0, **options))
        self.reset_parameters(defer_init=str(options["device"]) == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters, and mark how they are split."""
        super().reset_parameters(defer_init=defer_init)
        for i in range(0 if defer_init else self.num_gemms):
            weight = getattr(self, f"weight{i}")
            set_tensor_model_parallel_attributes(weight, True, 1 if self.parallel_mode == "row" else 0, 1)

    def forward(self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """Multiply the rows of all experts [rows, in]; return [rows, out], and the biases if asked for.

        `m_splits` are the rows of each expert.
        """
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        with self.around_forward(inp, num_gemms=self.num_gemms) as inp:
            count, forward = self.num_gemms, self.quantizers["scaling_fwd"]
            args = LinearArgs(
                module=self,
                is_first_microbatch=is_first_microbatch,
                fp8=self.fp8,
                # for each kind of tensor, the quantizers of all experts are consecutive
                input_quantizer=forward[:count] if self.fp8 else None,
                weight_quantizer=forward[count : 2 * count] if self.fp8 else None,
                grad_output_quantizer=self.quantizers["scaling_bwd"][:count] if self.fp8 else None,
                wgrad_store=self.wgrad_store,
                fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
                tp_group=None,
                tp_size=1,
                sequence_parallel=False,
                parallel_mode=None,
                activation_dtype=self.activation_dtype,
                is_grad_enabled=torch.is_grad_enabled(),
                save_original_input=self.save_original_input,
            )
            parameters = [getattr(self, f"{kind}{i}") for kind in ("weight", "bias") for i in range(count)]
            if torch.is_grad_enabled():
                out = _GroupedLinear.apply(inp, m_splits, self.apply_bias, args, *parameters)
            else:
                out = _GroupedLinear.forward(None, inp, m_splits, self.apply_bias, args, *parameters)
        if self.return_bias:
            return out, [cast_if_needed(getattr(self, f"bias{i}"), self.activation_dtype) for i in range(count)]
        return out
