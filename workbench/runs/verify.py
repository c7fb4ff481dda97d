"""Is a run what its manifest says? Execute it again and name the first value on disk that differs.

On one machine, with the versions and the thread count that the manifest records, every value must come out the same,
floats to the last bit. The second run goes on beside the first only until a difference is seen or the first one's
steps are through, so that an interrupted run is verified as far as it went.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from .. import shipped
from ..errors import WorkbenchError
from ..trackers import VARIABLE as TRACKERS
from . import manifest
from .folder import RunFolder, step_of

TIMES = frozenset({"seconds", "started", "ended", "created"})  # columns and results that a clock decides
_CAUSES = ("evals", "budget", "turns", "episodes", "updates", "modules", "steps")  # within a step, what comes first
_KEYS = ("step", "episode", "turn", "update", "reuse", "module", "panel", "role", "task")
_POLL = 0.5


@dataclass(frozen=True)
class Difference:
    """The first place where two runs part. recorded, now: the values there, or what is there in place of a value."""

    where: str
    recorded: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.where}\n  recorded  {_shown(self.recorded)}\n  now       {_shown(self.now)}"


@dataclass(frozen=True)
class Verdict:
    """What a second execution gave. again: the second run's folder, kept where something differs."""

    difference: Difference | None
    files: int = 0
    rows: int = 0
    result: bool = False  # whether result records were compared too
    again: Path | None = None
    also: tuple[str, ...] = field(default=())  # other tables that differ in the same step


def verify(
    path: str | Path, tolerance: float = 0.0, say: Callable[[str], Any] = print, progress: bool = False
) -> Verdict:
    """Execute a run again, into a hidden folder beside it, and compare tables and result record.

    tolerance: 0 asks for equal bits; above 0, floats a and b are equal where |a - b| <= tolerance * max(1, |a|, |b|),
    all else exactly. say receives what differs from the recorded circumstances, before anything runs; progress passes
    the notebook's own lines on to stderr. The hidden folder is removed unless there is a difference. Raises
    WorkbenchError on a folder that is no run of the runner, is being written, or holds nothing to compare.
    """
    if not 0 <= tolerance < 1:
        raise WorkbenchError(f"tolerance must be at least 0 and below 1, got {tolerance}")
    run = RunFolder.open(path)
    stored = run.manifest
    if "notebook_path" not in stored:
        raise WorkbenchError(f"{run.path} was not made by the runner, so it does not say which notebook to execute")
    if run.is_locked:
        raise WorkbenchError(f"{run.path} is being written; verify it when it has ended")
    wanted = _files(run)
    if not wanted and not (run.is_complete and stored.get("result")):
        raise WorkbenchError(f"{run.path} holds no tables and no result record, so there is nothing to compare")
    source = _source(run, stored)
    for line in circumstances(stored, source):
        say(line)
    try:
        out = Path(tempfile.mkdtemp(prefix=f".verify-{run.path.name}-", dir=run.path.parent))
    except OSError as error:
        raise WorkbenchError(f"{run.path.parent}: no folder for the second run: {error.strerror}") from None
    verdict = None
    try:
        verdict = _compare(run, stored, wanted, _Again(source, stored, out, progress), tolerance)
    finally:
        if verdict is None or verdict.difference is None:
            shutil.rmtree(out, ignore_errors=True)
    return verdict


def circumstances(stored: Mapping[str, Any], source: Path) -> list[str]:
    """What is not as it was when a run was made, a line each: notebook, versions, machine, code."""
    lines = []
    name = f"{stored['notebook']}.ipynb"
    if stored["notebook_sha256"] != manifest.sha256(source):
        lines.append(f"note: {name} has changed since this run was made")
    elif source.name != name:
        lines.append(f"note: {name} has changed since this run was made; the copy that the run kept is executed")
    now = manifest.versions()
    for name, version in stored.get("versions", {}).items():
        if name in now and now[name] != version:
            lines.append(f"note: {name} is {now[name]} and was {version}")
    here, was = manifest.machine(), stored.get("machine")
    if was is None:
        lines.append("note: this run does not say on which processor and with how many threads it was made")
    else:
        named = {"arch": "architecture", "cpu": "processor", "cores": "number of cores"}
        lines += [f"note: the {named[k]} is {here[k]} and was {was[k]}" for k in named if here[k] != was[k]]
    device = manifest.device()
    if stored.get("device") not in (None, device):
        lines.append(f"note: the device is {device} and was {stored['device']}")
    git = manifest.code_state(Path(stored["notebook_path"])) if stored.get("git") else None
    if git and git["commit"] != stored["git"]["commit"]:
        lines.append(f"note: the code is at {git['commit'][:10]} and was at {stored['git']['commit'][:10]}")
    elif git and (git["dirty"] or stored["git"]["dirty"]):
        lines.append("note: the code had changes that were not committed, now or then")
    if len(stored.get("attempts", ())) > 1:
        lines.append(f"note: this run was resumed, {len(stored['attempts']) - 1} times; it is executed in one go now")
    return lines


