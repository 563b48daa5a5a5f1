"""Tells which operators are worth capturing, and the traits of each operator for the native tape.

Expensive operators come in four kinds (memplug/README.md, "Swapping and recomputing"):

| kind | operators | a fraction of rows? | recomputed? |
|---|---|---|---|
| `ROWS` | mm, addmm, bmm, baddbmm, grouped mm | yes | yes |
| `ATTENTION` | every scaled-dot-product backend, `flash_attn*::*` | whole or none | if budgets leave no other way |
| `COLLECTIVE` | functional ones, captured at `wait_tensor`; those of `c10d` that fill a tensor | whole | on all ranks |
| `CHOICE` | topk, sort, argmax, nonzero: the pick must not change | whole | never: rounding could pick differently |

Every other operator is cheap (`None`): it is captured only when a plan asks for it. A library's own operator that
launches collectives and waits for them, such as that of DeepSpeed's Ulysses attention for Hugging Face models, is
detected when it runs, and counts as a `COLLECTIVE` from then on (native/tape/observer.cpp).
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memplug.profile.operator_names import COLLECTIVE_NAMESPACES
from memplug.torch_private import OpOverload


class CaptureKind(enum.Enum):
    """A kind of expensive operator, by how it may be captured; see the table above."""

    ROWS = "rows"
    ATTENTION = "attention"
    COLLECTIVE = "collective"
    CHOICE = "choice"


_ROWS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_grouped_mm",
}
_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
}
_DROPOUT = {"dropout_p", "p_dropout"}
_CHOICE = {
    "aten::topk",
    "aten::sort",
    "aten::argsort",
    "aten::argmax",
    "aten::argmin",
    "aten::max.dim",
    "aten::min.dim",
    "aten::multinomial",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::_unique2",
}
# `c10d` operators that write to their first argument; a call waits for the result, unless `async_op` is set
_FILLS = {"c10d::allreduce_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"}
# `c10d` operators that read the memory they write to; a broadcast does if this rank sends (native/tape/unfilled.cpp)
_READS_WRITTEN = {"c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::reduce_", "c10d::broadcast_"}
# torch's in-place operators that write all elements without reading them
_OVERWRITES = {
    *(f"aten::{name}_" for name in ("copy", "fill", "zero", "_foreach_copy", "_foreach_zero")),
    *(f"aten::{name}_" for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal")),
    *(f"aten::{name}_" for name in ("normal", "random", "uniform", "_philox_normal", "_philox_uniform")),
}
_PARTIAL = {"aten::index_put_", "aten::_index_put_impl_", "aten::index_copy_", "aten::scatter_"}
_WRITES_NOTHING = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_"}
# operators that write to the running mean and variance in training, although their schemas do not say so
_STATISTICS = {
    *(f"aten::{name}_batch_norm" for name in ("native", "cudnn", "miopen")),
    *(f"aten::batch_norm_{name}" for name in ("update_stats", "gather_stats", "gather_stats_with_counts")),
}
_EMPTY = {
    *(f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "empty_permuted")),
    *(f"aten::{name}" for name in ("new_empty", "new_empty_strided")),
}
_RESHAPES = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data", "aten::swap_"}
_DUAL = {"aten::_make_dual", "aten::_make_dual_copy"}
_DETACH = "aten::detach_"  # its name says in place, but it only takes a tensor out of the graph
_LIFT = "aten::lift_fresh"  # the last operator of torch.tensor([1, 2]) (native/tape/literals.cpp)
_WAIT = "_c10d_functional::wait_tensor"
_WITHOUT_COMMUNICATION = {_WAIT, "_c10d_functional::_wrap_tensor_autograd"}
_FLASH_ATTENTION = (
    "flash_attn"  # part of the namespaces flash_attn, flash_attn_3, and _flash_attn2_588b404 of Hugging Face's hub
)
PART_OF_UNIT = "memplug::of_unit"
_UNITS = {"memplug::unit", "memplug::unit_"}  # the second one writes to its arguments
_KINDS = {
    **dict.fromkeys(("rows", "whole", "whole_shared"), CaptureKind.ROWS),
    **dict.fromkeys(("attention", "attention_shared"), CaptureKind.ATTENTION),
    "exchange": CaptureKind.COLLECTIVE,
    "choice": CaptureKind.CHOICE,
}
"""Kind of a unit's part, by the part's overload (native/units/units.cpp)."""


@functools.cache
def kind_of(func: Any) -> CaptureKind | None:
    """Return the kind of an operator (an `OpOverload`); None if it is cheap or must not be captured."""
    if not isinstance(func, OpOverload) or (func._schema.is_mutable and not _may_write_nothing(func)):
        return None
    name = func._schema.name
    namespace, _, operator = name.partition("::")
    if name == PART_OF_UNIT:
        return _KINDS.get(func._overloadname)
    if name in _ROWS and func._overloadname in ("default", ""):
        return CaptureKind.ROWS
    if name in _ATTENTION:
        return CaptureKind.ATTENTION
    if _FLASH_ATTENTION in namespace and "backward" not in operator and "bwd" not in operator:
        return CaptureKind.ATTENTION if "forward" in operator or "fwd" in operator else None
    if name == _WAIT or name in _FILLS:
        return CaptureKind.COLLECTIVE
    return CaptureKind.CHOICE if name in _CHOICE or f"{name}.{func._overloadname}" in _CHOICE else None


def _may_write_nothing(func: Any) -> bool:
    """Return whether all arguments that an operator writes to are optional, like the result of `flash_attn_3::fwd`.

    A call without these arguments is pure. A call with one of them writes, so its outputs are not captured
    (native/tape/forward.cpp, `classify`).
    """
    written = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return bool(func._schema.returns) and all(isinstance(each.type, torch.OptionalType) for each in written)


def is_communication(func: Any) -> bool:
    """Return whether other ranks take part: such an operator runs on every rank or on none."""
    if not isinstance(func, OpOverload) or func._schema.name in _WITHOUT_COMMUNICATION:
        return False
    if func._schema.name in _UNITS:
        return func._overloadname == "shared"
    return func.namespace in COLLECTIVE_NAMESPACES


def is_unit(func: Any) -> bool:
    """Return whether the operator stands for a unit (native/units/unit.h)."""
    return isinstance(func, OpOverload) and func._schema.name in _UNITS


def is_part_of_unit(func: Any) -> bool:
    """Return whether the operator stands for one storage that a unit made (native/units/unit.h)."""
    return isinstance(func, OpOverload) and func._schema.name == PART_OF_UNIT


def is_shared(func: Any) -> bool:
    """Return whether the operator stands for a storage made by a unit that communicates.

    All ranks must capture the same storages of such a unit.
    """
    return is_part_of_unit(func) and func._overloadname.endswith("shared")


@functools.cache
def is_exchange(func: Any) -> bool:
    """Return whether the operator is one of `c10d`: it writes to its arguments, although its schema does not say so."""
    return isinstance(func, OpOverload) and func.namespace == "c10d"


def fills(func: Any) -> bool:
    """Return whether the operator writes all elements of the tensors that it writes to, and reads none of them.

    memplug assumes this of operators that are not torch's own, unless their names say that they work in place.
    """
    if not is_mutable(func) or is_exchange(func):
        return is_exchange(func) and func._schema.name not in _READS_WRITTEN
    if func.namespace != "aten":
        return not func._schema.name.endswith("_")
    if func._schema.name in _STATISTICS:
        return False
    written = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return func._schema.name in _OVERWRITES or all(each.kwarg_only or each.name == "out" for each in written)


def fills_in_part(func: Any) -> bool:
    """Return whether the operator reads nothing of a tensor that it writes to, and may write only a part of it.

    Such operators write the elements that indices name, or write nothing and change the shape.
    """
    if not is_mutable(func) or "reduce" in func._overloadname:
        return False
    return func._schema.name in _PARTIAL or torch.Tag.inplace_view in func.tags


def is_random(func: Any) -> bool:
    """Return whether the operator may advance a random generator.

    Attention of other libraries may draw random numbers (dropout) although it lacks torch's tag for that.
    """
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return True
    return kind_of(func) is CaptureKind.ATTENTION and any(each.name in _DROPOUT for each in func._schema.arguments)


def has_effects(func: Any) -> bool:
    """Return whether the operator may do more than its outputs show: assertions, printing, higher-order operators."""
    return not isinstance(func, OpOverload) or not func._schema.returns


def gives_python_value(func: Any) -> bool:
    """Return whether Python gets a number from the values that the operator reads (`item`, `equal`)."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())


