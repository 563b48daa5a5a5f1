"""Every command in every README would start: its arguments, configurations, text, layout and memory are checked."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.support.readmes import broken_links, check, commands_of, documents, readmes


@pytest.fixture(autouse=True)
def under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the repository's folder, under a launcher."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("readme", readmes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_readme_commands_would_start_on_their_stated_gpus(readme: Path) -> None:
    for command in commands_of(readme.read_text()):
        if described := check(command):
            logging.getLogger(__name__).info("%s\n%s", command, described)


def test_recipe_readmes_are_among_the_checked_readmes() -> None:
    found = {str(path.relative_to(ROOT)) for path in readmes()}
    assert {"README.md", *(f"examples/{name}/README.md" for name in ("llama2", "mixtral", "megatron_llama2"))} <= found


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_lead_to_files_or_headings(document: Path) -> None:
    assert broken_links(document.read_text(), document.parent) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](README.md), [b](README.md#try-it), [c](https://x.org/y), [d](examples/llama2)", []),
        ("[a](RAEDME.md)", ["RAEDME.md"]),
        ("[a](README.md#try-them)", ["README.md#try-them"]),
        ("## The host's time\n[a](#the-hosts-time) [b](#the-host)", ["#the-host"]),
    ],
)
def test_broken_link_is_found(text: str, broken: list[str]) -> None:
    assert broken_links(text, ROOT) == broken


def test_list_of_rooms_in_the_package_readme_is_complete() -> None:
    text = (ROOT / "memplug/README.md").read_text()
    linked = set(re.findall(r"\]\(([\w/.]+?)(?:/README\.md)?\)", text[: text.index("Imports point downwards")]))
    rooms = {
        path.name for path in (ROOT / "memplug").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert rooms - {"__init__.py"} <= linked


def bash(line: str) -> str:
    return f"```bash\n{line}\n```\n"


SEVEN = "--model configs/models/7b.yaml --deepspeed_config configs/ds_zero3.json"
BIG = "--model configs/models/mixtral_8x7b.yaml"
OFFLOADING = "--deepspeed_config configs/ds_zero3_offload.json"
EXPERTS = f"{BIG} --expert 8 --tensor 2 --sequence --distributed-optimizer --micro-batch 1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (bash("make all"), "unknown kind"),
        (bash("python -m http.server"), "unknown kind"),
        (bash("torchrun --module something.else train.py"), "unknown kind"),
        (bash("memplug forget"), "memplug has no forget"),
        (bash("pip install -e '.[exmaples]'"), "no such extra"),
        ("```\nlaunch/llama2_torchrun.sh\n```\n", "not called bash"),
        ("No command.", "no command"),
        (bash(f"launch/llama2_torchrun.sh {SEVEN}"), "which GPUs"),
        (bash(f"launch/llama2_torchrun.sh {SEVEN}  # 1 GPU of 80 GB"), "too few"),
        (bash(f"# 8 GPUs of 80 GB\nlaunch/llama2_torchrun.sh {SEVEN} --seq-len 2000000"), "tokens"),
        (bash(f"launch/llama2_torchrun.sh {BIG} {OFFLOADING}  # 8 GPUs of 80 GB"), "how much host memory"),
        (bash(f"launch/llama2_torchrun.sh {BIG} {OFFLOADING}  # 8 GPUs of 80 GB, 512 GB of host memory"), "too few"),
        (bash(f"# 8 GPUs of 80 GB\nlaunch/mixtral_megatron.sh {EXPERTS}"), "too few"),
        (bash("NPROC=2 launch/megatron_torchrun.sh --tensor 3"), "divide"),
        (bash("# 8 GPUs of 80 GB\nlaunch/llama2_torchrun.sh --context 3"), "divide"),
        (bash("# 8 GPUs of 80 GB\nlaunch/megatron_torchrun.sh --fp8"), "needs --attention te"),
        (bash("launch/megatron_torchrun.sh --attention te"), "transformer_engine"),
        (bash("# 16 GPUs of 80 GB on 2 machines\nlaunch/megatron_torchrun_multinode.sh 4 HOST:PORT"), "on 4 machines"),
        (bash("# 16 GPUs of 80 GB on 2 machines\nsbatch --nodes 4 launch/megatron_slurm.sh"), "on 4 machines"),
        (bash("launch/megatron_torchrun_multinode.sh 2 --steps 3"), "no HOST:PORT"),
        (bash("# 16 GPUs of 80 GB on 2 machines\nsbatch --nodes 2 launch/megatron_slurm.sh --tensor 3"), "divide"),
        ("Run `launch/llama2_torchrun.sh --deepspeed_config configs/ds_none.json` now.", "ds_none"),
    ],
)
def test_command_that_would_not_start_is_found(text: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        for command in commands_of(text):
            check(command)


@pytest.mark.parametrize(
    "line",
    [
        "launch/llama2_torchrun.sh --stpes 3",
        "launch/mixtral_megatron.sh --deepspeed_config configs/ds_tiny.json",
        "torchrun --nproc-per-gpu 2 examples/llama2/train.py",
        "python -m tests.bench.step_time --hots megatron",
        "memplug show trace.npz --jpg step.jpg",
    ],
)
def test_nonexistent_option_is_found(line: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises((SystemExit, Exception)) as found:
        for command in commands_of(bash(line)):
            check(command)
    said = f"{found.value}{capsys.readouterr().err}"
    assert "unrecognized arguments: --" in said or "No such option: --jpg" in said


PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|cpp|h|md|sh))`")


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(document: Path) -> None:
    """Paths are relative to the repository, the package or the folder of the document."""
    named = PATH.findall(document.read_text())
    roots = (ROOT, ROOT / "memplug", document.parent)
    assert [path for path in named if not any((root / path).exists() for root in roots)] == []
