"""Measures a model's parts one by one on the virtual device, for ProTrain's estimators."""

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
    """The times and sizes of one part for one micro-batch.

    A part is the embedding, one decoder layer, or the final norm with the head and the loss.

    Attributes:
        forward_s: Seconds that the part's forward takes: the kernels' time, or the host's if the host is slower.
        backward_s: Seconds that the part's backward takes, counted like `forward_s`.
        saved_bytes: Device memory that the part's forward leaves in use, including the part's output.
        forward_peak_bytes: Peak device memory of the forward, above the memory in use when the forward begins.
        backward_peak_bytes: Peak device memory of the backward, above the memory in use when the backward begins. The
            gradient of the part's output is in use by then; the gradients of the part's parameters are not.
        parameters: Elements of each parameter, in the order of the part's modules.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    parameters: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return the number of elements of all parameters of this part."""
        return sum(self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """The parts of a model that trains on one GPU in bfloat16.

    Attributes:
        embedding: The embedding.
        layer: One decoder layer; all decoder layers are alike.
        head: The final norm, the head and the loss.
        layers: The number of decoder layers.
        hidden_bytes: Size of a layer's input, which is also the size of its output.
        swapped_bytes: Bytes that memplug offloads for a layer that swaps: the layer's input, and the outputs of its
            matmuls and attention.
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

    A virtual device without a memory limit replaces the process's virtual device for good.

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
    """Run one part forward and backward, and return its times and bytes; `parameters` stays empty.

    The part's parameters must not have gradients yet.
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
    # In a real step the part's output is freed before this backward begins; here `out` still holds it. So the measured
    # peak is too high by the output's size, which is also the size of `gradient`.
    return ProfiledPart(
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=after - before,
        forward_peak_bytes=forward_peak - before,
        backward_peak_bytes=device.usage().allocated_peak - after - gradient.nbytes,
        parameters=(),
    )


def _model(shape: Shape) -> nn.Module:
    """Make the model with one layer on the virtual device.

    One dense MLP replaces the experts of a mixture (`_with_experts`).
    """
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

    memplug offloads the layer's input, queries, keys and values, the attention's output, the outputs of the two
    projections that are added to the hidden states, and the MLP's two wide products, all in bfloat16. It also offloads
    attention's log-sum-exp, one float32 for each head.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = 3 * config.hidden_size + 2 * head_size * (heads + groups) + 2 * config.intermediate_size
    return ELEMENT_BYTES * width + 4 * heads


def _parameters(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return each parameter's number of elements, in three tuples: embedding, one layer, and final norm with head.

    A parameter that two of these share counts only in the first.
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
    """Correct the profile of a mixture, whose experts were run as one dense MLP.

    Routing depends on data, which the virtual device does not have. The dense MLP is as wide as all experts of one
    token together. So it takes as many operations as the experts do if tokens are spread evenly over them. It saves as
    many bytes, except for the copies that routing makes: each token's input and output, once for each expert of the
    token. This function adds these copies, and the gradients of the experts that the dense MLP does not include. It
    neglects the router's time, and the time to read and write the weights of those experts.
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
