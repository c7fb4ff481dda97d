"""A curve that is drawn again while a run goes on."""

from pathlib import Path
from typing import Any

import polars as pl
from IPython.display import display
from polars import selectors

from ..runs.folder import RunFolder, scan_files
from . import curves
from .display import MIME, bundle


class Live:
    """Call it after each step: once a new evaluation is on disk, the success curve is drawn again in the same place."""

    def __init__(self, folder: RunFolder):
        self.evals = _Growing(folder, "evals", "step", "panel", "role", "outcome")
        self.steps = _Growing(folder, "steps", "step", "success", "success_tasks")
        self.handle = None

    def __call__(self, trainer: Any = None) -> None:
        if not self.evals.grow():
            return
        self.steps.grow()
        figure = bundle(curves.success(self.evals.rows, self.steps.rows))
        del figure[MIME]  # JupyterLab does not draw plotly's own form again when an output is updated, HTML it does
        if self.handle is None:
            self.handle = display(figure, raw=True, display_id=True)
        else:
            self.handle.update(figure, raw=True)


class _Growing:
    """Columns of a table that grows, as far as it has them; `grow` reads the files that came since, and no other.

    A resumed run writes everything after a step anew. So as long as the last file that was read stands in its place,
    what was read before it does too, and otherwise all is read again.
    """

    def __init__(self, folder: RunFolder, name: str, *columns: str):
        self.folder, self.name = folder, name
        self.columns = selectors.by_name(*columns, require_all=False)
        self.count, self.last = 0, None
        self.rows: pl.DataFrame | None = None

    def grow(self) -> bool:
        """Whether there are other rows than before, and some."""
        files = self.folder.table_files(self.name)
        if self.count and (len(files) < self.count or _identity(files[self.count - 1]) != self.last):
            self.count, self.rows = 0, None
        new = files[self.count :]
        if not new:
            return False
        self.count, self.last = len(files), _identity(files[-1])
        read = scan_files(new).select(self.columns).collect()
        held = [] if self.rows is None else [self.rows]
        self.rows = pl.concat([*held, read], how="diagonal_relaxed", rechunk=True)
        return True


def _identity(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_ino, status.st_mtime_ns
