"""What memory is accounted to in a picture: phases and layers in words, under few names, each with its colour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from memplug.profile.trace import Layer, Pass, Phase
from memplug.show.figure import Group

BEFORE = "before the recording"
OUTSIDE = "outside of layers"
AT_MOST = 8  # groups of layers, or of phases of one kind


class _Kind(NamedTuple):
    """A kind of phase in words and in letters, and the colours of its first and its last group."""

    words: str
    letters: str
    first_colour: str
    last_colour: str


PASSES = {  # from the bottom of the stack: what lives longest first
    Pass.OTHER: _Kind("between passes", "", "#b9b2a6", "#b9b2a6"),
    Pass.OPTIMIZER: _Kind("optimizer", "opt", "#3f8f5b", "#3f8f5b"),
    Pass.NO_GRAD: _Kind("forward without gradients", "V", "#8c8f3f", "#8c8f3f"),
    Pass.FORWARD: _Kind("forward", "F", "#2166a5", "#9cc8e8"),
    Pass.BACKWARD: _Kind("backward", "B", "#c8520f", "#fbc58b"),
    Pass.EITHER: _Kind("forward or backward", "P", "#6a4c9c", "#d0c1e8"),
}
_BEFORE_COLOUR, _OUTSIDE_COLOUR = "#7f7f7f", "#c9c4bb"
# Even in lightness, and told apart by colour-blind readers (the anchors of viridis, without its palest end).
_LAYER_COLOURS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#e8d92b")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups from the bottom of the stack up, and what falls into which."""

    groups: tuple[Group, ...]  # the first is what was allocated before the recording
    of: np.ndarray  # int64, the group of each phase, or of each layer; one more at the end, for index -1


def phase_words(phase: Phase) -> str:
    """For example "backward of micro-batch 1"; of a phase that may be either pass, "forward or backward 3"."""
    words = PASSES[phase.kind].words
    if phase.micro_batch < 0:
        return words
    return (
        f"{words} {phase.micro_batch}" if phase.kind == Pass.EITHER else f"{words} of micro-batch {phase.micro_batch}"
    )


def phase_letters(phase: Phase) -> str:
    """Where there is no room for words: "F0", "B0", "opt"; "P3" for a phase that may be either pass."""
    return PASSES[phase.kind].letters + (str(phase.micro_batch) if phase.micro_batch >= 0 else "")


def by_phase(phases: Sequence[Phase]) -> Grouping:
    """Groups phases by kind and micro-batch; many micro-batches share a group with their neighbours."""
    groups = [Group(BEFORE, _BEFORE_COLOUR)]
    of = np.zeros(len(phases) + 1, np.int64)
    for kind, (_, _, *colours_of_it) in PASSES.items():
        members = sorted({phase.micro_batch for phase in phases if phase.kind == kind})
        shares = _shares(len(members), AT_MOST)
        colours = _colours(colours_of_it, len(shares))
        for (first, last), colour in zip(shares, colours, strict=True):
            label = phase_words(Phase(kind, members[first]))
            if last > first:
                label = label.replace("micro-batch ", "micro-batches ") + f"-{members[last]}"
            held = set(members[first : last + 1])
            of[[i for i, phase in enumerate(phases) if phase.kind == kind and phase.micro_batch in held]] = len(groups)
            groups.append(Group(label, colour))
    return Grouping(tuple(groups), of)


def by_layer(layers: Sequence[Layer]) -> Grouping:
    """Groups layers in their order, at most AT_MOST groups; what lies outside of layers is one more."""
    groups = [Group(BEFORE, _BEFORE_COLOUR), Group(OUTSIDE, _OUTSIDE_COLOUR)]
    of = np.ones(len(layers) + 1, np.int64)
    names = short_names(layers)
    shares = _shares(len(layers), AT_MOST)
    for (first, last), colour in zip(shares, layer_colours(len(shares)), strict=True):
        of[first : last + 1] = len(groups)
        groups.append(Group(range_words(names[first], names[last]), colour))
    return Grouping(tuple(groups), of)


def layer_colours(count: int) -> list[str]:
    """A sequential colour map over `count` layers, "#rrggbb" each."""
    return _colours(_LAYER_COLOURS, count)


def is_dark(colour: str) -> bool:
    """Whether white letters read better than black on "#rrggbb" (ITU-R BT.601 luma)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def short_names(layers: Sequence[Layer]) -> list[str]:
    """The names without the dotted prefix that all share: "3" for model.layers.3; the root module has no name."""
    names = [layer.name for layer in layers]
    prefix = commonprefix(names)
    cut = prefix.rfind(".") + 1
    return [name[cut:] or name or "(root)" for name in names]


def layer_words(name: str) -> str:
    """A short name as it stands alone: "layer 3"."""
    return f"layer {name}" if name.isdigit() else name


def range_words(first: str, last: str) -> str:
    """From one short name to another, such as "layers 0-3"."""
    if first == last:
        return layer_words(first)
    return f"layers {first}-{last}" if first.isdigit() and last.isdigit() else f"{first} to {last}"


def _shares(count: int, at_most: int) -> list[tuple[int, int]]:
    """Cuts `count` things in a row into at most `at_most` shares of equal length, but for the last: (first, last)."""
    length = -(-count // at_most)
    return [(first, min(first + length, count) - 1) for first in range(0, count, max(length, 1))]


def _colours(anchors: Sequence[str], count: int) -> list[str]:
    rgb = np.array([[int(anchor[i : i + 2], 16) for i in (1, 3, 5)] for anchor in anchors])
    places = np.linspace(0, len(anchors) - 1, count) if count > 1 else np.zeros(count)
    mixed = [np.interp(places, np.arange(len(anchors)), rgb[:, channel]) for channel in range(3)]
    return ["#" + "".join(f"{round(value):02x}" for value in colour) for colour in zip(*mixed, strict=True)]
