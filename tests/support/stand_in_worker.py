"""Run the stand-ins of Transformer Engine and flash-attn, and write the results to `FOLDER/results.pt`.

`python -m tests.support.stand_in_worker FOLDER [VERSION]`; VERSION is Transformer Engine's. The results are by case.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import stand_in

stand_in.use(*sys.argv[2:3])

import flash_attn  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from flash_attn.layers.rotary import apply_rotary_emb  # noqa: E402
from transformer_engine.common import recipe  # noqa: E402
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb  # noqa: E402
from transformer_engine.pytorch.distributed import activation_recompute_forward  # noqa: E402
from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: E402
from transformer_engine.stand_in import calls  # noqa: E402

Run = Callable[..., Any]


def difference(run: Run, reference: Run, inputs: Sequence[torch.Tensor], module: Any = None) -> float:
    """Return the largest difference of outputs and of gradients (inputs, parameters), relative to the largest value."""
    parameters = list(module.parameters()) if module is not None else []
    found = []
    for one in (run, reference):
        out = one(*inputs)
        generator = torch.Generator().manual_seed(1)
        grad = torch.randn(out.shape, generator=generator)
        found.append([out, *torch.autograd.grad(out, [*inputs, *parameters], grad)])
    pairs = [[x.detach(), y.detach()] for x, y in zip(*found, strict=True)]
    return max(float((x - y).abs().max() / (y.abs().max() + 1e-6)) for x, y in pairs)


def norm(x: torch.Tensor, module: Any, prefix: str = "") -> torch.Tensor:
    """Normalize with torch's operators."""
    weight, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias", None)
    if bias is not None:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, module.eps)
    return functional.rms_norm(x, x.shape[-1:], weight, module.eps)


def random(*sizes: int) -> torch.Tensor:
    """Return a random tensor that requires a gradient."""
    return torch.randn(*sizes, requires_grad=True)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int = -1) -> torch.Tensor:
    """Run causal attention of [b, s, h, d] with torch's operators."""
    share = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(share, 1) for x in (k, v))
    places = torch.arange(q.shape[2])
    hidden = places[None] > places[:, None]
    if left >= 0:
        hidden = hidden | (places[None] < places[:, None] - left)
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def packed(run: Run, starts: Sequence[int]) -> Run:
    """Return a function of packed sequences [t, h, d] that runs `run` on each sequence by itself."""
    pairs = list(zip(starts, starts[1:], strict=False))
    return lambda *tensors: torch.cat([run(*(x[None, a:b] for x in tensors))[0] for a, b in pairs])


def linears() -> dict[str, float]:
    """Return the differences of linear layers, norms and activations from torch's operators."""
    found = {}
    linear, x = te.Linear(32, 48), random(5, 2, 32)
    found["Linear"] = difference(linear, lambda x: functional.linear(x, linear.weight, linear.bias), [x], linear)
    for kind in ("LayerNorm", "RMSNorm"):
        both = te.LayerNormLinear(32, 48, normalization=kind)
        found[f"LayerNormLinear {kind}"] = difference(
            both, lambda x, m=both: functional.linear(norm(x, m, "layer_norm_"), m.weight, m.bias), [x], both
        )
        alone = getattr(te, kind)(32)
        found[kind] = difference(alone, lambda x, m=alone: norm(x, m), [x], alone)
    activations = {
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        "relu": functional.relu,
    }
    for name, activation in activations.items():
        mlp = te.LayerNormMLP(32, 64, activation=name, normalization="RMSNorm")

        def reference_mlp(x: torch.Tensor, m: Any = mlp, activate: Run = activation) -> torch.Tensor:
            hidden = functional.linear(norm(x, m, "layer_norm_"), m.fc1_weight, m.fc1_bias)
            return functional.linear(activate(hidden), m.fc2_weight, m.fc2_bias)

        found[f"LayerNormMLP {name}"] = difference(mlp, reference_mlp, [x], mlp)
        operation = {"gelu": te.ops.GELU, "swiglu": te.ops.SwiGLU, "relu": te.ops.ReLU}[name]()
        found[f"ops.{name}"] = difference(operation, activation, [x])
    grouped, rows, splits = te.GroupedLinear(3, 32, 16), random(9, 32), [4, 0, 5]

    def reference_grouped(x: torch.Tensor) -> torch.Tensor:
        parts = enumerate(x.split(splits))
        return torch.cat(
            [functional.linear(part, getattr(grouped, f"weight{i}"), getattr(grouped, f"bias{i}")) for i, part in parts]
        )

    found["GroupedLinear"] = difference(lambda x: grouped(x, splits), reference_grouped, [rows], grouped)
    return found


