"""Swap and recompute: what is decided for regions."""
