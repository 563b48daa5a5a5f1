"""Implements DeepSpeed's accelerator interface (`deepspeed.accelerator`) for the virtual device.

    with joined(rank=0, world_size=8), accelerated():
        engine, *_ = deepspeed.initialize(...)

DeepSpeed then uses the streams, events and memory numbers of the virtual device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import torch

from memplug.predict.virtual import NAME, VirtualDevice
from memplug.predict.virtual.replacing import replaced

DEEPSPEED = "deepspeed 0.19"


@contextlib.contextmanager
def accelerated() -> Iterator[None]:
    """Make DeepSpeed run on the virtual device inside the context.

    The virtual device must exist and torch.distributed must be initialized.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    import deepspeed
    from deepspeed.accelerator import real_accelerator

    before = real_accelerator.ds_accelerator
    real_accelerator.set_accelerator(_accelerator())
    try:
        deepspeed.init_distributed(NAME)
        with _without_reading():
            yield
    finally:
        deepspeed.comm.comm.cdb = None  # DeepSpeed's communication backend: its groups may no longer exist
        real_accelerator.ds_accelerator = before


@contextlib.contextmanager
def _without_reading() -> Iterator[None]:
    """Replace, inside the context, DeepSpeed's functions that read numbers from the device.

    The device has no values. So checks for infinite gradients find none, and comparisons with rank 0 find no
    difference.
    """

    def never(original: Any) -> Any:
        return lambda *args, **kwargs: bool(original(*args, **kwargs)) and False

    def own(original: Any) -> Any:
        """Wrap a function that compares this rank's numbers with rank 0's, to return this rank's numbers.

        The function still runs, because its collectives are part of the predicted step.
        """

        def answer(numbers: Any) -> Any:
            with contextlib.suppress(RuntimeError):  # raised if rank 0's numbers seem to differ
                original(numbers)
            return numbers

        return answer

    zero = "deepspeed.runtime.zero."
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (zero + "stage_1_and_2:DeepSpeedZeroOptimizer", "has_overflow"),
            (zero + "stage_1_and_2", "is_invalid_grad_norm"),
            (zero + "stage3:DeepSpeedZeroOptimizer_Stage3", "has_overflow"),
            (zero + "stage3", "is_invalid_grad_norm"),
            ("deepspeed.runtime.utils:CheckOverflow", "has_overflow"),
        ):
            target = pkgutil.resolve_name(owner)
            stack.enter_context(replaced(target, name, never(getattr(target, name)), DEEPSPEED))
        checks = importlib.import_module(zero + "utils")
        for name in ("get_lst_from_rank0", "assert_lst_len_same_as_other_ranks"):
            stack.enter_context(replaced(checks, name, own(getattr(checks, name)), DEEPSPEED))
        yield


@functools.cache
def _accelerator() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    return type("VirtualAccelerator", (_Virtual, CPU_Accelerator), {})()


class _Virtual:
    """Overrides that turn DeepSpeed's CPU accelerator into the virtual device's.

    The CPU accelerator uses only torch's operators, except through op builders.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = NAME
        self._communication_backend_name = NAME

    def is_synchronized_device(self) -> bool:
        return False

    def create_op_builder(self, class_name: str) -> Any:
        # with a builder, DeepSpeed would compile a shared-memory all-reduce that no rank calls
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None:
        VirtualDevice.current().synchronize()

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    # streams

    Stream = property(lambda self: functools.partial(torch.Stream, NAME))
    Event = property(lambda self: functools.partial(torch.Event, NAME))

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext() if stream is None else stream

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return VirtualDevice.default_stream()

    # memory

    def empty_cache(self) -> None:
        VirtualDevice.current().empty_cache()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        VirtualDevice.current().reset_peaks()

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        usage = VirtualDevice.current().usage()
        return {
            "allocated_bytes.all.current": usage.allocated,
            "allocated_bytes.all.peak": usage.allocated_peak,
            "reserved_bytes.all.current": usage.reserved,
            "reserved_bytes.all.peak": usage.reserved_peak,
            "num_alloc_retries": usage.retries,
        }

    def memory_allocated(self, device_index: int | None = None) -> int:
        return VirtualDevice.current().usage().allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return VirtualDevice.current().usage().allocated_peak

    def memory_reserved(self, device_index: int | None = None) -> int:
        return VirtualDevice.current().usage().reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return VirtualDevice.current().usage().reserved_peak

    def total_memory(self, device_index: int | None = None) -> int:
        return int(VirtualDevice.current().hardware.memory_bytes)

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory() - VirtualDevice.current().usage().reserved

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def _made(self, dtype: torch.dtype) -> Any:
        return functools.partial(torch.tensor, dtype=dtype, device=NAME)

    BFloat16Tensor = property(lambda self: self._made(torch.bfloat16))
    ByteTensor = property(lambda self: self._made(torch.uint8))
    DoubleTensor = property(lambda self: self._made(torch.float64))
    FloatTensor = property(lambda self: self._made(torch.float32))
    HalfTensor = property(lambda self: self._made(torch.float16))
    IntTensor = property(lambda self: self._made(torch.int32))
    LongTensor = property(lambda self: self._made(torch.int64))