def attentions() -> dict[str, float]:
    """Return the differences of attention from torch's operators."""
    q, k, v = random(2, 12, 4, 8), random(2, 12, 2, 8), random(2, 12, 2, 8)
    found = {}
    core = te.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd")
    found["DotProductAttention"] = difference(core, lambda *x: attention(*x).flatten(2), [q, k, v])
    turned = te.DotProductAttention(4, 8, num_gqa_groups=2)
    by_tokens = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    found["DotProductAttention sbhd"] = difference(
        turned, lambda *x: attention(*(y.transpose(0, 1) for y in x)).transpose(0, 1).flatten(2), by_tokens
    )
    found["window"] = difference(
        lambda *x: core(*x, window_size=(3, 0)), lambda *x: attention(*x, left=3).flatten(2), [q, k, v]
    )
    starts = [0, 5, 12, 24]
    lengths = torch.tensor(starts, dtype=torch.int32)
    tokens = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    found["packed"] = difference(
        lambda *x: core(*x, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=lengths,
                        cu_seqlens_kv=lengths, max_seqlen_q=12, max_seqlen_kv=12),
        lambda *x: packed(attention, starts)(*x).flatten(1), tokens,
    )  # fmt: skip
    found["FlashAttnFunc"] = difference(lambda *x: flash_attn.flash_attn_func(*x, causal=True), attention, [q, k, v])
    odd = random(1, 6, 2, 5)
    found["FlashAttnFunc, padded heads"] = difference(
        lambda x: flash_attn.flash_attn_func(x, x, x, causal=True), lambda x: attention(x, x, x), [odd]
    )
    found["FlashAttnVarlenFunc"] = difference(
        lambda *x: flash_attn.flash_attn_varlen_func(*x, lengths, lengths, 12, 12, causal=True),
        packed(attention, starts), tokens,
    )  # fmt: skip
    three = importlib.import_module("flash_attn_3.flash_attn_interface")
    found["flash-attn 3"] = difference(lambda *x: three.flash_attn_func(*x, causal=True), attention, [q, k, v])
    found["flash-attn 3, packed"] = difference(
        lambda *x: three.flash_attn_varlen_func(*x, lengths, lengths, 12, 12, causal=True),
        packed(attention, starts), tokens,
    )  # fmt: skip
    together = random(2, 12, 3, 4, 8)
    found["FlashAttnQKVPackedFunc"] = difference(
        lambda x: flash_attn.flash_attn_qkvpacked_func(x, causal=True), lambda x: attention(*x.unbind(2)), [together]
    )
    return found


