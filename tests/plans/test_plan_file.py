"""A plan file loads as the saved plan, or raises one error with advice, however its bytes were changed."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplug.arena.plan.part import AddressPlan
from memplug.arena.plan.problem import BUFFER
from memplug.errors import LayoutError
from memplug.plans.plan_file import is_plan, load, save
from memplug.plans.schema import FORMAT
from memplug.profile import trace_file
from memplug.swap.plan.part import SwapPart
from memplug.tokenwise.plan.decisions import Decisions
from tests.support.layouts import address_plans
from tests.support.memory_plans import assert_same, decided_plan, small_plan, target
from tests.support.traces import training

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


@given(address_plans(streams=3), st.booleans(), st.booleans(), st.floats(0, 1e9), st.text(max_size=5))
@in_one_folder
def test_loaded_plan_equals_saved_one(tmp_path, plan, optimal, timed_out, seconds, planner):
    solution = replace(plan.solution, optimal=optimal, timed_out=timed_out, seconds=seconds, planner=planner)
    plan = replace(plan, solution=solution)
    save(plan.alone(), tmp_path / "plan.json")
    loaded = load(str(tmp_path / "plan.json"))
    assert_same(loaded, plan)
    assert is_plan(tmp_path / "plan.json")
    save(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_equal_plans_give_identical_files(path):
    save(small_plan().alone(), path)
    first = path.read_bytes()
    save(small_plan().alone(), path)
    assert path.read_bytes() == first


def test_plan_of_numpy_numbers_gives_the_same_file(path):
    plan = small_plan()
    save(plan.alone(), path)
    first = path.read_bytes()
    numbers = {"lower": np.int64(5), "spaces": ((np.int64(512), np.int64(1536)), (1537, 2048))}
    solution = replace(plan.solution, height=np.int64(plan.solution.height), optimal=np.False_)
    save(replace(plan, solution=solution, dynamic=(replace(plan.dynamic[0], **numbers),)).alone(), path)
    assert path.read_bytes() == first


def test_plan_file_is_plain_json_with_a_readable_head(path):
    plan = small_plan()
    save(plan.alone(), path)
    document = json.loads(path.read_text())
    assert document["memplug_plan"] == FORMAT and document["fingerprint"]["model"] == "Llama"
    document = document["parts"]["arena"]
    assert document["phases"][1] == {"kind": "backward", "micro_batch": 0}
    assert document["layers"][2] == {"name": "layers.1.mlp", "dynamic": True}
    assert document["dynamic"][0]["spaces"] == [[512, 1536], [1537, 2048]]
    assert document["buffers"]["offset"] == plan.solution.offsets.tolist()
    assert list(document["buffers"]) == ["id", "offset", *BUFFER.names]
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert lines.index('"planner": "stacked",') < lines.index('"buffers": {')
    assert [line.count(",") for line in lines if line.startswith('"upper"')] == [4]


def test_file_with_any_bit_flipped_is_refused(path, tmp_path):
    save(small_plan().alone(), path)
    content = path.read_bytes()
    flipped = tmp_path / "flipped.json"
    flipped.write_bytes(content)
    accepted = []
    with flipped.open("r+b", buffering=0) as file:
        for bit in range(8 * len(content)):
            os.pwrite(file.fileno(), bytes([content[bit // 8] ^ 1 << bit % 8]), bit // 8)
            with suppress(LayoutError):
                load(flipped)
                accepted.append(bit)
            os.pwrite(file.fileno(), content[bit // 8 : bit // 8 + 1], bit // 8)
    assert not accepted
    assert_same(load(flipped), small_plan())


def test_file_truncated_at_any_length_is_refused(path, tmp_path):
    save(small_plan().alone(), path)
    content = path.read_bytes()
    for length in range(len(content)):
        (tmp_path / "short.json").write_bytes(content[:length])
        with pytest.raises(LayoutError, match="What to do"):
            load(tmp_path / "short.json")


@given(data=st.data())
@in_one_folder
def test_file_with_overwritten_bytes_gives_the_same_plan_or_an_error(tmp_path, data):
    plan = small_plan()
    path = tmp_path / "overwritten.json"
    save(plan.alone(), path)
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    piece = data.draw(st.binary(min_size=1, max_size=64))
    content[start : start + data.draw(st.integers(0, len(piece)))] = piece
    path.write_bytes(content)
    with suppress(LayoutError):
        assert_same(load(path), plan)


def test_edited_plan_is_refused_with_advice(path):
    save(small_plan().alone(), path)
    path.write_text(path.read_text().replace('"height_bytes": 2048', '"height_bytes": 4096'))
    with pytest.raises(LayoutError, match="not what was saved") as refused:
        load(path)
    assert refused.value.problem.startswith(f"{path}: ")
    assert "memplug plan" in refused.value.advice


def test_reformatted_file_is_recognised_as_a_plan_but_refused(path):
    save(small_plan().alone(), path)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    assert is_plan(path)
    with pytest.raises(LayoutError, match="not what was saved"):
        load(path)


@pytest.mark.parametrize("version", [0, 1, FORMAT - 1, 17])
def test_error_of_a_file_in_another_format_names_both_formats(path, version):
    save(small_plan().alone(), path)
    path.write_bytes(path.read_bytes().replace(b'"memplug_plan": %d' % FORMAT, b'"memplug_plan": %d' % version))
    with pytest.raises(LayoutError, match=f"format {version}, and this memplug reads format {FORMAT}") as refused:
        load(path)
    assert "newer" in refused.value.advice and "make it again" in refused.value.advice


def forge(path, change):
    """Change the JSON object, and correct the digest."""
    document = json.loads(path.read_bytes())
    del document["memplug_plan"], document["sha256"]
    change(document)
    content = json.dumps(document).encode().removeprefix(b"{") + b"\n"
    path.write_bytes(
        b'{"memplug_plan": %d, "sha256": "%s",\n' % (FORMAT, hashlib.sha256(content).hexdigest().encode()) + content
    )


def test_rewritten_file_with_the_same_content_loads_as_the_same_plan(path):
    save(small_plan().alone(), path)
    forge(path, lambda document: None)
    assert_same(load(path), small_plan())


def of_addresses(change):
    return lambda document: change(document["parts"]["arena"])


def put(value, *keys):
    def change(document):
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


FORGED = {
    "no table": lambda part: part.pop("buffers"),
    "no column": lambda part: part["buffers"].pop("stream"),
    "no head": lambda part: part.pop("planner"),
    "a table of something else": put([1, 2], "buffers"),
    "a column too short": put([0, 1, 2], "buffers", "lower"),
    "a column too long": put([0] * 5, "buffers", "offset"),
    "a column of text": put("0000", "buffers", "offset"),
    "a text among numbers": put([0, 512, "1024", 1536], "buffers", "offset"),
    "a fraction": put([0, 512, 1024.5, 1536], "buffers", "offset"),
    "a truth among numbers": put([0, 512, True, 1536], "buffers", "offset"),
    "a list in a list": put([0, 512, [1024], 1536], "buffers", "offset"),
    "no number of 64 bits": put([0, 512, 2**63, 1536], "buffers", "offset"),
    "no number of 32 bits": put([0, 0, 2**31, 0], "buffers", "stream"),
    "no truth": put([0, 0, 2, 0], "buffers", "outlives"),
    "ids of two kinds": put([0, 1, "x", 3], "buffers", "id"),
    "too few ids": put([0, 1], "buffers", "id"),
    "too few ids of text": put(["0", "1"], "buffers", "id"),
    "fewer requests": put(3, "requests"),
    "no size": put([512, 0, 512, 512], "buffers", "size"),
    "no time": put([1, 2, 3, 5], "buffers", "lower"),
    "no such phase": put([0, 3, 0, 0], "buffers", "lower_phase"),
    "no such layer": put([0, -2, 0, 0], "buffers", "upper_layer"),
    "orderings of two lengths": put([0], "orderings", "after"),
    "falling orderings": put([1, 0], "orderings", "time"),
    "a negative height": put(-1, "height_bytes"),
    "a height that is no number": put("2048", "height_bytes"),
    "a height beyond all": put(2**70, "height_bytes"),
    "seconds that are none": put(float("nan"), "seconds"),
    "a truth that is a number": put(1, "optimal"),
    "another pass": put("sideways", "phases", 0, "kind"),
    "a layer that is a number": put(3, "layers", 0, "name"),
    "a space of three": put([[0, 1, 2]], "dynamic", 0, "spaces"),
    "no predictions": put(None, "predictions"),
    "something more in a part": put(1, "comment"),
    "nothing in a part": lambda part: part.clear(),
}
FORGED = {name: of_addresses(change) for name, change in FORGED.items()}
FORGED |= {
    "something more": put(1, "comment"),
    "nothing": lambda document: document.clear(),
    "no fingerprint": lambda document: document.pop("fingerprint"),
    "no parts": lambda document: document.pop("parts"),
    "a list of parts": put([1], "parts"),
    "a part that is a number": put(1, "parts", "later"),
    "a training of nothing": put({}, "training"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_file_with_a_correct_digest_is_refused(path, name):
    save(small_plan().alone(), path)
    forge(path, FORGED[name])
    with pytest.raises(LayoutError) as refused:
        AddressPlan.of(load(path))
    assert refused.value.problem.startswith(f"{path}: ")
    assert "memplug plan" in refused.value.advice


def signed(content):
    return b'{"memplug_plan": %d, "sha256": "%s",\n' % (FORMAT, hashlib.sha256(content).hexdigest().encode()) + content


FOREIGN = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("a plan\n"),
    "binary": lambda path: path.write_bytes(bytes(1000)),
    "other JSON": lambda path: path.write_text('{"plan": 1}'),
    "a trace": lambda path: trace_file.save(training().trace(), path),
    "directory": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "missing": lambda path: None,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_raises_one_error_that_names_it(path, kind):
    FOREIGN[kind](path)
    assert not is_plan(path)
    with pytest.raises(LayoutError) as refused:
        load(path)
    assert refused.value.problem.startswith(f"{path}: ")
    assert "path of a" in refused.value.advice


@pytest.mark.parametrize("content", [b"", b"[", b"[" * 10**6, b"\xff}", b"}"], ids=["", "[", "[[[", "bytes", "}"])
def test_nonsense_with_a_correct_digest_is_refused(path, content):
    path.write_bytes(signed(content))
    assert is_plan(path)
    with pytest.raises(LayoutError, match="not a plan that memplug has written"):
        load(path)


def test_failed_save_leaves_only_the_old_file(path, monkeypatch):
    save(small_plan().alone(), path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LayoutError, match="the plan cannot be written.*No space left on device"):
        save(small_plan(planner="other").alone(), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert_same(load(path), small_plan())


def test_save_into_a_missing_folder_is_refused_with_advice(path):
    with pytest.raises(LayoutError, match="No such file or directory") as refused:
        save(small_plan().alone(), path.parent / "missing" / "plan.json")
    assert "folder that exists" in refused.value.advice


def test_part_of_unknown_technique_is_saved_unchanged(path, tmp_path):
    later = {"steps": [1, 2.5, None], "nested": {"µ": [[0, 1], []]}}
    plan = small_plan().alone()
    save(replace(plan, parts={**plan.parts, "later": later}), path)
    loaded = load(path)
    assert loaded.parts["later"] == later
    assert_same(loaded, small_plan())
    save(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_loaded_swap_list_equals_saved_one(path):
    first = target("", 1, last_use=-1, key=3)
    part = SwapPart(
        names=("aten::mm", "µ"),
        program=(0, 1, 0),
        outside=((1, (0, 1)),),
        ranks=(2, 0),
        targets=(first, target("aten::mm", 3)),
        anchors=((3, 0, 3),),
        host_bytes=512,
        predicted_stall_s=0.25,
    )
    save(decided_plan().with_part(part), path)
    assert SwapPart.of(load(path)) == part


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (SwapPart, put("3", "parts", "swap", "targets", 0, "nbytes")),
        (SwapPart, put([[0, 1]], "parts", "swap", "anchors")),
        (SwapPart, lambda document: document["parts"]["swap"]["targets"][0].pop("operator")),
        (SwapPart, put(1, "parts", "swap", "comment")),
        (Decisions, put(None, "parts", "tokenwise", "solution")),
        (Decisions, put(float("nan"), "parts", "tokenwise", "solution", "step_s")),
        (Decisions, put([["aten::mm", "1", False]], "parts", "tokenwise", "settings", "layers.0", "plan")),
        (Decisions, put(1, "parts", "tokenwise", "comment")),
        (
            Decisions,
            lambda document: document["parts"]["tokenwise"].pop("frame_bytes"),
        ),  # the field has a default, but must be in the file
    ],
)
def test_forged_parts_with_a_correct_digest_are_refused(path, kind, change):
    save(decided_plan().with_part(SwapPart(targets=(target("aten::mm", 3),))), path)
    assert kind.of(load(path)) is not None
    forge(path, change)
    with pytest.raises(LayoutError) as refused:
        kind.of(load(path))
    assert refused.value.problem.startswith(f"{path}: ") and f"in its part {kind.name}: " in refused.value.problem
    assert "memplug plan" in refused.value.advice
