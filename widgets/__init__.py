"""What a person touches in a notebook: widgets over a run folder. They read workbench, and nothing there reads them."""

from .explorer import Explorer, Selection

__all__ = ["Explorer", "Selection"]