def movers() -> dict[str, float]:
    """Return the differences of rotary embeddings and of experts' permutations from torch's operators."""
    found = {}
    for interleaved in (False, True):
        freqs, x = RotaryPositionEmbedding(6, interleaved=interleaved)(7), random(7, 2, 3, 8)
        options = {"interleaved": interleaved}
        found[f"FusedRoPEFunc interleaved={interleaved}"] = difference(
            lambda x, f=freqs, o=options: apply_rotary_pos_emb(x, f, fused=True, **o),
            lambda x, f=freqs, o=options: apply_rotary_pos_emb(x, f, **o), [x],
        )  # fmt: skip
    half = freqs[:, 0, 0, ::2]
    found["ApplyRotaryEmb"] = difference(
        lambda x: apply_rotary_emb(x.transpose(0, 1), half.cos(), half.sin(), interleaved=True),
        lambda x: apply_rotary_pos_emb(x, freqs, interleaved=True).transpose(0, 1), [x],
    )  # fmt: skip
    rows, probs = random(6, 8), random(6, 3)
    routing = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0]], dtype=torch.bool)

    def experts(rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        moved, weights, row_map = te.moe_permute_with_probs(rows, probs, routing, num_out_tokens=8)
        sizes, order = torch.tensor([3, 2, 3]), torch.tensor([2, 0, 1])
        moved, weights = te.moe_sort_chunks_by_index_with_probs(moved, weights, sizes, order)
        made = moved.tanh() * weights[:, None]
        made = te.moe_sort_chunks_by_index(made, sizes[order], torch.tensor([1, 2, 0]))
        return te.moe_unpermute(made, row_map)

    found["permutation"] = difference(
        experts, lambda rows, probs: rows.tanh() * (probs * routing).sum(1, keepdim=True), [rows, probs]
    )
    return found


def layer(**options: Any) -> te.TransformerLayer:
    """Return a layer with the same weights at every call."""
    torch.manual_seed(3)
    shape = {"normalization": "RMSNorm", "activation": "swiglu", "num_gqa_groups": 2}
    return te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **shape, **options)


def sixteen_bits() -> float:
    """Return the difference of a layer in bfloat16 from one in float32."""
    x = torch.randn(16, 2, 32)
    exact, rough = layer()(x), layer().bfloat16()(x.bfloat16())
    return float((exact - rough.float()).abs().max() / exact.abs().max())


def repeats() -> dict[str, Any]:
    """Return whether two runs of a layer are equal, and whether rows keep their bits in a product of fewer rows."""
    module, x = layer(), torch.randn(16, 2, 32)
    results = []
    for _ in range(2):
        module.zero_grad()
        out = module(x)
        out.square().mean().backward()
        results.append([out.detach(), *(parameter.grad for parameter in module.parameters())])
    linear, rows = te.LayerNormLinear(32, 48), torch.randn(64, 32)
    with torch.no_grad():
        some = torch.equal(linear(rows)[10:13], linear(rows[10:13]))
    return {"equal": all(torch.equal(x, y) for x, y in zip(*results, strict=True)), "some_rows": some}


class _Seen(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def dispatcher() -> dict[str, Any]:
    """Return a layer's operators as torch sees them in forward, the saved tensors' shapes, and how many are freed."""
    module, x = te.LayerNormMLP(32, 64, activation="swiglu"), torch.randn(4, 32)
    given: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor.detach())
        return given[-1]

    with _Seen() as seen, torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        out = module(x)
    sizes = [tuple(tensor.shape) for tensor in _saved(out)]
    out.sum().backward()
    return {"operators": seen.names, "saved": sizes, "freed": sum(tensor.numel() == 0 for tensor in given)}


def _saved(out: torch.Tensor) -> list[torch.Tensor]:
    node = out.grad_fn
    while not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    return [tensor.clone() for tensor in node.saved_tensors if tensor is not None]


