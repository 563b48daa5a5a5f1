"""A stand-in for Transformer Engine on machines without a GPU (see ../README.md)."""

from transformer_engine import stand_in

__version__ = ".".join(map(str, stand_in.version))

from transformer_engine import common, pytorch  # their modules read `version` from `stand_in`

__all__ = ["common", "pytorch", "stand_in"]
