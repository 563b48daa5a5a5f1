"""What the modes of a benchmark are, what they all run, and how their gradients are compared.

No torch here: the parent process stays small.

| mode | what it is |
|---|---|
| `keep_all` | autograd as it is: the ideal |
| `full` | `torch.utils.checkpoint` around every layer |
| `selective` | the same, attention outputs saved |
| `save_on_cpu` | `torch.autograd.graph.save_on_cpu`, pinned on CUDA; on the CPU it moves nothing |
| `deepspeed` | `deepspeed.checkpointing` around every layer, `cpu_checkpointing` on CUDA only |
| `offload` | Megatron-Core's fine-grained offloading around attention and norms, the MLP recomputed |
| `memplug`, `memplug:A` | this package; alpha is "auto", or the number A |
| `memplug_torch`, `memplug_torch:A` | the same without its arena: torch's own allocator |

On the CPU `cpu_checkpointing` is off, since there DeepSpeed 0.19 empties what it has just saved.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("keep_all", "full", "selective", "save_on_cpu", "deepspeed", "memplug")
OWN = ("memplug", "memplug_torch")
HOSTS = ("transformers", "megatron", "megatron-te")
OWN_MODES = {  # all but the last are Megatron-Core's own; it offloads layers of Transformer Engine alone
    "megatron": ("keep_all", "full", "selective", "memplug"),
    "megatron-te": ("keep_all", "full", "offload", "memplug"),
}
ATTENTION = ("cudnn", "flash", "default")
MODELS = ("tiny", "7b", "13b")


def is_mode(name: str) -> bool:
    """Whether `name` is in the table above."""
    base, _, alpha = name.partition(":")
    return name in (*MODES, *OWN, "offload") or (
        base in OWN and alpha.replace(".", "", 1).isdigit() and float(alpha) <= 1
    )


@dataclass(frozen=True)
class Case:
    """What every mode runs: one sequence of `tokens` through `layers` layers of `model` (a file of configs/models)."""

    tokens: int
    layers: int
    model: str
    device: str
    attention: str
    min_offload_bytes: int
    host: str = "transformers"
    """Whose layers, of HOSTS: a package's, or those that Megatron-Core makes of Transformer Engine's modules."""
    gpu: str = ""
    """Whose rates the virtual device has: a file of configs/hardware."""
    budget_bytes: int | None = None
    """Of the device, for memplug."""

    @property
    def is_virtual(self) -> bool:
        """Nothing is computed."""
        return self.device == "virtual"

    def __str__(self) -> str:
        host = "" if self.host == HOSTS[0] else f"{self.host} "
        gpu = f" {self.gpu}" if self.gpu else ""
        return f"{host}{self.model} {self.tokens}x{self.layers} {self.device}{gpu}"


def gradient_error(measured: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """How far two `Run.gradients` are apart, relative to the norm, at worst.

    A product with a random direction differs by about the norm of the difference.
    """
    return max(
        abs(one - other) / right[0]
        for name, right in expected.items()
        for one, other in zip(measured[name], right, strict=True)
    )
