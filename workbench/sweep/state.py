"""What a study's folder already holds of each cell, and with which code it was made."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import canonical_json
from ..errors import WorkbenchError
from ..runs import RunFolder, manifest
from ..runs.files import read_json
from .study import Cell, Study

VERSIONS = ("workbench", "torch")  # runs made with different ones are not mixed without being asked to
CHANGED_WAY = "--accept-changed counts them all the same, another name or --out keeps them apart"


@dataclass(frozen=True)
class Now:
    """The code that would run now: the notebook and its hash, versions of packages, the checkout's commit."""

    notebook: Path
    sha256: str
    versions: Mapping[str, str | None]
    commit: str | None

    @classmethod
    def of(cls, study: Study) -> "Now":
        commit = (study.git or {}).get("commit")
        return cls(study.notebook, study.notebook_sha256, study.versions, commit)


@dataclass(frozen=True)
class State:
    """Of one cell: "done", "to resume", "running" or "to run"; the folder meant; what of it was made otherwise.

    `changed` says what forbids mixing, `noted` what is only told. An unfinished run that was begun with what forbids
    mixing is left as it is: the cell is "to run", and `noted` says so.
    """

    cell: Cell
    state: str
    run: RunFolder | None = None
    changed: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()


def survey(study: Study, folder: Path) -> list[State]:
    """The state of every cell, from one look at the folder."""
    index = defaultdict(list)
    for path in folder.glob("*-*"):
        index[path.name.split("-")[1]].append(path)
    now = Now.of(study)
    return [state_of(cell, index[cell.digest], now) for cell in study.cells]


def look(cell: Cell, folder: Path, now: Now) -> State:
    """The state of one cell at this moment."""
    return state_of(cell, list(folder.glob(f"*-{cell.digest}*")), now)


def state_of(cell: Cell, paths: Sequence[Path], now: Now) -> State:
    """A finished run counts before a running one, and that before one to resume; the newest of several."""
    best = State(cell, "to run")
    for run in runs_of(cell.parameters, paths):
        state = run.state
        changed, noted = changes(run, now)
        if state == "complete":
            return State(cell, "done", run, changed, noted)
        if state == "running" and best.state != "running":
            best = State(cell, "running", run)
        elif best.state == "to run" and not changed:
            best = State(cell, "to resume", run, noted=noted)
        elif best.state == "to run":
            best = State(cell, "to run", noted=best.noted + changed)
    return best


def runs_of(parameters: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[RunFolder]:
    """Of the folders, the readable runs with exactly these parameters, newest first."""
    mark = canonical_json(parameters)
    for path in sorted(paths, key=lambda p: (p.name[:16], len(p.name), p.name), reverse=True):
        with contextlib.suppress(WorkbenchError):  # what cannot be read is no run of this cell
            run = RunFolder.open(path)
            if canonical_json(run.config) == mark and "versions" in run.manifest:
                yield run


def changes(run: RunFolder, now: Now) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a run was made with, in any attempt, that is different now: what forbids mixing, and what is only told."""
    made = run.manifest
    attempts = made.get("attempts") or [{}]
    hashes = [attempt.get("notebook_sha256", made["notebook_sha256"]) for attempt in attempts]
    changed, noted = [], []
    if set(hashes) != {now.sha256}:
        code = _code(now.notebook)
        if any(_code_of(run, sha256, hashes[-1]) != code for sha256 in set(hashes) - {now.sha256}):
            changed.append(f"with other code in {now.notebook.name}")
    for name in VERSIONS:
        for version in dict.fromkeys((made["versions"] | a.get("versions", {})).get(name) for a in attempts):
            if version != now.versions[name]:
                changed.append(f"with {name} {version}, now {now.versions[name]}")
    gits = [attempt.get("git") or made.get("git") or {} for attempt in attempts]
    for commit, dirty in dict.fromkeys((git.get("commit"), bool(git.get("dirty"))) for git in gits):
        at = f"at commit {_short(commit)}{' with uncommitted changes' if dirty else ''}"
        noted += [f"{at}, now {_short(now.commit)}"] if commit != now.commit else [at] if dirty else []
    return tuple(changed), tuple(noted)


def told_changes(states: Sequence[State]) -> tuple[list[str], list[str]]:
    """One line a kind of change: those of finished cells that forbid mixing, and all others."""
    of = {kind: [s for s in states if s.state == kind] for kind in ("done", "to resume", "to run")}
    return _lines((c for s in of["done"] for c in s.changed), "finished", "made"), [
        *_lines((c for s in of["done"] for c in s.noted), "finished", "made"),
        *_lines((c for s in of["to resume"] for c in s.noted), "unfinished", "begun", ", to go on"),
        *_lines((c for s in of["to run"] for c in s.noted), "unfinished", "begun", ", to begin anew"),
    ]


def _code_of(run: RunFolder, sha256: str, last: str) -> list[str] | None:
    """The code of the run's copy with this hash; where that was not fetched from a URL, what was executed last."""
    kept = [path for path in run.path.glob("notebook*.ipynb") if manifest.sha256(path) == sha256]
    return _code(kept[0] if kept else run.path / "executed.ipynb") if kept or sha256 == last else None


def _code(notebook: Path) -> list[str] | None:
    """The code of a notebook's cells, without the cell of values that the runner puts in."""
    try:
        cells = read_json(notebook)["cells"]
    except (WorkbenchError, KeyError):
        return None
    plain = [c for c in cells if "injected-parameters" not in c.get("metadata", {}).get("tags", [])]
    return ["".join(c["source"]) for c in plain if c["cell_type"] == "code"]


def _lines(kinds: Iterator[str], which: str, how: str, then: str = "") -> list[str]:
    counts = Counter(kinds).items()
    return [f"{n} {which} cell{' was' if n == 1 else 's were'} {how} {kind}{then}" for kind, n in counts]


def _short(commit: str | None) -> str:
    return commit[:7] if commit else "unknown"
