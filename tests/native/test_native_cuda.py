"""Requirements for recording CUDA memory, checked without a GPU: headers, and an allocator that can be observed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memplug import native
from memplug.arena.arena import Arena
from memplug.errors import ArenaError, RecorderError
from memplug.native import building
from memplug.profile.recorder import Detail, Recorder


class _Core:
    """Stands in for the native core built with CUDA, and records the relevant calls in order."""

    def __init__(self, complaint: str | None = None):
        self.calls: list[Any] = []
        self._complaint = complaint

    def device_type(self, name: str) -> int:
        return ["cpu", "cuda"].index(name)

    def install_cuda(self, index: int) -> None:
        if self._complaint:
            raise RuntimeError(self._complaint)
        self.calls.append(("install_cuda", index))

    def begin_requests(self, base_bytes: int) -> None:
        self.calls.append(("begin_requests", base_bytes))

    def begin_records(self, detail: int, device_type: int) -> None:
        self.calls.append(("begin_records", detail, device_type))

    def take_requests(self) -> bytes:
        return b""

    def nodes(self) -> int:
        return 0

    Suspended = SimpleNamespace

    def claim(self, *_: Any) -> None:
        """Do nothing; the names below are further calls that do nothing."""

    release = watch = forget = end_requests = uninstall_cpu = uninstall_cuda = claim


@pytest.fixture
def recorder_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a recorder of "cuda:1" on a given core; torch answers as if the device existed."""

    def make(core: Any, backend: str = "native") -> Recorder:
        stats = {"requested_bytes": 1000, "active_bytes": 2048, "allocated_bytes": 1536}
        monkeypatch.setattr(native, "load", lambda: core)
        monkeypatch.setattr(torch.cuda, "init", lambda: core.calls.append("init"))
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda index: {f"{name}.all.current": value for name, value in stats.items()}
        )
        return Recorder("cuda:1")

    return make


def test_cuda_is_initialised_before_the_listener_is_attached(recorder_on):
    # Before initialization the allocator has no devices: the listener would be attached to none, without an error.
    core = _Core()
    recorder = recorder_on(core)
    recorder.begin(Detail.TENSORS)
    assert core.calls[:2] == ["init", ("install_cuda", 1)]
    assert core.calls[-1] == ("begin_records", 2, 1)
    recorder.stop()


def test_initial_memory_excludes_freed_blocks_that_wait_for_a_stream(recorder_on):
    # 2048 - 1536 bytes are in blocks that are already freed, so the recorder will see no free of them.
    core = _Core()
    recorder = recorder_on(core)
    recorder.begin(Detail.REQUESTS)
    assert ("begin_requests", 1000 - 512) in core.calls
    recorder.stop()


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_error_for_unobservable_allocator_names_the_setting_to_change(recorder_on, backend):
    # The beginning of torch's error; a stack follows it.
    core = _Core(
        f"{backend} does not yet support attachAllocatorTraceTracker.\nException raised from here (most recent"
    )
    recorder = recorder_on(core, backend)
    with pytest.raises(RecorderError) as caught:
        recorder.begin(Detail.REQUESTS)
    assert f"allocator is {backend}" in caught.value.problem and "\n" not in caught.value.problem
    for remedy in (
        "backend:cudaMallocAsync",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "change_current_allocator",
    ):
        assert remedy in caught.value.advice
    assert not recorder.recording
    assert core.calls == ["init"], "nothing was begun"
    recorder.stop()


