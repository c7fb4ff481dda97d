"""Run a notebook with papermill so that the run can be trusted, read while it goes on, and resumed."""

import contextlib
import logging
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError
from . import account, manifest
from .account import resume_command, shown
from .files import atomic_write
from .folder import LOCK_HELD_FOR, RunFolder
from .plan import Resumption, injected, plan, resumption
from .progress import Narrator
from .text import one_line

__all__ = ["RunFailed", "RunInterrupted", "resume_command", "run_notebook", "shown"]

_ATOMIC = "workbench-atomic:"


class RunFailed(RuntimeError):
    """A cell of the notebook did not complete. The message tells which, why, and how to resume; `run` is its folder,
    `why` the reason in one line, also where a full disk kept it out of the manifest."""

    def __init__(self, message: str, run: RunFolder, why: str = ""):
        super().__init__(message)
        self.run, self.why = run, why


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or a signal like it (`why`): the folder was left so that the run can be resumed; the message says how."""

    def __init__(self, message: str, run: RunFolder, why: str = ""):
        super().__init__(message)
        self.run, self.why = run, why


def run_notebook(
    notebook: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    resume: str | Path | None = None,
    progress: bool = True,
    changed_notebook: str = "refuse",
) -> RunFolder:
    """Execute a notebook, by path or shipped name, into a new run folder; or go on with an interrupted one.

    parameters: values for names that the notebook's `parameters` cell declares, text allowed; refused with a
    WorkbenchError before anything is created when a name is unknown or a value ill-typed. The notebook sees them in a
    cell after that one, with `run_dir` set to the folder where it declares that name. Relative paths mean what
    they mean in the working directory of the caller.
    resume: a run folder; the same notebook is executed again with the stored parameters and the same `run_dir`.
    progress: tell on stderr which cell runs, and pass on what it prints (progress.Narrator).
    changed_notebook: for a resumed run whose notebook was edited since: "refuse", "ignore" or "use" (plan.resumption).
    Raises RunFailed where any cell did not complete (SystemExit(0) included), RunInterrupted on Ctrl-C, SIGTERM or
    SIGHUP; both leave the folder resumable, without COMPLETE.
    """
    run = plan(notebook, parameters).begin(out) if resume is None else RunFolder.open(resume)
    if resume is None:
        notebook, parameters, changed_notebook = None, None, "ignore"
    elif run.is_complete:  # said before a folder that is perhaps read-only is locked
        raise WorkbenchError(f"{run.path} is complete; there is nothing to resume; without --resume a new run starts")
    with run.lock():
        return _execute(run, resumption(run, notebook, parameters, changed_notebook), progress)


def _execute(run: RunFolder, what: Resumption, progress: bool) -> RunFolder:
    for note in what.notes:
        print(f"note: {note}", file=sys.stderr)
    what.keep()
    clock, before = time.monotonic(), run.manifest
    earlier = before["attempts"]
    spent = sum(attempt["seconds"] for attempt in earlier)
    # A clock that jumped back must not make an attempt begin before the one that it goes on from.
    latest = max([before["started"], *(attempt["started"] for attempt in earlier)])
    started = max(datetime.now(UTC), datetime.fromisoformat(latest))
    attempt = {"started": started.isoformat(), "notebook_sha256": what.sha256}
    attempt |= ({"versions": what.versions} if what.versions else {}) | ({"git": what.git} if what.git else {})

    def ended(status: str) -> dict[str, Any]:
        """What a manifest says of the time until now; the end is counted from the start, by a steady clock."""
        seconds = round(time.monotonic() - clock, 3)
        return {
            "status": status,
            "attempts": [*earlier, attempt | {"status": status, "seconds": seconds}],
            "seconds": round(spent + seconds, 3),
            "ended": (started + timedelta(seconds=seconds)).isoformat(),
        }

    run.update_manifest(
        status="running", error=None, traceback=[], attempts=[*earlier, attempt | {"status": "running", "seconds": 0.0}]
    )
    with _stoppable() as stops:
        stopped: BaseException | None = None
        narrator = Narrator(progress)
        try:
            _papermill(run, what.notebook, injected(what.names, what.values, run), what.cwd, narrator)
        except (Exception, KeyboardInterrupt) as error:
            stopped = error
        narrator.finish()
        interrupted = isinstance(stopped, KeyboardInterrupt)
        notebook = _cleaned(run)
        cells = account.cells(notebook, "interrupted" if interrupted else "failed", stopped is not None)
        failed = account.stopped_cell(cells)
        status = "interrupted" if interrupted else "failed" if failed or stopped or not cells else "complete"
        facts = {"cells": cells, "result": account.result(notebook), "device": manifest.device()}
        if status != "complete":
            facts["error"] = stops.name if interrupted else account.reason(notebook, failed, stopped)
            facts["traceback"] = [] if interrupted else account.frames(notebook, failed)
        try:
            run.update_manifest(**facts, **ended(status))
            if status == "complete":
                from ..report import build_report

                build_report(run)
                run.update_manifest(artifacts=manifest.artifacts(run.path))
                run.complete()
                return run
        except (Exception, KeyboardInterrupt) as error:
            # All cells may have run, yet a folder that lacks its report or its marks is not complete.
            stopped = stopped or error
            if status == "complete":
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                facts["error"] = stops.name if status == "interrupted" else account.reason(None, None, error)
            with contextlib.suppress(WorkbenchError):
                run.update_manifest(**facts, **ended(status))
    told = account.account(run, facts | {"status": status})
    raise (RunInterrupted if status == "interrupted" else RunFailed)(told, run, facts["error"]) from stopped


class _Stops:
    """Which signal asked the run to stop: the first raises KeyboardInterrupt, the second only says to wait.

    What follows the first (the kernel's end, the manifest) takes seconds and must not be cut short by an impatient
    second; a third leaves at once, and the folder is resumable even then.
    """

    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP, the terminal was closed"}

    def __init__(self) -> None:
        self.count, self.name = 0, "Ctrl-C"

    def __call__(self, number: int, frame: Any) -> None:
        self.count += 1
        if self.count == 1:
            self.name = self.names[signal.Signals(number)]
        elif self.count == 2:
            with contextlib.suppress(OSError):
                print("stopping: one moment, a third signal leaves at once", file=sys.stderr)
            return
        raise KeyboardInterrupt


@contextlib.contextmanager
def _stoppable() -> Iterator[_Stops]:
    """Handle the signals that would raise KeyboardInterrupt; those that are ignored or handled otherwise stay so."""
    stops = _Stops()
    main = threading.current_thread() is threading.main_thread()
    before = {n: signal.getsignal(n) for n in _Stops.names} if main else {}
    before = {n: handler for n, handler in before.items() if handler is signal.default_int_handler}
    for number in before:
        signal.signal(number, stops)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _papermill(run: RunFolder, source: Path, injected: dict[str, Any], cwd: Path, narrator: Narrator) -> None:
    import papermill
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import DeadKernelError
    from papermill.iorw import papermill_io

    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = KernelSpec(argv=argv, display_name="Python 3", language="python", env={LOCK_HELD_FOR: str(run.path)})
    papermill_io.register(_ATOMIC, _AtomicWriter())
    with _quiet(), tempfile.TemporaryDirectory(prefix="workbench-") as sockets:
        log = Path(sockets) / "kernel.log"

        class ThisPython(AsyncKernelManager):
            """A kernel of the interpreter that runs this, whatever kernels are installed, on sockets of its user."""

            def __init__(self, **options: Any):
                super().__init__(**options, transport="ipc", connection_file=str(Path(sockets) / "kernel.json"))

            @property
            def kernel_spec(self) -> KernelSpec:
                return spec

            async def start_kernel(self, **options: Any) -> None:
                with open(log, "wb") as stderr:
                    await super().start_kernel(**options, stderr=stderr)

        try:
            papermill.execute_notebook(
                _unformatted(source),
                _ATOMIC + _unformatted(run.path / "executed.ipynb"),
                injected,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                cwd=str(cwd),
                stdout_file=narrator,
                stderr_file=narrator,
                autosave_cell_every=10,
                start_timeout=300,  # a busy machine takes its time
                kernel_manager_class=ThisPython,
                on_cell_start=narrator.cell,
                on_notebook_start=narrator.count,
                store_widget_state=False,
            )
        except DeadKernelError:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"; its last words: {one_line(last)}" if last else ""
            raise WorkbenchError(f"the kernel died (killed, out of memory, or it ended itself){why}") from None


def _unformatted(path: Path) -> str:
    """papermill takes a path for a format string."""
    return str(path).replace("{", "{{").replace("}", "}}")


class _AtomicWriter:
    """papermill's saving, whole files only."""

    def write(self, text: str, path: str) -> None:
        atomic_write(Path(path.removeprefix(_ATOMIC)), text.encode())

    def pretty_path(self, path: str) -> str:
        return path.removeprefix(_ATOMIC)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence papermill's own log (it warns of every parameter whose annotation it cannot parse)."""
    logger = logging.getLogger("papermill")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _cleaned(run: RunFolder) -> Any:
    """The executed notebook, without papermill's error banners and private paths; None where it was never written."""
    import nbformat

    path = run.path / "executed.ipynb"
    if not path.is_file():
        return None
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    notebook.metadata.papermill.update(input_path=f"{run.manifest['notebook']}.ipynb", output_path="executed.ipynb")
    with contextlib.suppress(WorkbenchError):  # a full disk was told already
        atomic_write(path, nbformat.writes(notebook).encode())
    return notebook
