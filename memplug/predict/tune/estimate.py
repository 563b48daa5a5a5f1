"""Predicts a configuration's time and memory by ProTrain's equations (protrain.py), adapted to DeepSpeed.

* Equation 2 lets the CPU update its chunks while backward runs. DeepSpeed updates after backward, on the device and on
  the CPU at the same time. So a step predicted here is never shorter than by Equation 2.
* Equations 3 to 6 are unchanged. Parameters are uploaded only if they are offloaded. ZeRO 1 and 2 gather parameters
  once, after the update.
* In Equation 7 persistent chunks and the last `n_buffer` chunks stay gathered. DeepSpeed keeps only the last
  `n_buffer` gathered.
* As in the paper, swapping takes no time of its own, but its copies share the link: uploads in backward wait for the
  prefetches of swapped blocks. `space.py` excludes configurations whose copies to the host outlast the forward.
* The paper swaps all saved activations of a block. memplug swaps the outputs of matmuls and attention, and recomputes
  the other activations; recomputing them moves three times their bytes in device memory.
* Equations 8 and 9 are applied to whole parts of the model (embedding, layers, head) instead of operators. Equation 10
  is not used: it adds a recomputed block to the peak, even if the peak is elsewhere, such as at the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memplug.predict.tune import protrain
from memplug.predict.tune.machine import Machine
from memplug.predict.tune.profiled import ELEMENT_BYTES, ModelProfile, ProfiledPart
from memplug.predict.tune.protrain import ChunkTimes, OperatorMemory, Placement
from memplug.predict.tune.search import Box, Configuration, Prediction, StepLayout

MASTER_BYTES = 4
STATE_BYTES = 12
"""Bytes of one element's optimizer states: the master weight and Adam's two states."""
IN_FLIGHT = 2
"""Chunks that are gathered at a time in addition to the last `n_buffer`: the chunk that computes and the next one."""
FEWEST_CHUNKS = 8
REDUCE_BUCKETS = 2
"""Gradient buckets on the device: one is filled while the other is reduced."""
SWAPPING = 3
"""Device buffers, each as large as the swapped bytes of one block. Two are memplug's `tokenwise.buffers`, which are
reserved before the first step. One is for a block whose copies are in progress when the loss is computed.
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parameters that are gathered and offloaded together.

    Attributes:
        parts: The model's parts in the chunk, in forward order.
        blocks: The indices of the decoder layers in the chunk, from 0.
    """

    parts: tuple[ProfiledPart, ...]
    blocks: range

    @property
    def count(self) -> int:
        """Return the number of elements of the chunk's parameters."""
        return sum(part.count for part in self.parts)


def chunks_of(profile: ModelProfile) -> list[Chunk]:
    """Return the model's chunks for the chunk size that wastes the fewest bytes (appendix B.1).

    Candidates are the size of the largest part, and two and four times that size. A multiple is left out if it is
    larger than an eighth of the model, because two chunks are gathered at a time.

    Args:
        profile: The model's profile.
    """
    sizes = [part.count for part in profile.parts]
    several = [n * max(sizes) for n in (2, 4) if FEWEST_CHUNKS * n * max(sizes) <= sum(sizes)]
    size = protrain.chunk_size(sizes, [max(sizes), *several])
    parts, chunks, block = iter(profile.parts), [], 0
    for filled in protrain.chunks_of(sizes, size):
        inside: list[ProfiledPart] = []
        while sum(part.count for part in inside) < filled:
            inside.append(next(parts))
        layers = sum(part is profile.layer for part in inside)
        chunks.append(Chunk(tuple(inside), range(block, block + layers)))
        block += layers
    return chunks


