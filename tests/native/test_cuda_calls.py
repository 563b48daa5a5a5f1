"""Calls of torch's CUDA allocator that the arena does not forward are found in the header."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memplug.native.cuda_calls import not_handed_on

HEADER = """
#include <c10/core/Allocator.h>
namespace c10::cuda::CUDACachingAllocator {
class C10_CUDA_API CUDAAllocator : public DeviceAllocator {
 public:
  virtual ~CUDAAllocator() = default;
  virtual void* raw_alloc(size_t nbytes) = 0;
  virtual void attachOutOfMemoryObserver(OutOfMemoryObserver observer) = 0;
  // virtual void only_a_comment(int count) = 0;
  virtual SnapshotInfo snapshot(
      MempoolId_t mempool_id = {0, 0},
      bool include_traces = true) = 0;
  virtual void setNoSplit(c10::DeviceIndex device, MempoolId_t mempool_id) {
    TORCH_CHECK(false, name(), " does not");
  }
ADDED
  void not_virtual(int count);
};
inline void beside(int count) {}
} // namespace
"""


def found(tmp_path: Path, added: str) -> list[str]:
    folder = tmp_path / "c10/cuda"
    folder.mkdir(parents=True)
    (folder / "CUDACachingAllocator.h").write_text(HEADER.replace("ADDED", added))
    return not_handed_on(tmp_path)


def test_forwarded_allocator_calls_are_not_reported(tmp_path: Path) -> None:
    assert found(tmp_path, "") == []


@pytest.mark.parametrize(
    ("added", "name"),
    [
        ("  virtual void compactAll(c10::DeviceIndex device) {}", "compactAll, parameters: 1"),
        (
            "  virtual std::pair<size_t, size_t> spaceOf(\n      const std::map<int, int>& pools, int device) {\n"
            "    return {0, 0};\n  }",
            "spaceOf, parameters: 2",
        ),
        ("  virtual void setNoSplit(c10::DeviceIndex device) {}", "setNoSplit, parameters: 1"),
        ("  virtual void pure() = 0;", "pure, parameters: 0"),
    ],
)
def test_unforwarded_allocator_call_is_reported_with_parameter_count(added: str, name: str, tmp_path: Path) -> None:
    assert found(tmp_path, added) == [name]


@pytest.mark.gpu
def test_arena_forwards_every_allocator_call_of_the_installed_torch() -> None:
    assert torch.version.cuda is not None
    assert not_handed_on() == []
