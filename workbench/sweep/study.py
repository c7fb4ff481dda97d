"""A study: which cells a sweep has, read from TOML and checked whole before anything starts.

    name = "credit"                 # the folder under --out
    notebook = "train"              # a shipped name, or a path from the study's folder
    [parameters]                    # of every cell
    steps = 10
    [grid]                          # crossed with each other and with the cases
    seed = [0, 1, 2]
    [[case]]                        # parameters that go together
    method = "grpo_reuse"
    method_options = {max_reuse = 2}
    label = "grpo_reuse K=2"        # without it the method, or else what tells the case apart

Cells are cases x grid. Where the grid holds more than seeds and models, its values stand in the label, so that runs of
one label differ in seed and model alone.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import shipped
from ..config import canonical_json, digest
from ..errors import WorkbenchError, unknown
from ..runs import manifest
from ..runs.files import read_json, read_toml, write_json
from ..runs.folder import NAME
from ..runs.plan import plan

_KEYS = ("name", "notebook", "parameters", "grid", "case")


@dataclass(frozen=True)
class Cell:
    """One run of a study: every parameter of the notebook, and the digest by which its folder is known."""

    label: str
    digest: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A resolved study. `notebook` is a path; `versions` and `git` are those of the sweep that wrote study.json."""

    name: str
    notebook: Path
    notebook_sha256: str
    cells: tuple[Cell, ...]
    versions: dict[str, str | None]
    git: dict[str, Any] | None

    @classmethod
    def read(cls, path: str | Path) -> "Study":
        """The study of a TOML file, or of a shipped one by name ("credit").

        Raises WorkbenchError in one line that names the place: an unknown key or parameter (nearest one named), an
        ill-typed value, a parameter that stands in two places, two cells that are the same run.
        """
        path = _file(path)
        table = _table(path)
        source = _notebook(path, table["notebook"])
        names = plan(source).names
        fixed = table.get("parameters", {})
        if "experiment" in names and "experiment" in fixed:
            raise WorkbenchError(f"{path}: experiment is set by the sweep, to the study's name")
        own = {"experiment": table["name"]} if "experiment" in names else {}
        cells = []
        for label, given in _crossed(path, table):
            try:
                values = plan(source, own | fixed | given).values
                cells.append(Cell(label, digest(values), values))
            except WorkbenchError as error:
                raise WorkbenchError(f"{path}, {told(label, given)}: {error}") from None
        _refuse_twins(path, cells)
        found = manifest.versions(), manifest.code_state(source)
        return cls(table["name"], source, manifest.sha256(source), tuple(cells), *found)

    @classmethod
    def load(cls, folder: str | Path) -> "Study":
        """The study that a sweep left in its folder. Raises WorkbenchError where study.json is missing or odd."""
        path = Path(folder) / "study.json"
        stored = read_json(path)
        try:
            cells = tuple(Cell(**cell) for cell in stored["cells"])
            facts = {name: stored[name] for name in ("name", "notebook_sha256", "versions", "git")}
            return cls(notebook=Path(stored["notebook_path"]), cells=cells, **facts)
        except (KeyError, TypeError) as error:
            raise WorkbenchError(f"{path} does not describe a study: {error}") from None

    def save(self, folder: Path, accepted: bool = False) -> None:
        """Write study.json, whole.

        accepted: cells that other code made count as done. Then the notebook, versions and commit on record stay those
        of that code, and what was accepted in their place is appended to `accepted`, with the time in UTC.
        """
        facts = {name: value for name, value in asdict(self).items() if name not in ("cells", "notebook")}
        facts |= {"notebook": self.notebook.stem, "notebook_path": str(self.notebook)}
        kept = {"cells": [asdict(cell) for cell in self.cells]}
        path = folder / "study.json"
        before = read_json(path) if path.is_file() else {}
        history = before.get("accepted", [])
        if before and (accepted or history):
            own = {name: value for name, value in facts.items() if name != "name"}
            facts = {name: before.get(name, value) for name, value in facts.items()}
            last = {name: value for name, value in history[-1].items() if name != "at"} if history else {}
            if own != last and any(facts[name] != value for name, value in own.items()):
                history = [*history, {"at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"} | own]
            kept["accepted"] = history
        write_json(path, {"format_version": 1} | facts | kept)

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Names of the parameters in which cells differ, in the notebook's order."""
        first, *others = (cell.parameters for cell in self.cells)
        return tuple(n for n in first if any(canonical_json(p[n]) != canonical_json(first[n]) for p in others))

    def told(self, cell: Cell) -> str:
        """A cell as one says it: its label, and in brackets what else tells it from others of that label."""
        like = [c.parameters for c in self.cells if c.label == cell.label]
        more = {n: cell.parameters[n] for n in self.varying if any(p[n] != cell.parameters[n] for p in like)}
        return told(cell.label, more)


