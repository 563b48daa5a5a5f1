"""Decisions to device: swapping, recomputation and the streams that order them."""
