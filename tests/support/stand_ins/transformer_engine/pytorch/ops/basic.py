"""Normalizations and activations as operations; other operations that Megatron-Core names are refused when built."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex

from transformer_engine.pytorch.ops.fuser import _OperationFuserAutogradFunction
from transformer_engine.pytorch.utils import cast_if_needed, clear_tensor_data, default_device, refuse


class FusibleOperation(torch.nn.Module):
    """The base of operations; by itself, an operation that the stand-in lacks."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(f"the stand-in of Transformer Engine has no ops.{type(self).__name__}")


class _Norm(FusibleOperation):
    """Normalizes the last dimension.

    It saves its input as rows, means (of a layer norm) and inverse deviations, and frees all of them in backward.
    """

    rms: bool

    def __init__(
        self,
        normalized_shape: Any,
        *,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **sm_margins: Any,
    ) -> None:
        torch.nn.Module.__init__(self)
        size = normalized_shape if isinstance(normalized_shape, int) else normalized_shape[-1]
        options = {"device": default_device() if device is None else device, "dtype": dtype}
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.empty(size, **options))
        if not self.rms:
            self.bias = torch.nn.Parameter(torch.empty(size, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to parameters that leave normalized values as they are."""
        torch.nn.init.constant_(self.weight, float(not self.zero_centered_gamma))
        if not self.rms:
            torch.nn.init.zeros_(self.bias)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Normalize [..., size]; return the same shape."""
        parameters = (self.weight,) if self.rms else (self.weight, self.bias)
        if torch.is_grad_enabled():
            return _OperationFuserAutogradFunction.apply(input_, self, *parameters)
        return _OperationFuserAutogradFunction.forward(None, input_, self, *parameters)

    def op_forward(self, input_: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> tuple[torch.Tensor, list]:
        """Return the output and the tensors to save."""
        kind = input_.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        x = cast_if_needed(input_.contiguous(), dtype).view(-1, weight.numel())
        y, mu, rsigma = tex.norm_fwd(
            x, cast_if_needed(weight, dtype), cast_if_needed(bias, dtype), self.eps, self.zero_centered_gamma, self.rms
        )
        return y.view(input_.shape), [x, rsigma] if self.rms else [x, mu, rsigma]

    def op_backward(self, grad_output: torch.Tensor, saved: list[torch.Tensor]) -> tuple[torch.Tensor, list]:
        """Return gradients of the input and of the parameters."""
        x, *means, rsigma = saved
        dy = cast_if_needed(grad_output.contiguous(), x.dtype).view(x.size())
        weight = cast_if_needed(self.weight, x.dtype)
        mu = means[0] if means else None
        dx, dw, db = tex.norm_bwd(dy, x, mu, rsigma, weight, self.zero_centered_gamma, self.rms)
        clear_tensor_data(x, mu, rsigma)
        return dx.view(grad_output.size()), [dw] if self.rms else [dw, db]


class RMSNorm(_Norm):
    """Normalizes by the root of the mean square."""

    rms = True


class LayerNorm(_Norm):
    """Normalizes by mean and deviation."""

    rms = False


class Sequential(FusibleOperation):
    """An operation that the stand-in lacks."""


class BasicLinear(FusibleOperation):
    """An operation that the stand-in lacks."""


class Bias(FusibleOperation):
    """An operation that the stand-in lacks."""


class AllReduce(FusibleOperation):
    """An operation that the stand-in lacks."""


class ReduceScatter(FusibleOperation):
    """An operation that the stand-in lacks."""


class _Activation(FusibleOperation):
    """An activation; saves its input."""

    kind: str

    def __init__(self, *, cache_quantized_input: bool = False):
        refuse(cache_quantized_input=cache_quantized_input)
        torch.nn.Module.__init__(self)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Apply the activation to [..., size]; a gated one returns half of that."""
        if torch.is_grad_enabled():
            return _OperationFuserAutogradFunction.apply(input_, self)
        return _OperationFuserAutogradFunction.forward(None, input_, self)

    def op_forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, list]:
        """Return the output and the tensors to save."""
        x = input_.contiguous()
        return tex.activation_fwd(x, self.kind), [x]

    def op_backward(self, grad_output: torch.Tensor, saved: list[torch.Tensor]) -> tuple[torch.Tensor, list]:
        """Return the gradient of the input."""
        (x,) = saved
        dx = tex.activation_bwd(grad_output.contiguous(), x, self.kind)
        clear_tensor_data(x)
        return dx, []


class GELU(_Activation):
    """GELU by tanh."""

    kind = "gelu"


class GEGLU(_Activation):
    """Gated GELU."""

    kind = "geglu"


class ReLU(_Activation):
    """max(x, 0)."""

    kind = "relu"


class ReGLU(_Activation):
    """Gated ReLU."""

    kind = "reglu"


class SiLU(_Activation):
    """x sigmoid(x)."""

    kind = "silu"


class SwiGLU(_Activation):
    """Gated SiLU: activates the first half of a row, and multiplies it by the second."""

    kind = "swiglu"
