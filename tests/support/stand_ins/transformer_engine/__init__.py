"""A stand-in of Transformer Engine for machines without a GPU (see ../README.md)."""

from transformer_engine import common, pytorch, stand_in

__version__ = "2.10.0"
__all__ = ["common", "pytorch", "stand_in"]
