"""What tests ask the stand-in, and would not find in the real one."""

from stand_in_kernels import calls, settings

version: tuple[int, ...] = tuple(map(int, settings["transformer_engine"].split(".")))
"""Whose names the stand-in has, of the state of FP8 and of a forward's start: others since 2.9, 2.12 and 2.15."""

__all__ = ["calls", "version"]
