"""Names of operators that several rooms distinguish."""

from __future__ import annotations

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
"""Namespaces of collectives, and of the operators that wait for collectives."""

COLLECTIVES = tuple(f"{namespace}::" for namespace in COLLECTIVE_NAMESPACES)
"""Prefixes of the names of the operators in `COLLECTIVE_NAMESPACES`."""

SCALED_MATMULS = ("aten::_scaled_mm",)
"""Matmuls whose first two arguments are the factors, followed by their scales."""

MATMULS = (
    *("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", "aten::addbmm"),
    *("aten::_int_mm", "aten::_grouped_mm", *SCALED_MATMULS),
)

CONVOLUTION = "convolution"
"""The virtual device's name for every convolution."""
