"""Which operators are worth capturing, and how to recompute only the last rows of one.

Expensive operators come in four kinds (DESIGN: "Row-cached recompute"):

| kind | operators | a fraction of rows? | recomputed? |
|---|---|---|---|
| `ROWS` | mm, addmm, bmm, baddbmm, grouped mm | yes | yes |
| `ATTENTION` | every scaled-dot-product backend, `flash_attn::*` | whole or none | where budgets leave nothing else |
| `COLLECTIVE` | functional ones, captured at `wait_tensor`; those of `c10d` that fill a tensor | whole | on all ranks |
| `CHOICE` | topk, sort, argmax, nonzero: the pick must not change | whole | never: rounding could pick differently |

Every other operator is cheap (`None`): captured only when a plan asks for it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

try:  # a torch without c10d has no exchanges
    from torch._C._distributed_c10d import FakeWork, Work
except ImportError:
    FakeWork = Work = None

aten = torch.ops.aten


class Kind(enum.Enum):
    """How an expensive operator may be captured; see the table above."""

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
# of `c10d`: each writes to its first argument, and ends before it returns unless `async_op` says otherwise
_FILLS = {"c10d::allreduce_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_"}
_ACCUMULATES = {"c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::broadcast_", "c10d::reduce_"}
_WRITES_NOTHING = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_"}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_RESHAPES = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::set_data", "aten::swap_"}
_WITHOUT_COMMUNICATION = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
_ATTENTION_NAMESPACES = {"flash_attn", "flash_attn_2", "flash_attn_3"}


@functools.cache
def kind_of(func: Any) -> Kind | None:
    """The kind of an operator (an `OpOverload`), None when it is cheap or must not be captured."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return None
    name = func._schema.name
    namespace, _, operator = name.partition("::")
    if name in _ROWS and func._overloadname in ("default", ""):
        return Kind.ROWS
    if name in _ATTENTION:
        return Kind.ATTENTION
    if namespace in _ATTENTION_NAMESPACES and "backward" not in operator and "bwd" not in operator:
        return Kind.ATTENTION if "forward" in operator or "fwd" in operator else None
    if name == "_c10d_functional::wait_tensor" or name in _FILLS:
        return Kind.COLLECTIVE
    return Kind.CHOICE if name in _CHOICE or f"{name}.{func._overloadname}" in _CHOICE else None


@functools.cache
def is_communication(func: Any) -> bool:
    """Whether other ranks take part: such an operator runs on every rank or on none."""
    if not isinstance(func, torch._ops.OpOverload) or func._schema.name in _WITHOUT_COMMUNICATION:
        return False
    return func.namespace in _COLLECTIVE_NAMESPACES


@functools.cache
def is_exchange(func: Any) -> bool:
    """Whether the operator is one of `c10d`: it writes to its arguments, although its schema does not say so."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d"


@functools.cache
def accumulates(func: Any) -> bool:
    """Whether an exchange reads what it writes to."""
    return func._schema.name in _ACCUMULATES


def is_over(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call of an exchange is waited for before anything else runs."""
    return not _argument(func, args, kwargs, "async_op", True)


