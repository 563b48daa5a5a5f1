"""All errors that a user of memplug can see, each with advice; imports nothing from memplug."""

import copyreg
import math
from collections.abc import Sequence


class MemplugError(Exception):
    """Base class of memplug's errors: what is wrong, and what to do about it.

    Args:
        problem: One sentence that says what is wrong, with the names and values concerned; also an attribute.
        advice: What to do next; also an attribute. By default the advice of the class.
        code: The section of examples/troubleshooting.md that says more, such as "MP012"; also an attribute.
    """

    default_advice = "Run `memplug doctor` and attach its output to a bug report."

    def __init__(self, problem: str, advice: str | None = None, *, code: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice or self.default_advice
        self.code = code

    def __str__(self) -> str:
        """Return the problem, the advice and, if there is one, the code."""
        text = f"{self.problem}\nWhat to do: {self.advice}"
        return coded(self.code, text) if self.code else text

    def __reduce__(self) -> tuple:
        """Support pickling."""
        # Exception's own method would call the class with `args`, which does not match the subclasses' signatures: an
        # error raised in a worker process would reach its parent as a TypeError about unpickling.
        return copyreg.__newobj__, (type(self), self.problem), self.__dict__


def coded(code: str, text: str) -> str:
    """Return the text of an error or warning followed by the code of its section in examples/troubleshooting.md."""
    return f"{text} [{code}]"


class ConfigError(MemplugError):
    """The "memplug" block, or the file that should hold it, cannot be used; lists all problems at once.

    Args:
        problems: At least one, each in one sentence; also an attribute.
        advice: See `MemplugError`.
    """

    default_advice = (
        "Correct the block and try again; `memplug check FILE` checks it without a GPU, `memplug check --schema` "
        "prints the JSON schema."
    )

    def __init__(self, problems: Sequence[str], advice: str | None = None) -> None:
        assert problems and not isinstance(problems, str), "a sequence of at least one problem"
        self.problems: tuple[str, ...] = tuple(problems)
        if len(self.problems) == 1:
            text = f"memplug's configuration cannot be used: {self.problems[0]}"
        else:
            text = "\n  - ".join([f"memplug's configuration has {len(self.problems)} problems:", *self.problems])
        super().__init__(text, advice)


class BudgetError(MemplugError):
    """Even the safest setting, which swaps or recomputes everything, does not keep a step within `device_budget_gib`.

    Args:
        least_gib: Device memory of a step at the safest setting, in GiB.
        rank: The rank whose step needs this much.
        asked_gib: The budget in that rank's block, in GiB.

    Attributes:
        least_gib: The smallest possible budget: the argument, rounded up to three significant digits.
    """

    def __init__(self, least_gib: float, rank: int, asked_gib: float) -> None:
        digit = 10.0 ** (math.floor(math.log10(least_gib)) - 2)
        self.least_gib = float(f"{math.ceil(least_gib / digit) * digit:.3g}")
        super().__init__(
            f'"device_budget_gib" is {asked_gib:g}, and on rank {rank} a step takes {self.least_gib:g} GiB of device '
            "memory even if everything is swapped or recomputed",
            f'Set "device_budget_gib" to {self.least_gib:g} or more, or to "auto"; or let a step take less: a shorter '
            "sequence, a smaller micro-batch, optimizer states in fewer bytes or on more ranks.",
            code="MP011",
        )


class UnsupportedVersionError(MemplugError):
    """An installed package is too old or too new for memplug."""

    default_advice = "Install a version in the range that the message names; `memplug doctor` lists what is installed."


class HardwareError(MemplugError):
    """A hardware profile cannot be read, or torch cannot register the virtual device."""

    default_advice = (
        "Start from a profile in configs/hardware, or let `memplug doctor --measure FILE` write one. The virtual "
        "device needs a process in which no other vendor's device is registered with torch."
    )


class EstimateError(MemplugError):
    """A step cannot be estimated: an operator needs values, and the virtual device has none."""

    default_advice = (
        "Estimate a module without that operator. Or record a step of a real run: for the estimate the values that it "
        "reads (`memplug.record_values`), for `memplug show` and `memplug plan` the whole step (`session.record`)."
    )


class RegionError(MemplugError):
    """No decoder layers were recognised, a pattern matches no module, or a region contains another."""

    default_advice = (
        'Name the regions yourself: set "tokenwise.regions" to a list of module-name patterns as '
        '`model.named_modules()` spells them, for example ["model.layers.*.self_attn", "model.layers.*.mlp"]; '
        "no region may contain another."
    )


class ConflictError(MemplugError):
    """Another library's checkpointing or offloading is on, and would handle the tensors that memplug handles."""

    default_advice = "Switch the other one off, or memplug: they cannot share a layer."


class PatchError(MemplugError):
    """A symbol that memplug patches does not exist in the installed version of its package.

    Args:
        symbol: Full dotted path of the symbol; also an attribute.
        expected: The package and versions in which it is known to exist, for example "deepspeed 0.16 to 0.19"; also an
            attribute.
        advice: See `MemplugError`.
    """

    default_advice = (
        "Install a version in that range, or attach to the model yourself with `memplug.attach(model, config)`."
    )

    def __init__(self, symbol: str, expected: str, advice: str | None = None) -> None:
        self.symbol = symbol
        self.expected = expected
        super().__init__(f"`{symbol}`, which memplug patches, was not found; it is expected as in {expected}.", advice)


class RecomputeError(MemplugError):
    """The recompute pass ran other operators than the forward, so the saved rows cannot be matched."""

    default_advice = (
        "Make the region's forward depend only on its inputs, parameters and the random state: no counters, "
        'caches or data-dependent branches. Or leave that region out of "tokenwise.regions".'
    )


class InPlaceError(MemplugError, RuntimeError):
    """A tensor that backward needs was modified in place; a `RuntimeError`, like autograd's own error."""

    default_advice = (
        'Replace the in-place operation by its out-of-place form, or leave that region out of "tokenwise.regions".'
    )


class RanksError(MemplugError):
    """Some ranks of a model attach to it, or end a step, while others do not."""

    default_advice = (
        "Attach on every rank that trains the model, the same number of times. If some ranks of the job do not train "
        "it, say which do: `memplug.attach(model, config, group=group)`, with a process group or the list of ranks."
    )


class TraceError(MemplugError):
    """A trace cannot be read or written, or is not a possible recording: indices out of range, a double free."""

    default_advice = "Record it again, or give the path of another trace that memplug has saved (.npz)."


class LayoutError(MemplugError):
    """Buffers cannot be placed (no size, no lifetime), or a file of buffers or of a plan cannot be read."""

    default_advice = "Give each buffer a size above 0 and a lifetime that ends after it begins (half open)."


class NativeError(MemplugError):
    """The native core cannot be built or loaded on this machine; memplug goes on without the features that need it."""

    default_advice = (
        "Install a C++ compiler (g++ or clang++, C++20) and `pip install ninja`, then run `memplug doctor`, which "
        "builds the core and shows what the compiler says."
    )


class RecorderError(MemplugError):
    """The recorder is already in use, or cannot make this recording on this device."""

    default_advice = "A process has one recorder: first detach the session that uses it."


class SwapError(MemplugError):
    """No swap list keeps a step within its budgets, or this machine or model cannot be trained with one."""

    default_advice = 'Set "swap": {"enabled": false}, which leaves all tensors where they are.'


class TuneError(MemplugError):
    """`memplug tune` has no model or no GPU to tune for, or no DeepSpeed configuration fits."""

    default_advice = "See `memplug tune --help`."


class ArenaError(MemplugError):
    """The planned arena cannot be used on this machine, or a kernel wrote to arena memory that is not its own."""

    default_advice = 'Set "arena": {"enabled": false}, which leaves all memory to torch\'s own allocator.'
