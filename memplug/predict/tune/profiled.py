"""The measurements of a model that ProTrain's estimators need: its parts, run one by one on the virtual device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplug.predict.estimator.shapes import Shape, needed
from memplug.predict.estimator.workload import by_default
from memplug.predict.virtual import GpuProfile, VirtualDevice

ELEMENT_BYTES = 2
"""Bytes of one element of a parameter, gradient or activation in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledPart:
    """The embedding, one decoder layer, or the head with the loss, for one micro-batch.

    Attributes:
        forward_s: Seconds that its forward takes; of the host if that is slower than the kernels.
        backward_s: Seconds that its backward takes; likewise.
        saved_bytes: Device memory that its forward leaves in use: its output is included, its input is not.
        forward_peak_bytes: Peak of its forward, above the memory in use before.
        backward_peak_bytes: Peak of its backward, above the memory in use before, which includes the gradient of its
            output; the gradients of its parameters are made in it.
        parameters: Elements of each parameter, in order.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    parameters: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of elements of all its parameters."""
        return sum(self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model on one GPU, in bfloat16.

    Attributes:
        embedding: The embedding.
        layer: A decoder layer; all are alike.
        head: The final norm, the head and the loss.
        layers: The number of decoder layers.
        hidden_bytes: Size of a layer's input, and of its output.
        swapped_bytes: Bytes that memplug offloads for a layer that swaps: its input, and outputs of matmuls and
            attention.
        tokens: Tokens in a micro-batch.
    """

    embedding: ProfiledPart
    layer: ProfiledPart
    head: ProfiledPart
    layers: int
    hidden_bytes: int
    swapped_bytes: int
    tokens: int

    @property
    def parts(self) -> list[ProfiledPart]:
        """Return all parts in forward order."""
        return [self.embedding, *[self.layer] * self.layers, self.head]

    @property
    def parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(part.count for part in self.parts)


def profile(hardware: GpuProfile, shape: Shape, micro_batch: int, seq_len: int) -> ModelProfile:
    """Run the model's parts forward and backward on the virtual device, and return their times and bytes.

    The parts are the embedding, one layer, and the final norm with head and loss. The process's virtual device is
    replaced by one without a memory limit, and stays replaced.

    Args:
        hardware: The GPU's profile.
        shape: The model's shape.
        micro_batch: Sequences in a micro-batch.
        seq_len: Tokens in a sequence.

    Raises:
        EstimateError: transformers is missing.
        HardwareError: See `VirtualDevice`.
        NativeError: See `VirtualDevice`.
    """
    device = VirtualDevice(hardware, expandable_segments=True, bounded=False)
    device.restart()
    model = _model(shape)
    ids = torch.zeros(micro_batch, seq_len, dtype=torch.long, device=device.torch_device)
    embedding = _run(device, model.model.embed_tokens, ids)
    hidden = model.model.embed_tokens(ids).detach()
    positions = torch.arange(seq_len, device=device.torch_device)[None]
    rotary = model.model.rotary_emb(hidden, position_ids=positions)

    def layer(x: torch.Tensor) -> torch.Tensor:
        out = model.model.layers[0](x, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    def head(x: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(model.model.norm(x))
        return model.loss_function(logits, ids, vocab_size=model.config.vocab_size)

    layer_part = _run(device, layer, hidden.clone().requires_grad_())
    head_part = _run(device, head, hidden.clone().requires_grad_())
    embedded, in_layer, in_head = _parameters(shape)
    found = ModelProfile(
        embedding=dataclasses.replace(embedding, parameters=embedded),
        layer=dataclasses.replace(layer_part, parameters=in_layer),
        head=dataclasses.replace(head_part, parameters=in_head),
        layers=shape.layers,
        hidden_bytes=hidden.nbytes,
        swapped_bytes=micro_batch * seq_len * _swapped_bytes(model.config),
        tokens=micro_batch * seq_len,
    )
    return _with_experts(found, shape)


def _run(device: VirtualDevice, part: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> ProfiledPart:
    """Run one part and return its times and bytes.

    No gradients exist before; afterwards only those of parameters remain.
    """
    device.reset_peaks()
    before, began_s = device.usage().allocated, device.synchronize()
    out = part(x)
    forward_s = device.synchronize() - began_s
    after, forward_peak = device.usage().allocated, device.usage().allocated_peak
    gradient = torch.empty_like(out)
    device.reset_peaks()
    began_s = device.synchronize()
    out.backward(gradient)
    backward_s = device.synchronize() - began_s
    # This function still holds the output, which is as large as its gradient. In a real backward the part above has
    # released the output already: so the peak is too high by that size.
    return ProfiledPart(
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=after - before,
        forward_peak_bytes=forward_peak - before,
        backward_peak_bytes=device.usage().allocated_peak - after - gradient.nbytes,
        parameters=(),
    )


def _model(shape: Shape) -> nn.Module:
    """Make the model with one layer on the device; a mixture's experts are one dense MLP, see `_with_experts`."""
    transformers, family = needed("transformers"), shape.family
    fields = {**shape.fields, "num_hidden_layers": 1, "use_cache": False}
    if shape.is_mixture:
        chosen = fields.get("num_experts_per_tok", transformers.MixtralConfig().num_experts_per_tok)
        fields["intermediate_size"] *= chosen
        family, known = "Llama", transformers.LlamaConfig().to_dict()
        fields = {name: value for name, value in fields.items() if name in known or name.startswith("rope_")}
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="sdpa")
    with by_default(torch.bfloat16), torch.device("virtual"):
        return getattr(transformers, f"{family}ForCausalLM")(config).train()


