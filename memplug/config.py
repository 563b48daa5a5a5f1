"""Reads the "memplug" block of a DeepSpeed JSON and reports all of its errors at once."""

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.json_schema import models_json_schema

from memplug.block import SECTIONS, Allowed, MemplugConfig, Section
from memplug.ds_json.misplaced import blocks, near_memplug, plain
from memplug.ds_json.reading import read_json, shown
from memplug.errors import ConfigError

_log = logging.getLogger("memplug")

# Keys of the block that draw a warning at the top level of a DeepSpeed JSON. "profiler" and "report" do not: they may
# belong to another tool there.
_PARTS = frozenset(MemplugConfig.model_fields) - {"profiler", "report"}


def parse_block(block: Mapping[str, Any]) -> MemplugConfig:
    """Return the configuration in a "memplug" block as read from JSON, with defaults filled in.

    A block without `enabled` leaves memplug off and logs one warning.

    Raises:
        ConfigError: The block has problems. The error lists each with its path, the given value and the allowed values.
            For an unknown key it names the key that was probably meant.
    """
    if not isinstance(block, Mapping):
        raise ConfigError([f'memplug: got {shown(block)}; allowed: an object such as {{"enabled": true}}'])
    try:
        config = MemplugConfig.model_validate(block)
    except ValidationError as error:
        problems: list[str] = []
        for each in error.errors():
            problems.append(_problem(block, each["loc"]) if each["loc"] else each["msg"])
        # Pydantic reports each branch of a union and each element of a list separately: name each problem once.
        raise ConfigError(list(dict.fromkeys(problems))) from None
    if "enabled" not in block:
        _log.warning('the "memplug" block has no "enabled": memplug stays off; add "enabled": true to switch it on')
    return config


def read_ds_config(ds_config: Mapping[str, Any]) -> MemplugConfig:
    """Return the "memplug" block of a whole DeepSpeed configuration, or a disabled one if it has none.

    DeepSpeed silently accepts any top-level key, so this function warns of a misspelt or misplaced block, and of keys
    of the block at the top level.

    Raises:
        ConfigError: The block has problems; the error lists all of them.
    """
    near = [key for key in ds_config if key != "memplug" and near_memplug(key)]
    if near:
        _log.warning('top-level %s is ignored: did you mean "memplug"?', ", ".join(f'"{key}"' for key in near))
    for key in sorted(_PARTS & ds_config.keys()):
        _log.warning('top-level "%s" is ignored: it belongs in the "memplug" block', key)
    for path in blocks({key: value for key, value in ds_config.items() if key not in {"memplug", *near}}):
        _log.warning('"%s" is ignored: the "memplug" block belongs at the top level of the JSON', path)
    return parse_block(ds_config["memplug"]) if "memplug" in ds_config else MemplugConfig()


def load_config(source: Mapping[str, Any] | str | Path | MemplugConfig | None) -> MemplugConfig:
    """Return the configuration that a user gives in any of several forms.

    Args:
        source: The block itself; a configuration, returned as it is; the path of a DeepSpeed JSON with the block under
            "memplug"; or the path of a file that names such a JSON (`ds_json.reading.read`). None, or a file without a
            block, gives a disabled configuration.

    Raises:
        ConfigError: The file cannot be read, is not a JSON object, has a key twice or names no DeepSpeed JSON. Or the
            block has problems; the error lists all of them.
    """
    if source is None:
        return MemplugConfig()
    if isinstance(source, MemplugConfig):
        return source
    if isinstance(source, (str, Path)):
        return read_ds_config(read_json(source))
    return parse_block(source)


def block_in(file: str | Path) -> MemplugConfig:
    """Return the configuration in a file that is a block, or in which `load_config` finds a block.

    Raises:
        ConfigError: The cases of `load_config`, or the file has no block.
    """
    content = read_json(file)
    if "memplug" in content:
        return read_ds_config(content)
    if "enabled" in content:
        return parse_block(content)
    raise ConfigError(
        [f"{file}: holds no block"], 'Give a JSON with "memplug": {"enabled": true}, or with {"enabled": true} alone.'
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a DeepSpeed JSON; it describes "memplug" and no other key."""
    _, definitions = models_json_schema([(MemplugConfig, "validation")])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": 'DeepSpeed JSON with a "memplug" block',
        "type": "object",
        "properties": {"memplug": {"$ref": "#/$defs/MemplugConfig"}},
        **definitions,
    }


def _problem(block: Mapping[str, Any], place: tuple[str | int, ...]) -> str:
    """Return a sentence on the problem that pydantic found at one place of the block.

    Args:
        block: The whole block.
        place: Keys from the block inwards, perhaps followed by a branch of a union or an index of a list.
    """
    model, value, path = MemplugConfig, block, "memplug"
    for key in place:
        value, path, section = value.get(key), f"{path}.{key}", path
        if key not in model.model_fields:
            return f"{path}: unknown, given {shown(value)}; {_suggestion(str(key), model, section)}"
        field = model.model_fields[key]
        if not isinstance(field.default, Section):
            break
        model = field.annotation
    allowed = next(mark.text for mark in field.metadata if isinstance(mark, Allowed))
    return f"{path}: got {shown(value)}; allowed: {allowed}"


def _suggestion(key: str, model: type[Section], path: str) -> str:
    if path == "memplug" and plain(key) == "memplug":
        return 'pass the block itself, without the "memplug" key around it'
    here = {plain(name): f"{path}.{name}" for name in model.model_fields}
    anywhere = {
        plain(name): f"memplug.{section}{name}" for section, part in SECTIONS.items() for name in part.model_fields
    }
    for candidates in (here, anywhere):
        close = get_close_matches(plain(key), candidates, n=1, cutoff=0.7)
        if close:
            return f"did you mean `{candidates[close[0]]}`?"
    return f"known here: {', '.join(model.model_fields)}"
