"""The Function that runs operations of `transformer_engine.pytorch.ops`; here one operation alone."""

from __future__ import annotations

from typing import Any

import torch
from stand_in_kernels import calls

from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor import prepare_for_saving, restore_from_saved


class _OperationFuserAutogradFunction(torch.autograd.Function):
    """Saves its operation's tensors; marks input and output, so that no backward frees their memory."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, operation: Any, *parameters: torch.Tensor) -> torch.Tensor:
        calls.forward("_OperationFuserAutogradFunction")
        for tensor in (input_, *parameters):
            tensor._do_not_clear = True
        records = torch.is_grad_enabled() if ctx is None else any(ctx.needs_input_grad)
        output, to_save = operation.op_forward(input_, *parameters)
        if ctx is not None:
            tensors, ctx.tensor_objects = prepare_for_saving(*to_save)
            ctx.save_for_backward(*tensors)
            ctx.operation, ctx.parameters = operation, parameters
            ctx.is_first_module = records and FP8GlobalStateManager.is_first_fp8_module()
        output._do_not_clear = True
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
        grad_input, grad_parameters = ctx.operation.op_backward(grad_output, saved)
        if ctx.is_first_module:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return grad_input, None, *grad_parameters
