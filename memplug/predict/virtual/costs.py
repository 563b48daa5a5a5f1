"""Predicts the duration of kernels (by a roofline), copies and collectives from a GPU's rates."""

from __future__ import annotations

import math
from typing import Any

from memplug.errors import HardwareError
from memplug.predict.virtual.hardware import GpuProfile
from memplug.profile.operator_names import CONVOLUTION, MATMULS, SCALED_MATMULS

DTYPES = {1: "float8", 2: "bfloat16", 4: "float32", 8: "float64"}
"""Dtypes of matrix products by bytes per element; float16 is as fast as bfloat16."""
WITHOUT_READING = ("aten::fill_", "aten::zero_", "aten::zeros", "aten::ones", "aten::arange")
"""Operators that only write; their inputs' bytes are not counted as traffic."""
WHOLE = ("broadcast_", "reduce_", "send", "recv_", "recv_any_source_")
"""Collectives that move all their bytes; in other collectives a rank's own share does not move."""
REDUCED_AND_GATHERED = ("allreduce_", "allreduce_coalesced_")
"""Collectives that move their bytes twice."""


def cost(hardware: GpuProfile, attention: str, work: Any) -> tuple[float, float]:
    """Return the duration and the floating-point operations of one kernel.

    Args:
        hardware: The GPU's rates.
        attention: The attention back end.
        work: The kernel, see `kernel_s`.

    Returns:
        Seconds, and the number of floating-point operations.
    """
    return kernel_s(hardware, attention, work), flops(work)


def kernel_s(hardware: GpuProfile, attention: str, work: Any) -> float:
    """Return the duration of one kernel: the longer of its computation and its memory traffic.

    Args:
        hardware: The GPU's rates.
        attention: The attention back end.
        work: The kernel: its `name`, the `sizes` and `nbytes` of its `inputs` and `outputs`, and for attention whether
            it is `causal` (`Work` in memplug/predict/virtual/native/device.h).

    Returns:
        Seconds.
    """
    seconds = max(moved_bytes(work) / hardware.memory_bytes_per_s, hardware.kernel_s)
    if work.name.startswith("attention"):
        backward, keys = work.name == "attention_backward", work.inputs[1].sizes[-2]
        rates = hardware.attention_backward_flops if backward else hardware.attention_forward_flops
        return max(seconds, flops(work) / rates[attention].at(keys))
    return max(seconds, _products_s(hardware, work, flops(work)))


def flops(work: Any) -> float:
    """Return the floating-point operations of a matrix product, a convolution or attention; 0 for any other kernel."""
    if work.name in MATMULS:
        return matmul_flops(work)
    if work.name == CONVOLUTION:
        return convolution_flops(work)
    if work.name.startswith("attention"):
        return attention_flops(work, backward=work.name == "attention_backward")
    return 0.0


def _products_s(hardware: GpuProfile, work: Any, flops: float) -> float:
    if not flops:
        return 0.0
    factor = _factors(work)[-1]
    element_bytes = factor.nbytes // math.prod(factor.sizes)
    rate = hardware.matmul_flops.get(DTYPES.get(element_bytes, ""))
    if rate is None:
        raise HardwareError(
            f"the profile of {hardware.name} has no rate for matrix products with elements of {element_bytes} bytes"
        )
    return flops / rate.at(flops)


def copy_s(hardware: GpuProfile, to_host: bool, nbytes: int) -> tuple[float, float]:
    """Return the duration of one copy over the link.

    Args:
        hardware: The GPU's rates.
        to_host: Whether the copy is from device to host; otherwise it is from host to device.
        nbytes: The size of the copy.

    Returns:
        Seconds with the other direction idle, and with it busy.
    """
    alone, both = (
        (hardware.to_host_bytes_per_s, hardware.to_host_both_bytes_per_s)
        if to_host
        else (hardware.to_device_bytes_per_s, hardware.to_device_both_bytes_per_s)
    )
    return hardware.copy_s + nbytes / alone.at(nbytes), hardware.copy_s + nbytes / both.at(nbytes)


def collective_s(hardware: GpuProfile, name: str, nbytes: int, ranks: int) -> float:
    """Return the duration of one ring collective, from the bus bandwidth that nccl-tests defines.

    Args:
        hardware: The GPU's rates.
        name: The operator's name in torch's library c10d.
        nbytes: The bytes of this rank's inputs or outputs, whichever are more.
        ranks: The number of ranks in the group; a single rank moves nothing.

    Returns:
        Seconds.
    """
    share = 1.0 if name in WHOLE else (ranks - 1) / ranks
    passes = 2 if name in REDUCED_AND_GATHERED else 1
    return hardware.collective_s + passes * share * nbytes / hardware.collective_bytes_per_s if ranks > 1 else 0.0


def matmul_flops(work: Any) -> float:
    """Return the floating-point operations of a matrix product: two for each multiplication."""
    left, right = _factors(work)
    in_groups = len(right.sizes) < len(left.sizes)  # each matrix of `left` multiplies its own columns of `right`
    return 2.0 * math.prod(left.sizes[1:] if in_groups else left.sizes) * right.sizes[-1]


def _factors(work: Any) -> Any:
    return work.inputs[:2] if work.name in SCALED_MATMULS else work.inputs[-2:]


def convolution_flops(work: Any) -> float:
    """Return the floating-point operations of a convolution: two for each output element and element of its filter."""
    _, weight = work.inputs
    return 2.0 * math.prod(work.outputs[0].sizes) * math.prod(weight.sizes[1:])


def attention_flops(work: Any, *, backward: bool) -> float:
    """Return the floating-point operations of attention.

    Forward has two matrix products over all pairs of query and key; backward has five. Causal attention counts half of
    the pairs.

    Args:
        work: The kernel, see `kernel_s`.
        backward: Whether the kernel is attention's backward.
    """
    query, key, value = work.inputs[:3]
    pairs = math.prod(query.sizes[:-1]) * key.sizes[-2]
    channels = 3 * query.sizes[-1] + 2 * value.sizes[-1] if backward else query.sizes[-1] + value.sizes[-1]
    return 2.0 * pairs * channels * (0.5 if work.causal else 1.0)


def moved_bytes(work: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    read_bytes = 0 if work.name in WITHOUT_READING else sum(tensor.nbytes for tensor in work.inputs)
    return read_bytes + sum(tensor.nbytes for tensor in work.outputs)