class StepEstimator:
    """Predicts time and memory of one model's steps on one machine.

    Args:
        machine: The machine to tune for.
        profiles: The model's profiles by micro-batch.
    """

    def __init__(self, machine: Machine, profiles: Mapping[int, ModelProfile]):
        self._machine = machine
        self._laid = functools.cache(lambda layout: _Laid(machine, profiles[layout.micro_batch], layout))

    def chunks(self, layout: StepLayout) -> list[Chunk]:
        """Return the model's chunks; `n_persist` and `n_buffer` count these.

        Args:
            layout: The layout.
        """
        return self._laid(layout).chunks

    def predict(self, configuration: Configuration) -> Prediction:
        """Predict one configuration by the equations.

        Args:
            configuration: The configuration.
        """
        at = configuration
        laid: _Laid = self._laid(at.layout)
        recomputed = range(at.n_swap, at.n_swap + at.n_checkpoint)
        return Prediction(
            step_s=laid.passes_s(at.n_buffer, at.n_swap, recomputed) + laid.update_s(at.n_persist, at.n_persist),
            tokens=laid.tokens,
            device_bytes=laid.device_bytes(at.n_persist, at.n_buffer, at.n_swap, at.n_checkpoint, swaps=at.n_swap > 0),
            host_bytes=laid.host_bytes(at.n_persist, at.n_swap),
        )

    def least(self, box: Box) -> Prediction:
        """Return a lower bound for all configurations of a box, as `search.Estimator` requires.

        The time of forward and backward is the larger of two lower bounds. One is the equations' time, in which only
        those blocks are recomputed that every configuration of the box recomputes. The other is the time of the kernels
        alone, with the box's smallest `n_swap` and `n_checkpoint`. Device memory includes buffers for swapping only if
        every configuration of the box swaps.

        Args:
            box: The configurations.
        """
        laid: _Laid = self._laid(box.layout)
        always = range(box.n_swap[-1], max(box.n_swap[-1], box.n_swap[0] + box.n_checkpoint[0]))
        passes_s = laid.passes_s(box.n_buffer[-1], box.n_swap[0], always)
        passes_s = max(passes_s, laid.computed_s(box.n_swap[0], box.n_checkpoint[0]))
        recomputed = min(box.n_checkpoint[-1], box.blocks - box.n_swap[-1])
        return Prediction(
            step_s=passes_s + laid.update_s(box.n_persist[0], box.n_persist[-1]),
            tokens=laid.tokens,
            device_bytes=laid.device_bytes(
                box.n_persist[0], box.n_buffer[0], box.n_swap[-1], recomputed, swaps=box.n_swap[0] > 0
            ),
            host_bytes=laid.host_bytes(box.n_persist[-1], box.n_swap[0]),
        )


