"""Adds the stand-ins of Transformer Engine and flash-attn (stand_ins/README.md) to a worker process's path."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest import mock

from torch.overrides import TorchFunctionMode

from tests.support.folders import ROOT

FOLDER = ROOT / "tests" / "support" / "stand_ins"


def use(transformer_engine: str | None = None) -> None:
    """Use the stand-ins for the rest of the process; call this before any import of Transformer Engine or flash-attn.

    Args:
        transformer_engine: the version that the stand-in reports, by default "2.10.0"; stand_ins/README.md says which
            names differ.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    if transformer_engine is not None:
        importlib.import_module("stand_in_kernels").settings["transformer_engine"] = transformer_engine


def let_transformers_use_flash_attention() -> None:
    """Make transformers accept `attn_implementation="flash_attention_2"` on the CPU and in float32."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    mock.patch.object(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True).start()
    mock.patch.object(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True).start()


def transformer_engine_layers() -> None:
    """Make the Megatron-Core recipe (examples/megatron_llama2/model.py) build layers of Transformer Engine."""
    import model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def block_spec(config: object, vp_stage: int | None = None, attention: str = "te") -> object:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)

    mock.patch.object(model, "block_spec", block_spec).start()


class _Unpinned(TorchFunctionMode):
    """Drops requests for pinned memory, which does not exist without CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def let_megatron_split_sequences() -> None:
    """Let Megatron-Core's rotary embedding, which pins memory under context parallelism, run without CUDA."""
    _Unpinned().__enter__()
