"""Blocks of any lifetime and holder: older than a recording, or freed after the recorder stopped or as Python exits."""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from memplug import native
from memplug.profile.recorder import Detail, Recorder
from tests.support.recording import nothing_left, profiled_requests, record, recorder, request_sizes, run_python

__all__ = ["nothing_left", "recorder"]


def test_recordings_ignore_tensors_older_than_the_first_recording(recorder: Recorder) -> None:
    before = [torch.ones(1000), torch.ones(1000)]
    views = [before[1].view(10, 100)[2]]

    def step() -> None:
        before.clear()
        views[0].add_(views[0])
        views.clear()

    assert len(record(recorder, step).events) == 0


def test_recordings_ignore_empty_tensors(recorder: Recorder) -> None:
    trace = record(recorder, lambda: (torch.empty(0), torch.ones(3, 0).sum(1, keepdim=True), torch.empty(0).resize_(0)))
    assert trace.requests["nbytes"].tolist() == [12]


def test_resized_storage_is_freed_and_requested_again(recorder: Recorder) -> None:
    def step() -> None:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(400)
        x.untyped_storage().resize_(1000)
        x.resize_(10)

    trace = record(recorder, step)
    assert request_sizes(trace) == [400, -400, 400, 1000, -400, -1000] == profiled_requests(step)


def test_older_storages_may_be_resized_during_and_after_a_recording(recorder: Recorder) -> None:
    before, inside = torch.ones(100), []

    def step() -> None:
        before.untyped_storage().resize_(0)
        before.untyped_storage().resize_(800)
        inside.append(torch.ones(50))

    assert record(recorder, step).replays_exactly() is True
    inside[0].untyped_storage().resize_(2000)
    assert native.load().tracked_bytes() == 0
    later = record(recorder, lambda: inside[0].untyped_storage().resize_(4000))
    assert later.requests["nbytes"].tolist() == [4000] and later.base_bytes == 0
    inside.clear()
    assert native.load().tracked_bytes() == 0


def share(x: torch.Tensor) -> Any:
    return x.share_memory_()


def through_pickle(x: torch.Tensor) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_file(x: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    return torch.load(io.BytesIO(file.getvalue()))


def copy_on_write(x: torch.Tensor) -> Any:
    lazy = torch._lazy_clone(x)
    lazy.add_(lazy)
    return lazy


HOLDERS = {
    "numpy": lambda x: x.numpy(),
    "from numpy": lambda x: torch.from_numpy(x.numpy()[10:]),
    "DLPack": lambda x: torch.from_dlpack(torch.to_dlpack(x)),
    "shared memory": share,
    "pickle": through_pickle,
    "file": through_file,
    "copy on write": copy_on_write,
    "copy on write, unwritten": lambda x: torch._lazy_clone(x),
    "storage": lambda x: x.untyped_storage(),
    "parameter": lambda x: nn.Parameter(x),
    "set_": lambda x: torch.empty(3).set_(x),
    "data": lambda x: setattr(keeper := torch.ones(5), "data", x) or keeper,
}


def total(held: Any) -> float:
    """Return the sum of all elements."""
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0).set_(held)
    return held.sum().item()


@pytest.mark.parametrize("how", HOLDERS)
def test_recording_sees_malloc_and_free_of_blocks_with_any_holder(how: str, recorder: Recorder) -> None:
    held: list[Any] = []

    def step() -> None:
        x = torch.arange(1000.0)
        held.append(HOLDERS[how](x))
        del x
        gc.collect()

    trace = record(recorder, step)
    kept_bytes = int(trace.live_bytes[-1])
    assert trace.replays_exactly() is True and trace.requests["nbytes"].max() == 4000
    # torch unpickles into memory of the default allocator, whichever is installed
    assert native.load().tracked_bytes() == kept_bytes == (0 if how in ("shared memory", "pickle") else 4000)
    assert total(held[0]) in {sum(range(1000)), sum(range(10, 1000)), 2 * sum(range(1000))}
    later = record(recorder, held.clear)
    assert later.base_bytes == kept_bytes == -sum(request_sizes(later)), "freed bytes equal requested bytes"
    assert native.load().tracked_bytes() == 0


def test_memory_may_be_freed_after_the_recorder_is_gone(nothing_left: None) -> None:
    recorder = Recorder("cpu")
    kept = []
    record(recorder, lambda: kept.append(torch.ones(1000)))
    recorder.begin(Detail.TENSORS)
    kept.append(torch.ones(500))
    recorder.stop()
    del recorder
    gc.collect()
    assert native.load().tracked_bytes() == 6000 and kept[0].sum() == 1000
    kept.pop()
    assert native.load().tracked_bytes() == 4000
    kept[0].untyped_storage().resize_(8000)
    assert native.load().tracked_bytes() == 0
    again = Recorder("cpu")
    assert record(again, kept.clear).base_bytes == 0
    again.stop()


def test_memory_may_be_freed_as_the_process_ends() -> None:
    output = run_python(
        """
        class Late:
            def __del__(self, write=os.write):
                self.x = self.x.exp() + self.x
                write(1, b"late %d" % self.x[0].item())

        late = Late()
        recorder = Recorder("cpu")
        record(recorder, lambda: setattr(late, "x", torch.zeros(10)))
        recorder.begin(Detail.TENSORS)
        sys.late = torch.ones(100)
        torch.late = torch.ones(100).exp()
        torch.ops.late = late
        del late
        """
    )
    assert output.endswith("late 1")
