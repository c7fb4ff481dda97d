"""Optional sinks beside a run's tables: TensorBoard, MLflow, Weights & Biases and trackio.

The tables on disk stay the truth. A tracker is told, step by step, numbers that are already in them; it runs in a
thread of its own, and one that is not installed, cannot reach its server, raises or hangs costs one line of warning
and changes nothing. What it was told last is kept in the run folder (trackers/<name>.json), so that a resumed run goes
on in the same tracker run and no step is sent twice; one that was killed while it sent a step may lack that step.
"""

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import polars as pl

from .errors import WorkbenchError, unknown
from .runs.files import read_json, write_json
from .runs.folder import RunFolder, step_of

TABLES = ("steps", "evals", "timings")  # whose numbers are told
VARIABLE = "WORKBENCH_TRACKERS"  # names with commas between, in place of the configuration's; "none": no tracker
PATIENCE, IMPATIENCE = 30.0, 5.0  # seconds that a finished and a stopped run wait for what is still being sent


class Tracker(Protocol):
    """A sink: `start` once, then a call a step, then `finish`. It may raise anything at any time."""

    name: str

    def start(self, config: Mapping[str, Any], known: str | None) -> str | None:
        """Begin, or go on with the tracker's own run `known`; returns the name by which it can be found again."""

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def finish(self, status: str) -> None:
        """The end of the process's work on a run: "complete", "failed" or "interrupted"."""


class TensorBoard:
    """Event files in the run folder: `tensorboard --logdir runs`."""

    name = "tensorboard"

    def __init__(self, run: RunFolder):
        self.folder = run.path / "trackers" / "tensorboard"

    def start(self, config: Mapping[str, Any], known: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder))
        if known is None:
            self.writer.add_text("config", "\n".join(f"    {k} = {v}" for k, v in flat(config).items()))
        return self.folder.name

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()

    def finish(self, status: str) -> None:
        self.writer.close()