def first_difference(recorded: pl.DataFrame, now: pl.DataFrame, tolerance: float = 0.0) -> Difference | None:
    """The first row, and in it the first column, where two tables differ; None where they are the same.

    Columns of TIMES are passed over. NaN equals NaN; without a tolerance 0.0 and -0.0 differ, as their bits do.
    """
    for name in recorded.columns:
        if name not in now.columns:
            return Difference(f"column {name}", recorded[name].dtype, "no such column")
        if recorded[name].dtype != now[name].dtype:
            return Difference(f"type of column {name}", recorded[name].dtype, now[name].dtype)
    for name in now.columns:
        if name not in recorded.columns:
            return Difference(f"column {name}", "no such column", now[name].dtype)
    height = min(recorded.height, now.height)
    found: tuple[int, str, int | None] | None = None
    for name in recorded.columns:
        if name in TIMES:
            continue
        place = _place(recorded[name].head(height), now[name].head(height), tolerance)
        if place is not None and (found is None or place[0] < found[0]):
            found = (place[0], name, place[1])
    if found is None:
        if recorded.height == now.height:
            return None
        return Difference("number of rows", recorded.height, now.height)
    row, name, item = found
    keys = ", ".join(f"{key} {recorded[key][row]}" for key in _KEYS[1:] if key in recorded.columns and key != name)
    where = f"row {row}{f' ({keys})' if keys else ''}, column {name}"
    old, new = recorded[name][row], now[name][row]
    return Difference(where, old, new) if item is None else Difference(f"{where}[{item}]", old[item], new[item])


def result_difference(recorded: Any, now: Any, tolerance: float = 0.0, where: str = "result") -> Difference | None:
    """The first value where two result records differ; names of TIMES are passed over."""
    if isinstance(recorded, Mapping) and isinstance(now, Mapping):
        if list(recorded) != list(now):
            return Difference(f"names in {where}", ", ".join(recorded), ", ".join(now))
        pairs = [(f"{where}.{name}", recorded[name], now[name]) for name in recorded if name not in TIMES]
    elif isinstance(recorded, list) and isinstance(now, list) and len(recorded) == len(now):
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(recorded, now, strict=True))]
    else:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (recorded, now))
        near = numbers and tolerance and abs(recorded - now) <= tolerance * max(1, abs(recorded), abs(now))
        same = near or (recorded == now and type(recorded) is type(now))
        return None if same else Difference(where, recorded, now)
    found = (result_difference(a, b, tolerance, at) for at, a, b in pairs)
    return next((difference for difference in found if difference), None)


class _Again:
    """The second execution, in a process of its own."""

    def __init__(self, source: Path, stored: Mapping[str, Any], out: Path, progress: bool):
        self.out = out
        self.message = out / "message"
        was = stored.get("machine") or {}
        environment = dict(was.get("environment", {}))
        if was and not any(name in environment for name in manifest.THREADS):
            if was["cores"] != manifest.machine()["cores"]:
                environment["OMP_NUM_THREADS"] = str(was["cores"])
        cwd = stored["cwd"] if Path(stored["cwd"]).is_dir() else os.getcwd()
        arguments = (source, stored["parameters"], out, cwd, environment, progress, self.message)
        self.process = multiprocessing.get_context("spawn").Process(target=_execute, args=arguments)

    def __enter__(self) -> "_Again":
        self.process.start()
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        if kind is KeyboardInterrupt:
            self.process.join(5)  # a Ctrl-C of the terminal reaches it too
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGINT)
            self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    @property
    def ended(self) -> bool:
        return not self.process.is_alive()

    @property
    def failure(self) -> str | None:
        """Why it failed, None where it did not."""
        if self.process.exitcode == 0:
            return None
        return self.message.read_text() if self.message.is_file() else f"it died, exit code {self.process.exitcode}"

    def run(self) -> RunFolder | None:
        found = [config.parent for config in self.out.glob("*/*/config.json") if config.parent.name[0] != "."]
        return RunFolder(found[0]) if found else None


def _execute(
    source: Path, parameters: dict[str, Any], out: Path, cwd: str, environment: dict[str, str], progress: bool,
    message: Path,
) -> None:  # fmt: skip
    from .execute import RunFailed, RunInterrupted, run_notebook

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
    for name in manifest.DECISIVE:
        os.environ.pop(name, None)
    os.environ.update(environment, **{TRACKERS: "none"})
    os.chdir(cwd)
    try:
        run_notebook(source, parameters, out, progress=progress)
    except (WorkbenchError, RunFailed) as error:
        message.write_text(str(error))
        raise SystemExit(1) from None
    except (RunInterrupted, KeyboardInterrupt):
        raise SystemExit(130) from None


