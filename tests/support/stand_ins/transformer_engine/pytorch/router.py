"""The names of fused routing of experts, which Megatron-Core imports and the stand-in refuses to run."""

from __future__ import annotations

from typing import Any


def _refused(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in of Transformer Engine has no fused router")


fused_topk_with_score_function = _refused
fused_compute_score_for_moe_aux_loss = _refused
fused_moe_aux_loss = _refused
