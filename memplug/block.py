"""The fields of the "memplug" block: defaults, units, bounds, and what is allowed in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from memplug import planners


def has_technique(name: str) -> bool:
    """Whether its room is in this memplug."""
    return (Path(__file__).parent / name / "technique.py").exists()


@dataclass(frozen=True)
class Allowed:
    """What a field accepts, in words: the error's counterpart of the bounds beside it."""

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
Bytes = Annotated[int, Field(strict=True, ge=0), Integral, Allowed("a whole number of bytes, 0 or more")]
Buffers = Annotated[int, Field(strict=True, ge=2), Integral, Allowed("a whole number, 2 or more")]
Steps = Annotated[int, Field(strict=True, ge=0), Integral, Allowed("a whole number of steps, 0 or more")]
Timeline = Annotated[Switch | Name, Allowed("false, true, or the name of a folder")]
Folder = Annotated[Literal[False] | Name, Allowed("false, or the name of a folder")]
Planner = Annotated[
    Literal[planners.names()], Allowed(f'"auto", or one of {planners.listed(mark=chr(34))}')  # type: ignore[valid-type]
]


class Section(BaseModel):
    """An object of the block, whose fields' docstrings are their descriptions in the JSON schema."""

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
        """Any mapping will do."""
        return dict(section) if isinstance(section, Mapping) else section


class TechniqueSection(Section):
    """The section of a technique, whose room has the section's name."""

    enabled: WhereNeeded


class TokenwiseConfig(TechniqueSection):
    """Row-cached recompute: which rows of which tensors are swapped to host memory, which are recomputed."""

    enabled: Switch = True
    """true or false. Switches row-cached recompute on within an enabled memplug."""
    alpha: Fraction = "auto"
    """Fraction of the rows (tokens) of each captured tensor that is swapped to host memory; the rest is recomputed. A
    number from 0 (recompute all) to 1 (swap all), without unit, or "auto": chosen per tensor from measured link and
    compute rates and the budgets, or "memo": the largest one fraction whose copies fit into each region's forward and
    into host memory (MEMO, section 4.1)."""
    regions: Patterns = "auto"
    """The modules that run as regions. A non-empty list of glob patterns over whole names of modules, in which *, ? and
    [0-3] stay within one part of a name, and parts that wrappers put in may be left out, for example
    ["model.layers.*.self_attn", "model.layers.*.mlp"], or "auto": every decoder layer of a Hugging Face or
    Megatron-Core model."""
    min_offload_bytes: Bytes = 1 << 20
    """Tensors below this many bytes are never swapped. A whole number, 0 or more, in bytes."""
    buffers: Buffers = 2
    """Rounding buffers (MEMO, section 4.1). In forward: how many regions' captured tensors are on the device while they
    leave for the host; the next region waits for the oldest. In backward, without the planned arena: as many buffers of
    device memory, each for what the largest region swaps, that tensors are prefetched into in turn, reserved before the
    first step under a plan. With the arena nothing is reserved: their addresses are planned. With one, no copy would
    overlap with computation. A whole number, 2 or more."""


class ProfilerConfig(Section):
    """When to plan, and when to plan anew: what counts as another program (Chameleon, Algorithm 1)."""

    enabled: Switch = True
    """true or false. Compares the operators of each training step with those of the last. With false only the sizes of
    the regions' inputs are compared."""
    warmup_steps: Steps = 2
    """The program is planned for once this many steps were like the one before. A whole number of steps, 0 or more."""
    policy_steps: Steps = 5
    """How many plans are tried, each for one step, before the fastest is kept; with 0 the one that should be the
    fastest is taken. A whole number of steps, 0 or more."""
    length_tolerance: Share = 0.05
    """A step whose number of operators, or size of the regions' inputs, differs by more than this share is another
    program. A number from 0 to 1, without unit."""
    wait_for_plans: Switch = False
    """true or false. With true, training waits while a plan is made, so that every run adopts it at the same step; else
    another process makes it, and training goes on meanwhile."""
    cosine_similarity: Share = 0.95
    """A step is another program where the cosine similarity of its operators (counts of neighbouring pairs) falls below
    this. A number from 0 to 1, without unit."""


class ArenaConfig(TechniqueSection):
    """The planned arena: training is served from one block of memory, at addresses that were planned (STWeaver)."""

    enabled: Switch = True
    """true or false. Serves the memory of a training step from one block at planned addresses, once the program
    repeats; what is not in the plan is left to torch's own allocator."""
    planner: Planner = Field(
        default="auto",
        description='Who finds the addresses: "auto" for the lowest of search and exact within ten seconds, sooner for '
        f"a small arena, or one of {planners.listed(mark=chr(34))} alone.",
    )
    checks: Switch = False
    """true or false. Fills memory that was freed with a pattern (NaN), puts another behind each block, and raises where
    one was written over: for finding kernels that write where they must not. Slow."""


