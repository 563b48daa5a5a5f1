"""Puts the stand-ins of Transformer Engine and flash-attn (stand_ins/README.md) on a worker process's path."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest import mock

from torch.overrides import TorchFunctionMode

from tests.support.folders import ROOT

FOLDER = ROOT / "tests" / "support" / "stand_ins"


def use(transformer_engine: str | None = None) -> None:
    """From now on, for the rest of the process. Call it before anything is imported that asks for either.

    Args:
        transformer_engine: the version that it calls itself, by default "2.10.0"; stand_ins/README.md says which names
            differ.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    if transformer_engine is not None:
        importlib.import_module("stand_in_kernels").settings["transformer_engine"] = transformer_engine


def let_transformers_use_flash_attention() -> None:
    """Hugging Face's transformers refuses `attn_implementation="flash_attention_2"` on the CPU, and in float32."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    mock.patch.object(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True).start()
    mock.patch.object(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True).start()


def transformer_engine_layers() -> None:
    """The Megatron-Core recipe (examples/megatron_llama2/model.py) builds layers of Transformer Engine from now on."""
    import model
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    def block_spec(config: object, vp_stage: int | None = None, attention: str = "te") -> object:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)

    mock.patch.object(model, "block_spec", block_spec).start()


class _Unpinned(TorchFunctionMode):
    """Memory that is asked for pinned is not: without CUDA there is none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def let_megatron_split_sequences() -> None:
    """Megatron-Core's rotary embedding pins memory where context-parallel ranks have some tokens each."""
    _Unpinned().__enter__()
