"""Pickles of plain data are read, and no pickle runs code."""

from __future__ import annotations

import os
import pickle
import random
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.profile.plain_pickle import NotPlainError, is_pickle, loads
from tests.support.allocator_snapshots import steps

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.lists(inner).map(tuple)
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(3, 5), st.booleans())
def test_plain_data_is_read_as_pickle_reads_it(value, protocol, twice):
    content = pickle.dumps([value, value] if twice else value, protocol=protocol)
    assert loads(content) == pickle.loads(content) and is_pickle(content)


def test_pickles_with_long_strings_and_shared_objects_are_read():
    shared = {"name": "x" * 70_000, "n": list(range(1000))}
    for protocol in (2, 3, 4, 5):
        found = loads(pickle.dumps([shared] * 400, protocol=protocol))
        assert found == [shared] * 400 and found[0] is found[399]


class Runs:
    """An object that makes a folder if Python unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reading_a_pickle_imports_and_calls_nothing(tmp_path, protocol):
    content = pickle.dumps({"device_traces": [Runs(tmp_path / "made")]}, protocol=protocol)
    with pytest.raises(NotPlainError, match="only data is read"):
        loads(content)
    assert not (tmp_path / "made").exists()
    for value in (pickle, print, Path("a"), {1, 2}, 1 << 3000, bytearray(b"x")):
        try:
            content = pickle.dumps(value, protocol=protocol)
        except TypeError:
            continue
        with pytest.raises(ValueError):
            loads(content)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04N.garbage"[:2],
        b"\x80\x04}r\xff\xff\xff\xffj\xff\xff\xff\xfe.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x04B\xff\xff\xff\xffabc.",
        b"\x80\x04]K\x01K\x02s.",
        b"\x80\x04}(K\x01u.",
        b"\x80\x04}]K\x01s.",
        b"\x80\x04NK\x01a.",
        b"\x80\x04\x94.",
        b"\x80\x04t.",
        b"\x80\x04.",
        b"\x80\x04",
        b"",
    ],
)
def test_damaged_pickle_raises_value_error_without_allocating_memory(content):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError):
        loads(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_truncated_or_altered_pickle_is_read_or_raises_value_error():
    content = pickle.dumps(steps())
    for end in range(0, len(content), 7):
        with pytest.raises(ValueError):
            loads(content[:end])
    chance = random.Random(0)
    for _ in range(3000):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            loads(bytes(damaged))
        except ValueError:
            pass
