"""The interface between tests and the stand-in, which the real package does not have."""

from stand_in_kernels import calls, settings

version: tuple[int, ...] = tuple(map(int, settings["transformer_engine"].split(".")))
"""The version whose names the stand-in uses; names of FP8 state and of a forward's start changed in 2.9, 2.12, 2.15."""

__all__ = ["calls", "version"]
