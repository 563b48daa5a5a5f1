"""Allowed values of arguments."""

import torch

AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
GemmParallelModes = ("row", "column", None)
dist_group_type = torch.distributed.ProcessGroup
