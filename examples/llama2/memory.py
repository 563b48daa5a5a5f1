"""Estimates the memory of a run by arithmetic: parameters from a model's shape, and DeepSpeed's own estimators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LOGIT_BYTES = 12
"""Bytes per logit at the peak, in backward: the log-softmax, its gradient and the logit's gradient, in float32."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The number of parameters in each part of a Llama, a Mixtral or a Qwen3, which have no biases."""

    layers: int
    embedding: int
    head: int
    """Parameters of the head; 0 where the head is tied to the embedding."""
    norm: int
    """Parameters of one norm; there are two in a layer, and one before the head."""
    attention: int
    """Parameters of one layer's attention."""
    head_norms: int
    """Parameters of one layer's norms of queries and keys, which all heads share; 0 where there are no such norms."""
    feed_forward: int
    """Parameters of one layer's feed-forward part, all experts together."""
    router: int
    """Parameters of one layer's router; 0 where there are no experts."""
    largest: int
    """Largest number of parameters that one module owns directly: ZeRO 3 gathers these at once."""

    @property
    def total(self) -> int:
        """Return the number of parameters of the model."""
        layer = self.attention + self.feed_forward + self.router + self.head_norms + 2 * self.norm
        return self.embedding + self.layers * layer + self.norm + self.head


def count(shape: Mapping[str, Any]) -> Parameters:
    """Count the parameters of a model with these fields of LlamaConfig, MixtralConfig or Qwen3Config."""
    hidden, feed_forward, experts = shape["hidden_size"], shape["intermediate_size"], shape.get("num_local_experts", 0)
    head_size = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    queries, keys = (shape[name] * head_size for name in ("num_attention_heads", "num_key_value_heads"))
    vocabulary, matmul = shape["vocab_size"] * hidden, hidden * feed_forward
    # Hugging Face's model has all experts of a layer in one module, whose parameters ZeRO 3 gathers together
    widest = 3 * matmul * experts if experts else matmul
    return Parameters(
        layers=shape["num_hidden_layers"],
        embedding=vocabulary,
        head=0 if shape.get("tie_word_embeddings") else vocabulary,
        norm=hidden,
        attention=2 * hidden * (queries + keys),
        head_norms=2 * head_size if shape.get("model_type") == "qwen3" else 0,
        feed_forward=3 * matmul * max(experts, 1),
        router=hidden * experts,
        largest=max(vocabulary, widest, hidden * queries),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of the rank that needs most, and of a machine's host."""

    source: str
    """Name of the arithmetic that the estimate comes from."""
    states_bytes: int
    """Weights, gradients and the optimizer's state on the device."""
    logits_bytes: int
    """Logits, loss and their gradients at the peak."""
    host_bytes: int = 0
    """Host memory of all ranks of a machine together."""
    notes: dict[str, str] = field(default_factory=dict)
    """Further lines to print: name and value."""

    def fits(self, device_gib: float | None, host_gib: float | None = None) -> bool:
        """Return whether device and host have more memory than needed; None stands for no limit."""
        on_device = device_gib is None or self.states_bytes + self.logits_bytes < device_gib * GIB
        return on_device and (host_gib is None or self.host_bytes < host_gib * GIB)

    def render(self, device_gib: float | None, host_gib: float | None = None) -> str:
        """Return the estimate as lines for a person to read, beside the memory that device and host have."""
        rows = {**self.notes}
        rows["weights, gradients, optimizer"] = f"{self.states_bytes / GIB:.1f} GiB a rank, by {self.source}"
        rows["logits and loss"] = f"{self.logits_bytes / GIB:.1f} GiB a rank"
        if device_gib is not None:
            left = device_gib - (self.states_bytes + self.logits_bytes) / GIB
            rows["the device has"] = f"{device_gib:.1f} GiB, " + (
                f"{left:.1f} are left for activations and buffers" if left > 0 else f"{-left:.1f} too few"
            )
        if self.host_bytes:
            rows["offloaded to the host"] = f"{self.host_bytes / GIB:.0f} GiB a machine, by {self.source}"
            if host_gib is not None:
                enough = self.host_bytes < host_gib * GIB
                rows["the host has"] = f"{host_gib:.0f} GiB, which is {'enough' if enough else 'too few'}"
        width = max(map(len, rows))
        return "estimate of memory:\n" + "".join(f"  {name:<{width}}  {value}\n" for name, value in rows.items())


def logits_bytes(vocab_size: int, tokens: int, tiles: int = 1) -> int:
    """Return the bytes that the logits and the loss of `tokens` tokens take, computed in `tiles` parts."""
    return -(-tokens // tiles) * vocab_size * LOGIT_BYTES


def deepspeed_estimate(
    shape: Mapping[str, Any], config: Mapping[str, Any], ranks: int, machines: int, logits: int
) -> Estimate:
    """Estimate a rank under ZeRO by DeepSpeed's own functions.

    DeepSpeed has no functions for stages 0 and 1: their estimate uses the numbers in the others.

    Args:
        shape: shape of the model.
        config: DeepSpeed's JSON.
        ranks: number of all ranks.
        machines: number of machines that they run on.
        logits: bytes of logits and loss.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    parameters = count(shape)
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    optimizer, weights = (_is_offloaded(zero, what) for what in ("offload_optimizer", "offload_param"))
    where = {"num_gpus_per_node": ranks // machines, "num_nodes": machines, "cpu_offload": optimizer}
    own = "DeepSpeed's estimator"
    if stage == 3:
        host, states, _ = estimate_zero3_model_states_mem_needs(
            parameters.total, parameters.largest, cpu_offload_params=weights, zero_init=True, **where
        )
    else:
        host, states = estimate_zero2_model_states_mem_needs(parameters.total, **where)
    if stage < 2:
        # bytes per parameter: 2 + 2 for weights and gradients; 4 · 4 for gradients, weights and two moments in float32,
        # which ZeRO 1 splits or offloads
        own = f"the numbers of {own}"
        states = 4 * parameters.total + (0 if optimizer else 16 * parameters.total // (ranks if stage else 1))
    offloaded = " and ".join(name for name, is_so in (("optimizer", optimizer), ("parameters", weights)) if is_so)
    split = f"ZeRO {stage}" + (f", {offloaded} offloaded" if offloaded else "")
    return Estimate(
        source=own,
        states_bytes=states,
        logits_bytes=logits,
        host_bytes=host if offloaded else 0,
        notes={"model": f"{parameters.total:,} parameters", "on": f"{ranks} rank{'s' if ranks > 1 else ''}, {split}"},
    )


def _is_offloaded(zero: Mapping[str, Any], what: str) -> bool:
    return (zero.get(what) or {}).get("device", "none") != "none"
