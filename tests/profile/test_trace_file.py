"""A trace file loads as the saved trace, or raises one error with advice, however its bytes were damaged."""

import io
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplug.errors import TraceError
from memplug.profile import trace_file
from memplug.profile.trace import Fingerprint, Pass, Phase, earlier_frees, still_live
from memplug.profile.trace_file import load, save
from tests.support.folders import DATA
from tests.support.traces import LEGACY, Recording, assert_same, recordings, training

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.npz"


@given(recordings(), st.builds(Fingerprint, model=st.text(), versions=st.just((("torch", "2.11.0"), ("µ", "1")))))
@in_one_folder
def test_saved_trace_loads_unchanged(tmp_path, recording, fingerprint):
    trace = recording.trace(fingerprint=fingerprint, base_bytes=3, peak_bytes=2**50)
    save(trace, tmp_path / "trace.npz")
    loaded = load(str(tmp_path / "trace.npz"))
    assert_same(loaded, trace)
    assert loaded.fingerprint.digest() == fingerprint.digest()
    assert not loaded.events.flags.writeable


def test_numpy_opens_a_trace_without_pickle(path):
    trace = training().trace()
    save(trace, path)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["events"].tolist() == trace.events.tolist()
        assert json.loads(arrays["meta"].tobytes())["names"] == list(trace.names)


def test_equal_traces_make_equal_files(path):
    save(training().trace(), path)
    first = path.read_bytes()
    save(training().trace(), path)
    assert path.read_bytes() == first


