"""CSV files of problems are read without loss, or refused with the number of the malformed line."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplug.arena.plan.problem import Buffer, Problem, buffers, solved
from memplug.arena.plan.problem_file import read_csv, write_csv
from memplug.errors import LayoutError
from tests.support.layouts import problems, stacked

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "problem.csv"


def read(path, text):
    path.write_text(text)
    return read_csv(path)


def rows_of(problem):
    return problem.buffers[["lower", "upper", "size", "alignment"]].tolist()


@given(problems(), st.data())
@in_one_folder
def test_written_problem_reads_back_equal_and_lists_its_offsets(tmp_path, problem, data):
    names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=4)
    many = {"min_size": len(problem), "max_size": len(problem), "unique": True}
    numbers = st.lists(st.integers(-(2**63), 2**63 - 1), **many)
    ids = data.draw(st.one_of(numbers, st.lists(names, **many)))
    array = np.array(ids, np.int64 if not ids or isinstance(ids[0], int) else np.str_)
    problem = Problem(buffers=problem.buffers, ids=array)
    path = tmp_path / "problem.csv"
    write_csv(problem, stacked(problem), path)
    again = read_csv(path)
    assert rows_of(again) == rows_of(problem)
    assert list(map(str, again.ids.tolist())) == list(map(str, ids))
    lines = path.read_text().splitlines()
    assert lines[0].startswith("id,lower,upper,size") and lines[0].endswith(",offset")
    assert [int(line.rpartition(",")[2]) for line in lines[1:]] == stacked(problem).offsets.tolist()


def test_solution_file_holds_rows_and_offsets(path):
    problem = Problem(buffers=buffers(np.array([[0, 3, 4], [3, 9, 8]])), ids=np.array(["b1", "b,2"]))
    write_csv(problem, solved(problem, np.array([8, 0]), "test"), path)
    assert path.read_text() == 'id,lower,upper,size,offset\nb1,0,3,4,8\n"b,2",3,9,8,0\n'


def test_alignment_column_is_written_if_any_alignment_is_not_1(path):
    problem = Problem(
        buffers=buffers([Buffer(lower=0, upper=3, size=4), Buffer(lower=0, upper=3, size=4, alignment=8)])
    )
    write_csv(problem, stacked(problem), path)
    assert path.read_text() == "id,lower,upper,size,alignment,offset\n0,0,3,4,1,0\n1,0,3,4,8,8\n"


READ = {
    "plain": ("id,lower,upper,size\n7,0,3,4\n9,3,5,8\n", [(0, 3, 4, 1), (3, 5, 8, 1)], [7, 9]),
    "text": ("id,lower,upper,size\nb1,0,3,4\nb2,3,5,8\n", [(0, 3, 4, 1), (3, 5, 8, 1)], ["b1", "b2"]),
    "another order": ("size,upper,id,lower\n4,3,7,0\n", [(0, 3, 4, 1)], [7]),
    "start and inclusive end": ("buffer_id,start,end,size\nx,0,2,4\n", [(0, 3, 4, 1)], ["x"]),
    "buffer and begin": ("buffer,begin,upper,size\nx,0,2,4\n", [(0, 2, 4, 1)], ["x"]),
    "alignment": ("id,lower,upper,size,alignment\n1,0,2,4,16\n", [(0, 2, 4, 16)], [1]),
    "hint, gaps, offset and others": (
        "id,lower,hint,upper,size,gaps,offset,colour\n1,0,-1,2,4,,oops,red\n",
        [(0, 2, 4, 1)],
        [1],
    ),
    "spaces": ("id, lower ,upper,size\n 1 , 0, 2 ,4\n", [(0, 2, 4, 1)], [1]),
    "carriage returns": ("id,lower,upper,size\r\n1,0,2,4\r\n", [(0, 2, 4, 1)], [1]),
    "blank lines": ("\nid,lower,upper,size\n\n1,0,2,4\n\n\n2,0,2,4", [(0, 2, 4, 1)] * 2, [1, 2]),
    "byte order mark": ("\ufeffid,lower,upper,size\n1,0,2,4\n", [(0, 2, 4, 1)], [1]),
    "ids that look alike": ("id,lower,upper,size\n7,0,2,4\n07,0,2,4\n", [(0, 2, 4, 1)] * 2, ["7", "07"]),
    "ids beyond 64 bits": (f"id,lower,upper,size\n{2**64},0,2,4\n", [(0, 2, 4, 1)], [str(2**64)]),
    "before the beginning": ("id,lower,upper,size\n1,-5,2,4\n", [(-5, 2, 4, 1)], [1]),
    "no buffers": ("id,lower,upper,size\n", [], []),
}


@pytest.mark.parametrize("kind", READ)
def test_columns_are_read_by_name_in_any_order(path, kind):
    text, rows, ids = READ[kind]
    problem = read(path, text)
    assert rows_of(problem) == rows
    assert problem.ids.tolist() == ids


AT_FAULT = {
    "too few fields": ("2,0,3", "3 fields where the header has 5"),
    "too many fields": ("2,0,3,4,1,0", "6 fields where the header has 5: '2,0,3,4,1,0'"),
    "not an integer": ("2,0,3,4.0,1", "size is '4.0', not an integer"),
    "empty field": ("2,0,,4,1", "upper is '', not an integer"),
    "beyond 64 bits": (f"2,0,{2**63},4,1", f"upper is '{2**63}', which no int64 holds"),
    "far beyond 64 bits": (f"2,0,3,1{'0' * 5000},1", "size is '1000000000"),
    "zero size": ("2,0,3,0,1", "size is 0, not above 0"),
    "negative size": ("2,0,3,-4,1", "size is -4, not above 0"),
    "zero alignment": ("2,0,3,4,0", "alignment is 0, not above 0"),
    "empty lifetime": ("2,3,3,4,1", "in use from 3 up to 3: no time at all"),
    "backwards": ("2,3,1,4,1", "in use from 3 up to 1: no time at all"),
    "duplicate id": ("1,0,3,4,1", "the id '1' is already on line 2"),
    "missing id": (",0,3,4,1", "no id"),
    "NUL byte": ("2,0,3\x00,4,1", "upper is '3\\x00', not an integer"),
}


@pytest.mark.parametrize("kind", AT_FAULT)
def test_error_names_the_malformed_line_and_what_is_wrong(path, kind):
    line, problem = AT_FAULT[kind]
    with pytest.raises(LayoutError) as refused:
        read(path, f"id,lower,upper,size,alignment\n1,0,3,4,1\n\n{line}\n3,0,3,4,1\n2,-,,,\n")
    assert refused.value.problem.startswith(f"{path}: at line 4: {problem}")
    assert "id,lower,upper,size" in refused.value.advice


def test_line_numbers_count_line_breaks_inside_quotes(path):
    with pytest.raises(LayoutError, match="line 4: size is 0"):
        read(path, 'id,lower,upper,size\n"on\ntwo",0,1,8\n3,0,1,0\n')


@given(st.integers(2, 40), st.data())
@in_one_folder
def test_error_names_the_first_of_several_malformed_lines(tmp_path, count, data):
    lines = ["id,lower,upper,size", *(f"{i},{i},{i + 1},8" for i in range(count))]
    broken = data.draw(st.lists(st.integers(1, count), min_size=1, max_size=3, unique=True))
    for line in broken:
        lines[line] = data.draw(st.sampled_from(("x", f"{line - 1},1,2,0", f"{line - 1},2,1,8", f"{line - 1},1,2,8,9")))
    path = tmp_path / "problem.csv"
    with pytest.raises(LayoutError, match=f"line {min(broken) + 1}: "):
        read(path, "\n".join(lines))


def test_inclusive_end_equal_to_the_start_means_one_instant(path):
    assert rows_of(read(path, "id,lower,end,size\n1,4,4,8\n")) == [(4, 5, 8, 1)]
    with pytest.raises(LayoutError, match="line 2: in use from 4 up to 4"):
        read(path, "id,lower,end,size\n1,4,3,8\n")
    with pytest.raises(LayoutError, match="line 2: upper .* no int64 holds"):
        read(path, f"id,lower,end,size\n1,4,{2**63 - 1},8\n")


def test_row_with_gaps_in_its_lifetime_is_refused(path):
    with pytest.raises(LayoutError, match="line 3: gaps '1-2@0:4'.*whole lifetime"):
        read(path, "id,lower,upper,size,gaps\n1,0,3,4,\n2,0,3,4,1-2@0:4\n")


def test_oversized_buffer_error_names_the_file(path):
    with pytest.raises(LayoutError, match="problem.csv: buffer 1 has .* sizes are below 2"):
        read(path, f"id,lower,upper,size\n1,0,3,{2**61}\n")


FOREIGN = {
    "empty": (lambda path: path.write_bytes(b""), "an empty file"),
    "blank": (lambda path: path.write_bytes(b"\n\n"), "an empty file"),
    "no header": (lambda path: path.write_text("0,0,3,4\n"), "line 1: the header has no column id, lower, upper, size"),
    "other header": (lambda path: path.write_text("id,lower,size\n1,0,4\n"), "line 1: the header has no column upper"),
    "duplicate column": (lambda path: path.write_text("id,lower,upper,size,start\n"), "more than one column for lower"),
    "binary": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000)), "line 1 or later: not text in UTF-8"),
    "binary later": (lambda path: path.write_bytes(b"id,lower,upper,size\n1,0,2,\xff\n"), "not text in UTF-8"),
    "one long field": (lambda path: path.write_text("x" * 200_000), "line 1: field larger than field limit"),
    "unclosed quote": (lambda path: path.write_text('id,lower,upper,size\n"1,0,3,4\n2,0,3,4\n'), "line 2: 1 fields"),
    "directory": (lambda path: path.mkdir(), "not a file"),
    "pipe": (lambda path: os.mkfifo(path), "not a file"),
    "missing": (lambda path: None, "unreadable: No such file or directory"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_raises_one_error_with_its_name(path, kind):
    make, problem = FOREIGN[kind]
    make(path)
    with pytest.raises(LayoutError) as refused:
        read_csv(path)
    assert refused.value.problem.startswith(f"{path}: ") and problem in refused.value.problem


def test_fifty_thousand_rows_read_back_exactly(path):
    count = 50_000
    rows = np.arange(count)
    problem = Problem(buffers=buffers(np.stack([rows, rows + 7, 512 * (rows % 99 + 1)], axis=1)), ids=rows[::-1].copy())
    write_csv(problem, stacked(problem), path)
    again = read_csv(path)
    assert np.array_equal(again.buffers, problem.buffers) and np.array_equal(again.ids, problem.ids)
    with path.open("a") as file:
        file.write("x,0,1,0,0\n")
    with pytest.raises(LayoutError, match=f"line {count + 2}: size is 0"):
        read_csv(path)


def test_failed_write_leaves_the_old_file(path, monkeypatch):
    problem = read(path, "id,lower,upper,size\n1,0,2,4\n")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LayoutError, match="No space left on device"):
        write_csv(problem, stacked(problem), path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "id,lower,upper,size\n1,0,2,4\n"
