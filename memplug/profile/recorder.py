"""Watches the operators of training and records whole steps, through the native core.

See Chameleon, section 4, and STWeaver, section 4. Watching calls back once for each operator, and yields the operator's
number: enough to detect that the program changed. Recording yields a `Trace`, which also has each operator's pass,
micro-batch and layer, the requests for memory and, with `Detail.TENSORS`, the storages that operators use. A process
has one recorder, since operators and allocators belong to the process.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memplug import native
from memplug.errors import RecorderError
from memplug.profile.trace import OPERATOR, REQUEST_EVENT, TENSOR, USE, Fingerprint, Layer, Pass, Phase, Trace

Place = tuple[int, int, int]  # pass, micro-batch, layer

_DTYPES = {  # torch's dtype names by c10::ScalarType's, where the two differ in more than case
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "ComplexHalf": "complex32",
}


class Detail(enum.IntEnum):
    """Level of detail of a recording."""

    REQUESTS = 1  # operators with their places, and requests
    TENSORS = 2  # also the storages that each operator reads and writes


class Recorder:
    """Watches operators from its construction until `stop`, on the constructing thread and autograd's threads.

    Args:
        device: the device whose memory is recorded.

    Attributes:
        recording: True between `begin` and `end` or `drop`.
        suspended: `with recorder.suspended:` surrounds memplug's own operators. Traces contain them; the sequence that
            `take` returns does not.

    Raises:
        NativeError: the native core cannot be built here.
        RecorderError: this process has a recorder already.
    """

    def __init__(self, device: torch.device | str):
        self._native = native.load()
        self.device = torch.device(device)
        try:
            self._native.claim()
        except RuntimeError as error:
            text = f"memplug cannot watch the operators of this session: {error}"
            raise RecorderError(text, code="MP007") from None
        self._release = weakref.finalize(self, _release, self._native, self.device.type)
        self.recording = False
        self.suspended = self._native.Suspended()
        self._watching = True
        self._nodes = self._native.nodes()
        self._native.watch(True)

    def take(self) -> np.ndarray | None:
        """Return the numbers of the program's operators since the last call, in order; None if they are not watched.

        The program does not include operators that run without gradients outside of backward (a validation, the
        optimizer). The sequence is cut after 4 million operators.

        Returns:
            int32[operators].
        """
        buffer, _ = self._native.take_sequence()
        return np.frombuffer(buffer, np.int32) if self._watching or self.recording else None

    def take_nodes(self) -> int:
        """Return the number of autograd nodes that the program made on the calling thread since the last call.

        This costs nothing, and works whether operators are watched or not.
        """
        before, self._nodes = self._nodes, self._native.nodes()
        return self._nodes - before

    def begin_program(self) -> None:
        """Begin a step's program, at its first forward with gradients; drop earlier operators and nodes."""
        self.take()
        self.take_nodes()
        self._native.mark_peak()

    def watch(self, on: bool) -> None:
        """Start or stop watching operators; an operator that is not watched costs nothing."""
        if on != self._watching and not self.recording and self._release.alive:
            self._native.watch(on)
        self._watching = on

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of operators, by the operator's number."""
        return tuple(self._native.operator_names())

    def stop(self) -> None:
        """Stop for good, and remove callback and allocator; a second call does nothing."""
        self.recording = False
        self._release()

    def place_hooks(self) -> Any:
        """Return the native functions to call when the training thread enters or leaves a forward, layer or optimizer.

        Backward needs no hook, since the nodes of its graph tell its place. `layer_hooks(index)` returns a forward
        pre-hook and a forward hook for the layer of that index in the trace. `enter_forward` takes the number of the
        micro-batch in the step, from 0.
        """
        return self._native.PlaceHooks()

    def here(self) -> Place:
        """Return the place of the calling thread."""
        return self._native.here()

    # -- recording -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the places of the last step; called when an unrecorded step begins."""
        self._native.forget()

    def begin(self, detail: Detail) -> None:
        """Begin to record, at the beginning of a step; `end` or `drop` ends the recording.

        Raises:
            RecorderError: the requests of this device cannot be observed.
        """
        assert not self.recording, "one recording at a time"
        assert self._release.alive, "it was stopped"
        self._native.forget()
        self._begin_requests()
        self._native.begin_records(int(detail), self._native.device_type(self.device.type))
        self.recording = True
        self._begun = time.perf_counter()

    def end(self, fingerprint: Fingerprint, layers: Sequence[Layer]) -> Trace:
        """End the recording, and return it as a trace of one step.

        Args:
            fingerprint: the job and the inputs of the step.
            layers: the layers, in the order of the indices passed to `layer_hooks`.
        """
        assert self.recording, "`begin` comes first"
        duration_s = time.perf_counter() - self._begun
        self._native.end_requests()  # comes first: other threads may be requesting memory now
        operators, uses, tensors = self._native.end_records()
        base_bytes, _, peak_bytes, _ = self._native.usage()
        events = np.frombuffer(self._end_requests(), REQUEST_EVENT)
        self.recording = False
        self._native.watch(self._watching)
        return _trace(
            names=self.names,
            scalar_types=self._native.scalar_types(),
            operators=np.frombuffer(operators, OPERATOR),
            uses=np.frombuffer(uses, USE),
            tensors=np.frombuffer(tensors, TENSOR),
            events=events,
            fingerprint=fingerprint,
            layers=tuple(layers),
            steps=((0, 0, duration_s),),
            base_bytes=base_bytes,
            peak_bytes=peak_bytes,
        )

    def drop(self) -> None:
        """End the recording without making a trace."""
        assert self.recording, "`begin` comes first"
        self._native.end_records()
        self._end_requests()
        self.recording = False
        self._native.watch(self._watching)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use since `begin_program`, or since `begin` if that was later.

        On the CPU without a memory limit, only blocks that were allocated during a recording count.
        """
        assert self.recording, "`begin` comes first"
        _, _, _, peak_bytes = self._native.usage()
        return peak_bytes

    def _begin_requests(self) -> None:
        if self.device.type == "cpu":
            try:
                self._native.install_cpu()
            except RuntimeError as error:
                raise RecorderError(
                    f"requests for memory cannot be recorded: {error}",
                    "Leave out the library that changes the CPU's allocator, or set "
                    '"arena": {"enabled": false}, which needs no record of them.',
                    code="MP006",
                ) from None
            self._native.begin_requests(-1)
        elif self.device.type != "cuda":
            self._native.install_other()
            stats = torch.get_device_module(self.device).memory_stats()
            arenas_bytes = self._native.arenas_live_bytes() - self._native.arenas_reserved_bytes()
            self._native.begin_requests(stats["requested_bytes.all.current"] + arenas_bytes)
        else:
            index = self._listen_to_cuda()
            stats = torch.cuda.memory_stats(index)
            # torch has reported the free of a block that another stream still uses, but counts it as requested
            pending = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
            self._native.begin_requests(max(0, stats["requested_bytes.all.current"] - pending))

    def _listen_to_cuda(self) -> int:
        """Install the listener in torch's CUDA allocator; return the index of the device."""
        if not hasattr(self._native, "install_cuda"):
            raise RecorderError(
                "requests for CUDA memory cannot be recorded: CUDA's headers were not there when the native core was "
                "built",
                _header_advice(torch.version.cuda),
                code="MP006",
            )
        torch.cuda.init()  # until then the allocator has no devices to attach the listener to
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        try:
            self._native.install_cuda(index)
        except RuntimeError as error:
            backend = torch.cuda.get_allocator_backend()
            raise RecorderError(
                f"requests for CUDA memory cannot be recorded: torch's allocator is {backend}, which does not report "
                f"its requests ({str(error).splitlines()[0]})",
                'Use torch\'s own allocator: take "backend:cudaMallocAsync" out of PYTORCH_ALLOC_CONF and '
                "PYTORCH_CUDA_ALLOC_CONF, and do not change the allocator "
                "(torch.cuda.memory.change_current_allocator).",
                code="MP006",
            ) from None
        return index

    def _end_requests(self) -> bytes:
        return _end_requests(self._native, self.device.type)


