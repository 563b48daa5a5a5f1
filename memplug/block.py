"""The fields of the "memplug" block: defaults, units, bounds, and the allowed values in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from memplug import planners


def has_technique(name: str) -> bool:
    """Return whether this memplug contains the technique's folder."""
    return (Path(__file__).parent / name / "technique.py").exists()


@dataclass(frozen=True)
class Allowed:
    """The values that a field accepts, in words for error messages. Pydantic enforces them by the field's type."""

    text: str


# DeepSpeed files write sizes as 5e8, which JSON reads as a float.
Integral = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)

Switch = Annotated[bool, Field(strict=True), Allowed("true or false")]
WhereNeeded = Annotated[Switch | Literal["auto"], Allowed('true, false or "auto"')]
Number = Annotated[float, Field(strict=True)]
Text = Annotated[str, Field(strict=True, pattern=r"\S")]
Name = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]

Budget = Annotated[
    Literal["auto"] | Annotated[Number, Field(gt=0, allow_inf_nan=False)],
    Allowed('"auto" or a number of GiB above 0'),
]
Share = Annotated[Number, Field(ge=0, le=1), Allowed("a number from 0 to 1")]
Fraction = Annotated[Literal["auto", "memo"] | Share, Allowed('"auto", "memo" or a number from 0 to 1')]
Patterns = Annotated[
    Literal["auto"] | Annotated[tuple[Text, ...], Field(min_length=1)],
    Allowed('"auto" or a non-empty list of non-empty module-name patterns'),
]
Checkpointing = Annotated[Literal["replace", "refuse"], Allowed('"replace" or "refuse"')]
Bytes = Annotated[int, Field(strict=True, ge=0), Integral, Allowed("a whole number of bytes, 0 or more")]
Buffers = Annotated[int, Field(strict=True, ge=2), Integral, Allowed("a whole number, 2 or more")]
Steps = Annotated[int, Field(strict=True, ge=0), Integral, Allowed("a whole number of steps, 0 or more")]
Timeline = Annotated[Switch | Name, Allowed("false, true, or the name of a folder")]
Folder = Annotated[Literal[False] | Name, Allowed("false, or the name of a folder")]
Planner = Annotated[
    Literal[planners.names()], Allowed(f'"auto", or one of {planners.listed(mark=chr(34))}')  # type: ignore[valid-type]
]


class Section(BaseModel):
    """A section of the block. The docstrings of its fields are their descriptions in the JSON schema."""

    @staticmethod
    def _complete_schema(schema: dict[str, Any], model: "type[Section]") -> None:
        for field in schema["properties"].values():
            field["description"] = field["description"].replace("\n", " ")

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_complete_schema
    )

    @model_validator(mode="before")
    @classmethod
    def _as_dict(cls, section: object) -> object:
        """Accept any mapping."""
        return dict(section) if isinstance(section, Mapping) else section


class TechniqueSection(Section):
    """The section of a technique. The block's field that holds it has the name of the technique's folder."""

    enabled: WhereNeeded


class TokenwiseConfig(TechniqueSection):
    """Row-cached recompute: which rows of which tensors are swapped to host memory, and which are recomputed."""

    enabled: Switch = True
    """true or false. Switches row-cached recompute on, within an enabled memplug."""
    alpha: Fraction = "auto"
    """Fraction of the rows (tokens) of each captured tensor that is swapped to host memory; the rest is recomputed. A
    number from 0 (recompute all) to 1 (swap all), without unit; or "auto": chosen for each tensor from measured link
    and compute rates and the budgets; or "memo": the largest single fraction whose copies fit into each region's
    forward and into host memory (MEMO, section 4.1)."""
    checkpointing: Checkpointing = "replace"
    """What happens to activation checkpointing that the script asks for around a region. "replace": memplug takes it
    over, and gives it back when it detaches. "refuse": attaching, or the first such forward, is an error."""
    regions: Patterns = "auto"
    """The modules that run as regions. A non-empty list of glob patterns over whole names of modules, for example
    ["model.layers.*.self_attn", "model.layers.*.mlp"]: *, ? and [0-3] stay within one part of a name, and parts that
    wrappers insert may be left out. A pattern must match on at least one rank. Or "auto": every decoder layer of a
    Hugging Face or Megatron-Core model; in other models the modules that repeat (numbered children of one class)."""
    min_offload_bytes: Bytes = 1 << 20
    """Tensors smaller than this are never swapped. A whole number, 0 or more, in bytes."""
    buffers: Buffers = 2
    """Number of rounding buffers (MEMO, section 4.1). In forward: how many regions may have captured tensors on the
    device that are being offloaded; the next region waits for the oldest. In backward, without the planned arena: how
    many device buffers swapped tensors are prefetched into in turn, each as large as the swapped tensors of the largest
    region; they are reserved before the first step under a plan. With the arena nothing is reserved: the addresses are
    planned. A single buffer would prevent copies from overlapping with computation. A whole number, 2 or more."""


