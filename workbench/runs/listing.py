"""The runs under a folder as one frame, quickly also where there are thousands.

What a manifest says is kept in `<out>/.index.parquet`, so that a listing reads again only the runs that are new or have
changed. The index is never the truth: which runs there are, whether one is complete and whether a process writes to it
are asked of the folders each time; a row counts only while COMPLETE, or the manifest of a run without it, is the file
that it was (time, size and inode); and an index that is missing, torn or of another version is made anew.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import polars as pl

from ..errors import WorkbenchError
from .files import atomic_write
from .folder import RunFolder, state_of

INDEX = ".index.parquet"
INDEX_FROM = 200  # runs; a smaller folder is read as fast without an index, and stays free of it
_NAMES = ("path", "experiment", "notebook", "digest", "state", "started", "seconds", "error")
_SCHEMA = {name: pl.Float64 if name == "seconds" else pl.String for name in _NAMES}
_KEPT = ("notebook", "digest", "started", "seconds", "error", "status")
_INDEX_SCHEMA = {"place": pl.String, "mark": pl.String} | {n: _SCHEMA.get(n, pl.String) for n in _KEPT}


def list_runs(out: str | Path) -> pl.DataFrame:
    """One row a run under `out`, oldest first: path, experiment, notebook, digest, state, started, seconds, error.

    out: what runs went into, or the folder of one experiment in it, whose runs alone are given then.
    Folders that cannot be read (another format version, a torn manifest) are listed with state "unreadable".
    """
    out = Path(out)
    if any(os.path.isfile(f"{out}/{name}/config.json") for name in _folders(out)):
        out = out if out.name not in ("", "..") else out.resolve()
        return list_runs(out.parent).filter(pl.col("experiment") == out.name)
    index = _load(out / INDEX)
    rows, found, fresh = [], {}, 0
    for experiment in _folders(out):
        base = os.path.join(out, experiment)
        for name in _folders(base):
            path, place = f"{base}/{name}", f"{experiment}/{name}"
            complete = _mark(f"{path}/COMPLETE")
            mark = complete or _mark(f"{path}/manifest.json") or ""
            known = index.get(place)
            try:
                if known is None or known[0] != mark:
                    if not os.path.isfile(f"{path}/config.json"):
                        continue
                    manifest = RunFolder.open(path).manifest
                    known, fresh = (mark, *(_typed(manifest.get(kept), kept) for kept in _KEPT)), fresh + 1
                found[place] = known
                _, notebook, digest, started, seconds, error, status = known
                state = "complete" if complete else state_of(status, RunFolder(path).is_locked)
            except (WorkbenchError, OSError) as problem:
                told = isinstance(problem, WorkbenchError)
                error = str(problem) if told else f"{path} cannot be read: {problem.strerror}"
                notebook, digest, state, started, seconds = None, None, "unreadable", None, None
            rows.append((path, experiment, notebook, digest, state, started, seconds, error))
    if len(found) >= INDEX_FROM and (fresh or len(found) != len(index)):
        _save(out / INDEX, found)
    return pl.DataFrame(sorted(rows, key=_order), schema=_SCHEMA, orient="row")


def _order(row: tuple) -> tuple[str, ...]:
    """By the stamp in the name; within one second by the time in the manifest, which names do not tell."""
    name = row[0].rpartition("/")[2]
    return name[:16], row[5] or "", name, row[0]


def _folders(path: str | Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


def _mark(path: str) -> str | None:
    """What tells whether a file is the one that it was; None where there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return f"{stat.st_mtime_ns},{stat.st_size},{stat.st_ino}"


def _typed(value: Any, name: str) -> Any:
    """A manifest is a file anyone may edit: a value of another type is told as text, or left out of the seconds."""
    if name == "seconds":
        return float(value) if isinstance(value, int | float) else None
    return value if value is None or isinstance(value, str) else str(value)


def _load(path: Path) -> dict[str, tuple]:
    try:
        frame = pl.read_parquet(path, glob=False, hive_partitioning=False)
    except (OSError, pl.exceptions.PolarsError):
        return {}
    return {row[0]: row[1:] for row in frame.iter_rows()} if dict(frame.schema) == _INDEX_SCHEMA else {}


def _save(path: Path, rows: dict[str, tuple]) -> None:
    """Keep the index; a folder that takes no file, or a full disk, only makes the next listing slower."""
    frame = pl.DataFrame([(place, *row) for place, row in rows.items()], schema=_INDEX_SCHEMA, orient="row")
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    with contextlib.suppress(WorkbenchError):
        atomic_write(path, buffer.getvalue())
