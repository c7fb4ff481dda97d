"""Small notebooks for tests of the runner and the report."""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook


def make_notebook(path: Path, parameters: str, *cells: str, kernelspec: bool = True) -> Path:
    """Write a notebook: a title, the parameters cell, then the code cells."""
    first = new_code_cell(parameters)
    first.metadata["tags"] = ["parameters"]
    notebook = new_notebook(cells=[new_markdown_cell(f"# {path.stem}"), first, *map(new_code_cell, cells)])
    if kernelspec:
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path
