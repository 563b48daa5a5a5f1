"""Reads a DeepSpeed JSON, or the file of Accelerate or of training arguments that names it.

It adds remarks on contents that these readers of the file treat differently:

| reader | comments, trailing commas, missing quotes | a key twice | NaN | byte order mark |
|---|---|---|---|---|
| DeepSpeed, given a path (hjson) | reads | refuses | reads as text, or refuses | reads |
| Trainer, Accelerate (json) | refuse | use the last one | read | refuse |
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplug.ds_json import places
from memplug.ds_json.misplaced import blocks
from memplug.errors import ConfigError

_log = logging.getLogger("memplug")

_NAN = re.compile(r'"(?:[^"\\]|\\.)*"|(-?Infinity|NaN)')
_MARK = "\ufeff"
_YAML = (".yaml", ".yml")
_ACCELERATE = ("compute_environment", "distributed_type", "deepspeed_config")  # none of these is a key of DeepSpeed
# Accelerate reads a file as YAML unless its name ends in .json.
_LIKE_YAML = re.compile(rf"(?!\s*{{).*^(?:{'|'.join(_ACCELERATE)}):", re.M | re.S)


@dataclass(frozen=True, kw_only=True)
class DsJson:
    """DeepSpeed's configuration, as read from a file.

    Attributes:
        path: the file that contains the configuration; another file may have named it.
        content: the whole configuration.
        remarks: sentences on contents that DeepSpeed, Trainer and Accelerate interpret differently, or that one of
            them refuses.
    """

    path: Path
    content: dict[str, Any]
    remarks: tuple[str, ...] = ()


def read_json(source: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON as `read` does, and return its content without the remarks."""
    return read(source).content


def read(source: str | Path) -> DsJson:
    """Read a whole DeepSpeed JSON; comments and trailing commas are accepted if DeepSpeed's own reader accepts them.

    `source` may also be a file of Accelerate (YAML or JSON) or of training arguments. Then its key
    `deepspeed_config_file` or `deepspeed` names the DeepSpeed JSON to read, or `deepspeed` contains the configuration.
    A "memplug" block elsewhere in such a file is ignored, with a warning.

    Args:
        source: path of the file.

    Raises:
        ConfigError: a file cannot be read, is not a JSON object, has a key twice, or names no DeepSpeed JSON.
    """
    path = Path(source)
    text = _text(path)
    try:
        if path.suffix.lower() in _YAML or _LIKE_YAML.match(text):
            content, lines = _yaml(path, text)
            return _named(path, content, lines.get)
        content, remarks = _json(path, text)
        if _names_another(content):
            return _named(path, content, lambda key: places.line_of(text, key))
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply"], "Make the file one flat JSON object.") from None
    return DsJson(path=path, content=content, remarks=tuple(remarks))