def over(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Wait for an exchange that its caller would wait for at once; what the back end does then is no operator of the
    region. Returns what the caller gets instead of `out`.
    """
    if not is_over(func, args, kwargs) or not can_stand_in():
        return out
    boxed = out[-1] if isinstance(out, tuple) else out
    work = None if boxed is None else Work.unbox(boxed)
    if work is not None:  # NCCL leaves none behind where it ran on the caller's stream
        work.wait()
    return finished_exchange(func, args)


def finished_exchange(func: Any, args: Sequence[Any]) -> Any:
    """What an exchange returns that is over, its result in place."""
    work = Work.boxed(FakeWork())
    return (args[0], work) if len(func._schema.returns) > 1 else work


def can_stand_in() -> bool:
    """Whether this torch lets somebody else answer for an exchange; else all of them run in every recompute pass."""
    return FakeWork is not None and hasattr(Work, "boxed") and hasattr(Work, "unbox")


@functools.cache
def is_random(func: Any) -> bool:
    """Whether the operator may advance a random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


@functools.cache
def has_effects(func: Any) -> bool:
    """Whether the operator may do more than its outputs show: assertions, printing, higher-order operators."""
    return not isinstance(func, torch._ops.OpOverload) or not func._schema.returns


@functools.cache
def gives_python_value(func: Any) -> bool:
    """Whether Python gets a number from the values that the operator reads (`item`, `equal`)."""
    return torch.Tag.data_dependent_output in getattr(func, "tags", ())


@functools.cache
def has_dynamic_shape(func: Any) -> bool:
    """Whether the output's shape depends on values (`nonzero`, indexing with a mask)."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


@functools.cache
def is_factory(func: Any) -> bool:
    """Whether the operator makes a tensor out of nothing (`arange`, `zeros_like`, `new_empty`).

    Never captured: it costs next to nothing, others may be about to fill it, and torch's Python bindings wrap such an
    output anew when somebody else holds it, which would be one operator more than the recompute pass runs.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False
    operator = func._schema.name.partition("::")[2]
    reads = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return not reads or operator.endswith("_like") or operator.startswith("new_")


@functools.cache
def leaves_memory_blank(func: Any) -> bool:
    """Whether the output is memory that somebody else has to fill (`empty`)."""
    return isinstance(func, torch._ops.OpOverload) and func._schema.name in _EMPTY


@functools.cache
def is_mutable(func: Any) -> bool:
    """Whether the operator writes to one of its arguments."""
    return isinstance(func, torch._ops.OpOverload) and (func._schema.is_mutable or is_exchange(func))


def describe(name: str, overload: str) -> int:
    """What the native tape needs to know about an operator, as the bits of `Trait` in memplug/native/operators.h.

    Args:
        name: with its namespace, such as "aten::add".
        overload: such as "Tensor"; "" for the default one.
    """
    namespace, _, operator = name.partition("::")
    func = getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    exchange = is_exchange(func)
    traits = (
        is_communication(func),
        exchange,
        exchange and accumulates(func),
        exchange and name in _WRITES_NOTHING,
        is_random(func),
        has_effects(func),
        gives_python_value(func),
        leaves_memory_blank(func),
        name in _RESHAPES,
    )
    return sum(1 << bit for bit, holds in enumerate(traits) if holds)


@functools.cache
def is_ordinary(func: Any) -> bool:
    """Whether none of the above holds: the operator reads its inputs and makes its outputs, like most."""
    special = (is_communication, is_random, has_effects, gives_python_value, leaves_memory_blank, is_mutable)
    return not any(holds(func) for holds in special)


def returns_list(func: Any) -> bool:
    """Whether the operator returns a list of tensors as one value."""
    return isinstance(func._schema.returns[0].type, torch.ListType)


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a mutable operator writes in place."""
    if is_exchange(func):
        return [] if func._schema.name in _WRITES_NOTHING else list(tensors_in(args[:1]))
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                written.append(tensor)
    return written


def draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this call advances a random generator: an attention operator only does when its `dropout_p` is above
    zero.
    """
    return is_random(func) and bool(_argument(func, args, kwargs, "dropout_p", True))


def tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors of an argument list, and of the lists in it (operator schemas allow two levels of them)."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str, absent: Any) -> Any:
    """The value of an argument by name: its default where it was not given, `absent` where there is none."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return absent


def recompute_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: torch.Tensor, start: int) -> None:
    """Write rows `[start, n)` of a `ROWS` operator's output into `out`, whose rows `[0, start)` are there already.

    A row is an index of dimension 0: a token of mm, addmm and grouped mm, a batch element of bmm and baddbmm.
    """
    rows = out[start:]
    name = func._schema.name
    if name == "aten::mm":
        aten.mm.out(args[0][start:], args[1], out=rows)
    elif name == "aten::addmm":
        bias = args[0] if args[0].dim() < 2 or args[0].shape[0] == 1 else args[0][start:]
        aten.addmm.out(bias, args[1][start:], args[2], **kwargs, out=rows)
    elif name == "aten::bmm":
        aten.bmm.out(args[0][start:], args[1][start:], out=rows)
    elif name == "aten::baddbmm":
        bias = args[0] if args[0].dim() < 3 or args[0].shape[0] == 1 else args[0][start:]
        aten.baddbmm.out(bias, args[1][start:], args[2][start:], **kwargs, out=rows)
    else:
        rows.copy_(_grouped_rows(func, args, kwargs, start))


def _grouped_rows(func: Any, args: Sequence[Any], kwargs: dict[str, Any], start: int) -> torch.Tensor:
    """Rows `[start, n)` of `_grouped_mm(a, b, offs)` for a 2-D `a`: groups that end before `start` become empty."""
    offsets = (args[2] if len(args) > 2 else kwargs["offs"]) - start
    rest = {key: value for key, value in kwargs.items() if key != "offs"}
    return func(args[0][start:], args[1], offsets.clamp_(min=0), *args[3:], **rest)


def splits_by_rows(func: Any, args: Sequence[Any]) -> bool:
    """Whether this call of a `ROWS` operator can be recomputed from any row on: not a grouped mm over 3-D inputs."""
    return func._schema.name != "aten::_grouped_mm" or (args[0].dim() == 2 and args[1].dim() == 3)
