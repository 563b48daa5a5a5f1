"""The modes of a benchmark, the case that they all run, and the comparison of their gradients.

No torch here: the parent process stays small.

| mode | what it is |
|---|---|
| `keep_all` | unchanged autograd: the ideal |
| `full` | `torch.utils.checkpoint` around every layer |
| `reentrant` | the same with `use_reentrant=True` |
| `flag` | Hugging Face's flag `gradient_checkpointing` set on every layer |
| `wrapper` | torch's `CheckpointWrapper` around every layer |
| `selective` | the same, attention outputs saved |
| `save_on_cpu` | `torch.autograd.graph.save_on_cpu`, pinned on CUDA; on the CPU it moves nothing |
| `deepspeed` | `deepspeed.checkpointing` around every layer, `cpu_checkpointing` on CUDA only |
| `offload` | Megatron-Core's fine-grained offloading around attention and norms, the MLP recomputed |
| `memplug`, `memplug:A` | this package; alpha is "auto", or the number A |
| `memplug_torch`, `memplug_torch:A` | the same without its arena: torch's own allocator |
| `memplug_over:M` | `memplug`, attached to a model with the checkpoints of mode M, which memplug replaces |

On the CPU `cpu_checkpointing` is off, since DeepSpeed 0.19 empties the tensors that it has just saved there.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("keep_all", "full", "selective", "save_on_cpu", "deepspeed", "memplug")
CHECKPOINTS = ("full", "selective", "reentrant", "flag", "wrapper", "deepspeed")
OWN = ("memplug", "memplug_torch", "memplug_over")
HOSTS = ("transformers", "megatron", "megatron-te")
OWN_MODES = {  # all but "memplug" are Megatron-Core's own modes; it offloads only layers of Transformer Engine
    "megatron": ("keep_all", "full", "selective", "memplug"),
    "megatron-te": ("keep_all", "full", "offload", "memplug"),
}
ATTENTION = ("cudnn", "flash", "default")
MODELS = ("tiny", "7b", "13b")


def is_mode(name: str) -> bool:
    """Return whether `name` is in the table above."""
    base, _, rest = name.partition(":")
    if base == "memplug_over":
        return rest in CHECKPOINTS
    is_alpha = not rest or (rest.replace(".", "", 1).isdigit() and float(rest) <= 1)
    return name in (*MODES, *CHECKPOINTS, "offload") or (base in OWN and is_alpha)


@dataclass(frozen=True)
class Case:
    """The work of each mode: one sequence of `tokens` through `layers` layers of `model` (a file of configs/models)."""

    tokens: int
    layers: int
    model: str
    device: str
    attention: str
    min_offload_bytes: int
    host: str = "transformers"
    """The layers' origin, one of HOSTS: a package, or Megatron-Core with Transformer Engine's modules."""
    gpu: str = ""
    """The file of configs/hardware that has the virtual device's rates."""
    budget_bytes: int | None = None
    """memplug's device budget."""

    @property
    def is_virtual(self) -> bool:
        """Return whether the device is virtual: nothing is computed."""
        return self.device == "virtual"

    def __str__(self) -> str:
        host = "" if self.host == HOSTS[0] else f"{self.host} "
        gpu = f" {self.gpu}" if self.gpu else ""
        return f"{host}{self.model} {self.tokens}x{self.layers} {self.device}{gpu}"


def gradient_error(measured: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """Return the largest difference of two `Run.gradients`, relative to the norm.

    Two gradients' products with a random direction differ by about the norm of the gradients' difference.
    """
    return max(
        abs(one - other) / right[0]
        for name, right in expected.items()
        for one, other in zip(measured[name], right, strict=True)
    )