def told(label: str, parameters: Mapping[str, Any]) -> str:
    """A label and in brackets the parameters that do not stand in it already."""
    words = [label, *label.replace(",", " ").split()]
    more = {f"{name}={value}": str(value) for name, value in parameters.items()}
    inside = ", ".join(text for text, value in more.items() if value != label and text not in words)
    return f"{label} ({inside})" if inside else label


def _file(given: str | Path) -> Path:
    path = Path(given)
    if path.is_file():
        return path
    known = shipped.studies()
    name = path.stem if path.suffix == ".toml" else str(given)
    if name in known and len(path.parts) == 1:
        return known[name]
    raise unknown("study", str(given), known)


def _table(path: Path) -> dict[str, Any]:
    """The TOML of a study, with the kinds of its keys checked."""
    table = read_toml(path)
    for name in table:
        if name not in _KEYS:
            raise unknown(f"key of {path}", name, _KEYS)
    table.setdefault("name", path.stem)
    if not isinstance(table["name"], str) or not NAME.fullmatch(table["name"]):
        raise WorkbenchError(f"{path}: name must be letters, digits, '.', '_' or '-', got {table['name']!r}")
    if not isinstance(table.get("notebook"), str):
        raise WorkbenchError(f"{path}: notebook must be a shipped notebook's name or a path")
    for name in ("parameters", "grid"):
        if not isinstance(table.get(name, {}), dict):
            raise WorkbenchError(f"{path}: {name} must be a table, [{name}]")
    for name, values in table.get("grid", {}).items():
        if not isinstance(values, list) or not values:
            raise WorkbenchError(f"{path}: grid.{name} must be a list of values, got {values!r}")
    cases = table.get("case", [])
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise WorkbenchError(f"{path}: case must be tables, [[case]]")
    places: dict[str, str] = {}
    for place, held in (("parameters", table.get("parameters", {})), ("grid", table.get("grid", {}))):
        for name in held:
            if name in places:
                raise WorkbenchError(f"{path}: {name} stands in [{places[name]}] and in [{place}]; once is expected")
            places[name] = place
    for case in cases:
        for name in case:
            if name in places:
                raise WorkbenchError(f"{path}: {name} stands in [{places[name]}] and in a [[case]]; once is expected")
    return table


def _notebook(path: Path, given: str) -> Path:
    beside = path.parent / given
    return shipped.notebook(beside if given.endswith(".ipynb") and beside.is_file() else given)


def _crossed(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The label and the given parameters of every cell."""
    grid = table.get("grid", {})
    axes = [name for name in grid if name not in ("model", "method") and name not in manifest.seeds(grid)]
    owner: dict[str, int] = {}
    for number, case in enumerate(table.get("case") or [{}], 1):
        own = {name: value for name, value in case.items() if name != "label"}
        named = case.get("label", own.get("method"))
        if not isinstance(named, str | None) or named == "":
            raise WorkbenchError(f"{path}: the label of case {number} must be text, got {named!r}")
        for values in itertools.product(*grid.values()):
            given = dict(zip(grid, values, strict=True))
            plain = ", ".join(f"{n}={v}" for n, v in own.items()) or table.get("parameters", {}).get("method")
            words = [str(named or given.get("method") or plain or table["name"])]
            words += [str(given["method"])] if named and "method" in given else []
            words += [f"{name}={given[name]}" for name in axes]
            label = " ".join(words)
            if owner.setdefault(label, number) != number:
                raise WorkbenchError(f"{path}: cases {owner[label]} and {number} are both {label!r}: give one a label")
            yield label, own | given


def _refuse_twins(path: Path, cells: list[Cell]) -> None:
    seen: dict[str, int] = {}
    for number, cell in enumerate(cells, 1):
        first = seen.setdefault(canonical_json(cell.parameters), number)
        if first != number:
            other = cells[first - 1].label
            both = f"both {other}" if other == cell.label else f"{other} and {cell.label}"
            same = {n: cell.parameters[n] for n in ("method", *manifest.seeds(cell.parameters), "model")
                    if n in cell.parameters}  # fmt: skip
            share = ", ".join(f"{name}={value}" for name, value in same.items())
            told_share = f": they share {share} and every other parameter" if share else ""
            raise WorkbenchError(f"{path}: cells {first} and {number} ({both}) are the same run{told_share}")
