"""The folder a run leaves: tables by step, checkpoints, manifest. Every write is whole or not there.

    <out>/<experiment>/<UTC stamp>-<digest8>/
        config.json  manifest.json  executed.ipynb  report.html  notes.jsonl  COMPLETE
        tables/<name>/step=000010.parquet
        checkpoints/step=000010/

A file is written under a temporary name, flushed to the disk and renamed, so a reader never sees half of one and a
killed run leaves nothing torn. COMPLETE is written last: a folder without it belongs to a run that can be resumed.
"""

import contextlib
import fcntl
import io
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

import polars as pl

from ..config import digest
from ..errors import WorkbenchError, unknown
from .files import atomic_write, read_json, sync_folder, told, write_json

FORMAT_VERSION = 1
LOCK_HELD_FOR = "WORKBENCH_LOCKED_RUN"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STAMP = "%Y%m%dT%H%M%SZ"
_STEP = re.compile(r"step=(\d{6,})(?:\.(\d+))?")


class RunFolder:
    """One run on disk; make it with `create` or `open`."""

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()

    @classmethod
    def create(cls, out: str | Path, experiment: str, config: Mapping[str, Any]) -> "RunFolder":
        """A new folder under `out`/`experiment`, named by the UTC time and the configuration's digest.

        The folder appears at once with config.json and a manifest in it. Where the clock is behind the newest run of
        the experiment, as after it jumped back, the run is stamped a second after that one, so that names keep the
        order in which runs were made. Raises WorkbenchError on an experiment name that is no plain file name, a
        configuration JSON cannot hold, or a disk that does not take it.
        """
        if not NAME.fullmatch(experiment):
            raise WorkbenchError(f"experiment {experiment!r} must be letters, digits, '.', '_' or '-', no mark first")
        parent = Path(out).resolve() / experiment
        with told(parent):
            created = _after_newest(parent, datetime.now(UTC))
        name = f"{created:{_STAMP}}-{digest(config)}"
        draft = parent / f".{name}.{os.getpid()}"
        with told(parent):
            draft.mkdir(parents=True)
        try:
            header = {"format_version": FORMAT_VERSION, "experiment": experiment, "digest": digest(config)}
            write_json(draft / "config.json", header | {"created": created.isoformat(), "config": dict(config)})
            write_json(draft / "manifest.json", header | {"status": "running", "started": created.isoformat()})
            return cls(_claim(draft, parent, name))
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """The run at `path`. Raises WorkbenchError where that is no run folder or one of another format version."""
        run = cls(path)
        if not (run.path / "config.json").is_file():
            lack = "config.json in it is missing" if run.path.is_dir() else "no such folder"
            raise WorkbenchError(f"{path} is not a run folder ({lack}); one is <out>/<experiment>/<time>-<digest>")
        version = read_json(run.path / "config.json").get("format_version")
        if version != FORMAT_VERSION:
            raise WorkbenchError(f"{path} is a run of format version {version}; version {FORMAT_VERSION} is expected")
        return run

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def experiment(self) -> str:
        return read_json(self.path / "config.json")["experiment"]

    @property
    def config(self) -> dict[str, Any]:
        """What the run was created with."""
        return read_json(self.path / "config.json")["config"]

    @property
    def manifest(self) -> dict[str, Any]:
        """Everything recorded about the run so far (workbench/runs/manifest.py lists the names)."""
        return read_json(self.path / "manifest.json")

    def update_manifest(self, **changes: Any) -> None:
        write_json(self.path / "manifest.json", self.manifest | changes)

    # Tables

    @property
    def tables(self) -> list[str]:
        """Names of the tables that hold at least one step."""
        folders = (self.path / "tables").glob("*")
        return sorted(folder.name for folder in folders if self.table_files(folder.name))

    def table_files(self, name: str) -> list[Path]:
        """The table's files in order of their step, and of their number where an import left several a step."""
        files = [path for path in (self.path / "tables" / name).glob("*.parquet") if step_of(path) is not None]
        return sorted(files, key=lambda path: (step_of(path), len(path.name), path.name))

    def step_files(self, name: str, step: int) -> list[Path]:
        """The table's files of one step, as `table_files` orders them, without a listing of all steps."""
        file = self.path / "tables" / name / f"step={step:06d}.parquet"
        numbered = (file.with_suffix(f".{number}.parquet") for number in itertools.count(1))
        return [file, *itertools.takewhile(Path.is_file, numbered)] if file.is_file() else []

    def write_table(self, name: str, step: int, frame: pl.DataFrame) -> Path:
        """Write one step of a table, whole or not at all; writing the same step again replaces it.

        A column `step` is put in front where the frame has none. Raises WorkbenchError where the frame's own step
        differs, the name is no plain file name, or the disk is full.
        """
        if not NAME.fullmatch(name):
            raise WorkbenchError(f"table {name!r} must be named by letters, digits, '.', '_' or '-'")
        if step < 0:
            raise WorkbenchError(f"table {name}: step must be 0 or more, got {step}")
        if "step" not in frame.columns:
            frame = frame.select(pl.lit(step, pl.Int64).alias("step"), pl.all())
        elif not frame.filter(pl.col("step").ne_missing(step)).is_empty():
            found = frame.filter(pl.col("step").ne_missing(step))["step"][0]
            raise WorkbenchError(f"table {name}: a row of step {found} was given for step {step}")
        buffer = io.BytesIO()
        frame.write_parquet(buffer, compression="zstd", statistics=True)
        path = self.path / "tables" / name / f"step={step:06d}.parquet"
        atomic_write(path, buffer.getvalue())
        return path

    def scan(self, name: str) -> pl.LazyFrame:
        """All steps of a table so far, in order, as one lazy frame; a column that is null in some steps keeps its type.

        Safe while the run goes on. Raises WorkbenchError where the table is not there, naming those that are.
        """
        files = self.table_files(name)
        if not files:
            if not self.tables:
                raise WorkbenchError(f"no table {name!r} in {self.path}: it holds no tables yet")
            raise unknown(f"table of {self.path}", name, self.tables)
        return scan_files(files)

    def read(self, name: str) -> pl.DataFrame:
        """As `scan`, collected."""
        return self.scan(name).collect()

    def truncate(self, after_step: int) -> None:
        """Drop table files of later steps, which a resumed run will write anew, and what killed writes left."""
        for path in (self.path / "tables").glob("*/*"):
            step = step_of(path)
            if path.name.startswith(".") or (step is not None and step > after_step):
                path.unlink(missing_ok=True)
        for draft in self.checkpoint_dir.glob(".step=*"):
            shutil.rmtree(draft, ignore_errors=True)

    # Checkpoints

    @property
    def checkpoint_dir(self) -> Path:
        return self.path / "checkpoints"

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int = 2) -> Path:
        """Call `write` with an empty folder, then put that folder in place as a whole and keep the newest `keep`.

        A checkpoint of the same step is replaced, and there is never a moment without a whole one. Raises
        WorkbenchError where the disk is full; the earlier checkpoints stay then.
        """
        target = self.checkpoint_dir / f"step={step:06d}"
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        with told(target):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        try:
            with told(target):
                write(draft)
                files = {str(p.relative_to(draft)): p.stat().st_size for p in sorted(draft.rglob("*")) if p.is_file()}
                for name in files:
                    with open(draft / name, "rb+") as handle:
                        os.fsync(handle.fileno())
            write_json(draft / "checkpoint.json", {"step": step, "files": files})
            same = [p for p in self._checkpoints() if checkpoint_step(p) == step]
            number = max((int(_STEP.fullmatch(p.name)[2] or 0) for p in same), default=-1) + 1
            path = target.with_name(f"{target.name}.{number}") if number else target
            with told(target):
                draft.rename(path)
                sync_folder(self.checkpoint_dir)
        except RuntimeError as error:
            # torch.save reports a full disk as a RuntimeError of its own
            if shutil.disk_usage(self.path).free < 1 << 24:
                raise WorkbenchError(f"{target} was not written: the disk is full") from error
            raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        others = [p for p in self._checkpoints() if p != path and p not in same]
        for old in same + others[: max(len(others) - max(keep, 1) + 1, 0)]:
            shutil.rmtree(old, ignore_errors=True)
        return path

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, or None; torn and temporary ones are passed over. See `checkpoint_step`."""
        return next(reversed(self._checkpoints()), None)

    def _checkpoints(self) -> list[Path]:
        found = [(p, m) for p in self.checkpoint_dir.glob("step=*") if (m := _STEP.fullmatch(p.name)) and _is_whole(p)]
        return [p for p, _ in sorted(found, key=lambda pm: (int(pm[1][1]), int(pm[1][2] or 0)))]

    # The end of a run, and who writes

    @property
    def is_complete(self) -> bool:
        return (self.path / "COMPLETE").is_file()

    def complete(self) -> None:
        """Mark the run as finished; nothing is written to it after this."""
        atomic_write(self.path / "COMPLETE", f"{datetime.now(UTC).isoformat()}\n".encode())

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Be the folder's one writer while the context lasts.

        The lock goes with its process: one that died holds nothing. A notebook that the runner executes writes
        under the runner's lock. Raises WorkbenchError where another process is writing.
        """
        if os.environ.get(LOCK_HELD_FOR) == str(self.path):
            yield
            return
        with told(self.path):
            handle = open(self.path / "LOCK", "a+")  # noqa: SIM115
        with handle:
            if not _flock(handle):
                handle.seek(0)
                raise WorkbenchError(f"{self.path} is being written by {handle.read().strip() or 'another process'}")
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            with told(self.path / "LOCK"):
                handle.truncate(0)
                handle.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
                handle.flush()
            try:
                yield
            finally:
                handle.truncate(0)

    @property
    def writer(self) -> str:
        """Who is writing here, such as "process 12 on host since 2026-01-01 10:00:00 UTC"; empty for nobody."""
        with contextlib.suppress(OSError):
            return (self.path / "LOCK").read_text(errors="replace").strip() if self.is_locked else ""
        return ""

    @property
    def is_locked(self) -> bool:
        """Whether a live process is writing here."""
        try:
            with open(self.path / "LOCK") as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def state(self) -> str:
        """"complete", "running", "interrupted" or "failed"."""
        if self.is_complete:
            return "complete"
        return state_of(self.manifest.get("status"), self.is_locked)


