"""Run a notebook with papermill so that the run can be trusted, read while it goes on, and resumed."""

import contextlib
import logging
import os
import re
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import shipped
from ..errors import WorkbenchError
from . import RESULT_MIME, manifest
from .files import atomic_write, read_json
from .folder import LOCK_HELD_FOR, RunFolder
from .parameters import RUN_DIR, Parameter, declared, resolve

_ATOMIC = "workbench-atomic:"


class RunFailed(RuntimeError):
    """A cell of the notebook did not complete. The message tells which, why, and how to resume; `run` is its folder."""

    def __init__(self, message: str, run: RunFolder):
        super().__init__(message)
        self.run = run


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C: the folder was left so that the run can be resumed; the message says how."""

    def __init__(self, message: str, run: RunFolder):
        super().__init__(message)
        self.run = run


def run_notebook(
    notebook: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    out: str | Path = "runs",
    resume: str | Path | None = None,
    progress: bool = True,
) -> RunFolder:
    """Execute a notebook, by path or shipped name, into a new run folder; or go on with an interrupted one.

    parameters: values for names that the notebook's `parameters` cell declares, text allowed; refused with a
    WorkbenchError before anything is created when a name is unknown or a value ill-typed. The notebook sees them in a
    cell after that one, with `run_dir` set to the folder where it declares that name. Relative paths mean what
    they mean in the working directory of the caller.
    resume: a run folder; the same notebook is executed again with the stored parameters and the same `run_dir`.
    progress: tell on stderr which cell runs, and pass on what it prints.
    Raises RunFailed where any cell did not complete (SystemExit(0) included), RunInterrupted on Ctrl-C; both leave
    the folder resumable, without COMPLETE.
    """
    if resume is None:
        if notebook is None:
            raise WorkbenchError("which notebook? give a path or the name of a shipped one")
        source = shipped.notebook(notebook)
        names = declared(_read(source), source.name)
        values = resolve(names, parameters or {}, source.name)
        if source == shipped.notebook("train"):
            from ..settings import from_parameters

            from_parameters(values)  # what would fail in its second cell is refused before there is a folder
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip("-._")
        run, cwd = RunFolder.create(out, values.get("experiment") or stem or "notebook", values), Path.cwd()
        run.update_manifest(**_origin(source, values, cwd))
    else:
        run = RunFolder.open(resume)
        source, names, values, cwd = _resumed(run, notebook, parameters)
    with run.lock():
        return _execute(run, source, names, values, cwd, progress)


def resume_command(run: RunFolder) -> str:
    """The command that goes on with a run, for the present working directory."""
    return f"workbench run --resume {shlex.quote(shown(run.path))}"


def shown(path: Path) -> str:
    """A path as short as it can be said from the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _read(path: Path) -> dict[str, Any]:
    notebook = read_json(path)
    if notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise WorkbenchError(f"{path} is not a notebook of format 4")
    return notebook


def _origin(source: Path, values: dict[str, Any], cwd: Path) -> dict[str, Any]:
    """What is known of a run before it starts."""
    package = Path(shipped.__file__).parent
    checkout = package.parent if (package.parent / "pyproject.toml").is_file() else source.parent
    return {
        "notebook": source.stem,
        "notebook_path": str(source),
        "notebook_sha256": manifest.sha256(source),
        "parameters": values,
        "seeds": manifest.seeds(values),
        "cwd": str(cwd),
        "command": shlex.join(["workbench", *sys.argv[1:]]) if Path(sys.argv[0]).name == "workbench" else None,
        "git": None if "site-packages" in checkout.parts else manifest.git_state(checkout),
        "versions": manifest.versions(),
        "device": None,
        "host": os.uname().nodename,
        "attempts": [],
        "cells": [],
        "error": None,
        "result": None,
        "artifacts": [],
    }


def _resumed(
    run: RunFolder, notebook: str | Path | None, parameters: Mapping[str, Any] | None
) -> tuple[Path, dict[str, Parameter], dict[str, Any], Path]:
    """The notebook, its declared parameters, the stored values and the working directory of a run to go on with."""
    if run.is_complete:
        raise WorkbenchError(f"{run.path} is complete; there is nothing to resume")
    stored = run.manifest
    if "notebook_path" not in stored:
        raise WorkbenchError(f"{run.path} was not made by the runner, so it does not say which notebook to execute")
    source = shipped.notebook(notebook or stored["notebook_path"])
    if source.stem != stored["notebook"]:
        raise WorkbenchError(f"{run.path} is a run of {stored['notebook']!r}, not of {source.stem!r}")
    names = declared(_read(source), source.name)
    values = resolve(names, run.config, source.name)
    for name, value in resolve(names, parameters or {}, source.name).items():
        if name in (parameters or {}) and value != values[name]:
            raise WorkbenchError(f"a resumed run keeps its parameters: {name} is {values[name]!r}, got {value!r}")
    if manifest.sha256(source) != stored["notebook_sha256"]:
        print(f"note: {source} has changed since this run began", file=sys.stderr)
    cwd = Path(stored["cwd"])
    return source, names, values, cwd if cwd.is_dir() else Path.cwd()


