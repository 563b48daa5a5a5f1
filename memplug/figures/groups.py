"""Groups phases and layers for pictures of memory: a few groups, each with a name and a colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from memplug.figures.figure import ColourGroup
from memplug.profile.trace import Layer, Pass, Phase

BEFORE = "before the recording"
OUTSIDE = "outside of layers"
AT_MOST = 8  # largest number of groups of layers, or of groups of one kind of phase


class _Kind(NamedTuple):
    """A kind of phase in words and in letters, and the colours from which its groups' colours are mixed."""

    words: str
    letters: str
    colours: tuple[str, ...]


PASSES = {  # from the bottom of the stack, the longest-lived memory first
    Pass.OTHER: _Kind("between passes", "", ("#b9b2a6",)),
    Pass.OPTIMIZER: _Kind("optimizer", "opt", ("#3f8f5b",)),
    Pass.NO_GRAD: _Kind("forward without gradients", "V", ("#8c8f3f",)),
    Pass.FORWARD: _Kind("forward", "F", ("#2166a5", "#9cc8e8")),
    Pass.BACKWARD: _Kind("backward", "B", ("#c8520f", "#fbc58b")),
    Pass.PREFETCH: _Kind("prefetch", "pre", ("#b0357a", "#e8b0d0")),
    Pass.EITHER: _Kind("forward or backward", "P", ("#6a4c9c", "#d0c1e8")),
}
_BEFORE_COLOUR, _OUTSIDE_COLOUR = "#7f7f7f", "#c9c4bb"
# Even in lightness, and distinguishable for colour-blind readers (the anchors of viridis, without its palest end).
LAYER_COLOURS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#e8d92b")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups from the bottom of the stack up, and the group of each item."""

    groups: tuple[ColourGroup, ...]  # the first is for memory allocated before the recording
    of: np.ndarray  # int64, index of each phase's or layer's group; the last entry is for index -1


def phase_words(phase: Phase) -> str:
    """Return a phase in words, such as "backward of micro-batch 1", or "forward or backward 3" if it may be either."""
    words = PASSES[phase.kind].words
    if phase.micro_batch < 0:
        return words
    return f"{words}{'' if phase.kind == Pass.EITHER else ' of micro-batch'} {phase.micro_batch}"


def phase_letters(phase: Phase) -> str:
    """Return a phase in few letters, such as "F0", "B0" or "opt", or "P3" if it may be forward or backward."""
    return PASSES[phase.kind].letters + (str(phase.micro_batch) if phase.micro_batch >= 0 else "")


def by_phase(phases: Sequence[Phase]) -> Grouping:
    """Group phases by kind and micro-batch; if there are many micro-batches, neighbours share a group."""
    groups = [ColourGroup(BEFORE, _BEFORE_COLOUR)]
    of = np.zeros(len(phases) + 1, np.int64)
    for kind, its in PASSES.items():
        members = sorted({phase.micro_batch for phase in phases if phase.kind == kind})
        for first, last, colour in _shares(len(members), its.colours):
            label = phase_words(Phase(kind, members[first]))
            if last > first:
                label = label.replace("micro-batch ", "micro-batches ") + f"-{members[last]}"
            held = members[first : last + 1]
            of[[i for i, phase in enumerate(phases) if phase.kind == kind and phase.micro_batch in held]] = len(groups)
            groups.append(ColourGroup(label, colour))
    return Grouping(tuple(groups), of)


def by_layer(layers: Sequence[Layer]) -> Grouping:
    """Group layers in their order into at most AT_MOST groups, and one more for memory outside of layers."""
    groups = [ColourGroup(BEFORE, _BEFORE_COLOUR), ColourGroup(OUTSIDE, _OUTSIDE_COLOUR)]
    of = np.ones(len(layers) + 1, np.int64)
    names = short_names(layers)
    for first, last, colour in _shares(len(layers), LAYER_COLOURS):
        of[first : last + 1] = len(groups)
        groups.append(ColourGroup(range_words(names[first], names[last]), colour))
    return Grouping(tuple(groups), of)


def sequence(count: int, anchors: Sequence[str] = LAYER_COLOURS) -> list[str]:
    """Return `count` colours as "#rrggbb", evenly spaced along the colours `anchors`."""
    rgb = np.array([[*bytes.fromhex(anchor[1:])] for anchor in anchors])
    places = np.linspace(0, len(anchors) - 1, count) if count > 1 else np.zeros(count)
    mixed = [np.interp(places, np.arange(len(anchors)), channel) for channel in rgb.T]
    return ["#" + bytes(map(round, colour)).hex() for colour in zip(*mixed, strict=True)]


def is_dark(colour: str) -> bool:
    """Return whether white letters read better than black on "#rrggbb" (ITU-R BT.601 luma)."""
    red, green, blue = bytes.fromhex(colour[1:])
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def short_names(layers: Sequence[Layer]) -> list[str]:
    """Return the names without their common dotted prefix: "3" for model.layers.3; the root module is "(root)"."""
    names = [layer.name for layer in layers]
    cut = commonprefix(names).rfind(".") + 1
    return [name[cut:] or name or "(root)" for name in names]


def layer_words(name: str) -> str:
    """Return a short name in words: "layer 3" for "3"."""
    return f"layer {name}" if name.isdigit() else name


def range_words(first: str, last: str) -> str:
    """Return a range of short names, such as "layers 0-3"."""
    if first == last:
        return layer_words(first)
    return f"layers {first}-{last}" if first.isdigit() and last.isdigit() else f"{first} to {last}"


def _shares(count: int, anchors: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (first, last, colour) of at most AT_MOST equal runs of `count` items; the last run may be shorter."""
    length = max(-(-count // AT_MOST), 1)
    firsts = range(0, count, length)
    for first, colour in zip(firsts, sequence(len(firsts), anchors), strict=True):
        yield first, min(first + length, count) - 1, colour