class SwapConfig(TechniqueSection):
    """The swap list: tensors of any kind that are away from the device, whole, between two uses (Chameleon)."""

    enabled: WhereNeeded = "auto"
    """false, true or "auto". Swaps tensors that no region swaps or recomputes, whole, where a step takes more of the
    device than its budget without: logits, embeddings, whatever models without regions save for backward. Until there
    is a plan, tensors leave where a request for memory fails, so that the step completes. With "auto" nothing is said
    where there is no budget, or torch is too old; with true a warning says so."""
    min_bytes: Bytes = 1 << 20
    """Tensors below this many bytes are never swapped. A whole number, 0 or more, in bytes."""
    states: Switch = False
    """true or false. The list may have what the optimizer uses too: its states, away from the step's beginning until it
    runs, parameters that it updates and no region uses, and gradients until it runs. Refused beside DeepSpeed's own
    offloading of optimizer or parameters."""


class ReportConfig(Section):
    """Where memplug's counters go."""

    monitor: Switch = True
    """true or false. Writes memplug's metrics to the monitor that DeepSpeed is configured with."""
    timeline: Timeline = False
    """false, or the folder that a trace of one step goes to after each plan, for `memplug show`: operators, requests
    for memory, phases, layers. true stands for "memplug_timeline", in the working directory."""
    snapshot_on_oom: Timeline = False
    """false, or the folder that a snapshot of the CUDA allocator goes to when a step runs out of memory for good, for
    pytorch.org/memory_viz. true stands for "memplug_snapshots", in the working directory."""


class MemplugConfig(Section):
    """The "memplug" block. Frozen; every field has a default, and `{"enabled": true}` is the useful block."""

    enabled: Switch = False
    """true or false. Without it, or with false, memplug leaves the training run untouched."""
    device_budget_gib: Budget = "auto"
    """The most device memory of a rank that a step may take under a plan, all of it counted (on the CPU, what recorded
    steps allocate; with the swap list on, the CPU then has no more, and fails as a GPU does); up to it, outputs are
    kept instead of swapped. Less than a step takes in which everything is swapped or recomputed is an error, which
    names the least. A number of GiB (2**30 bytes) above 0, or "auto": 92 % of what other processes leave; on the
    CPU nothing is kept."""
    host_budget_gib: Budget = "auto"
    """Host memory that a rank may use for swapped activations. A number of GiB (2**30 bytes) above 0, or "auto": 80 %
    of what the host has available, shared by the ranks of a machine."""
    plan_dir: Folder = "memplug_plans"
    """The folder that memory plans are kept in, by what they were made for, so that the next run of the same program
    need not make them. A name, or false: they are not kept."""
    tokenwise: Annotated[TokenwiseConfig, Allowed('an object such as {"alpha": "auto"}')] = TokenwiseConfig()
    """Row-cached recompute. An object."""
    profiler: Annotated[ProfilerConfig, Allowed('an object such as {"warmup_steps": 2}')] = ProfilerConfig()
    """When to plan, and when to plan anew. An object."""
    swap: Annotated[SwapConfig, Allowed('an object such as {"enabled": "auto"}')] = SwapConfig()
    """The swap list. An object."""
    arena: Annotated[ArenaConfig, Allowed('an object such as {"planner": "auto"}')] = ArenaConfig()
    """The planned arena. An object."""
    report: Annotated[ReportConfig, Allowed('an object such as {"monitor": true}')] = ReportConfig()
    """Where memplug's counters go. An object."""

    @property
    def active(self) -> bool:
        """Whether there is anything to do: enabled, and one of the techniques is."""
        return self.enabled and any(self.asks_for(name) for name in TECHNIQUES)

    def asks_for(self, technique: str) -> bool:
        """Whether a technique is not switched off."""
        return bool(getattr(self, technique).enabled)

    def with_only(self, *techniques: str) -> "MemplugConfig":
        """Returns the block with every technique but these switched off; these stay as they are."""
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
"""Each is a section of the block, and a room of that name; in the order of the block's fields."""

SECTIONS: dict[str, type[Section]] = {f"{name}.": type(section) for name, section in reversed(_sections.items())}
SECTIONS[""] = MemplugConfig
"""The models, by what their fields' names begin with; the block itself is last."""
