"""Lines of keys, in JSON and in the other formats that DeepSpeed reads."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplug.ds_json.places import line_of, repeated


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]}', []),
        ('{"a": 1,\n"b": 2,\n"a": 3}', [("a", [1, 3])]),
        ('{"a": {"b": [0, {"c": 1,\n\n"c": 2}]}}', [("a.b[1].c", [1, 3])]),
        ('{"a": "x\\": {\\n", /* "a": 0 */ // "a": 0\n "a": [\n]\n, "a": {}}', [("a", [1, 2, 4])]),
        ("# a: 0\na: 1\nb: '''\na: 2\n'''\n'a': tr ue, }\n", [("a", [2, 6])]),
        ('{"\\u0061": 1, "a": 2}', [("a", [1, 1])]),
        ('\ufeff{"a": 1,\r\n"a": 2}', [("a", [1, 2])]),
        ('{"a": 1, "a" 2}', [("a", [1, 1])]),
        ('{"a": 1\n"b": x, y}\n"a": 2\n}', [("a", [1, 3])]),
    ],
    ids=str,
)
def test_repeated_keys_are_found_with_their_lines(text, found):
    assert repeated(text) == found


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.integers(0, 2))
def test_unique_keys_are_not_reported_as_repeated(value, indent):
    assert repeated(json.dumps(value, indent=indent or None)) == []
    assert repeated(json.dumps(value, ensure_ascii=False)) == []


@given(st.lists(st.text("abc", min_size=1), unique=True, max_size=8), VALUES)
def test_every_key_is_found_on_its_line(keys, value):
    text = "{\n" + ",\n".join(f'"{key}": {json.dumps([value])}' for key in keys) + "}"
    assert [line_of(text, key) for key in keys] == [number + 2 for number in range(len(keys))]


@given(st.text("{}[]:,\"'#/*\\ \nax1"))
def test_search_for_repeated_keys_always_terminates(text):
    repeated(text)


def test_long_unterminated_comments_and_blanks_are_read_quickly():
    for text in (
        '{"a"' + " " * 50_000,
        '{"a"' + "#" * 50_000 + "\n",
        '{"a": /*' + "/" * 50_000,
        '{"a": "' + "\\" * 50_001,
    ):
        assert line_of(text, "a") in (1, None)
