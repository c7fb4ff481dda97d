"""Where shipped notebooks, studies and data are: beside the package in a checkout, inside it in an installed wheel."""

from pathlib import Path

from .errors import WorkbenchError, unknown

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def root(folder: str) -> Path:
    """The folder "notebooks", "studies" or "data" of this installation."""
    in_checkout = _CHECKOUT / folder
    return in_checkout if (_CHECKOUT / "pyproject.toml").is_file() and in_checkout.is_dir() else _PACKAGE / folder


def data(*parts: str) -> Path:
    """The path of a shipped data file or folder, for example data("skills", "alfworld"); it may not exist."""
    return root("data").joinpath(*parts)


def notebooks() -> dict[str, Path]:
    """Every shipped notebook by its name, without the ending."""
    return {path.stem: path for path in sorted(root("notebooks").glob("*.ipynb"))}


def studies() -> dict[str, Path]:
    """Every shipped study (workbench/sweep/study.py) by its name, without the ending."""
    return {path.stem: path for path in sorted(root("studies").glob("*.toml"))}


def notebook(name_or_path: str | Path) -> Path:
    """A notebook by path, or a shipped one by name ("train" or "train.ipynb").

    A file at that path wins over a shipped name. Raises WorkbenchError where neither exists, naming the nearest.
    """
    path = Path(name_or_path)
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    known = notebooks()
    name = path.stem if path.suffix == ".ipynb" else str(name_or_path)
    if name in known and len(path.parts) == 1:
        return known[name]
    if path.is_file():
        raise WorkbenchError(f"{path} is not a notebook: a file ending in .ipynb is expected")
    if len(path.parts) > 1:
        raise WorkbenchError(f"no notebook at {path}; shipped ones, by name: {', '.join(known)}")
    raise unknown("notebook", str(name_or_path), known)
