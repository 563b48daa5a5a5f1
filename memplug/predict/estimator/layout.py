"""The layout of a Megatron-Core model over the GPUs of one machine, and the check that a model allows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memplug.errors import EstimateError
from memplug.predict.estimator.shapes import Shape

MICRO_BATCHES_PER_STAGE = 2
LEFT_OUT = ("attention_bias", "mlp_bias", "sliding_window")
"""Fields of a shape that an estimate of Megatron-Core does not support; they would change the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """The sizes of Megatron-Core's parallel groups; `data`, the number of data-parallel ranks, follows from them.

    Attributes:
        gpus: The number of all ranks; 0: the smallest number that the other sizes allow.
        tensor: The number of ranks that share each matrix product.
        sequence: Whether tensor-parallel ranks also split the layer's other operators by tokens (sequence parallelism).
        pipeline: The number of pipeline stages.
        expert: The number of ranks that share the experts of a mixture; each expert is whole on its rank.
        context: The number of ranks that share the tokens of a sequence.
    """

    gpus: int = 0
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        """Replace `gpus` 0 by the smallest number that the other sizes allow."""
        if self.gpus == 0:
            least = self.pipeline * math.lcm(self.tensor * self.context, self.expert)
            object.__setattr__(self, "gpus", least)

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Return the default number of micro-batches in a step; a pipeline needs several to keep its stages busy."""
        return MICRO_BATCHES_PER_STAGE * self.pipeline if self.pipeline > 1 else 1

    @property
    def stages(self) -> dict[int, int]:
        """Return the pipeline stages to estimate: a map from a stage's number to how many stages it represents.

        Stage 1 represents all middle stages. They have the same number of layers, and stage 1 has more micro-batches in
        flight than the other middle stages.
        """
        middle = {1: self.pipeline - 2} if self.pipeline > 2 else {}
        return {0: 1, **middle, self.pipeline - 1: 1}

    def rank(self, stage: int) -> int:
        """Return the lowest rank of a stage; Megatron-Core gives the ranks of a stage consecutive numbers."""
        return stage * self.gpus // self.pipeline

    def check(self, shape: Shape, layers: int, seq_len: int) -> None:
        """Check that a model can have this layout.

        Args:
            shape: The model's shape.
            layers: The number of decoder layers to train; may be fewer than the shape has.
            seq_len: Tokens in a sequence.

        Raises:
            EstimateError: A size does not divide what it splits, an option or a mixture needs another option, `expert`
                needs experts that the model lacks, or the shape sets a field of `LEFT_OUT`.
        """
        fields, experts = shape.fields, shape.fields.get("num_local_experts", 0)
        divides("--tensor × --context × --pipeline", self.tensor * self.context * self.pipeline, self.gpus, "--gpus")
        for name in (name for name in LEFT_OUT if fields.get(name)):
            raise EstimateError(
                f"the model has {name}, which an estimate of Megatron-Core does not support",
                f"Remove {name} from the model's file, or leave out the options of Megatron-Core.",
            )
        heads = fields["num_attention_heads"]
        sizes = {"num_attention_heads": heads, "num_key_value_heads": fields.get("num_key_value_heads", heads)}
        sizes |= {name: fields[name] for name in ("intermediate_size", "vocab_size")}
        for name, size in sizes.items():
            divides("--tensor", self.tensor, size, f"the model's {name}")
        divides("--pipeline", self.pipeline, layers, "the number of layers")
        if self.context > 1:  # each rank has two pieces of the sequence, one from each half
            divides("twice --context", 2 * self.context, seq_len, "--seq-len")
        if self.sequence:
            divides("--tensor, with --sequence,", self.tensor, seq_len // self.context, "a rank's tokens")
        if self.sequence and self.tensor == 1:
            raise EstimateError(
                "--sequence splits the sequence among tensor-parallel ranks, and --tensor is 1",
                "Give --tensor 2 or more.",
            )
        if self.expert > 1:
            if not experts:
                raise EstimateError(f"--expert is {self.expert}, and the model has no experts", "Leave it out.")
            divides("--expert", self.expert, experts, "the number of experts")
            divides("--expert × --pipeline", self.expert * self.pipeline, self.gpus, "--gpus")
        if experts and self.tensor > 1 and not self.sequence:
            raise EstimateError("a mixture with --tensor needs --sequence", "Add --sequence.")

    def __str__(self) -> str:
        """Return the group sizes above 1 in words, such as "tensor 2, sequence, data 4"."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "context": self.context}
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if self.sequence:
            parts.insert(1, "sequence")
        return ", ".join(parts + ([f"data {self.data}"] if self.data > 1 else []))


def divides(option: str, size: int, count: int, what: str) -> None:
    """Check that `size` divides `count`.

    Args:
        option: The command-line option that sets `size`, for the error.
        size: The divisor.
        count: The number to be divided.
        what: The name of `count` in the error.

    Raises:
        EstimateError: `size` does not divide `count`; the error lists sizes that do.
    """
    if count % size:
        possible = ", ".join(str(each) for each in range(1, min(count, 64) + 1) if count % each == 0)
        raise EstimateError(
            f"{option} is {size}, which does not divide {what}, {count}", f"Possible sizes up to 64: {possible}."
        )
