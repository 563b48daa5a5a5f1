"""Finds the commands in a README's code, splits them into words, and checks each kind without running it."""

from __future__ import annotations

import configparser
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from memplug.cli import app
from tests.support.folders import ROOT
from tests.support.recipes import checks, layout, settings

GPUS = re.compile(
    r"(?P<count>\d+) GPUs? of (?P<gb>\d+) GB(?: on (?P<machines>\d+) machines)?"
    r"(?:, (?P<host_gb>\d+) GB of host memory)?"
)
FOREIGN = {"train.py", "pretrain_gpt.py"}  # the reader's own script, and Megatron-LM's
PLACEHOLDERS = {"FILE", "FOLDER"}  # values of options that the reader replaces
LARGE_BYTES = 2**30  # a model with larger states needs a GPU
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SETTING = re.compile(r"[A-Z_]+=\S*$")
_KINDS = r"(?:[A-Z_]+=\S+ )*(?:launch/\w+\.sh|sbatch |torchrun |deepspeed |python3? |pip |accelerate "
_MEMPLUG = typer.main.get_command(app).commands
_COMMAND = re.compile(_KINDS + rf"|memplug (?:{'|'.join(_MEMPLUG)})\b)")  # but not prose such as "memplug is off"


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a README.

    Attributes:
        words: the command's words, without leading settings of variables and without "..." (the reader's additions).
        environment: variables that are set in front of the command.
        comment: the comment on the command's line, or else on the line above.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    comment: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands_of(text: str) -> list[Command]:
    """Return all commands of a README: those in its blocks of bash, and those in its prose and tables.

    Raises:
        AssertionError: there are none, or one is in a block that is not called bash.
    """
    found = []
    for language, body in _FENCE.findall(text):
        if language == "bash":
            found += list(_commands_of_block(body))
        else:
            for line in body.splitlines():
                assert not _COMMAND.match(line), f"a command in a block that is not called bash: {line}"
    found += [_command(span, "") for span in re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)) if _COMMAND.match(span)]
    assert found, "no command at all"
    return found


def _commands_of_block(body: str) -> Iterator[Command]:
    above = ""
    for line in re.sub(r"\\\n\s*", " ", body).splitlines():
        code, _, comment = line.partition("# ")
        if not code.strip():
            above = comment
            continue
        for part in filter(None, (part.strip() for part in code.split("&&"))):
            yield _command(part, comment or above)


def _command(code: str, comment: str) -> Command:
    words = [word for word in shlex.split(code) if word != "..."]
    environment = {}
    while words and _SETTING.match(words[0]):
        name, _, environment[name] = words.pop(0).partition("=")
    return Command(words=tuple(words), environment=environment, comment=comment)


def check(command: Command) -> str:
    """Check a command as far as possible without running it; return its memory estimate if it trains, else "".

    Raises:
        AssertionError: the command is of an unknown kind, names missing files, or would end before it has built its
            model.
        SystemExit: the command has unknown arguments.
    """
    first, *rest = command.words
    if first.startswith("launch/"):
        return _check_launch(command, first, rest)
    if first == "sbatch":
        place = next(i for i, word in enumerate(rest) if word.startswith("launch/"))
        if "--nodes" in rest[:place]:
            _check_machines(command, rest[rest.index("--nodes") + 1])
        return _check_launch(command, rest[place], rest[place + 1 :])
    if first in ("torchrun", "deepspeed"):
        return _check_launcher(command, first, rest)
    if first in ("python", "python3"):
        return _check_python(command, rest)
    if first == "memplug" and rest[0] == "run" and rest[1:]:  # prose may have the command's name alone
        parsed = _MEMPLUG["run"].make_context("run", list(rest[1:])).params
        return check(Command(words=tuple(parsed["command"]), environment={}, comment=command.comment))
    if first == "memplug":
        _check_memplug(rest)
    elif first == "accelerate":
        _check_accelerate(rest)
    elif first == "pip":
        _check_pip(rest)
    else:
        activates = first == "." and rest in ([".venv/bin/activate"], [".venv-cuda/bin/activate"])
        assert activates, f"a command of unknown kind: {command}"
    return ""


def _check_launch(command: Command, script: str, arguments: list[str]) -> str:
    text = (ROOT / script).read_text()
    while not (targets := re.findall(r"examples/\w+/\w+\.py", text)):
        on_each_machine = re.search(r"/(\w+_multinode\.sh)", text).group(1)
        text, arguments = (ROOT / "launch" / on_each_machine).read_text(), ["2", "host:1", *arguments]
    if "NNODES HOST:PORT" in text:
        nodes, meeting, *arguments = arguments
        assert re.fullmatch(r"\w+:\w+", meeting), f"{command}: {meeting} is no HOST:PORT"
        if script == command.words[0]:  # in a Slurm job, sbatch names the machines
            _check_machines(command, nodes)
    return _check_recipe(command, targets[-1], arguments, int(command.environment.get("NPROC", 1)))