@functools.cache
def is_factory(func: Any) -> bool:
    """Return whether the operator makes a tensor out of nothing (`arange`, `zeros_like`, `new_empty`).

    Its output is never captured: the operator costs next to nothing, and others may be about to fill the output.
    """
    if not isinstance(func, OpOverload):
        return False
    operator = func._schema.name.partition("::")[2]
    reads = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return not reads or operator.endswith("_like") or operator.startswith("new_")


def leaves_memory_blank(func: Any) -> bool:
    """Return whether the output is memory that another operator has to fill (`empty`)."""
    return isinstance(func, OpOverload) and func._schema.name in _EMPTY


@functools.cache
def is_mutable(func: Any) -> bool:
    """Return whether the operator writes to memory of one of its arguments."""
    if not isinstance(func, OpOverload) or func._schema.name == _DETACH:
        return False
    return func._schema.is_mutable or is_exchange(func) or func._schema.name in _STATISTICS


@functools.cache
def named(name: str, overload: str) -> Any:
    """Return the operator (an `OpOverload`) with this name and overload.

    Args:
        name: with its namespace, such as "aten::add".
        overload: such as "Tensor"; "" for the default one.
    """
    namespace, _, operator = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")


def describe(name: str, overload: str) -> int:
    """Return the traits of an operator for the native tape, as the bits of `Trait` in native/tape/operators.h.

    Args:
        name: with its namespace, such as "aten::add".
        overload: such as "Tensor"; "" for the default one.
    """
    func = named(name, overload)
    exchange = is_exchange(func)
    traits = (
        is_communication(func),
        exchange,
        fills(func),
        exchange and name in _WRITES_NOTHING,
        is_random(func),
        has_effects(func),
        gives_python_value(func),
        leaves_memory_blank(func),
        name in _RESHAPES,
        is_factory(func),
        name == _WAIT,
        *(kind_of(func) is kind for kind in CaptureKind),
        fills_in_part(func),
        name in _UNITS,
        name == PART_OF_UNIT,
        name == PART_OF_UNIT and overload.endswith("shared"),
        name == _LIFT,
        name in _STATISTICS,
        name in _DUAL,
    )
    return sum(1 << bit for bit, holds in enumerate(traits) if holds)


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument list, and of the lists in it (operator schemas allow two levels of them)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