class ProfilerConfig(Section):
    """When to plan, and when to plan again: which steps count as another program (Chameleon, Algorithm 1)."""

    enabled: Switch = True
    """true or false. Compares the operators of each training step with those of the step before. With false only the
    sizes of the regions' inputs are compared."""
    warmup_steps: Steps = 2
    """memplug plans for a program once it has come again this often, in a row or not. A whole number of steps, 0 or
    more."""
    policy_steps: Steps = 5
    """How many plans are tried, each for one step, before the fastest is kept; with 0 the plan that is predicted to be
    the fastest is taken. A whole number of steps, 0 or more."""
    length_tolerance: Share = 0.05
    """A step whose number of operators differs by more than this share is another program. A step whose inputs exceed
    those that a plan is made for by more than this share needs another plan. A number from 0 to 1, without unit."""
    wait_for_plans: Switch = False
    """true or false. With true, training waits while a plan is made, so that every run adopts it at the same step; with
    false, another process makes it while training goes on."""
    cosine_similarity: Share = 0.95
    """A step is another program if the cosine similarity of its operators (counts of neighbouring pairs) is below this.
    A number from 0 to 1, without unit."""


class ArenaConfig(TechniqueSection):
    """The planned arena: reserved memory that serves training at planned addresses (STWeaver)."""

    enabled: Switch = True
    """true or false. Serves a training step from reserved memory, at planned addresses, once the program
    repeats; torch's own allocator serves the requests that are not in the plan."""
    planner: Planner = Field(
        default="auto",
        description='The planner that finds the addresses: "auto" for the lower result of search and exact within ten '
        f"seconds, less for a small arena, or one of {planners.listed(mark=chr(34))} alone.",
    )
    checks: Switch = False
    """true or false. Fills freed memory with a pattern (NaN), puts another pattern behind each block, and raises if one
    was overwritten: finds kernels that write outside of their memory. Slow."""


class SwapConfig(TechniqueSection):
    """The swap list: whole tensors of any kind that leave the device between two uses (Chameleon)."""

    enabled: WhereNeeded = "auto"
    """false, true or "auto". If a step needs more device memory than its budget, swaps whole tensors that no region
    swaps or recomputes: logits, embeddings, and all that models without regions save for backward. Until there is a
    plan, tensors are offloaded when a memory request fails, so that the step completes. Without a budget, or with a
    torch that is too old, "auto" is silent and true logs a warning."""
    min_bytes: Bytes = 1 << 20
    """Tensors smaller than this are never swapped. A whole number, 0 or more, in bytes."""
    states: Switch = False
    """true or false. Lets the list also swap tensors that the optimizer uses: its states, away from the beginning of
    the step until the optimizer runs; parameters that it updates and no region uses; and gradients until it runs.
    Refused together with DeepSpeed's own offloading of optimizer or parameters."""


