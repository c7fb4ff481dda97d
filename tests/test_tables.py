"""Columns of lists from flat values."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from workbench import tables


@given(st.lists(st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=4)), max_size=6))
def test_lists_are_cut_where_sizes_say_and_empty_ones_stay(rows):
    values, sizes = [x for row in rows for x in row or ()], [None if row is None else len(row) for row in rows]
    ids = tables.cut(pl.Series(values, dtype=pl.Int32), sizes)
    assert ids.to_list() == rows and ids.dtype == pl.List(pl.Int32)
    pieces = tables.cut(pl.Series([str(x) for x in values], dtype=pl.String), sizes)
    assert pieces.to_list() == [None if row is None else [str(x) for x in row] for row in rows]
    assert pieces.dtype == pl.List(pl.String)