def _check_machines(command: Command, nodes: str) -> None:
    """Assert that the command uses as many machines as its comment names; "NNODES" leaves them to the reader."""
    named = GPUS.search(command.comment)
    if named and nodes != "NNODES":
        assert int(nodes) == int(named["machines"] or 1), f"{command}: on {nodes} machines, where {named[0]} are named"


def _check_launcher(command: Command, launcher: str, arguments: list[str]) -> str:
    if launcher == "torchrun":
        from torch.distributed.run import get_args_parser

        parsed = get_args_parser().parse_args(arguments)
        script, rest, ranks = parsed.training_script, parsed.training_script_args, parsed.nproc_per_node
    else:
        from deepspeed.launcher.runner import parse_args

        parsed = parse_args(arguments)
        script, rest, ranks = parsed.user_script, parsed.user_args, max(parsed.num_gpus, 1)
    if parsed.module:
        assert script == "memplug.run", f"a module of unknown kind: {script}"
        from memplug.run import _parse

        line = _parse(rest)
        script, rest = line.target, line.arguments
    if script in FOREIGN:
        return ""
    return _check_recipe(command, script, list(rest), int(ranks))


def _check_python(command: Command, arguments: list[str]) -> str:
    if arguments[0] != "-m":
        return _check_recipe(command, arguments[0], arguments[1:], 1)
    module, rest = arguments[1], arguments[2:]
    if module.startswith("tests.bench."):
        importlib.import_module(module).parse_args(rest)
    else:
        assert module in ("venv", "pytest", "memplug.run"), f"a module of unknown kind: {module}"
    return ""


def _check_recipe(command: Command, script: str, arguments: list[str], ranks: int) -> str:
    assert (ROOT / script).is_file(), f"there is no {script}"
    if "--help" in arguments:
        return ""
    text = (ROOT / script).read_text()
    megatron = "megatron" in script
    defaults = re.findall(r'"--model", str\(ROOT / "([\w/.]+)"\)', text)
    argv = [*(["--model", str(ROOT / defaults[0])] if defaults else []), *arguments]
    named = GPUS.search(command.comment)
    machines = 1
    if named:
        ranks, machines = int(named["count"]), int(named["machines"] or 1)
        argv += ["--check", str(ranks), "--gpu-gib", str(_gib(named["gb"]))]
        argv += ["--host-gib", str(_gib(named["host_gb"]))] if named["host_gb"] else []
    recipe = layout if megatron else settings
    args = recipe.parse_args(argv)
    for name, value in vars(args).items():
        if str(value) in PLACEHOLDERS:
            setattr(args, name, None)
    inputs = recipe.read(args, checks.Ranks(count=ranks, machines=machines))
    assert not inputs.problems, f"{command}: {inputs.problems}"
    assert named or inputs.estimate.states_bytes < LARGE_BYTES, f"{command}: on which GPUs?"
    assert not inputs.estimate.host_bytes or args.host_gib, f"{command}: offloaded to how much host memory?"
    description, fine = checks.describe(inputs, args)
    assert fine, f"{command}:\n{description}"
    return description


def _gib(gigabytes: str) -> float:
    return int(gigabytes) * 1e9 / 2**30


def _check_memplug(arguments: list[str]) -> None:
    import click

    from memplug.config import load_config

    name, *rest = arguments
    if arguments == ["run"]:
        return
    assert name in _MEMPLUG, f"memplug has no {name}"
    _MEMPLUG[name].make_parser(click.Context(_MEMPLUG[name])).parse_args(list(rest))
    if name == "check" and rest and (ROOT / rest[0]).is_file():
        load_config(ROOT / rest[0])


def _check_accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch", f"accelerate {arguments[0]}"
    parsed = launch_command_parser().parse_args(arguments[1:])
    script, *_ = [parsed.training_script, *parsed.training_script_args][parsed.module :]
    assert not parsed.module or parsed.training_script == "memplug.run", f"accelerate starts {parsed}"
    assert script in FOREIGN, f"of unknown kind: {script}"


def _check_pip(arguments: list[str]) -> None:
    assert arguments[0] == "install", f"pip {arguments[0]}"
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    for word in arguments[1:]:
        if named := re.search(r"\[([\w,]+)\]", word):
            assert set(named.group(1).split(",")) <= extras, f"setup.cfg has no such extra: {word}"


def readmes() -> list[Path]:
    """Return every README of the repository."""
    found = [path.relative_to(ROOT) for path in ROOT.rglob("README.md")]
    return sorted(ROOT / path for path in found if not any(part.startswith(".") for part in path.parts))


def documents() -> list[Path]:
    """Return every Markdown file of the repository."""
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*.md")]
    return sorted(ROOT / path for path in found if not any(part.startswith(".") for part in path.parts))


def broken_links(text: str, folder: Path) -> list[str]:
    """Return the broken links of a README in `folder`: to missing files, or to missing headings of Markdown files."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", text)):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        file = folder / name
        exists = file.exists() and file.resolve().is_relative_to(ROOT)
        if not exists or (anchor and anchor not in _anchors(file.read_text() if name else text)):
            broken.append(target)
    return broken


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
