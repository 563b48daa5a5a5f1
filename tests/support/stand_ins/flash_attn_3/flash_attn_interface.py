"""The functions of the top-level module `flash_attn_interface`."""

from flash_attn_interface import (
    FlashAttnFunc,
    FlashAttnVarlenFunc,
    _flash_attn_backward,
    _flash_attn_forward,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "FlashAttnFunc",
    "FlashAttnVarlenFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
