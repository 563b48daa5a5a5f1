"""Names of operators that several rooms tell apart."""

from __future__ import annotations

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
"""Of the operators in which other ranks take part, or that wait for such."""

COLLECTIVES = tuple(f"{namespace}::" for namespace in COLLECTIVE_NAMESPACES)
"""What their names begin with."""

SCALED_MATMULS = ("aten::_scaled_mm",)
"""Matrix products whose factors come first, with scales behind them."""

MATMULS = (
    *("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", "aten::addbmm"),
    *("aten::_int_mm", "aten::_grouped_mm", *SCALED_MATMULS),
)

CONVOLUTION = "convolution"
"""What the virtual device calls every convolution."""
