"""What ProTrain's estimators need of a model on a GPU: its parts, run one by one on the virtual device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplug.predict.estimator.shapes import Shape, needed
from memplug.predict.estimator.workload import by_default
from memplug.predict.virtual import Hardware, VirtualDevice

ELEMENT_BYTES = 2
"""Of a parameter, a gradient or an activation in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The embedding, one decoder layer, or the head with the loss, of one micro-batch.

    Attributes:
        forward_s, backward_s: of its kernels, and of the host where that is slower.
        saved_bytes: that its forward leaves on the device, its output among them; not its input.
        forward_peak_bytes: the most in use in its forward, above what was before.
        backward_peak_bytes: the most in use in its backward, above what was before it, the gradient of its output
            among that; gradients of its parameters are made there.
        parameters: numbers of elements, one for each tensor, in order.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    parameters: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements of all its parameters."""
        return sum(self.parameters)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """A model on one GPU, in bfloat16.

    Attributes:
        embedding, layer, head: its parts; all decoder layers are alike.
        layers: how many there are.
        hidden_bytes: of a layer's input, which is as large as its output.
        swapped_bytes: that memplug offloads of a layer that swaps: its input, and outputs of matmuls and attention.
        tokens: of one micro-batch.
    """

    embedding: Part
    layer: Part
    head: Part
    layers: int
    hidden_bytes: int
    swapped_bytes: int
    tokens: int

    @property
    def parts(self) -> list[Part]:
        """In the order of the forward."""
        return [self.embedding, *[self.layer] * self.layers, self.head]

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(part.count for part in self.parts)


def profile(hardware: Hardware, shape: Shape, micro_batch: int, seq_len: int) -> ModelProfile:
    """Run the embedding, one layer, and the final norm, head and loss, forward and backward; seconds and bytes are the
    virtual device's. It is in place of the process's own one afterwards, and serves more memory than the GPU has.

    Raises:
        HardwareError, NativeError: as `VirtualDevice`.
        EstimateError: transformers is missing.
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


def _run(device: VirtualDevice, part: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Part:
    """Its times and bytes; of gradients none are there before, and none remain but those of parameters."""
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
    # this function holds the output, as large as its gradient: so the peak has one of them too many, and the part that
    # is above has released it in a real backward
    return Part(
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=after - before,
        forward_peak_bytes=forward_peak - before,
        backward_peak_bytes=device.usage().allocated_peak - after - gradient.nbytes,
        parameters=(),
    )


def _model(shape: Shape) -> nn.Module:
    """One layer of it, on the device; a mixture's experts are a dense MLP, see `_with_experts`."""
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
    """Of a token in one layer: its input, queries, attention, and what it and the MLP add; keys and values; the MLP's
    two wide products; and the sums of attention's exponentials, in 4 bytes.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    width = 3 * config.hidden_size + 2 * head_size * (heads + groups) + 2 * config.intermediate_size
    return ELEMENT_BYTES * width + 4 * heads


def _parameters(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Elements of each parameter of the embedding, of a layer, and of the final norm and the head, on the meta device;
    one that is shared counts to the first.
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
    """Routing depends on data, which the virtual device has none of: a layer's experts are run as one dense MLP that is
    as wide as all experts of a token together. For evenly spread tokens their products take as many operations, and
    what they save is of the same size, but for what routing copies: each token's input and output once for each of its
    experts. That is added here, and the gradients of the other experts; no time for the router, nor for reading and
    writing more weights.
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