def dtype_numbers(core: Any) -> dict[str, int]:
    """Return the numbers of torch's scalar types, by the dtype names that traces use."""
    return {_DTYPES.get(name, name.lower()): number for number, name in enumerate(core.scalar_types())}


def _header_advice(cuda: str | None) -> str:
    if cuda is None:
        return "Install a build of torch with CUDA."
    major = cuda.split(".")[0]
    names = (f"runtime-cu{major}", f"nvcc-cu{major}") if int(major) < 13 else ("runtime", "crt")
    packages = " ".join(f"nvidia-cuda-{name}~={cuda}.0" for name in names)
    return f"Install the toolkit of CUDA {cuda}, or `pip install {packages}`."


def _release(core: object, device_type: str) -> None:
    _end_requests(core, device_type)
    core.release()


def _end_requests(core: object, device_type: str) -> bytes:
    core.end_requests()
    if device_type == "cpu":
        core.uninstall_cpu()
    elif device_type != "cuda":
        core.uninstall_other()
    elif hasattr(core, "uninstall_cuda"):
        core.uninstall_cuda()
    return core.take_requests()


def _trace(
    *,
    names: tuple[str, ...],
    scalar_types: list[str],
    operators: np.ndarray,
    uses: np.ndarray,
    tensors: np.ndarray,
    events: np.ndarray,
    **rest: object,
) -> Trace:
    """Return a trace; number the names, dtypes and phases that occur in it from 0."""
    used, name = np.unique(operators["name"], return_inverse=True)
    kinds, dtype = np.unique(tensors["dtype"], return_inverse=True)
    packed, phase = np.unique(np.concatenate([operators["phase"], events["phase"]]), return_inverse=True)
    operators, tensors, events = operators.copy(), tensors.copy(), events.copy()
    operators["name"], tensors["dtype"] = name, dtype
    operators["phase"], events["phase"] = phase[: len(operators)], phase[len(operators) :]
    return Trace(
        names=tuple(names[number] for number in used),
        dtypes=tuple(_DTYPES.get(scalar_types[kind], scalar_types[kind].lower()) for kind in kinds),
        phases=tuple(Phase(Pass(value % 8), int(value) // 8 - 1) for value in packed),
        operators=operators,
        # an operator's outputs were recorded after the uses of the operators inside it
        uses=uses[np.argsort(uses["operator"], kind="stable")],
        tensors=tensors,
        events=events,
        **rest,
    )