class MLflow:
    """One MLflow run in the experiment of the run's name, at MLFLOW_TRACKING_URI or MLflow's default."""

    name = "mlflow"

    def __init__(self, run: RunFolder):
        self.experiment, self.label = run.experiment, run.path.name

    def start(self, config: Mapping[str, Any], known: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric, self.client, self.run_id = Metric, MlflowClient(), known
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            return known
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        self.run_id = self.client.create_run(experiment, run_name=self.label).info.run_id
        parameters = [Param(name, value[:500]) for name, value in flat(config).items()]
        for start in range(0, len(parameters), 100):
            self.client.log_batch(self.run_id, params=parameters[start : start + 100])
        return self.run_id

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, [self.metric(name, number, now, step) for name, number in numbers.items()])

    def finish(self, status: str) -> None:
        ends = {"complete": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self.client.set_terminated(self.run_id, ends[status])


class WandB:
    """One W&B run whose id is the run folder's name, in the project of the experiment; WANDB_MODE=offline is heeded."""

    name = "wandb"

    def __init__(self, run: RunFolder):
        self.path, self.project, self.id = run.path, run.experiment, run.path.name

    def start(self, config: Mapping[str, Any], known: str | None) -> str:
        import wandb

        folder = self.path / "trackers"
        folder.mkdir(exist_ok=True)
        self.run = wandb.init(
            project=self.project, id=self.id, name=self.id, dir=str(folder), config=dict(config), resume="allow",
            reinit="create_new", settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        return self.id

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def finish(self, status: str) -> None:
        self.run.finish(exit_code=0 if status == "complete" else 1)


class Trackio:
    """One trackio run of the run folder's name, in the experiment's project; local, or as TRACKIO_SPACE_ID says."""

    name = "trackio"

    def __init__(self, run: RunFolder):
        self.project, self.label = run.experiment, run.path.name

    def start(self, config: Mapping[str, Any], known: str | None) -> str:
        import trackio

        self.run = trackio.init(
            self.project, name=self.label, config=flat(config), resume="allow", embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        return self.label

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def finish(self, status: str) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[RunFolder], Tracker]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB, "trackio": Trackio,
}  # fmt: skip


def check(names: Sequence[str]) -> None:
    """Raise WorkbenchError on a name that is no tracker's."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", str(name), TRACKERS)


def numbers(run: RunFolder, step: int) -> dict[str, float]:
    """What the tables say of a step, finite numbers only: train/<column>, eval/<panel>/<role>, seconds/<stage>."""
    found: dict[str, Any] = {}
    for row in _rows(run, "steps", step):
        found |= {f"train/{name}": value for name, value in row.items() if name != "step"}
    played: dict[str, list[int]] = {}
    for row in _rows(run, "evals", step):
        played.setdefault(f"eval/{row['panel']}/{row['role']}", []).append(row["outcome"])
    found |= {name: sum(outcomes) / len(outcomes) for name, outcomes in played.items()}
    found |= {f"seconds/{row['stage']}": row["seconds"] for row in _rows(run, "timings", step)}
    plain = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    return {name: value for name, value in plain.items() if math.isfinite(value)}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A configuration as text by dotted name."""
    out = {}
    for name, value in config.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": str(value)}
    return out


def send(run: RunFolder, name: str) -> int:
    """Tell a tracker every step of a run's tables that it was not told yet; returns how many those were.

    Raises WorkbenchError on an unknown tracker, a run that is being written or has nothing to tell, and a tracker that
    is not installed or raises.
    """
    check([name])
    if not _steps(run):
        raise WorkbenchError(f"{run.path} has no table that a tracker is told: steps, evals or timings is expected")
    with run.lock():
        feed = _Feed(TRACKERS[name](run), run)
        try:
            feed.start(run.config)
            sent = feed.send(None)
            feed.tracker.finish("complete" if run.is_complete else "interrupted")
        except (Exception, SystemExit) as error:
            raise WorkbenchError(_reason(name, error)) from error
    return sent


@contextlib.contextmanager
def follow(
    run: RunFolder,
    config: Mapping[str, Any],
    names: Sequence[str] = (),
    message: Callable[[str], Any] = print,
    more: Sequence[Tracker] = (),
) -> Iterator[Callable[[int], None]]:
    """Trackers that follow a run while the context lasts; gives a function to call with the number of steps done.

    names: of TRACKERS, unless the environment variable VARIABLE names others. more: trackers of the caller's own.
    message receives one line for a tracker that fails. Nothing that a tracker does raises here or delays a step.
    """
    workers = [_Worker(_Feed(tracker, run), config) for tracker in [*_chosen(run, names, message), *more]]

    def tell(done: int | None) -> None:
        for worker in workers:
            worker.orders.put(done)
            worker.warn(message)

    status = "failed"
    try:
        yield tell
        tell(None)
        status = "complete"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        for worker in workers:
            worker.orders.put(status)
        for worker in workers:
            worker.join(PATIENCE if status == "complete" else IMPATIENCE)
            worker.warn(message)
            if worker.is_alive():
                message(f"tracker {worker.name} did not finish in time; what it lacks: workbench track RUN --to NAME")


class _Feed:
    """A tracker with what it was told of one run."""

    def __init__(self, tracker: Tracker, run: RunFolder):
        self.tracker, self.run = tracker, run
        self.file = run.path / "trackers" / f"{tracker.name}.json"
        self.state: dict[str, Any] = {"id": None, "next": 0}

    def start(self, config: Mapping[str, Any]) -> None:
        if self.file.is_file():
            self.state |= read_json(self.file)
        self.state["id"] = self.tracker.start(config, self.state["id"])
        self._keep()

    def send(self, done: int | None) -> int:
        """Tell of every step below `done` (None: all that the tables hold) that was not told yet."""
        first = self.state["next"]
        # To list all steps at every step would take a long run longer and longer.
        steps = _steps(self.run) if done is None else range(first, done)
        steps = [s for s in steps if s >= first and any(self.run.step_files(table, s) for table in TABLES)]
        for step in steps:
            told = numbers(self.run, step)
            # Noted before it is sent: whoever is killed between the two loses a step rather than sends it twice.
            before, self.state["next"] = self.state["next"], step + 1
            self._keep()
            try:
                self.tracker(step, told)
            except BaseException:
                self.state["next"] = before
                self._keep()
                raise
        return len(steps)

    def _keep(self) -> None:
        write_json(self.file, self.state)


class _Worker(threading.Thread):
    """A feed in a thread of its own; orders are a number of steps done, None for all on disk, or a status to end on."""

    def __init__(self, feed: _Feed, config: Mapping[str, Any]):
        super().__init__(name=feed.tracker.name, daemon=True)
        self.feed, self.config = feed, dict(config)
        self.orders: queue.SimpleQueue[int | None | str] = queue.SimpleQueue()
        self.problem: str | None = None
        self.start()

    def run(self) -> None:
        try:
            self.feed.start(self.config)
            while not isinstance(order := self.orders.get(), str):
                self.feed.send(order)
            self.feed.tracker.finish(order)
        except BaseException as error:  # also SystemExit, which some clients raise
            self.problem = _reason(self.name, error)

    def warn(self, message: Callable[[str], Any]) -> None:
        if self.problem:
            message(f"{self.problem}; the run goes on without it")
            self.problem = None


def _chosen(run: RunFolder, names: Sequence[str], message: Callable[[str], Any]) -> list[Tracker]:
    asked = os.environ.get(VARIABLE, "").strip()
    if asked:
        names = [] if asked == "none" else [name.strip() for name in asked.split(",") if name.strip()]
    for name in (name for name in names if name not in TRACKERS):
        message(f"{VARIABLE}: {unknown('tracker', name, TRACKERS)}")
    return [TRACKERS[name](run) for name in dict.fromkeys(names) if name in TRACKERS]


def _reason(name: str, error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f"tracker {name} is off: {error} (pip install {name})"
    words = " ".join(str(error).split())
    return f"tracker {name} is off: {words[:200] or type(error).__name__}"


def _steps(run: RunFolder) -> list[int]:
    files = [file for table in TABLES for file in run.table_files(table)]
    return sorted({step_of(file) for file in files})


def _rows(run: RunFolder, table: str, step: int) -> list[dict[str, Any]]:
    files = run.step_files(table, step)
    return [row for file in files for row in pl.read_parquet(file, hive_partitioning=False).to_dicts()]
