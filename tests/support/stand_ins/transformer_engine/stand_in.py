"""What tests ask the stand-in, and would not find in the real one."""

from stand_in_kernels import calls

__all__ = ["calls"]
