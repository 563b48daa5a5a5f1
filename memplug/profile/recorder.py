"""Watches the operators of training, and records whole steps: the façade over the native core (Chameleon, section 4;
STWeaver, section 4).

Watching gives one integer an operator, at the price of a callback: enough to see that the program changed. Recording
adds where each operator runs, the requests for memory and, in detail, the storages that operators use, and gives a
`Trace`. There is one recorder in a process, since operators and allocators are the process's.
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

_DTYPES = {  # torch's names of scalar types that differ from those of its dtypes in more than case
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
    """How much a recording notes; each includes the ones before."""

    REQUESTS = 1  # operators with their places, and requests
    TENSORS = 2  # besides: the storages that each operator reads and writes


class Recorder:
    """Watches from the moment it is made until `stop`, on the calling thread and autograd's.

    Args:
        device: whose memory is recorded, the CPU or a CUDA device.

    Attributes:
        recording: between `begin` and `end`.
        suspended: `with recorder.suspended:` around operators that are memplug's own: part of traces, not of the
            sequence.

    Raises:
        NativeError: the native core cannot be built here.
        RecorderError: there is a recorder in this process already.
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
        """Numbers of the program's operators since the last call, int32, in order; None where they are not watched.

        Operators that run without gradients outside of a backward (a validation, the optimizer) are not among them. A
        step of more than 4 million operators is cut there.
        """
        buffer, _ = self._native.take_sequence()
        return np.frombuffer(buffer, np.int32) if self._watching or self.recording else None

    def take_nodes(self) -> int:
        """How many autograd nodes the calling thread's program made since the last call; costs nothing to keep, watched
        or not.
        """
        before, self._nodes = self._nodes, self._native.nodes()
        return self._nodes - before

    def begin_program(self) -> None:
        """A step's first forward with gradients begins: what ran since the step before is no part of its program."""
        self.take()
        self.take_nodes()
        self._native.mark_peak()

    def watch(self, on: bool) -> None:
        """Whether operators are watched from now on. Off, they cost nothing."""
        if on != self._watching and not self.recording and self._release.alive:
            self._native.watch(on)
        self._watching = on

    @property
    def names(self) -> tuple[str, ...]:
        """Operator names by number."""
        return tuple(self._native.operator_names())

    def stop(self) -> None:
        """See nothing any more; leaves no callback and no allocator behind. A second call does nothing."""
        self.recording = False
        self._release()

    def place_hooks(self) -> Any:
        """Returns what forwards, layers and the optimizer tell of their begin and end, so that the recorder knows where
        the training thread is; a backward need not: the nodes of the graph tell.

        `layer_hooks(index)` are two module hooks, for a layer of that index in the layers of the trace. `enter_forward`
        is given the running number of the micro-batch in the step.
        """
        return self._native.PlaceHooks()

    def here(self) -> Place:
        """Where the calling thread is."""
        return self._native.here()

    # -- recording -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """A step begins, and is not recorded: places of the last one mean nothing any more."""
        self._native.forget()

    def begin(self, detail: Detail) -> None:
        """Record from here, the beginning of a step, until `end`.

        Raises:
            RecorderError: the requests of this device cannot be seen.
        """
        assert not self.recording, "one recording at a time"
        assert self._release.alive, "it was stopped"
        self._native.forget()
        self._begin_requests()
        self._native.begin_records(int(detail), self._native.device_type(self.device.type))
        self.recording = True
        self._begun = time.perf_counter()

    def end(self, fingerprint: Fingerprint, layers: Sequence[Layer]) -> Trace:
        """What was recorded, as one step.

        Args:
            fingerprint: what runs.
            layers: those that `layer_hooks` were made for, by their indices.
        """
        assert self.recording, "`begin` comes first"
        duration_s = time.perf_counter() - self._begun
        self._native.end_requests()  # first: other threads may be asking for memory now
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
        """End the recording without a trace."""
        assert self.recording, "`begin` comes first"
        self._native.end_records()
        self._end_requests()
        self.recording = False
        self._native.watch(self._watching)

    @property
    def peak_bytes(self) -> int:
        """Largest memory in use since the program began, or the recording where that began later; on the CPU, of what
        was allocated while one ran.
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
            # a block that another stream still reads counts as requested until that is done, but its free has been seen
            pending = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
            self._native.begin_requests(max(0, stats["requested_bytes.all.current"] - pending))

    def _listen_to_cuda(self) -> int:
        """Index of the device, whose allocator says from now on what it does."""
        if not hasattr(self._native, "install_cuda"):
            raise RecorderError(
                "requests for CUDA memory cannot be recorded: CUDA's headers were not there when the native core was "
                "built",
                _header_advice(torch.version.cuda),
                code="MP006",
            )
        torch.cuda.init()  # before it, the allocator has no devices, and would attach the listener to none of them
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        try:
            self._native.install_cuda(index)
        except RuntimeError as error:
            backend = torch.cuda.get_allocator_backend()
            raise RecorderError(
                f"requests for CUDA memory cannot be recorded: torch's allocator is {backend}, which does not say what "
                f"it does ({str(error).splitlines()[0]})",
                'Use torch\'s own allocator: take "backend:cudaMallocAsync" out of PYTORCH_ALLOC_CONF and '
                "PYTORCH_CUDA_ALLOC_CONF, and do not change the allocator "
                "(torch.cuda.memory.change_current_allocator).",
                code="MP006",
            ) from None
        return index

    def _end_requests(self) -> bytes:
        return _end_requests(self._native, self.device.type)


def dtype_numbers(core: Any) -> dict[str, int]:
    """torch's numbers of scalar types, by the names that traces have."""
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
    """A trace in its own numbering: of the names, dtypes and phases that occur."""
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
        uses=uses[np.argsort(uses["operator"], kind="stable")],  # an operator writes after those inside of it
        tensors=tensors,
        events=events,
        **rest,
    )
