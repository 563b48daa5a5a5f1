"""The repository keeps its own rules: lint, imports in one direction, and a README whose commands exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from tests.support.readmes import readmes


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_lint_is_clean() -> None:
    result = run("-m", "ruff", "check", "--config", ".ci/ruff.toml", "--no-cache", ".")
    assert result.returncode == 0, result.stdout


def test_rooms_import_each_other_in_one_direction_only() -> None:
    result = run("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 kept, 0 broken" in result.stdout


def imports_by_module() -> dict[str, set[str]]:
    """Return the modules that each module imports, anywhere in it, including for types."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in (ROOT / "memplug").rglob("*.py")
    }
    found = {}
    for name, tree in modules.items():
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{each.name}" for node in froms for each in node.names}
        whole = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
        candidates = {*named, *(name.rpartition(".")[0] for name in named - modules.keys()), *whole}
        found[name] = candidates & modules.keys() - {name}
    return found


def test_imports_have_no_cycles() -> None:
    left = imports_by_module()
    assert len(left) > 200
    while leaves := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left, sorted(left)


def test_no_module_imports_a_test_module() -> None:
    importing = re.compile(r"^ *(?:from|import) tests\.(?:\w+\.)*test_\w+", re.M)
    assert [file for file in (ROOT / "tests").rglob("*.py") if importing.search(file.read_text(encoding="utf-8"))] == []


def test_importing_memplug_imports_no_heavy_package() -> None:
    result = run(
        "-c",
        "import sys, memplug; print([m for m in ('torch', 'deepspeed', 'transformers', 'scipy') if m in sys.modules])",
    )
    assert result.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package as a wheel would contain it, and return its folder."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("installed")
    built = run("-c", "import setuptools; setuptools.setup()", "build_py", "--build-lib", str(folder))
    assert built.returncode == 0, built.stderr
    return folder / "memplug"


def test_installed_package_has_all_sources(installed: Path) -> None:
    """Include the C++ sources of all folders: the native core is built from them."""
    for pattern in ("*.py", "*.cpp", "*.h"):
        files = [path.relative_to(ROOT / "memplug") for path in (ROOT / "memplug").rglob(pattern)]
        assert files and [str(file) for file in files if not (installed / file).is_file()] == []


def test_installed_package_has_the_gpu_profiles(installed: Path) -> None:
    profiles = installed / "predict" / "virtual" / "profiles"
    assert not profiles.is_symlink()
    for file in (ROOT / "configs" / "hardware").iterdir():
        assert (profiles / file.name).read_bytes() == file.read_bytes()


def test_scripts_and_configurations_in_readmes_exist() -> None:
    for readme in readmes():
        for name in re.findall(
            r"(?<![\w/])((?:launch|configs|examples|memplug|tests)/[\w/.-]+\.(?:sh|json|yaml|py))\b", readme.read_text()
        ):
            assert (ROOT / name).exists(), f"{readme} names {name}"


def test_both_install_commands_of_the_readme_agree() -> None:
    """The commands to train and to test differ in the extra that they install and in what they run."""
    text = (ROOT / "README.md").read_text()
    blocks = [re.search(rf"<!-- {name} -->\s*```bash\n(.*?)```", text, re.S).group(1) for name in ("train", "tests")]
    installs = [re.sub(r"\[\w+\]", "[]", block.rsplit("&&", 1)[0]) for block in blocks]
    assert installs[0] == installs[1]
