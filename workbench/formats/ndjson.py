"""JSON lines of long number lists, parsed a chunk at a time by polars, which takes a third of the time of `json`.

What comes out is what `base.jsonl` gives, except that lists of numbers are numpy arrays of the schema's type, those of
floats finite, and names outside the schema are left out; a list of strings is a polars Series, and its strings joined
come beside it as "<name>.joined". A chunk that polars does not take, or would read otherwise than the JSON standard
says, is parsed by `json` line by line, so that an error names its line.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from .base import lines, parse_object, place

CHUNK = 1 << 24  # bytes of lines parsed at once
Schema = Mapping[str, pl.DataType]
Span = tuple[int, int, int]  # of a line: its number from 1, and where it starts and ends in the file, in bytes


def records(path: Path, schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of every line that is not blank. Raises WorkbenchError naming the line that is torn."""
    yield from parse(path, ((number, start, start + len(line)) for number, start, line in lines(path)), schema)


def parse(path: Path, spans: Iterable[Span], schema: Schema) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, record) of these lines, in the order given. Raises WorkbenchError naming the line that is torn."""
    with open(path, "rb") as handle, ThreadPoolExecutor(1) as pool:
        waiting: list[tuple[list[Span], Future]] = []
        for chunk in _chunks(spans):
            data = b"".join(_runs(handle.fileno(), chunk))
            waiting.append((chunk, pool.submit(_parsed, data, len(chunk), schema)))
            if len(waiting) == 2:  # polars parses the second while the first is used
                yield from _records(path, handle.fileno(), *waiting.pop(0))
        for chunk, frame in waiting:
            yield from _records(path, handle.fileno(), chunk, frame)


def _chunks(spans: Iterable[Span]) -> Iterator[list[Span]]:
    chunk: list[Span] = []
    size = 0
    for number, start, end in spans:
        chunk.append((number, start, end))
        size += end - start
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _runs(file: int, chunk: list[Span]) -> Iterator[bytes]:
    """The lines, those that follow each other in the file read at once; each run ends in a newline."""
    _, begin, stop = chunk[0]
    for _, start, end in (*chunk[1:], (0, -1, -1)):
        if start != stop:
            data = os.pread(file, stop - begin, begin)
            yield data if data.endswith(b"\n") else data + b"\n"
            begin = start
        stop = end


def _records(path: Path, file: int, chunk: list[Span], parsed: Future) -> Iterator[tuple[str, dict[str, Any]]]:
    frame, name = parsed.result(), place(path, "")
    columns = None if frame is None else _columns(frame)
    if columns is None:
        for number, start, end in chunk:
            yield f"{name}{number}", parse_object(os.pread(file, end - start, start), f"{name}{number}")
        return
    for (number, *_), *values in zip(chunk, *columns.values(), strict=True):
        yield f"{name}{number}", dict(zip(columns, values, strict=True))


def _parsed(data: bytes, rows: int, schema: Schema) -> pl.DataFrame | None:
    """A row a line, None where polars does not take these lines. In few calls: each waits for Python's lock."""
    try:
        frame = pl.read_ndjson(data, schema=dict(schema))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return None
    return frame if frame.height == rows else None


def _columns(frame: pl.DataFrame) -> dict[str, list] | None:
    """The values of each name, None where `json` would give others or has to say what is wrong."""
    out: dict[str, list] = {}
    for name, kind in frame.schema.items():
        column = frame[name]
        if not isinstance(kind, pl.List):
            if kind == pl.String and _has_zero(column):
                return None
            out[name] = column.to_list()
            continue
        if kind.inner == pl.String:
            joined = column.list.join("", ignore_nulls=False)
            if joined.null_count() > column.null_count() or _has_zero(joined):
                return None
            out[name], out[f"{name}.joined"] = list(column), joined.to_list()
            continue
        sizes = column.list.len()
        if column.null_count() or not sizes.min():  # explode would put a null for these
            flat = column.filter((sizes > 0).fill_null(False)).explode()
        else:
            flat = column.explode()
        values = flat.to_numpy()
        if flat.null_count() or not np.isfinite(values).all():
            return None
        out[name] = _views(values, sizes.to_list())
    return out


def _has_zero(strings: pl.Series) -> bool:
    """Whether a string holds a zero, which polars puts for half of a surrogate pair."""
    return bool(strings.str.contains("\0", literal=True).any())


def _views(flat: np.ndarray, sizes: list[int | None]) -> list[np.ndarray | None]:
    """The lists of these sizes, None where there is none, as views of one array."""
    out, at = [], 0
    for size in sizes:
        out.append(None if size is None else flat[at : at + size])
        at += size or 0
    return out
