"""What tests ask the stand-in, and would not find in the real one."""

from stand_in_kernels import calls, settings

version: tuple[int, ...] = tuple(map(int, settings["transformer_engine"].split(".")))
"""Whose names the stand-in has: 2.10, or 2.18, where the state of FP8 and the start of a forward are others."""

__all__ = ["calls", "version"]