def _execute(
    run: RunFolder, source: Path, names: dict[str, Parameter], values: dict[str, Any], cwd: Path, progress: bool
) -> RunFolder:
    started, clock = datetime.now(UTC).isoformat(), time.monotonic()
    earlier = run.manifest["attempts"]
    spent = sum(attempt["seconds"] for attempt in earlier)
    run.update_manifest(status="running", error=None, attempts=[*earlier, _attempt(started, "running", 0.0)])
    injected = {n: v for n, v in values.items() if v != names[n].default or type(v) is not type(names[n].default)}
    if RUN_DIR in names:
        injected[RUN_DIR] = str(run.path)
    narrator = _Narrator(progress)
    stopped: BaseException | None = None
    try:
        _papermill(run, source, injected, cwd, narrator)
    except (Exception, KeyboardInterrupt) as error:
        stopped = error
    interrupted = isinstance(stopped, KeyboardInterrupt)
    notebook = _cleaned(run)
    cells = _cells(notebook, "interrupted" if interrupted else "failed", stopped is not None)
    failed = next((cell for cell in cells if cell["status"] != "completed"), None)
    status = "interrupted" if interrupted else "failed" if failed or stopped or not cells else "complete"
    reason = None if status == "complete" else "Ctrl-C" if interrupted else _reason(notebook, failed, stopped)
    seconds = round(time.monotonic() - clock, 3)
    run.update_manifest(
        status=status, error=reason, cells=cells, result=_result(notebook), device=manifest.device(),
        ended=datetime.now(UTC).isoformat(), seconds=round(spent + seconds, 3),
        attempts=[*earlier, _attempt(started, status, seconds)],
    )  # fmt: skip
    if status != "complete":
        account = _account(run, status, failed, len(cells), reason)
        raise (RunInterrupted(account, run) if interrupted else RunFailed(account, run)) from stopped
    from ..report import build_report

    build_report(run)
    run.update_manifest(artifacts=manifest.artifacts(run.path))
    run.complete()
    return run


def _attempt(started: str, status: str, seconds: float) -> dict[str, Any]:
    return {"started": started, "status": status, "seconds": seconds}


def _papermill(run: RunFolder, source: Path, injected: dict[str, Any], cwd: Path, narrator: "_Narrator") -> None:
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
                kernel_manager_class=ThisPython,
                on_cell_start=narrator.cell,
                on_notebook_start=narrator.count,
                store_widget_state=False,
            )
        except DeadKernelError:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"; its last words: {_one_line(last)}" if last else ""
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


class _Narrator:
    """Tells on stderr which cell runs and what it prints; control sequences in what it prints are left out."""

    _ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?"
    _CONTROL = re.compile(_ESCAPES + r"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")

    def __init__(self, on: bool):
        self.on, self.total, self.number, self.fresh = on, 0, 0, True

    def count(self, notebook: Any) -> None:
        self.total = sum(cell.cell_type == "code" for cell in notebook.cells)

    def cell(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            self.number += 1
            self._say(f"[{self.number}/{self.total}] {_first_line(cell.source)}\n")

    def write(self, text: str) -> None:
        if self.on and text:
            text = self._CONTROL.sub("", text)
            sys.stderr.write(text)
            self.fresh = text.endswith("\n")

    def flush(self) -> None:
        sys.stderr.flush()

    def _say(self, line: str) -> None:
        if self.on:
            sys.stderr.write(line if self.fresh else "\n" + line)
            sys.stderr.flush()
            self.fresh = True


def _first_line(source: str) -> str:
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith("#")]
    return _one_line((code or lines or ["(empty)"])[0], 100)


def _one_line(text: str, limit: int = 400) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


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


def _cells(notebook: Any, broken: str, stopped: bool) -> list[dict[str, Any]]:
    """Status of each code cell. Where the kernel died, papermill marks cells it never reached as completed."""
    code = [c for c in notebook.cells if c.cell_type == "code"] if notebook else []
    rows = []
    for number, cell in enumerate(code, 1):
        facts = cell.metadata.get("papermill", {})
        status = facts.get("status", "pending") if facts.get("start_time") else "pending"
        status = broken if status in ("running", "failed") else status
        line = _first_line(cell.source)
        rows.append({"cell": number, "status": status, "seconds": facts.get("duration"), "line": line})
    reached = [row for row in rows if row["status"] != "pending"]
    if stopped and reached and all(row["status"] == "completed" for row in reached):
        reached[-1]["status"] = broken
    return rows


def _reason(notebook: Any, failed: dict[str, Any] | None, stopped: BaseException | None) -> str:
    code = [c for c in notebook.cells if c.cell_type == "code"] if notebook else []
    for output in code[failed["cell"] - 1].outputs if failed else []:
        if output.output_type == "error":
            hint = " (leaving early counts as a failure)" if output.ename == "SystemExit" else ""
            return _one_line(f"{output.ename}: {output.evalue}" if output.evalue else output.ename) + hint
    if isinstance(stopped, WorkbenchError):
        return str(stopped)
    return _one_line(f"{type(stopped).__name__}: {stopped}") if stopped else "the cell did not complete"


def _account(run: RunFolder, status: str, failed: dict[str, Any] | None, total: int, reason: str) -> str:
    where = f" in cell {failed['cell']} of {total}: {failed['line']}" if failed else " before its first cell"
    lines = [f"run {status}{where}"]
    lines += [f"  {reason}"] if status == "failed" else []
    return "\n".join([*lines, f"  folder: {shown(run.path)}", f"  resume: {resume_command(run)}"])


def _result(notebook: Any) -> dict[str, Any] | None:
    """The last result record among the outputs."""
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs] if notebook else []
    records = [o.data[RESULT_MIME] for o in outputs if RESULT_MIME in o.get("data", {})]
    return dict(records[-1]) if records else None