class ReportConfig(Section):
    """Where memplug reports its counters."""

    monitor: Switch = True
    """true or false. Writes memplug's metrics to the monitor that DeepSpeed is configured with."""
    timeline: Timeline = False
    """false, or the folder for a trace of one step after each plan, for `memplug show`: operators, memory requests,
    phases, layers. true stands for "memplug_timeline", in the working directory."""
    snapshot_on_oom: Timeline = False
    """false, or the folder for a snapshot of the CUDA allocator when a step fails for lack of memory, for
    pytorch.org/memory_viz. true stands for "memplug_snapshots", in the working directory."""


class MemplugConfig(Section):
    """The "memplug" block. Frozen; every field has a default, and `{"enabled": true}` is the useful block."""

    enabled: Switch = False
    """true or false. Without it, or with false, memplug leaves the training run untouched."""
    device_budget_gib: Budget = "auto"
    """The most device memory of a rank that a step may use under a plan, all of the rank's memory counted. Outputs are
    kept instead of swapped up to this budget. A budget below the need of a step in which everything is swapped or
    recomputed is an error that names the least possible one. On the CPU the allocations of recorded steps are counted;
    with the swap list on, the budget is also a hard limit there, and exceeding it fails as on a GPU. A number of GiB
    (2**30 bytes) above 0, or "auto": 92 % of the memory that other processes leave; on the CPU nothing is kept."""
    host_budget_gib: Budget = "auto"
    """Host memory that a rank may use for swapped activations. A number of GiB (2**30 bytes) above 0, or "auto": 80 %
    of the host's available memory, shared by the ranks of a machine."""
    plan_dir: Folder = "memplug_plans"
    """The folder for memory plans, named by what they were made for, so that the next run of the same program need not
    plan again. A name, or false: plans are not kept."""
    tokenwise: Annotated[TokenwiseConfig, Allowed('an object such as {"alpha": "auto"}')] = TokenwiseConfig()
    """Row-cached recompute. An object."""
    profiler: Annotated[ProfilerConfig, Allowed('an object such as {"warmup_steps": 2}')] = ProfilerConfig()
    """When to plan, and when to plan again. An object."""
    swap: Annotated[SwapConfig, Allowed('an object such as {"enabled": "auto"}')] = SwapConfig()
    """The swap list. An object."""
    arena: Annotated[ArenaConfig, Allowed('an object such as {"planner": "auto"}')] = ArenaConfig()
    """The planned arena. An object."""
    report: Annotated[ReportConfig, Allowed('an object such as {"monitor": true}')] = ReportConfig()
    """Where memplug reports its counters. An object."""

    @property
    def active(self) -> bool:
        """Return whether memplug has anything to do: it is enabled, and so is one of its techniques."""
        return self.enabled and any(self.asks_for(name) for name in TECHNIQUES)

    def asks_for(self, technique: str) -> bool:
        """Return whether a technique is on, or is to be used where it is needed ("auto")."""
        return bool(getattr(self, technique).enabled)

    def with_only(self, *techniques: str) -> "MemplugConfig":
        """Return a copy of the block in which all techniques but these are switched off."""
        others = [name for name in TECHNIQUES if name not in techniques]
        return self.model_copy(
            update={name: getattr(self, name).model_copy(update={"enabled": False}) for name in others}
        )

    @model_validator(mode="after")
    def _has_what_it_enables(self) -> "MemplugConfig":
        for name in TECHNIQUES if self.enabled else ():
            if getattr(self, name).enabled is True and not has_technique(name):
                problem = "memplug.{name}.enabled: got true; allowed: false, as the folder memplug/{name} is not there"
                raise PydanticCustomError("absent", problem, {"name": name})
        return self


_sections = {
    name: field.default for name, field in MemplugConfig.model_fields.items() if isinstance(field.default, Section)
}

TECHNIQUES = tuple(name for name, section in _sections.items() if isinstance(section, TechniqueSection))
"""Names of the techniques, in the order of the block's fields: each has a section and a folder of that name."""

SECTIONS: dict[str, type[Section]] = {f"{name}.": type(section) for name, section in reversed(_sections.items())}
"""The section models, by the prefix of their fields' names ("arena."). The block itself, with prefix "", is last."""
SECTIONS[""] = MemplugConfig
