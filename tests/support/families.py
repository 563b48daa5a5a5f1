"""Every causal, masked and encoder-decoder family of the installed transformers, made tiny from its config class.

Families are found in transformers' own tables. Fields of a config are shrunk according to their names, so a family
of a newer transformers needs no entry here; `Cannot` says why a family cannot be made tiny.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

LARGEST = 6_000_000  # elements of all parameters
VOCABULARY, LENGTH, BATCH = 64, 8, 2
FIRST_TOKEN = 24  # the lowest token of a batch; lower ones are special tokens, such as padding

SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size\w*|\w*vocab_size|unpadded_vocab_size|codebook_size|pooler_hidden_size_vocab", VOCABULARY),
    (r"encoder_hash_byte_group_vocab|ngram_vocab_size_base", VOCABULARY),
    (r"num_key_value_heads|num_kv_heads|num_query_groups|swa_num_key_value_heads", 2),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"(.*_)?num_(\w+_)?heads|n_heads?|(\w+_)?attention_heads|num_heads|linear_num_\w*heads|index_n_heads", 4),
    (r"(num_(\w+_)?(layers|blocks)|n_layers?|\w+_layers|num_layers_per_stack|depth|num_self_attends_per_block)", 2),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|index_topk(_blocks)?", 2),
    (r"(\w+_)?(num_experts|n_routed_experts|num_local_experts|expert_num|zero_expert_num|moe_num_experts)", 4),
    (r"n_groups?|num_expert_group|topk_group|o_groups|upsample_groups|num_conv_pos_embedding_groups", 1),
    (r"(\w+_)?(kv_lora_rank|q_lora_rank|lora_rank|laurel_rank|loop_gate_rank|hc_lowrank|gated_norm_rank)", 8),
    (r"qk_head_dim", 16),
    (r"(\w+_)?(head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels|rotary_dim|headdim)", 8),
    (r"attention_head_dim", 16),
    (r"qk_(rope|nope)_head_dim|v_head_dim", 8),
    (r"(\w+_)?(intermediate_size\w*|ffn_dim|d_ff|dff|dim_ff|d_inner|hidden_dim|mlp_dim|feed_forward_size)", 64),
    (r"(\w+_)?(ffn_hidden_size|mamba_d_ssm|lru_width|ssm_intermediate)|attention_hidden_size", 64),
    (
        r"(\w+_)?(hidden_size(_\w+)?|intra_bottleneck_size|d_model|n_embd|embedding_size|emb_dim|embedding_dim|dim_model_base)|dim",
        32,
    ),
    (r"(\w+_)?(embed_dim|embed_proj_dim|output_dim|adapter_\w+_dim|projector_\w+_dim|out_hidden_size|emb_size)", 32),
    (r"(mamba_d_state|state_size|ssm_state_size|time_step_rank|mamba_dt_rank|d_rel|rel_extent)", 8),
    (r"mm_tokens_per_image|image_seq_length", 4),
    (r"(\w+_)?(sliding_window\w*|attention_window\w*|local_attention|window_size|chunk_size|attention_chunk_size)", 4),
    (r"(local|lsh)_attn_chunk_length|block_size|index_block_size|segment_means_seq_len|num_landmarks", 4),
    (r"num_latents|d_latents|num_codebooks|prompt_length|prompt_mid_dim|num_global_tokens", 8),
    (r"image_size|crop_size", 32),
    (r"patch_size", 16),
    (r"(\w+_)?max_\w*position\w*|n_positions|n_ctx|max_seq_len|model_max_length|context_length", 64),
)
MISSING = (
    "head_dim",
    "num_key_value_heads",
    "vocab_size",
    "num_experts_per_tok",
    "n_routed_experts",
    "mask_token_id",
)  # some configs need these fields and lack them
HINTS: dict[str, dict[str, Any]] = {  # fields whose values depend on other fields, which patterns of names cannot tell
    "BambaConfig": {"attn_layer_indices": [1]},
    "DoryConfig": {"num_hidden_layers": 6, "layer_types": None},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ReformerConfig": {"axial_pos_shape": (2, 4), "axial_pos_embds_dim": (16, 16), "is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
TOKEN = re.compile(r"\w+_token_(id|index)")


class Cannot(Exception):
    """An error that says why a family cannot be made tiny, or does not train without memplug."""


@dataclass(frozen=True)
class Family:
    """One architecture for one purpose.

    Attributes:
        table: transformers' table of model classes.
        name: the model type.
    """

    table: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}-{TABLES[self.table]}"

    def make(self) -> nn.Module:
        """Return the model, with the same weights in every call.

        Raises:
            Cannot: the model cannot be made tiny.
        """
        try:
            kind = model_class(self)
            config = tiny(config_class(self.name))
            if TABLES[self.table] == "causal" and hasattr(config, "is_decoder"):
                config.is_decoder = True
            if not isinstance(config, kind.config_class):
                config = config.get_text_config(decoder=True)
            with torch.device("meta"):
                elements = sum(parameter.numel() for parameter in kind(config).parameters())
            if elements > LARGEST:
                raise Cannot(f"{elements:,} elements remain")
            torch.manual_seed(0)
            return kind(config).train()
        except Cannot:
            raise
        except Exception as error:
            raise Cannot(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


TABLES = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "causal",
    "MODEL_FOR_MASKED_LM_MAPPING": "masked",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "seq2seq",
}


def families() -> list[Family]:
    """Return all families of the installed transformers, each model class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Family] = {}
    for table in TABLES:
        for name, kind in getattr(modeling_auto, f"{table}_NAMES").items():
            found.setdefault(kind if isinstance(kind, str) else kind[0], Family(table, name))
    return list(found.values())