@pytest.mark.parametrize(
    "cuda, remedy",
    [
        ("12.4", "pip install nvidia-cuda-runtime-cu12~=12.4.0 nvidia-cuda-nvcc-cu12~=12.4.0"),
        ("13.0", "pip install nvidia-cuda-runtime~=13.0.0 nvidia-cuda-crt~=13.0.0"),
        (None, "a build of torch with CUDA"),
    ],
)
def test_core_without_cuda_headers_raises_with_the_packages_to_install(recorder_on, monkeypatch, cuda, remedy):
    class WithoutCuda(_Core):
        install_cuda = property()  # raises AttributeError

    monkeypatch.setattr(torch.version, "cuda", cuda)
    recorder = recorder_on(WithoutCuda())
    with pytest.raises(RecorderError) as caught:
        recorder.begin(Detail.REQUESTS)
    assert remedy in caught.value.advice
    recorder.stop()


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_arena_refuses_unsupported_allocator_with_advice(monkeypatch, backend):
    monkeypatch.setattr(native, "load", _Core)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    with pytest.raises(ArenaError, match=f"allocator {backend}") as caught:
        Arena("cuda:0")
    assert "PYTORCH_CUDA_ALLOC_CONF" in caught.value.advice and '"arena": {"enabled": false}' in caught.value.advice


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_settings_that_round_requests_up_are_refused(monkeypatch, variable):
    monkeypatch.setattr(native, "load", _Core)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setenv(variable, "expandable_segments:True,roundup_power2_divisions:[256:1,>:8]")
    with pytest.raises(ArenaError, match=f"{variable} rounds large requests up") as caught:
        Arena("cuda:0")
    assert "Take that out" in caught.value.advice


def test_core_built_without_the_cuda_arena_raises(monkeypatch):
    monkeypatch.setattr(native, "load", _Core)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    with pytest.raises(ArenaError, match="built without the arena for CUDA"):
        Arena("cuda:0")


CU12 = ("nvidia/cuda_runtime/include/cuda_runtime_api.h", "nvidia/cuda_nvcc/include/crt/host_config.h")
CU13 = ("nvidia/cu13/include/cuda_runtime_api.h", "nvidia/cu13/include/crt/host_config.h")
TRITON = tuple(f"triton/backends/nvidia/include/{header}" for header in ("cuda_runtime_api.h", "crt/host_config.h"))
TOOLKIT = ("include/cuda_runtime_api.h", "include/crt/host_config.h")


@pytest.mark.parametrize(
    "cuda, installed, found",
    [
        pytest.param("13.0", TOOLKIT + CU13 + TRITON, ("include",), id="toolkit before packages"),
        pytest.param("13.0", CU13 + TRITON, ("nvidia/cu13/include",), id="packages of CUDA 13"),
        pytest.param(
            "12.4",
            CU12 + TRITON,
            ("nvidia/cuda_runtime/include", "nvidia/cuda_nvcc/include"),
            id="packages of CUDA 12 and its compiler",
        ),
        # `pip install torch` installs the runtime without `crt`, and Triton.
        pytest.param("13.0", CU13[:1] + TRITON, ("triton/backends/nvidia/include",), id="torch's wheel of CUDA 13"),
        pytest.param("12.4", CU12[:1] + TRITON, ("triton/backends/nvidia/include",), id="torch's wheel of CUDA 12"),
        pytest.param("12.4", CU12[:1], (), id="half of the headers"),
        pytest.param("12.4", CU13, (), id="packages of another CUDA"),
        pytest.param(None, TOOLKIT + CU13 + TRITON, (), id="torch without CUDA"),
    ],
)
def test_cuda_headers_are_found_in_toolkits_and_wheels(tmp_path, monkeypatch, cuda, installed, found):
    for header in installed:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).touch()
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path) if TOOLKIT[0] in installed else None)
    monkeypatch.setattr(building, "_package_folders", lambda name: [tmp_path / name])
    building.cuda_headers.cache_clear()
    try:
        assert building.cuda_headers() == tuple(tmp_path / folder for folder in found)
    finally:
        building.cuda_headers.cache_clear()


def test_all_folders_of_a_namespace_package_are_found(tmp_path, monkeypatch):
    for place in ("a", "b"):
        (tmp_path / place / "memplug_test_namespace").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert set(building._package_folders("memplug_test_namespace")) == {
        Path(tmp_path / place / "memplug_test_namespace") for place in ("a", "b")
    }
    assert building._package_folders("memplug_no_such_package") == []
