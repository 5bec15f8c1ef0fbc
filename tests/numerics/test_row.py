"""Rows: headroom, what is subnormal or flushed, sums over ranks and passes, and files."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core.errors import ArgumentValueError
from halfstep.numerics import Row, load_rows, merge_rows, save_rows


@pytest.mark.parametrize(
    ("dtype", "amax", "scale", "headroom"),
    [
        ("float16", 65504.0, 1.0, 0.0),
        ("float16", 65504.0 / 2, 1.0, 1.0),
        ("float16", 65504.0 / 2**20, 2.0**16, 4.0),
        ("bfloat16", 0.0, 1.0, math.inf),
        ("float32", math.inf, 1.0, -math.inf),
        ("float16", math.nan, 1.0, -math.inf),
    ],
)
def test_headroom_counts_doublings_of_the_scaled_numbers(dtype, amax, scale, headroom):
    assert Row(0, "m", "grad", dtype=dtype, amax=amax, scale=scale).headroom == pytest.approx(headroom)


def test_subnormal_is_a_share_of_all_numbers():
    row = Row(0, "m", "grad", dtype="float16", numel=8, zeros=0.5, exponents={-15: 1, -14: 1, 0: 2})
    assert row.subnormal == 0.5 * 0.25
    assert Row(0, "m", "grad", dtype="float16", zeros=0.5, exponents={-31: 1, -30: 3}, scale=2.0**16).subnormal == 0.125


def test_zeros_of_a_relu_are_not_flushed():
    exponents = {-2: 20, -1: 20, 0: 10}
    assert Row(0, "relu", "output", dtype="float16", numel=100, zeros=0.5, exponents=exponents).flushed == 0.0


def test_flushed_is_continued_below_the_smallest_number_and_no_more_than_the_zeros():
    tail = Row(0, "m", "output_grad", dtype="float16", zeros=0.2, exponents={-24: 10, -23: 20, -22: 50})
    assert tail.flushed == pytest.approx(10 / 80 * 0.8)
    assert Row(0, "m", "output_grad", dtype="float16", zeros=0.9, exponents={-24: 9, -23: 1}).flushed == 0.9


def test_without_bins_nothing_is_claimed():
    row = Row(0, "m", "output", dtype="float16", zeros=0.5)
    assert math.isnan(row.subnormal)
    assert math.isnan(row.flushed)


ROWS = st.builds(
    Row,
    step=st.integers(0, 2),
    module=st.sampled_from(["a", "b.0"]),
    tensor=st.sampled_from(["output", "grad"]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    numel=st.integers(1, 100),
    amax=st.floats(0, 1e30) | st.sampled_from([math.inf]),
    rms=st.floats(0, 1e10),
    zeros=st.floats(0, 1),
    exponents=st.dictionaries(st.integers(-126, 127), st.integers(1, 100), max_size=4),
    scale=st.sampled_from([1.0, 2.0**16]),
    probe=st.lists(st.floats(-1e3, 1e3), max_size=3).map(tuple),
)


@given(st.lists(ROWS, max_size=6))
def test_what_is_saved_is_loaded(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("rows") / "run.jsonl"
    save_rows(path, rows, command="train.py")
    assert load_rows(path) == rows


@given(st.lists(ROWS, max_size=8), st.integers(0, 8))
def test_rows_of_ranks_add_up_in_any_order_and_grouping(rows, cut):
    once = {key(row): row for row in merge_rows(rows)}
    twice = {key(row): row for row in merge_rows([*merge_rows(rows[cut:]), *merge_rows(rows[:cut])])}
    assert once.keys() == twice.keys()
    for name, row in once.items():
        other = twice[name]
        assert (row.numel, row.amax, row.exponents) == (
            other.numel, other.amax, other.exponents,
        )  # fmt: skip
        assert row.rms == pytest.approx(other.rms, rel=1e-9, abs=1e-12)
        assert row.zeros == pytest.approx(other.zeros, abs=1e-12)


def key(row):
    return row.step, row.module, row.tensor, row.call, row.dtype


def test_a_nan_remains_in_a_sum():
    (row,) = merge_rows([Row(0, "m", "grad", numel=1, amax=1.0), Row(0, "m", "grad", numel=1, amax=math.nan)])
    assert math.isnan(row.amax)


@pytest.mark.parametrize("text", ["", "[]\n", '{"halfstep": "search"}\n', '{"halfstep": "numerics", "format": 99}\n'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ArgumentValueError, match=r"other\.jsonl has no rows of halfstep\.numerics in format 1"):
        load_rows(path)


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "run.jsonl"
    row = Row(0, "m", "grad", amax=1.0)
    save_rows(path, [row])
    path.write_text(path.read_text() + "\n  \n")
    assert load_rows(path) == [row]
