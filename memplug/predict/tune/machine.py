"""The machine to tune for: its GPUs, the link to the host, collectives, and the host's memory; seconds that moving
bytes over them takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from memplug.predict.virtual.hardware import Hardware

HOST_BYTES_PER_S = 1.5e11
"""That a host's memory is read and written with, by all its processes together: about half of what eight channels of
DDR5 have. Of a host that was measured, that counts.
"""
GPU_ADAM_BYTES = 40
"""Read and written for each parameter: its gradient, made 4 bytes of 2 (6); master weight, two states and gradient (16
read, 12 written); the parameter, of the master weight (6).
"""
CPU_ADAM_BYTES = 30
"""The same of DeepSpeed's CPU Adam: 16 read, 14 written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """GPUs of one kind in one machine; each is a rank.

    Attributes:
        gpus: how many.
        host_bytes_per_s: of its memory, for all GPUs together.
    """

    hardware: Hardware
    gpus: int
    host_bytes_per_s: float = HOST_BYTES_PER_S

    def gather_s(self, nbytes: float) -> float:
        """All ranks get all of a tensor of that size, of which each has its part; scattering a sum takes as long."""
        if self.gpus == 1:
            return 0.0
        seconds = nbytes * (self.gpus - 1) / self.gpus / self.hardware.collective_bytes_per_s
        return self.hardware.collective_s + seconds

    def upload_s(self, nbytes: float) -> float:
        """Each rank gets as many bytes from the host, all at the same time, while others leave."""
        return self._copy_s(nbytes, self.hardware.to_device_both_bytes_per_s.at(nbytes))

    def offload_s(self, nbytes: float) -> float:
        """Each rank sends as many bytes to the host, all at the same time, while others come."""
        return self._copy_s(nbytes, self.hardware.to_host_both_bytes_per_s.at(nbytes))

    def _copy_s(self, nbytes: float, link_bytes_per_s: float) -> float:
        return nbytes / min(link_bytes_per_s, self.host_bytes_per_s / self.gpus)

    def gpu_adam_s(self, parameters: float) -> float:
        """One rank updates as many parameters on its GPU."""
        return parameters * GPU_ADAM_BYTES / self.hardware.memory_bytes_per_s

    def cpu_adam_s(self, parameters: float) -> float:
        """All ranks together update as many parameters on the host."""
        return parameters * CPU_ADAM_BYTES / self.host_bytes_per_s
