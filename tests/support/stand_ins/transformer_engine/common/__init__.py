"""The part that does not depend on the framework."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
