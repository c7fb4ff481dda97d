"""The checks that all readers share."""

import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.formats import base


def test_a_zip_made_to_explode(tmp_path):
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", b"0" * (1 << 24))
    with pytest.raises(WorkbenchError, match=r"bomb.zip: rows.jsonl would unpack from \d+ to 16777216 bytes"):
        base.open_zip(bomb)


def test_a_zip_of_many_members_made_to_explode(tmp_path):
    """Each member is below the size from which its own ratio counts."""
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for k in range(4):
            archive.writestr(f"{k}.jsonl", b"0" * (1 << 19))
    with pytest.raises(WorkbenchError, match=r"bomb.zip: its members would unpack from \d+ to 2097152 bytes"):
        base.open_zip(bomb)


def test_a_zip_that_lies_about_its_size(tmp_path):
    """The directory says 100 bytes: no more than those are read, and the checksum does not fit."""
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", b"0" * (1 << 22))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 100)
    path.write_bytes(data)
    with base.open_zip(path) as archive, pytest.raises(WorkbenchError, match="liar.zip: rows.jsonl is torn"):
        base.read_member(archive, "rows.jsonl", "liar.zip")


def test_a_zip_beyond_the_limits(tmp_path, monkeypatch):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"x" * 1000)
        archive.writestr("b", b"x" * 1000)
    monkeypatch.setattr(base, "MAX_RECORD", 999)
    with base.open_zip(path) as archive:
        with pytest.raises(WorkbenchError, match="a is over"):
            base.read_member(archive, "a", "a.zip")
        with pytest.raises(WorkbenchError, match="c cannot be unpacked"):
            base.read_member(archive, "c", "a.zip")
    monkeypatch.setattr(base, "MAX_ARCHIVE", 1500)
    with pytest.raises(WorkbenchError, match="b would unpack"):
        base.open_zip(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"no zip at all"])
def test_no_zip(tmp_path, content):
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(WorkbenchError, match="a.zip: no whole zip archive"):
        base.open_zip(tmp_path / "a.zip")


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "MAX_RECORD", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b"{}\n" + b"[" * (1 << 21))
    with pytest.raises(WorkbenchError, match="a.jsonl:2: a line over 1 MiB, expected one record"):
        list(base.jsonl(tmp_path / "a.jsonl"))


def test_lines_know_where_they_begin(tmp_path):
    data = b"\xef\xbb\xbf{}\r\n\n  \n{ }\n{  }"
    (tmp_path / "a.jsonl").write_bytes(data)
    found = list(base.lines(tmp_path / "a.jsonl"))
    assert [number for number, *_ in found] == [1, 4, 5]
    assert all(data[start : start + len(line)] == line for _, start, line in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_subnormal=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), JSON, max_size=5), st.integers(0, 60))
def test_names_of_an_object_whose_end_is_not_seen(record, cut):
    import json

    line = json.dumps(record).encode()
    head = line[: len(line) - cut] if cut < len(line) else line
    names = base._top_names(head)
    assert names == [json.dumps(name)[1:-1] for name in record][: len(names)]
    if cut == 0:
        assert len(names) == len(record)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False), max_size=20))
def test_float32_values_come_back_exactly(values):
    out = base.floats([float(np.float32(v)) for v in values], "x", "here")
    assert out.dtype == np.float32 and out.tolist() == values


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_ids_come_back_exactly(values):
    out = base.ids(values, "x", "here")
    assert out.dtype == np.int32 and out.tolist() == values


@pytest.mark.parametrize("values", [[1e39], [float("nan")], [None], ["1"], [[1.0]], [True], 3, "12", None, {"a": 1}])
def test_no_list_of_numbers(values):
    with pytest.raises(WorkbenchError, match="^here: x "):
        base.floats(values, "x", "here")


@pytest.mark.parametrize("values", [[-1], [2**31], [10**40], [0.5], [None], ["1"], [True, False], 3, None])
def test_no_list_of_ids(values):
    with pytest.raises(WorkbenchError, match="^here: x "):
        base.ids(values, "x", "here")


@pytest.mark.parametrize("values", [[2], [0.5], ["1"], [None], 1])
def test_no_mask(values):
    with pytest.raises(WorkbenchError, match="^here: x "):
        base.mask(values, "x", "here")


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, 1e30, 1e300])
def test_whole_numbers_that_no_table_holds(value):
    with pytest.raises(WorkbenchError, match="^here: x is beyond 64 bits, expected"):
        base.integer({"x": value}, "x", "here")


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 3.0])
def test_whole_numbers_that_a_table_holds(value):
    assert base.integer({"x": value}, "x", "here") == value


def test_masks_of_numbers_and_truths():
    assert base.mask([True, False], "x", "").tolist() == base.mask([1.0, 0.0], "x", "").tolist() == [1, 0]