class _Laid:
    """Predicts all configurations of one layout, and holds the values that they share."""

    def __init__(self, machine: Machine, profile: ModelProfile, layout: StepLayout):
        self.machine, self.profile, self.layout = machine, profile, layout
        self.chunks = chunks_of(profile)
        self.tokens = profile.tokens * layout.accumulation * machine.gpus
        self.ranks = machine.gpus if layout.stage > 0 else 1  # ranks that optimizer states are sharded over
        self.total = profile.parameters
        self.before = [0]  # elements of all earlier chunks
        for chunk in self.chunks:
            self.before.append(self.before[-1] + chunk.count)
        self.times = [self._times(chunk) for chunk in self.chunks]
        everywhere = Placement(0, len(self.chunks) if layout.stage < 3 else 0)
        self.forward_s = protrain.forward_s(self.times, everywhere)
        self.remade_s = 3 * self._remade_bytes() / machine.hardware.memory_bytes_per_s
        self.backward_s = functools.cache(self._backward_s)
        self.peak_bytes = functools.cache(self._peak_bytes)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _times(self, chunk: Chunk) -> ChunkTimes:
        """Return a chunk's times in a micro-batch that reduces gradients."""
        machine, layout = self.machine, self.layout
        nbytes, shard = ELEMENT_BYTES * chunk.count, chunk.count / machine.gpus
        return ChunkTimes(
            forward_s=sum(part.forward_s for part in chunk.parts),
            backward_s=sum(part.backward_s for part in chunk.parts),
            gather_s=machine.gather_s(nbytes) if layout.stage == 3 else 0.0,
            upload_s=machine.upload_s(ELEMENT_BYTES * shard) if layout.offload == "parameters" else 0.0,
            reduce_s=machine.gather_s(nbytes) * (2 if layout.stage == 0 else 1),
            offload_s=machine.offload_s(MASTER_BYTES * shard) if layout.offload != "none" else 0.0,
        )

    def passes_s(self, n_buffer: int, n_swap: int, recomputed: range) -> float:
        """Return the time of all forwards and backwards of a step, in seconds.

        ZeRO 0 and 1 reduce gradients only in the last micro-batch.
        """
        reducing = self.layout.accumulation if self.layout.stage >= 2 else 1
        seconds = self.layout.accumulation * self.forward_s
        seconds += reducing * self.backward_s(n_buffer, n_swap, recomputed, True)
        if reducing < self.layout.accumulation:
            others = self.layout.accumulation - reducing
            seconds += others * self.backward_s(n_buffer, n_swap, recomputed, False)
        return seconds

    def computed_s(self, n_swap: int, n_checkpoint: int) -> float:
        """Return the time of the kernels of all forwards and backwards, in seconds; never more than `passes_s`."""
        once = sum(part.forward_s + part.backward_s for part in self.profile.parts)
        return self.layout.accumulation * (once + n_swap * self.remade_s + n_checkpoint * self.profile.layer.forward_s)

    def _backward_s(self, n_buffer: int, n_swap: int, recomputed: range, reduces: bool) -> float:
        swap_in_s = self.machine.upload_s(self.profile.swapped_bytes)
        times = []
        for chunk, each in zip(self.chunks, self.times, strict=True):
            swapped = _overlap(chunk.blocks, range(n_swap))
            again_s = _overlap(chunk.blocks, recomputed) * self.profile.layer.forward_s + swapped * self.remade_s
            if again_s:
                upload_s = each.upload_s + swapped * swap_in_s if each.upload_s else 0.0
                each = replace(each, recompute_s=again_s, upload_s=upload_s)
            times.append(each if reduces else replace(each, reduce_s=0.0, offload_s=0.0))
        return protrain.backward_s(times, Placement(0, n_buffer))

    def update_s(self, least_persist: int, most_persist: int) -> float:
        """Return the time of the optimizer with its copies and gathers, in seconds.

        Device and CPU update at the same time. For a configuration, pass its `n_persist` as both arguments. For a lower
        bound over a range of `n_persist`, pass the ends of the range.
        """
        machine, layout = self.machine, self.layout
        on_device, on_host = self.before[least_persist], self.total - self.before[most_persist]
        seconds = max(machine.gpu_adam_s(on_device / self.ranks), machine.cpu_adam_s(on_host))
        if layout.stage in (1, 2):
            seconds += machine.gather_s(ELEMENT_BYTES * self.total)
        # With offload all gradients pass through the host, so the device's share is uploaded again. After the update,
        # parameters are copied to the memory that stores them.
        if layout.offload != "none":
            seconds += machine.upload_s(MASTER_BYTES * on_device / machine.gpus)
        if layout.offload == "optimizer":
            seconds += machine.upload_s(ELEMENT_BYTES * on_host / machine.gpus)
        elif layout.offload == "parameters":
            seconds += machine.offload_s(ELEMENT_BYTES * on_device / machine.gpus)
        return seconds

    # -- memory --------------------------------------------------------------------------------------------------------

    def host_bytes(self, n_persist: int, n_swap: int) -> int:
        """Return the bytes of the machine's host memory that a step takes.

        Host memory holds swapped activations. With an offloaded optimizer it also holds optimizer states of the chunks
        that are not persistent, and all gradients in 4 bytes; with offloaded parameters, all parameters too.
        """
        nbytes = self.machine.gpus * n_swap * self.profile.swapped_bytes
        if self.layout.offload != "none":
            copies = 1 if self.layout.stage > 0 else self.machine.gpus
            nbytes += copies * (STATE_BYTES * (self.total - self.before[n_persist]) + MASTER_BYTES * self.total)
        return nbytes + (ELEMENT_BYTES * self.total if self.layout.offload == "parameters" else 0)

    def device_bytes(self, n_persist: int, n_buffer: int, n_swap: int, n_checkpoint: int, *, swaps: bool) -> int:
        """Return the peak device bytes of one rank.

        Device memory holds parameters and optimizer states. Forward and backward add gradients, gathered chunks,
        reduction buckets, buffers for swapping (if `swaps`) and the peak of activations. The update adds gradients and,
        except with ZeRO 3, copies of them in 4 bytes. Only the larger of these two additions counts.
        """
        layout = self.layout
        parameters = ELEMENT_BYTES * self.total
        if layout.stage == 3:
            parameters = 0 if layout.offload == "parameters" else parameters // self.ranks
        states = STATE_BYTES * self.before[n_persist] // self.ranks
        gradients = ELEMENT_BYTES * self.total // self.ranks if layout.stage >= 2 and layout.offload == "none" else 0
        updating = 0 if layout.stage == 3 else MASTER_BYTES * self.before[n_persist] // self.ranks
        updating += ELEMENT_BYTES * self.total if layout.stage < 2 else gradients
        largest = max(chunk.count for chunk in self.chunks) * ELEMENT_BYTES
        gathered = self._buffered_bytes(n_buffer) + IN_FLIGHT * largest if layout.stage == 3 else 0
        buckets = REDUCE_BUCKETS * largest if self.machine.gpus > 1 else 0
        rounding = SWAPPING * self.profile.swapped_bytes if swaps else 0
        passes = gradients + gathered + buckets + rounding + self.peak_bytes(n_swap, n_checkpoint)
        return parameters + states + max(passes, updating)

    def _buffered_bytes(self, n_buffer: int) -> int:
        return ELEMENT_BYTES * (self.total - self.before[len(self.chunks) - n_buffer])

    def _remade_bytes(self) -> int:
        """Return the bytes of saved activations that a swapping block recomputes."""
        profile = self.profile
        return max(0, profile.layer.saved_bytes - profile.hidden_bytes - profile.swapped_bytes)

    def _peak_bytes(self, n_swap: int, n_checkpoint: int) -> int:
        """Return the peak bytes of activations and gradients in a step, by Equations 8 and 9 over the model's parts.

        A block that checkpoints or swaps keeps only its output on the device from forward to backward. While its
        backward runs, all its saved activations are on the device again. A swapping block prefetches into a buffer,
        which `device_bytes` counts.
        """
        profile = self.profile
        keeps = profile.layers - n_swap - n_checkpoint
        saved, out = profile.layer.saved_bytes, profile.hidden_bytes
        kept = self._operator(profile.layer, saved, 0)
        again = self._operator(profile.layer, out, saved - out)
        swapped = self._operator(profile.layer, out, self._remade_bytes())
        blocks = [kept] * keeps + [again] * n_checkpoint + [swapped] * n_swap
        head = self._operator(profile.head, profile.head.saved_bytes, 0)
        embedding = self._operator(profile.embedding, profile.embedding.saved_bytes, 0)
        operators = [head, *blocks, embedding]
        at_loss = sum(each.activation_bytes for each in operators) - head.activation_bytes
        backward = protrain.base_peak_bytes(0, operators)
        there = ELEMENT_BYTES * self.total if self.layout.stage < 2 and self.layout.accumulation > 1 else 0
        return max(backward, at_loss + profile.head.forward_peak_bytes) + there

    def _operator(self, part: ProfiledPart, at_rest_bytes: int, again_bytes: int) -> OperatorMemory:
        """Return the effect of a part's backward on device memory.

        With ZeRO 0 and 1 and a single micro-batch, the gradients of the part's parameters stay after its backward.

        Args:
            part: The part.
            at_rest_bytes: Saved activations that stay on the device from forward to backward.
            again_bytes: Saved activations that the backward recomputes.
        """
        stay = ELEMENT_BYTES * part.count if self.layout.stage < 2 and self.layout.accumulation == 1 else 0
        return OperatorMemory(
            during_bytes=stay,
            during_peak_bytes=again_bytes + max(part.backward_peak_bytes, part.forward_peak_bytes - part.saved_bytes),
            activation_bytes=at_rest_bytes,
        )


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