def test_failed_save_leaves_only_the_old_file(path, monkeypatch):
    trace = training().trace()
    save(trace, path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match="No space left on device"):
        save(replace(trace, base_bytes=9), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert_same(load(path), trace)


def test_open_reader_still_reads_the_old_file_after_a_save(path):
    save(training(steps=1).trace(), path)
    old = path.read_bytes()
    with path.open("rb") as reader:
        start = reader.read(10)
        save(training(steps=9).trace(), path)
        assert start + reader.read() == old
    assert path.read_bytes() != old


def test_saving_into_a_missing_folder_raises(path):
    with pytest.raises(TraceError, match="No such file or directory") as refused:
        save(training().trace(), path.parent / "missing" / "trace.npz")
    assert "folder that exists" in refused.value.advice


@pytest.mark.parametrize("folder", [".", "a"])
def test_saving_over_a_folder_raises_and_leaves_nothing(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        save(training().trace(), folder)
    assert [each.name for each in tmp_path.rglob("*")] == ["a"]


@contextmanager
def peak_below(nbytes):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def assert_equal_or_refused(path, content, original):
    path.write_bytes(content)
    with peak_below(16 << 20), suppress(TraceError):
        assert_same(load(path), original)


FILES = {"saved": None, "long": LEGACY[0]}


@pytest.fixture(params=FILES)
def good(request, path):
    """Return the bytes of a file, and the trace in it."""
    if FILES[request.param]:
        shutil.copy(FILES[request.param], path)
    else:
        save(training(steps=1).trace(), path)
    return path.read_bytes(), load(path)


@given(data=st.data())
@settings(in_one_folder, max_examples=300)
def test_flipped_bits_give_the_same_trace_or_an_error(good, tmp_path, data):
    content, original = bytearray(good[0]), good[1]
    # Flip bits of the short headers and directory as often as those of compressed data.
    places = [st.integers(0, 8 * len(content) - 1)]
    for mark in (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"):
        first = 8 * bytes(content).rfind(mark)
        places.append(st.integers(first, min(first + 8 * 60, 8 * len(content) - 1)))
    for bit in data.draw(st.lists(st.one_of(places), min_size=1, max_size=4)):
        content[bit // 8] ^= 1 << bit % 8
    assert_equal_or_refused(tmp_path / "flipped.npz", content, original)


@given(data=st.data())
@in_one_folder
def test_truncated_file_raises(good, tmp_path, data):
    content = good[0]
    path = tmp_path / "short.npz"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TraceError, match="What to do"):
        load(path)


@given(data=st.data())
@in_one_folder
def test_overwritten_bytes_give_the_same_trace_or_an_error(good, tmp_path, data):
    content = bytearray(good[0])
    start = data.draw(st.integers(0, len(content) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=64))
    content[start : start + len(piece)] = piece
    assert_equal_or_refused(tmp_path / "overwritten.npz", content, good[1])


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


def write_members(path, contents, method=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_altered_contents_are_detected(path):
    save(training(steps=1).trace(), path)
    contents = members(path)
    contents["tensors.npy"] = npy(np.flip(np.load(io.BytesIO(contents["tensors.npy"]))))
    write_members(path, contents)
    with pytest.raises(TraceError, match="the contents are not what was saved"):
        load(path)


def test_error_for_a_missing_array_names_the_array(path):
    save(training().trace(), path)
    contents = members(path)
    del contents["uses.npy"]
    write_members(path, contents)
    with pytest.raises(TraceError, match="damaged: without uses"):
        load(path)


def test_oversized_array_header_is_refused_before_memory_is_allocated(path):
    save(training().trace(), path)
    contents = members(path)
    old = contents["events.npy"]
    contents["events.npy"] = old.replace(b"(32,)", b"(99999999999,)", 1)
    assert contents["events.npy"] != old
    write_members(path, contents)
    with peak_below(16 << 20), pytest.raises(TraceError, match="size that it declares"):
        load(path)


def test_unbounded_compression_is_refused(path):
    save(training().trace(), path)
    write_members(path, members(path), zipfile.ZIP_LZMA)
    with pytest.raises(TraceError, match="unknown method"):
        load(path)
    write_members(path, members(path), zipfile.ZIP_STORED)
    assert_same(load(path), training().trace())


def test_error_for_a_newer_format_names_both_versions(path, monkeypatch):
    monkeypatch.setattr(trace_file, "FORMAT", 7)
    save(training().trace(), path)
    monkeypatch.undo()
    with pytest.raises(TraceError, match="format 7.*reads format 2") as refused:
        load(path)
    assert "newer" in refused.value.advice


class Bomb:
    """An object that raises when it is unpickled."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


FOREIGN = {
    "image": lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000)),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a trace\n"),
    "array": lambda path: np.save(path.open("wb"), np.arange(9)),
    "pickle": lambda path: path.write_bytes(pickle.dumps(Bomb())),
    "zip": lambda path: write_members(path, {"readme.txt": b"hello"}),
    "empty zip": lambda path: write_members(path, {}),
    "unrelated arrays": lambda path: np.savez(path, weights=np.zeros(3), biases=np.zeros(3)),
    "other events": lambda path: np.savez(path, events=np.zeros((3, 2))),
    "pickled events": lambda path: np.savez(path, events=np.array([Bomb()], object)),
    "pickled meta": lambda path: np.savez(path, meta=np.array([Bomb()], object)),
    "other meta": lambda path: np.savez(path, meta=np.arange(3)),
    "unrelated JSON": lambda path: np.savez(path, meta=np.frombuffer(b"[1, 2]", np.uint8)),
    "nested JSON": lambda path: np.savez(path, meta=np.full(10**6, ord("["), np.uint8)),
    "malformed events": lambda path: write_members(path, {"events.npy": b"\x93NUMPY\x01\x00\xff\xff{"}),
    "directory": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "missing": lambda path: None,
    "below a file": lambda path: path.parent.joinpath("file").write_text(""),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_error_for_a_foreign_file_names_the_file(path, kind):
    FOREIGN[kind](path)
    if kind == "below a file":
        path = path.parent / "file" / "trace.npz"
    with pytest.raises(TraceError) as refused:
        load(path)
    assert refused.value.problem.startswith(f"{path}: ")
    assert refused.value.advice
    assert "damaged" not in refused.value.problem or "events" in kind or "pickled" in kind


def test_unreadable_file_raises(path):
    save(training().trace(), path)
    path.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(TraceError, match="Permission denied"):
            load(path)
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("file", LEGACY, ids=lambda file: file.stem)
def test_format_0_recording_keeps_every_row(file):
    rows = np.load(file)["events"]
    trace = load(file)
    phases = np.array([100 if phase.kind == Pass.OPTIMIZER else phase.micro_batch for phase in trace.phases])
    layers = np.array([*(int(layer.name.removeprefix("layers.")) for layer in trace.layers), -1])
    events = trace.events
    columns = [events["kind"], events["request"], events["nbytes"], phases[events["phase"]], layers[events["layer"]]]
    assert np.array_equal(np.stack([*columns, events["stream"]], axis=1), rows)
    assert len(trace.requests) == (rows[:, 0] == 0).sum()
    assert len(earlier_frees(trace.events)) == ((rows[:, 0] == 1) & (rows[:, 1] == -1)).sum() > 0
    assert still_live(trace.requests).any()


def test_format_0_recording_has_steps_but_mixes_forward_and_backward():
    trace = load(DATA / "mixtral_ckpt.npz")
    assert [first_event for _, first_event, _ in trace.steps] == [0, 6468, 12936]
    assert trace.phases == (*(Phase(Pass.EITHER, number) for number in range(4)), Phase(Pass.OPTIMIZER))
    assert trace.replayed_peak() == (10832, 3073468956)
    assert trace.replays_exactly() is None


def test_format_0_recording_saves_and_loads_unchanged(path):
    trace = load(LEGACY[1])
    save(trace, path)
    assert_same(load(path), trace)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([2, 0, 8, 0, -1, 0], "neither a malloc nor a free"),
        ([2**32, 0, 8, 0, -1, 0], "neither a malloc nor a free"),
        ([0, 0, 8, 150, -1, 0], "phase 150"),
        ([0, 0, 8, -1, -1, 0], "phase -1"),
        ([0, 0, 8, 0, -2, 0], "layer below -1"),
        ([0, 5, 8, 0, -1, 0], r"events\[0\].request is 5"),
        ([0, 0, -8, 0, -1, 0], "below 0"),
    ],
)
def test_meaningless_rows_of_format_0_are_refused(path, row, problem):
    np.savez(path, events=np.array([row], np.int64))
    with pytest.raises(TraceError, match=problem):
        load(path)


def test_events_before_a_first_forward_belong_to_that_forwards_step(path):
    phases = [200, 0, 1, 100, 200, 0, 1, 200, 0]
    np.savez(path, events=np.array([[0, i, 1, phase, -1, 0] for i, phase in enumerate(phases)], np.int64))
    trace = load(path)
    assert [first_event for _, first_event, _ in trace.steps] == [0, 4, 7]
    assert trace.phases[trace.events["phase"][4]] == Phase(Pass.OTHER)


def test_recording_that_begins_in_an_optimizer_begins_a_step_there(path):
    np.savez(path, events=np.array([[0, i, 1, phase, -1, 0] for i, phase in enumerate([100, 100, 0])], np.int64))
    assert [first_event for _, first_event, _ in load(path).steps] == [0, 2]


def test_empty_recording_is_a_valid_trace(path):
    save(Recording().trace(), path)
    trace = load(path)
    assert (len(trace.requests), len(trace.live_bytes), trace.replayed_peak()) == (0, 0, (-1, 0))
    np.savez(path, events=np.empty((0, 6), np.int64))
    assert len(load(path).events) == 0