def _swapped_bytes(config: Any) -> int:
    """Return the bytes that memplug offloads for one token in one layer.

    They are the layer's input, queries, the attention's output and the outputs of the two projections that are added to
    the hidden states; keys and values; the MLP's two wide products; and the sums of attention's exponentials, in 4
    bytes.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = 3 * config.hidden_size + 2 * head_size * (heads + groups) + 2 * config.intermediate_size
    return ELEMENT_BYTES * width + 4 * heads


def _parameters(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the elements of each parameter of the embedding, a layer, and the final norm with the head.

    They are counted on the meta device; a shared parameter counts only in the first of them.
    """
    transformers = needed("transformers")
    config = getattr(transformers, f"{shape.family}Config")(**{**shape.fields, "num_hidden_layers": 1})
    with torch.device("meta"):
        model = getattr(transformers, f"{shape.family}ForCausalLM")(config)
    model.tie_weights()
    seen: set[int] = set()

    def counts(*modules: nn.Module) -> tuple[int, ...]:
        new = []
        for parameter in (each for module in modules for each in module.parameters()):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                new.append(parameter.numel())
        return tuple(new)

    return counts(model.model.embed_tokens), counts(model.model.layers[0]), counts(model.model.norm, model.lm_head)


def _with_experts(found: ModelProfile, shape: Shape) -> ModelProfile:
    """Correct a mixture's profile for its experts, which were run as one dense MLP.

    Routing depends on data, which the virtual device does not have. The MLP is as wide as all experts of a token
    together. For evenly spread tokens it takes as many operations and saves as many bytes, except for the copies that
    routing makes: each token's input and output, once for each of its experts. These copies and the gradients of the
    other experts are added here; the time of the router, and of reading and writing more weights, is not.
    """
    if not shape.is_mixture:
        return found
    chosen = shape.fields.get("num_experts_per_tok", needed("transformers").MixtralConfig().num_experts_per_tok)
    copies = 2 * chosen * found.hidden_bytes
    of_expert = 3 * shape.fields["hidden_size"] * shape.fields["intermediate_size"]
    gradients = ELEMENT_BYTES * of_expert * (shape.fields["num_local_experts"] - chosen)
    layer = dataclasses.replace(
        found.layer,
        saved_bytes=found.layer.saved_bytes + copies,
        forward_peak_bytes=found.layer.forward_peak_bytes + copies,
        backward_peak_bytes=found.layer.backward_peak_bytes + gradients,
    )
    return dataclasses.replace(found, layer=layer)
