"""The machine to tune for: its GPUs and host memory, and the times of collectives, copies and Adam updates."""

from __future__ import annotations

from dataclasses import dataclass

from memplug.predict.virtual.hardware import GpuProfile

HOST_BYTES_PER_S = 1.5e11
"""Default bandwidth of host memory, shared by all ranks: about half of eight channels of DDR5. Pass a measured
value to `Machine` if there is one.
"""
GPU_ADAM_BYTES = 40
"""Bytes of device memory that Adam reads and writes for each element: 6 to convert the gradient from 2 bytes to 4; 28
for the update (master weight, two states and gradient: 16 read, 12 written); 6 to convert the master weight to 2 bytes.
"""
CPU_ADAM_BYTES = 30
"""Bytes of host memory that DeepSpeed's CPU Adam reads (16) and writes (14) for each element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """GPUs of one kind in one machine; each GPU is one rank.

    Attributes:
        hardware: The GPU's profile.
        gpus: The number of GPUs.
        host_bytes_per_s: Bandwidth of host memory, shared by all GPUs.
    """

    hardware: GpuProfile
    gpus: int
    host_bytes_per_s: float = HOST_BYTES_PER_S

    def gather_s(self, nbytes: float) -> float:
        """Return the time of an all-gather of a tensor that is sharded over all ranks, in seconds.

        A reduce-scatter of the tensor takes as long.

        Args:
            nbytes: Size of the whole tensor.
        """
        if self.gpus == 1:
            return 0.0
        seconds = nbytes * (self.gpus - 1) / self.gpus / self.hardware.collective_bytes_per_s
        return self.hardware.collective_s + seconds

    def upload_s(self, nbytes: float) -> float:
        """Return the time that all ranks take to copy from the host while they also copy to it, in seconds.

        Args:
            nbytes: Bytes that each rank copies.
        """
        return self._copy_s(nbytes, self.hardware.to_device_both_bytes_per_s.at(nbytes))

    def offload_s(self, nbytes: float) -> float:
        """Return the time that all ranks take to copy to the host while they also copy from it, in seconds.

        Args:
            nbytes: Bytes that each rank copies.
        """
        return self._copy_s(nbytes, self.hardware.to_host_both_bytes_per_s.at(nbytes))

    def _copy_s(self, nbytes: float, link_bytes_per_s: float) -> float:
        return nbytes / min(link_bytes_per_s, self.host_bytes_per_s / self.gpus)

    def gpu_adam_s(self, parameters: float) -> float:
        """Return the time of one rank's Adam update on its GPU, in seconds.

        Args:
            parameters: Elements that the rank updates.
        """
        return parameters * GPU_ADAM_BYTES / self.hardware.memory_bytes_per_s

    def cpu_adam_s(self, parameters: float) -> float:
        """Return the time of the Adam update of all ranks together on the CPU, in seconds.

        Args:
            parameters: Elements that all ranks update together.
        """
        return parameters * CPU_ADAM_BYTES / self.host_bytes_per_s