def _compare(
    run: RunFolder, stored: Mapping[str, Any], wanted: dict[int, dict[str, Path]], again: _Again, tolerance: float
) -> Verdict:
    files = rows = 0
    with again:
        for step, tables in sorted(wanted.items()):
            new = _wait(again, step, tables)
            differing = []
            for name in sorted(tables, key=lambda n: (_CAUSES.index(n) if n in _CAUSES else len(_CAUSES), n)):
                found, height = _table(tables[name], new.get(name), tolerance, again)
                if found:
                    differing.append((name, found))
                files, rows = files + 1, rows + height
            if differing:
                (name, found), *others = differing
                at = Difference(f"table {name}, step {step}, {found.where}", found.recorded, found.now)
                folder = again.run()
                kept = folder.path if folder else again.out
                return Verdict(at, files, rows, False, kept, tuple(other for other, _ in others))
        if not run.is_complete:
            return Verdict(None, files, rows)
        while not again.ended:
            time.sleep(_POLL)
    folder = again.run()
    kept = folder.path if folder else again.out
    if again.failure or folder is None:
        return Verdict(Difference("how it ended", "complete", again.failure), files, rows, False, kept)
    more = _more(_files(folder), wanted)
    if more:
        return Verdict(Difference(more, "no such file", "written"), files, rows, False, kept)
    old, new = (_nameless(r.manifest["result"], r) for r in (run, folder))
    return Verdict(result_difference(old, new, tolerance), files, rows, old is not None, kept)


def _wait(again: _Again, step: int, tables: Mapping[str, Path]) -> dict[str, Path]:
    """The second run's files of a step, when they are all there or it has ended."""
    while True:
        ended = again.ended
        folder = again.run()
        new = _files(folder).get(step, {}) if folder else {}
        if ended or tables.keys() <= new.keys():
            return new
        time.sleep(_POLL)


def _table(old: Path, new: Path | None, tolerance: float, again: _Again) -> tuple[Difference | None, int]:
    recorded = pl.read_parquet(old, hive_partitioning=False)
    if new is None:
        return Difference("the file", "written", again.failure or "not written"), recorded.height
    return first_difference(recorded, pl.read_parquet(new, hive_partitioning=False), tolerance), recorded.height


def _more(new: Mapping[int, Mapping[str, Path]], wanted: Mapping[int, Mapping[str, Path]]) -> str | None:
    for step, tables in sorted(new.items()):
        for name in sorted(tables.keys() - wanted.get(step, {}).keys()):
            return f"table {name}, step {step}"
    return None


def _files(run: RunFolder) -> dict[int, dict[str, Path]]:
    """Table files by step and table."""
    out: dict[int, dict[str, Path]] = {}
    for name in run.tables:
        for file in run.table_files(name):
            out.setdefault(step_of(file), {})[name] = file
    return out


def _source(run: RunFolder, stored: Mapping[str, Any]) -> Path:
    """The notebook that was executed: where it was, the shipped one of its name, or the copy in the run folder."""
    was, copy = Path(stored["notebook_path"]), run.path / "notebook.ipynb"
    found = was if was.is_file() else shipped.notebooks().get(stored["notebook"], copy)
    if copy.is_file() and manifest.sha256(found) != stored["notebook_sha256"] == manifest.sha256(copy):
        return copy
    return shipped.notebook(found)


def _nameless(result: Any, run: RunFolder) -> Any:
    """A result record without the run's own name and place, which no two runs share."""
    if isinstance(result, Mapping):
        return {name: _nameless(value, run) for name, value in result.items()}
    if isinstance(result, list):
        return [_nameless(value, run) for value in result]
    if isinstance(result, str):
        return result.replace(str(run.path), "<run>").replace(run.path.name, "<run>")
    return result


def _place(old: pl.Series, new: pl.Series, tolerance: float) -> tuple[int, int | None] | None:
    """The first row where two columns of one type and length differ, and the place in its list where it is one."""
    if isinstance(old.dtype, pl.List):
        lengths = old.list.len().ne_missing(new.list.len())
        row = lengths.arg_true()[0] if lengths.any() else None
        same = old.head(row) if row is not None else old
        flat_old, flat_new = (s.filter(s.list.len() > 0).explode() for s in (same, new.head(len(same))))
        inner = _place(flat_old, flat_new, tolerance)
        if inner is None:
            return None if row is None else (row, None)
        ends = np.cumsum(same.list.len().fill_null(0).to_numpy())
        at = int(np.searchsorted(ends, inner[0], side="right"))
        return at, inner[0] - (int(ends[at - 1]) if at else 0)
    if old.dtype.is_float():
        differs = (old.is_null() != new.is_null()) | pl.Series(_floats_differ(old, new, tolerance))
    else:
        differs = old.ne_missing(new)
    return (int(differs.arg_true()[0]), None) if differs.any() else None


def _floats_differ(old: pl.Series, new: pl.Series, tolerance: float) -> np.ndarray:
    a, b = (s.fill_null(0.0).to_numpy() for s in (old, new))
    both_nan = np.isnan(a) & np.isnan(b)
    if not tolerance:
        bits = np.dtype(f"u{a.dtype.itemsize}")
        return (a.view(bits) != b.view(bits)) & ~both_nan
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= tolerance * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))
    return ~(near | (a == b) | both_nan)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, float | str) and "\n" not in str(value) else str(value)
    return " ".join(text.split())[:300]
