"""Private names of torch occur in the two files for them, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplug.torch_private import KNOWN, OLDEST
from tests.support.folders import ROOT
from tests.support.readmes import readmes

PACKAGE = ROOT / "memplug"
PRIVATE = re.compile(r"torch(\.\w+)*\._(?!_)\w+(\.\w+)*")
OPERATORS = "torch.ops."  # public: registered operators


def private_uses(source: str) -> set[str]:
    """Return private names of torch that a module imports, reaches through its imports, or has as text."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                known[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
                found.add(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
                found.add(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute) and (chain := chain_of(node)):
            root, *rest = chain
            found.add(".".join([known.get(root, ""), *rest]))
    return {name for name in found if PRIVATE.fullmatch(name) and not name.startswith(OPERATORS)}


def chain_of(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`, or none if it does not begin with a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain_of(node.value) if isinstance(node, ast.Attribute) else []
    return [*before, node.attr] if before else []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._host_emptyCache()",
        "import torch as t\nt.fx._symbolic_trace.flag",
        "from torch.overrides import _push_mode",
        "from torch._dynamo import decorators",
        "import torch._dynamo.eval_frame",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "sys.modules['torch._inductor.config']",
    ],
)
def test_private_torch_name_is_found(source: str) -> None:
    assert private_uses(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops.aten._to_copy",
        "import torch\ntorch.__version__",
        "tensor._version",
        "'Use torch._C._x.'",
    ],
)
def test_public_torch_name_is_not_reported(source: str) -> None:
    assert not private_uses(source)


def modules() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "torch_private.py")


def test_python_uses_private_torch_names_in_one_file() -> None:
    uses = {str(path.relative_to(ROOT)): private_uses(path.read_text()) for path in modules()}
    assert len(uses) > 200
    assert {file: names for file, names in uses.items() if names} == {}


def test_torch_versions_are_stated_consistently() -> None:
    assert f"memplug knows {KNOWN}." in (ROOT / "README.md").read_text()
    assert f"    torch>={OLDEST}\n" in (ROOT / "setup.cfg").read_text()
    sources = [*modules(), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h"), *readmes()]
    ranges = {found for path in sources for found in re.findall(r"torch [\d.]+ to [\d.]*\d", path.read_text())}
    assert ranges <= {KNOWN}


# Headers of torch that may change, and the files that include them.
HEADERS = {
    r"torch/csrc/distributed/": {"exchange.cpp"},
    r"torch/csrc/(?!distributed/)": {"torch_private_csrc.h"},
    r"c10/cuda/CUDACachingAllocator\.h": {"hands_on.h", "cuda_allocator.cpp", "cuda_front.cpp", "cuda_device.cpp"},
    r"ATen/(PythonTorchFunctionTLS|SequenceNumber|record_function)\.h": {"torch_private.h"},
    r"c10/core/(StorageImpl|TensorImpl|StorageMaterializer)\.h": {"torch_private.h"},
    r"c10/core/impl/(LocalDispatchKeySet|TorchDispatchModeTLS)\.h": {"torch_private.h"},
}
# Names of torch that torch_private.h wraps in names of its own.
NAMES = (
    r"sequence_number::|_no_checks|version_counter\(\)|set_version_counter|shallow_copy_and_detach|TensorImpl::VIEW|_set_(conj|neg)\b"
    r"|TorchDispatchModeTLS|PythonTorchFunctionTLS|PyObject_TorchDispatchMode|LocalDispatchKeySet|ForceDispatchKeyGuard"
    r"|tls_local_dispatch_key_set|getStepCallbacksUnlessEmpty|\"torch\.|\"_[a-z]\w+\""
)


def native_sources() -> Iterator[Path]:
    return (path for path in PACKAGE.rglob("*") if path.suffix in (".cpp", ".h") and "predict" not in path.parts)


@pytest.mark.parametrize("header", HEADERS)
def test_cpp_includes_unstable_torch_headers_only_in_known_files(header: str) -> None:
    found = {path.name for path in native_sources() if re.search(rf"<{header}", path.read_text())}
    assert found == HEADERS[header]


def test_cpp_uses_private_torch_names_in_one_file() -> None:
    uses = {path.name: re.search(NAMES, re.sub("//.*", "", path.read_text())) for path in native_sources()}
    assert len(uses) > 100
    assert {file for file, found in uses.items() if found} == {"torch_private.h"}


def test_python_names_in_cpp_are_listed_for_the_check_at_attach() -> None:
    named = re.findall(r"char\* \w+ = \"([\w.]+)\"", (PACKAGE / "native/torch_private.h").read_text())
    asked = (PACKAGE / "torch_private.py").read_text()
    assert len(named) == 6
    assert [name for name in named if name not in asked] == []
