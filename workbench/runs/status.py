"""How a run stands, read from its manifest, lock and tables; nothing is kept for it on disk."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from ..errors import WorkbenchError, printable
from .account import account, resume_command, shown
from .detach import last_line
from .folder import RunFolder, step_of
from .listing import list_runs
from .text import duration, one_line

RECENT = 5  # steps that the success rate and the pace are taken over


@dataclass(frozen=True)
class Status:
    """A run as it is now. seconds: spent so far, all attempts; left: until the last step, None where not known."""

    run: RunFolder
    state: str
    manifest: Mapping[str, Any]
    step: int | None  # steps that are done; None for a notebook that trains nothing
    steps: int | None
    success: float | None  # mean over the last steps
    seconds: float
    left: float | None
    writer: str
    log: str

    @property
    def done(self) -> str:
        """Steps and success in a few words; empty where the run has no steps."""
        if self.step is None:
            return ""
        success = "" if self.success is None else f"  success {self.success:.2f}"
        return f"step {self.step}{f'/{self.steps}' if self.steps else ''}{success}"

    def lines(self) -> list[str]:
        """For a person: a fact a line; for a run that stopped, where, why and how to go on."""
        facts = {"run": shown(self.run.path), "state": self.state + (f" ({self.writer})" if self.writer else "")}
        facts |= {"notebook": str(self.manifest.get("notebook") or ""), "progress": self.done}
        facts["elapsed"] = duration(self.seconds) if self.seconds else ""
        facts["left"] = "" if self.left is None else f"about {duration(self.left)}, evaluations not counted"
        facts["last line"] = self.log if self.state in ("running", "complete") else ""
        lines = [f"{name:<9}  {one_line(value)}" for name, value in facts.items() if value]
        if self.state in ("failed", "interrupted"):
            lines += [printable(line) for line in _stopped(self.run, self.state, self.manifest)]
        elif self.state == "complete":
            lines.append(f"report     {shown(self.run.path / 'report.html')}")
        return lines


def status(run: RunFolder, now: datetime | None = None) -> Status:
    """How a run stands. Raises WorkbenchError where its manifest cannot be read."""
    manifest, state = run.manifest, run.state
    files = run.table_files("steps")
    parameters = manifest.get("parameters") or {}
    steps = parameters.get("steps") if isinstance(parameters, Mapping) else None
    steps = steps if isinstance(steps, int) and not isinstance(steps, bool) else None
    pace = _seconds_a_step(run)
    step = step_of(files[-1]) + 1 if files else 0 if steps and state == "running" else None
    left = pace * max(steps - step, 0) if state == "running" and pace and steps and step else None
    return Status(
        run, state, manifest, step, steps, _success(files[-RECENT:]), _elapsed(manifest, state, now), left,
        run.writer, last_line(run),
    )  # fmt: skip


def folder_lines(out: str | Path) -> list[str]:
    """A line a run under `out`, running ones first, then the others with the newest last."""
    rows = list_runs(out).to_dicts()
    rows.sort(key=lambda row: row["state"] != "running")
    width = max((len(shown_path(row["path"])) for row in rows), default=0)
    lines = []
    for row in rows:
        seconds, said = row["seconds"], row["error"] or ""
        if row["state"] == "running":
            try:
                now = status(RunFolder.open(row["path"]))
                left = "" if now.left is None else f"about {duration(now.left)} left"
                seconds, said = now.seconds, "  ".join(filter(None, (now.done, left))) or now.log
            except (WorkbenchError, OSError) as error:  # it ended, or was deleted, since it was listed
                said = str(error)
        spent = "" if seconds is None else duration(seconds)
        line = f"{shown_path(row['path']):<{width}}  {row['state']:<11}  {spent:>11}  {said}"
        lines.append(printable(line.rstrip()))
    return lines


def shown_path(path: str) -> str:
    return printable(shown(Path(path)))


def _stopped(run: RunFolder, state: str, manifest: Mapping[str, Any]) -> list[str]:
    if manifest.get("status") in ("failed", "interrupted"):
        return account(run, manifest).splitlines()
    # Killed: nothing was written at the end, so the cells are those of an earlier attempt or none.
    return ["the process that ran it is gone", f"  folder: {shown(run.path)}", f"  resume: {resume_command(run)}"]


def _elapsed(manifest: Mapping[str, Any], state: str, now: datetime | None) -> float:
    """Seconds of the attempts; of the one that runs, by the clock, which may have jumped back: never below 0."""
    attempts = manifest.get("attempts") or []
    spent = sum(float(attempt.get("seconds") or 0) for attempt in attempts)
    if state == "running" and attempts:
        began = datetime.fromisoformat(attempts[-1]["started"])
        spent += max(((now or datetime.now(UTC)) - began).total_seconds(), 0.0)
    return spent


def _success(files: list[Path]) -> float | None:
    frames = [frame for path in files if "success" in (frame := _read(path)).columns]
    rates = [rate for frame in frames for rate in frame["success"].to_list() if isinstance(rate, int | float)]
    rates = [rate for rate in rates if math.isfinite(rate)]
    return sum(rates) / len(rates) if rates else None


def _seconds_a_step(run: RunFolder) -> float | None:
    """From the stages' own seconds, which a steady clock measured, also across attempts of a resumed run."""
    frames = [_read(path) for path in run.table_files("timings")[-RECENT:]]
    sums = [float(frame["seconds"].sum()) for frame in frames if "seconds" in frame.columns]
    return sum(sums) / len(sums) if sums else None


def _read(path: Path) -> pl.DataFrame:
    """A step of a table, empty where it is dropped while one looks, as when the run is resumed."""
    try:
        return pl.read_parquet(path, glob=False, hive_partitioning=False)
    except (OSError, pl.exceptions.PolarsError):
        return pl.DataFrame()