def shown(value: object) -> str:
    """Return a value as the user wrote it, with JSON's true and null, in at most 80 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: the path contains a null byte
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"unreadable: {error}"
        raise ConfigError([f"{path}: {problem}"], "Give the path of your DeepSpeed JSON.") from None


def _json(path: Path, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the object that a text holds, and remarks on the text.

    Raises:
        ConfigError: the text holds no object, or has a key twice.
    """
    remarks: list[str] = []
    twice: list[str] = []

    def objects(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            twice.extend(key for key in made if keys.count(key) > 1)
        return made

    if text.startswith(_MARK):
        text = text.removeprefix(_MARK)
        remarks.append(
            f"{path}, line 1: begins with a byte order mark, which Trainer and Accelerate refuse: leave it out"
        )
    try:
        content = json.loads(text, object_pairs_hook=objects)
        for found in filter(lambda match: match[1], _NAN.finditer(text)):
            line = text.count("\n", 0, found.start()) + 1
            remarks.append(
                f"{path}, line {line}: {found[1]} is not JSON: DeepSpeed takes it for text, or refuses the file"
            )
    except ValueError as error:
        twice.clear()
        content = _hjson(path, text, error, objects)
        remarks.append(f"{path}, {_spot(text, error)}, which DeepSpeed reads, and Trainer and Accelerate refuse")
    if not isinstance(content, dict):
        advice = 'Make the file one JSON object: {"train_batch_size": ..., "memplug": {"enabled": true}}.'
        raise ConfigError([f"{path}: holds {shown(content)}, not a JSON object"], advice)
    if twice:
        # If the walk through the text misses a key, the message has no lines for it.
        found = places.repeated(text) or [(key, []) for key in dict.fromkeys(twice)]
        raise _given_twice(path, found)
    return content, remarks


def _hjson(path: Path, text: str, error: ValueError, objects: Callable[[list], dict]) -> Any:
    """Return the object that DeepSpeed's reader (hjson) reads from a text that is not JSON.

    Raises:
        ConfigError: hjson refuses it too, or is not installed.
    """
    place, hint = "the first place that is not JSON", ""
    if isinstance(error, json.JSONDecodeError):
        place = f"line {error.lineno}, column {error.colno}"
    try:
        import hjson

        content = hjson.loads(text, object_pairs_hook=objects) if text.strip() else None
        if isinstance(content, dict):
            return content
    except RecursionError:
        raise
    except Exception as other:  # hjson can also raise IndexError
        line = getattr(other, "lineno", None)
        if line not in (None, getattr(error, "lineno", None)):
            hint = f"; DeepSpeed's reader, which accepts more, stops at line {line}: {other.msg}"
    message = f"{error.msg} at {place}" if isinstance(error, json.JSONDecodeError) else str(error)
    raise ConfigError([f"{path}: not JSON: {message}{hint}"], f"Correct the file at {place}.") from None


def _spot(text: str, error: ValueError) -> str:
    """Describe the first place of a text that is not JSON: line number, text of the line, and reason."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error})"
    line = text.splitlines()[error.lineno - 1].strip() if text.splitlines()[error.lineno - 1 :] else ""
    return f"line {error.lineno}: {shown(line)} is not JSON ({error.msg}, column {error.colno})"


def _given_twice(path: Path, found: list[tuple[str, list[int]]]) -> ConfigError:
    problems = []
    for key, lines in found:
        numbers = [str(line) for line in dict.fromkeys(lines)]
        at = f", at line{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}" if numbers else ""
        problems.append(f'{path}: "{key}" is given more than once{at}')
    return ConfigError(
        problems, "Leave one of them: DeepSpeed refuses the file, and Trainer and Accelerate take the last one."
    )


def _yaml(path: Path, text: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML, and the line of each of its keys.

    Raises:
        ConfigError: the text is not YAML, has a key twice, or PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            [f"{path}: PyYAML cannot be imported: {error}"], "`pip install pyyaml`, or give the DeepSpeed JSON itself."
        ) from None
    try:
        root, content = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
        json.dumps(content, default=repr, skipkeys=True)  # raises if an anchor contains itself
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError([f"{path}: not YAML: {said}"], "Correct the file at that place.") from None
    lines: dict[str, list[int]] = {}
    pending = [("", root)]
    while pending:
        inside, node = pending.pop()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            here = f"{inside}.{key.value}".lstrip(".")
            lines.setdefault(here, []).append(key.start_mark.line + 1)
            pending.append((here, value))
    twice = [(key, found) for key, found in lines.items() if len(found) > 1 and not key.endswith("<<")]
    if twice:
        raise _given_twice(path, twice)
    return content, {key: found[-1] for key, found in lines.items()}


def _names_another(content: Mapping[str, Any]) -> bool:
    """Return whether a JSON is a file of Accelerate or of training arguments."""
    return any(key in content for key in _ACCELERATE) or isinstance(content.get("deepspeed"), (str, Mapping))


def _named(path: Path, content: Any, line_of: Callable[[str], int | None]) -> DsJson:
    """Return the DeepSpeed JSON that a file of Accelerate or of training arguments names or contains.

    Args:
        path: path of the file.
        content: its content.
        line_of: returns the line of a key, or None.

    Raises:
        ConfigError: the file names no DeepSpeed JSON, or one that cannot be read.
    """
    content = content if isinstance(content, Mapping) else {}
    inline = content.get("deepspeed") if isinstance(content.get("deepspeed"), Mapping) else None
    where = {key: value for key, value in content.items() if inline is None or key != "deepspeed"}
    for block in blocks(where):
        _log.warning(
            '%s, line %s: "%s" is ignored: the "memplug" block belongs at the top level of the DeepSpeed JSON',
            path,
            line_of(block) or "unknown",
            block,
        )
    if inline is not None:
        return DsJson(path=path, content=dict(inline))
    section = content.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else content.get("deepspeed")
    if not isinstance(named, str) or named in ("", "none"):
        raise ConfigError(
            [f"{path}: is no DeepSpeed JSON, and names none"],
            'Give the DeepSpeed JSON with the "memplug" block in it, or a file that names it: a file of Accelerate by '
            '"deepspeed_config_file" in its "deepspeed_config", or training arguments by "deepspeed".',
        )
    key = "deepspeed" if section is None else "deepspeed_config.deepspeed_config_file"
    try:
        # Trainer and Accelerate read the named file as a DeepSpeed JSON, whatever it is.
        found, remarks = _json(Path(named), _text(Path(named)))
        return DsJson(path=Path(named), content=found, remarks=tuple(remarks))
    except ConfigError as error:
        at = f"{path}, line {line_of(key) or 'unknown'}"
        problems = [f"{problem} (named at {at})" for problem in error.problems]
        raise ConfigError(problems, error.advice) from None
