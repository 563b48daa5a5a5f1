"""Finds the modules that run as regions: those that the block names, a framework's layers, or modules that repeat."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

from memplug.config import MemplugConfig
from memplug.errors import coded
from memplug.hooks import frameworks, regions
from memplug.hooks.framework import Layers, outermost
from memplug.session.ranks import Ranks

log = logging.getLogger("memplug")


def find_layers(model: nn.Module, config: MemplugConfig, ranks: Ranks | None = None) -> tuple[Layers, bool]:
    """Return the layers that the block names, or else those that a framework recognises, or else modules that repeat.

    All ranks call this: a pattern has to match on one of them, since stages of a pipeline hold different layers.

    Args:
        model: the model.
        config: the block.
        ranks: the ranks that train the model; None for this process alone.

    Returns:
        (name, module) of each layer, and whether any rank found layers.

    Raises:
        RegionError: a pattern matches nothing on any rank, or only modules that are never called.
        ConflictError: a layer that the block names is compiled.
    """
    ranks = ranks or Ranks([0])
    patterns, missing = config.tokenwise.regions, []
    if patterns == "auto":
        found = next(filter(None, (framework.layers(model) for framework in frameworks.FRAMEWORKS)), ())
        is_known = bool(found)
        found = found or repeated_modules(model)
    else:
        found, missing = regions.matching_modules(model, patterns)
        is_known = True
    everyone = ranks.gather((missing, bool(found)), patient=True)
    for pattern in missing:
        if all(pattern in others for others, _ in everyone):
            regions.refuse_missing(pattern, model)
    has_layers = any(has for _, has in everyone)
    if config.tokenwise.enabled and ranks.first and not is_known:
        _tell(model, found, has_layers)
    return found, has_layers


def repeated_modules(model: nn.Module) -> Layers:
    """Return the outermost modules that repeat: numbered children of one module, of one class.

    A module of `torch.nn` without children, such as `Linear`, does not count.
    """
    modules, written = regions.modules_as_written(model)
    kinds: dict[tuple[str, type], list[tuple[str, nn.Module]]] = {}
    for name, module in modules.items():
        container, _, last = written[name].rpartition(".")
        is_block = any(module.children()) or not type(module).__module__.startswith("torch.nn.")
        if last.isdigit() and is_block and regions.may_run_as_region(module):
            kinds.setdefault((container, type(module)), []).append((name, module))
    repeated = {name for group in kinds.values() if len(group) > 1 for name, _ in group}
    return outermost([(name, module) for name, module in modules.items() if name in repeated])


def _tell(model: nn.Module, found: Layers, elsewhere: bool) -> None:
    name = type(model).__name__
    if found:
        patterns = ", ".join(f'"{pattern}"' for pattern in _patterns(model, found))
        text = "memplug: %s is not a known model: its regions are the modules that repeat, %s; " + (
            '"tokenwise.regions" can name others'
        )
        log.info(text, name, patterns)
    elif not elsewhere:
        text = (
            "memplug: %s has no layers that memplug knows, and no modules that repeat: nothing is recomputed, and only "
            'other techniques save memory. To recompute, name its layers in "tokenwise.regions"'
        )
        log.warning(coded("MP001", text), name)


def _patterns(model: nn.Module, found: Layers) -> Iterator[str]:
    """Yield patterns for the found modules: one like `layers.*` if it matches only found modules, else each name."""
    _, written = regions.modules_as_written(model)
    names = [written[name] for name, _ in found]
    for container in dict.fromkeys(name.rpartition(".")[0] for name in names):
        pattern = f"{container}.*".lstrip(".")
        inside = [name for name in names if name.rpartition(".")[0] == container]
        matched, _ = regions.matching_modules(model, [pattern])
        if [written[name] for name, _ in matched] == inside:
            yield pattern
        else:
            yield from inside
