"""A curve that is drawn again while a run goes on."""

from typing import Any

from IPython.display import display

from ..runs.folder import RunFolder
from . import curves
from .display import MIME, bundle


class Live:
    """Call it after each step: once a new evaluation is on disk, the success curve is drawn again in the same place."""

    def __init__(self, folder: RunFolder):
        self.folder, self.drawn, self.handle = folder, 0, None

    def __call__(self, trainer: Any = None) -> None:
        found = len(self.folder.table_files("evals"))
        if found <= self.drawn:
            return
        self.drawn = found
        figure = bundle(curves.success(self.folder.read("evals"), self.folder.read("steps")))
        del figure[MIME]  # JupyterLab does not draw plotly's own form again when an output is updated, HTML it does
        if self.handle is None:
            self.handle = display(figure, raw=True, display_id=True)
        else:
            self.handle.update(figure, raw=True)