def eight_bits(which: recipe.Recipe, how: str) -> list[Any]:
    """Train a layer in FP8, and return the losses, and the scales of its first product.

    Args:
        which: the recipe.
        how: "plain"; "checkpoint"; "again": a second forward, outside of the recompute contexts; "contexts": a second
            forward in them.
    """
    FP8GlobalStateManager.reset()
    module, losses = layer(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        x = torch.randn(16, 2, 32, generator=generator).requires_grad_()
        first = activation_recompute_forward(how == "contexts", False)
        with te.autocast(enabled=True, recipe=which), first:
            out = te.checkpoint(module, x) if how == "checkpoint" else module(x)
        if how in ("again", "contexts"):
            again = activation_recompute_forward(how == "contexts", how == "contexts")
            with again, te.autocast(enabled=True, recipe=which):
                out = module(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    qkv = module.self_attention.layernorm_qkv
    scales = [qkv.fp8_meta[name].scale.tolist() for name in ("scaling_fwd", "scaling_bwd")] if which.delayed() else []
    return [losses, scales]


def recipes() -> dict[str, Any]:
    """Train in FP8 by each recipe, running a layer once or twice; return losses, and delayed scaling's scales."""
    delayed = recipe.DelayedScaling(amax_history_len=16)
    found = {how: eight_bits(delayed, how) for how in ("plain", "checkpoint", "again", "contexts")}
    for one in (recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling(), recipe.Float8BlockScaling()):
        found[type(one).__name__] = eight_bits(one, "plain")
        found[f"{type(one).__name__} again"] = eight_bits(one, "again")
    FP8GlobalStateManager.reset()
    return found


def micro_batches() -> dict[str, Any]:
    """Return whether weights are cast once for two micro-batches, and gradients accumulate in `main_grad`."""
    module = te.Linear(32, 16, bias=False, fuse_wgrad_accumulation=True)
    plain = te.Linear(32, 16, bias=False)
    plain.load_state_dict(module.state_dict(), strict=False)
    module.weight.main_grad = torch.full((16, 32), 7.0)
    xs = torch.randn(2, 8, 32)
    for first, x in zip((True, False), xs, strict=True):
        module(x, is_first_microbatch=first).sum().backward()
        plain(x).sum().backward()
    added = float((module.weight.main_grad - plain.weight.grad).abs().max())
    calls.clear()
    kinds = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kinds.append(type(x).__name__) or x, lambda x: x):
        for first, x in zip((True, False), xs, strict=True):
            with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
                module(x.requires_grad_(), is_first_microbatch=first).sum().backward()
    return {
        "main_grad": added,
        "grad": module.weight.grad is None,
        "casts": calls.kernels["quantize"],
        "saved": sorted(set(kinds)),
    }


def dropout() -> dict[str, bool]:
    """Return whether attention with dropout repeats from the same generator state, and from the next one."""
    core = te.DotProductAttention(2, 8, attention_dropout=0.5)
    q = torch.randn(10, 1, 2, 8)
    state = torch.get_rng_state()
    first, second = core(q, q, q), core(q, q, q)
    torch.set_rng_state(state)
    return {"same_state": torch.equal(core(q, q, q), first), "next_state": torch.equal(second, first)}


def hugging_face() -> dict[str, list[float]]:
    """Return the losses of a tiny Llama with torch's attention and with flash-attn's stand-in."""
    import transformers

    stand_in.let_transformers_use_flash_attention()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = {}
    for implementation in ("sdpa", "flash_attention_2"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**shape, **heads, attn_implementation=implementation)
        model = transformers.LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens, losses = torch.randint(0, 64, (2, 24)), []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[implementation] = losses
    return found | {"forwards": calls.functions["FlashAttnFunc"]}


def names() -> list[str]:
    """Return the names under which this version of Transformer Engine keeps FP8's state."""
    known = "get_fp8_autocast_state", "get_autocast_state", "AUTOCAST_DEPTH", "quantization_state"
    return [name for name in known if hasattr(FP8GlobalStateManager, name)]


def main() -> None:
    """Run all cases."""
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    for case in (
        linears,
        attentions,
        movers,
        sixteen_bits,
        repeats,
        dispatcher,
        recipes,
        micro_batches,
        dropout,
        hugging_face,
        names,
    ):
        results[case.__name__] = case()
    torch.save(results, Path(sys.argv[1]) / "results.pt")


if __name__ == "__main__":
    main()
