"""Columns of lists from flat values."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from workbench import tables


@given(st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=4), max_size=6))
def test_lists_are_cut_where_sizes_say_and_empty_ones_stay(rows):
    values = [x for row in rows for x in row]
    flat = {"ids": pl.Series(values, dtype=pl.Int32), "pieces": pl.Series([str(x) for x in values], dtype=pl.String)}
    found = tables.lists(flat, [len(row) for row in rows])
    assert found["ids"].to_list() == rows and found["ids"].dtype == pl.List(pl.Int32)
    assert found["pieces"].to_list() == [[str(x) for x in row] for row in rows]
    assert found["pieces"].dtype == pl.List(pl.String)
    assert tables.lists({}, []) == {}
