"""Values in eight bits: quantizers make them, and storages hold them; `QuantizedTensor` is a storage and a tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformer_engine_torch as tex


class Quantizer:
    """Makes quantized storage from tensors.

    Attributes:
        rowwise_usage: the values are needed as they lie.
        columnwise_usage: the values are needed transposed, for the products of gradients.
        internal: make storage, which autograd cannot save as it is; otherwise a tensor.
    """

    storage_type: type[QuantizedTensorStorage]
    tensor_type: type[QuantizedTensor]
    scaling: Any
    block = 0
    scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None

    def __init__(self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True):
        self.dtype = fp8_dtype
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise
        self.internal = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Set how the next result will be read."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> Quantizer:
        """Return a quantizer with the same scale and amax, but its own usage."""
        return copy.copy(self)

    def quantize(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> QuantizedTensorStorage:
        """Quantize a tensor; the result's nominal type is `dtype`, or the tensor's."""
        rowwise, columnwise = self._both(tensor, (None, None))
        fields = {"rowwise": rowwise, "columnwise": columnwise, "quantizer": self.copy(), "block": self.block}
        if self.internal:
            return self.storage_type(**fields)
        return self.tensor_type.make(tensor.shape, dtype or tensor.dtype, **fields)

    __call__ = quantize

    def update_quantized(self, source: torch.Tensor, target: QuantizedTensorStorage) -> None:
        """Quantize into existing memory."""
        self._both(source, (target.rowwise, target.columnwise))

    def _both(self, tensor: torch.Tensor, out: tuple[Any, Any]) -> tuple[Any, Any]:
        wanted = (self.rowwise_usage, self.columnwise_usage) if out == (None, None) else [x is not None for x in out]
        matrix = tensor.detach().contiguous()
        results = [None, None]
        for place, transposed in enumerate((False, True)):
            if wanted[place]:
                results[place] = tex.quantize(
                    matrix, self.scale, self.amax, self.dtype, self.scaling, self.block, transposed, out[place]
                )
        return results[0], results[1]

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether transposed values cannot be gathered."""
        return self.block == 0


class QuantizedTensorStorage:
    """Elements in eight bits, as they lie and transposed: each form is a pair (elements, inverse scales), or None."""

    def __init__(self, *, rowwise: Any, columnwise: Any, quantizer: Quantizer, block: int):
        self._set(rowwise, columnwise, quantizer, block)

    def _set(self, rowwise: Any, columnwise: Any, quantizer: Quantizer, block: int) -> None:
        self.rowwise, self.columnwise, self._quantizer, self.block = rowwise, columnwise, quantizer, block

    def operand(self, columnwise: bool = False) -> tuple[torch.Tensor, torch.Tensor, int, bool]:
        """Return the operand for a kernel: the form that the kernel asks for, or else the only form there is."""
        transposed = self.columnwise is not None and (columnwise or self.rowwise is None)
        chosen = self.columnwise if transposed else self.rowwise
        return chosen[0], chosen[1], self.block, transposed

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make the forms that are needed, and drop the forms that are not."""
        if columnwise_usage and self.columnwise is None:
            if self.block:
                raise RuntimeError("values of blocks cannot be transposed: their scales are others")
            self.columnwise = (tex.fp8_transpose(self.rowwise[0]), self.rowwise[1])
        if rowwise_usage and self.rowwise is None:
            raise RuntimeError("cannot make FP8 data of their transpose")
        if rowwise_usage is False:
            self.rowwise = None
        if columnwise_usage is False:
            self.columnwise = None

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Return the tensors for autograd to save; hold none of them until `restore_from_saved`."""
        tensors = [*(self.rowwise or (None, None)), *(self.columnwise or (None, None))]
        self.rowwise = self.columnwise = None
        return tensors, self

    def restore_from_saved(self, tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Take this storage's tensors back from the front of the list, and return the others."""
        pairs = [None if tensors[i] is None else (tensors[i], tensors[i + 1]) for i in (0, 2)]
        self.rowwise, self.columnwise = pairs
        return tensors[4:]

    def get_data_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the elements as they lie, and transposed."""
        return tuple(pair[0] if pair else None for pair in (self.rowwise, self.columnwise))

    def clear(self) -> None:
        """Free the elements; scales stay."""
        for data in self.get_data_tensors():
            if data is not None:
                data.data = data.new_empty(0)

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values."""
        return tex.dequantize(self, dtype)

    def quantize_(self, tensor: torch.Tensor) -> QuantizedTensorStorage:
        """Write new values to the same memory."""
        self._quantizer.update_quantized(tensor, self)
        return self

    def size(self, *args: int) -> Any:
        """Return the size of the matrix."""
        data, _, _, transposed = self.operand()
        shape = torch.Size(reversed(data.shape)) if transposed else data.shape
        return shape[args[0]] if args else shape


class QuantizedTensor(torch.Tensor):
    """Storage that autograd can save: a tensor of a nominal type whose operators compute on the values."""

    @classmethod
    def make(cls, shape: torch.Size, dtype: torch.dtype, **fields: Any) -> QuantizedTensor:
        """Make a tensor from a quantizer's results."""
        some = (fields["rowwise"] or fields["columnwise"])[0]
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=some.device, requires_grad=False)
        made._set(**fields)
        return made

    def make_like(self) -> QuantizedTensor:
        """Return another tensor of the same memory."""
        fields = {"rowwise": self.rowwise, "columnwise": self.columnwise}
        return type(self).make(self.shape, self.dtype, **fields, quantizer=self._quantizer, block=self.block)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].make_like()
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} changes a quantized tensor, which the stand-in does not do")
        plain = [arg.dequantize(dtype=arg.dtype) if isinstance(arg, QuantizedTensor) else arg for arg in args]
        return func(*plain, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[QuantizedTensorStorage | None]]:
    """Return the tensors for autograd to save, and for each argument its storage without tensors, or None."""
    saved: list[torch.Tensor | None] = []
    objects: list[QuantizedTensorStorage | None] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            its, holder = tensor.prepare_for_saving()
            saved.extend(its)
            objects.append(holder)
    return saved, objects


def restore_from_saved(objects: list[Any], saved: Any) -> list[Any]:
    """Return, in backward, the arguments of `prepare_for_saving`; storages have their tensors again."""
    saved, found = list(saved), []
    for holder in objects:
        if holder is None:
            found.append(saved.pop(0))
        else:
            saved = holder.restore_from_saved(saved)
            found.append(holder)
    return found