def config_class(name: str) -> type:
    """Return the config class of a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def model_class(family: Family) -> type:
    """Return the model class of a family."""
    import transformers
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, f"{family.table}_NAMES")[family.name]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def tiny(kind: type) -> Any:
    """Return a config of the class with small sizes."""
    config = kind(**_fields(kind()))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _fields(config: Any) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    fields: dict[str, Any] = {}
    layers, former = _layers(config)
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = {"model_type": value.model_type, **_fields(value)}
        elif TOKEN.fullmatch(name):
            fields.update({name: _token(name, value)} if value is not None or name in MISSING else {})
        elif isinstance(value, (list, tuple)) and former and len(value) == former:
            size = _size(name) if all(type(each) is int for each in value) else None
            fields[name] = [each if size is None else min(each, size) for each in _chosen(value, layers)]
        elif isinstance(value, int) and not isinstance(value, bool) and value > 1 or name in MISSING and value is None:
            if _size(name) is not None:
                fields[name] = _size(name)
    heads = vars(config).get("num_attention_heads")
    if "num_key_value_heads" in fields and vars(config)["num_key_value_heads"] == heads:
        fields["num_key_value_heads"] = fields["num_attention_heads"]  # still without grouped queries
    if former:
        fields[_layers_field(config)] = len(layers)
    if hasattr(config, "num_kv_shared_layers"):
        fields["num_kv_shared_layers"] = len(layers) // 2 if len(layers) > 2 else 0
    for name, value in HINTS.get(type(config).__name__, {}).items():
        fields[name] = value
    return fields


def _size(name: str) -> int | None:
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def _layers_field(config: Any) -> str | None:
    """Return the name of the field with the number of layers, or None."""
    known = (config.attribute_map or {}).get("num_hidden_layers", "num_hidden_layers")
    return known if isinstance(vars(config).get(known), int) else None


def _layers(config: Any) -> tuple[list[int], int]:
    """Return the indices of the layers to keep (at least two, one of each kind), and how many the config has."""
    name = _layers_field(config)
    if name is None:
        return [], 0
    former = getattr(config, name)
    kinds = [value for value in vars(config).values() if isinstance(value, (list, tuple)) and len(value) == former]
    kinds = [value for value in kinds if all(isinstance(each, str) for each in value)]
    by_kind = {each: index for index, each in reversed(list(enumerate(zip(*kinds, strict=True))))} if kinds else {}
    kept = sorted(set(by_kind.values()))
    if getattr(config, "num_kv_shared_layers", 0):
        kept = [*kept, *kept]
    rest = [index for index in range(former) if index not in kept]
    return (kept + rest[: max(0, 2 - len(kept))]) or [0, 1], former


def _chosen(values: Any, layers: list[int]) -> list[Any]:
    return [values[index] if index < len(values) else values[-1] for index in layers]


def _token(name: str, value: Any) -> Any:
    """Return a token that is in the vocabulary but in no batch."""
    if isinstance(value, (list, tuple)):
        return [min(each, 2) for each in value]
    return value if value is not None and value < 3 else 3 + sum(map(ord, name)) % (FIRST_TOKEN - 3)


def batch(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return the inputs of one step, named as in `forward`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_TOKEN, VOCABULARY, (BATCH, LENGTH), generator=generator)
    names = inspect.signature(model.forward).parameters
    found = {"input_ids": ids, "labels": ids}
    return {name: tensor for name, tensor in found.items() if name in names}


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's loss or, without one, the mean square of its first floating-point output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = next(value for value in output.values() if torch.is_tensor(value) and value.is_floating_point())
    return first.float().square().mean()


def steps(model: nn.Module, session: Any = None, count: int = 3) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Yield each step's loss and gradients; the model trains with plain SGD and is called with its defaults."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(count):
        torch.manual_seed(step)
        loss = loss_of(model(**batch(model, step)))
        loss.backward()
        yield loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.step()
