"""Features of tensors match a loop over their uses, and repeat for the same tensor in every iteration."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memplug.profile.tensors import FEATURES, LIFE, features, lives, ranking
from memplug.profile.trace import Pass, cut
from tests.support import rows
from tests.support.traces import Recording, recordings, training


def features_by_loop(trace, ranks):
    """Return the features by the loop in Chameleon's appendix A."""
    seen, rows = {}, []
    for use in trace.uses:
        name = trace.names[trace.operators["name"][use["operator"]]]
        rank = ranks.index(name) if name in ranks else 10**6
        count, tag, stack = seen.get(int(use["tensor"]), (0, 0, 0))
        count += 1
        tag |= 1 << rank if rank < 32 else 0
        stack = ((stack << 8) + min(rank, 255)) % 2**64
        seen[int(use["tensor"])] = (count, tag, stack)
        tensor = trace.tensors[use["tensor"]]
        rows.append((count, tag, stack, int(tensor["dtype"]), int(tensor["nbytes"])))
    return rows


@st.composite
def programs(draw):
    """Draw a trace with many operator names, whose operators read and write some of four tensors."""
    recording = Recording()
    tensors = [recording.tensor(draw(st.integers(0, 100)), draw(st.sampled_from("ab"))) for _ in range(4)]
    offset, several = draw(st.integers(0, 300)), st.lists(st.sampled_from(tensors), max_size=3)
    for name in range(offset):
        recording.op(f"often{name}")
        recording.op(f"often{name}")
    for name in draw(st.lists(st.integers(0, 60), max_size=60)):
        recording.op(f"op{name}", reads=draw(several), writes=draw(several))
    return recording.trace()


@given(programs())
def test_features_match_a_loop_over_the_uses(trace):
    table = features(trace)
    assert table.dtype == FEATURES
    assert table.tolist() == features_by_loop(trace, ranking(trace))


@given(programs(), st.lists(st.integers(0, 60), unique=True))
def test_unranked_operators_set_no_tag_bit_and_enter_the_stack_as_255(trace, names):
    ranks = [f"op{name}" for name in names]
    assert features(trace, ranks).tolist() == features_by_loop(trace, ranks)


@given(recordings())
def test_operators_are_ranked_by_frequency_then_name(recording):
    trace = recording.trace()
    ran = [operator.name for operator in rows.operators(trace)]
    assert list(ranking(trace)) == sorted(set(ran), key=lambda name: (-ran.count(name), name))


def test_tensor_has_the_same_features_in_every_iteration():
    trace = training(steps=4).trace()
    ranks = ranking(trace)
    # Weights outlive a step, so their use counts grow; only tensors that a step makes have equal features in each step.
    ours = [features(cut(trace, step), ranks)[cut(trace, step).uses["tensor"] >= 2] for step in (1, 2)]
    assert len(ours[0]) > 0
    assert ours[0].tolist() == ours[1].tolist()
    made = trace.uses["tensor"] >= 2
    whole = features(trace)[made]
    assert whole[: len(whole) // 4].tolist() == whole[-len(whole) // 4 :].tolist()


def test_tensors_used_by_different_operators_differ_in_features():
    recording = Recording()
    first, second = recording.tensor(8), recording.tensor(8)
    recording.op("a", writes=(first, second))
    recording.op("b", reads=(first,))
    recording.op("c", reads=(second,))
    _, _, one, other = features(recording.trace())
    assert one["count"] == other["count"] and one["nbytes"] == other["nbytes"]
    assert one["tag"] != other["tag"] and one["stack"] != other["stack"]


def test_stack_holds_the_last_eight_uses_with_the_latest_in_its_low_byte():
    recording = Recording()
    tensor = recording.tensor()
    for name in "aabbbcccc":
        recording.op(name, reads=(tensor,))
    ranks = ranking(recording.trace())
    assert ranks == ("c", "b", "a")
    assert int(features(recording.trace())["stack"][-1]).to_bytes(8, "big") == bytes([2, 1, 1, 1, 0, 0, 0, 0])
    assert features(recording.trace())["tag"].tolist() == [4, 4, 6, 6, 6, 7, 7, 7, 7]


def test_lives_table_has_features_of_each_tensors_last_forward_use():
    recording = Recording()
    saved, late, unused = recording.tensor(64, "bfloat16"), recording.tensor(32), recording.tensor(16)
    recording.phase(Pass.FORWARD, 0)
    recording.op("mm", writes=(saved,))
    recording.op("silu", reads=(saved,))
    recording.phase(Pass.BACKWARD, 0)
    recording.op("mm", reads=(saved,), writes=(late,))
    recording.op("mm", reads=(saved, late))
    trace = recording.trace()
    one, two, three = lives(trace)
    then = features(trace)
    assert (saved, late, unused) == (0, 1, 2), "rows are in the order of numbers"
    assert (one["nbytes"], trace.dtypes[one["dtype"]], one["uses"]) == (64, "bfloat16", 4)
    assert [int(one[name]) for name in ("first_operator", "last_operator", "use")] == [0, 3, 1]
    assert [one[name] for name in ("count", "tag", "stack")] == [2, then[1]["tag"], then[1]["stack"]]
    assert [int(two[name]) for name in ("first_operator", "last_operator", "use", "count")] == [2, 3, 5, 2]
    assert [int(three[name]) for name in ("first_operator", "last_operator", "uses", "use")] == [-1, -1, 0, -1]
    assert [int(three[name]) for name in ("count", "tag", "stack")] == [0, 0, 0]


@given(recordings())
def test_lives_table_matches_a_loop_over_the_uses(recording):
    trace = recording.trace()
    table, then = lives(trace), features(trace)
    assert table.dtype == LIFE and len(table) == len(trace.tensors)
    for tensor, row in enumerate(table):
        uses = [i for i, use in enumerate(trace.uses) if use["tensor"] == tensor]
        operators = [int(trace.uses["operator"][i]) for i in uses]
        forward = [
            i for i, o in zip(uses, operators, strict=True) if rows.operator(trace, o).phase.kind == Pass.FORWARD
        ]
        assert row["uses"] == len(uses)
        assert (row["first_operator"], row["last_operator"]) == ((operators[0], operators[-1]) if uses else (-1, -1))
        assert row["use"] == ((forward or uses)[-1] if uses else -1)
        for name in ("count", "tag", "stack"):
            assert row[name] == (then[row["use"]][name] if uses else 0)


def test_trace_without_operators_has_no_features_and_no_last_uses():
    recording = Recording()
    recording.tensor(8)
    trace = recording.trace()
    assert len(features(trace)) == 0
    assert lives(trace)["use"].tolist() == [-1]
    assert np.array_equal(lives(Recording().trace()), np.empty(0, LIFE))