def scan_files(files: Sequence[Path]) -> pl.LazyFrame:
    """Files of one table, at least one, as one lazy frame; a column that is null in some of them keeps its type."""
    runs: list[tuple[Any, list[Path]]] = []
    for file in files:
        schema = pl.read_parquet_schema(file)
        if runs and runs[-1][0] == schema:
            runs[-1][1].append(file)
        else:
            runs.append((schema, [file]))
    parts = [pl.scan_parquet(paths, hive_partitioning=False, glob=False) for _, paths in runs]
    return parts[0] if len(parts) == 1 else pl.concat(parts, how="diagonal_relaxed")


def state_of(status: str | None, locked: bool) -> str:
    """The state of a run without COMPLETE, from its manifest's status and whether a live process writes to it."""
    return "running" if locked else "failed" if status == "failed" else "interrupted"


def checkpoint_step(path: Path) -> int:
    """The step a checkpoint was saved at."""
    return read_json(path / "checkpoint.json")["step"]


def _after_newest(parent: Path, now: datetime) -> datetime:
    """The time a new run of `parent` is stamped with: now, or a second after the newest run's if that is later."""
    stamps = [name[:16] for name in (os.listdir(parent) if parent.is_dir() else []) if name[:1].isdigit()]
    for stamp in sorted(stamps, reverse=True):
        if stamp <= f"{now:{_STAMP}}":
            break
        with contextlib.suppress(ValueError, OverflowError):
            return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC) + timedelta(seconds=1)
    return now


def _claim(draft: Path, parent: Path, name: str) -> Path:
    """Rename the draft to `name`, or to name-2, name-3 … where a run of the same second has it."""
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        number += 1
        if path.exists():
            continue
        with told(path), contextlib.suppress(FileExistsError):
            draft.rename(path)
            return path


def _flock(handle: IO[str], tries: int = 5) -> bool:
    """Whether the lock could be had; `is_locked` of another process may hold it for an instant, hence the tries."""
    for _ in range(tries):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
    return False


def step_of(path: Path) -> int | None:
    """The step that a table's file or a checkpoint is of, None where its name says none."""
    match = _STEP.fullmatch(path.stem)
    return int(match[1]) if match else None


def _is_whole(path: Path) -> bool:
    """Whether a checkpoint's marker is there and every file it lists has the size it lists."""
    try:
        files = read_json(path / "checkpoint.json")["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, WorkbenchError, KeyError):
        return False
