"""Trace, hardware and config in, a plan out: pure functions over plain data, no torch."""
