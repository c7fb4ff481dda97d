"""One run in a process of its own: asked for as JSON on stdin, answered as JSON in the last line of stdout.

The end of stdin asks the run to stop as Ctrl-C would, so that a sweep that is gone leaves no run behind.
"""

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .. import shipped
from ..config import digest
from ..errors import WorkbenchError, printable
from ..runs import RunFolder, manifest
from ..runs.execute import RunFailed, RunInterrupted, run_notebook
from ..runs.plan import plan
from .mirror import Mirror, is_url
from .state import Now, State, look
from .study import Cell


@dataclass(frozen=True)
class Job:
    """One run to do: a notebook and its parameters, under `out`/`experiment` (None: as the notebook says).

    out: a folder, or for a cell of a study a URL. again: a cell of a study; a finished run of the very same parameters
    and code is taken as it is, an unfinished one is gone on with.
    """

    label: str
    notebook: str
    parameters: Mapping[str, Any]
    out: str
    experiment: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "complete", "failed", "interrupted", or "refused" before it had begun; one line of why."""

    status: str
    run: str | None
    error: str = ""


def do(job: Job, progress: bool = True) -> Outcome:
    """Run the job here and say how it ended; only what is no part of running is raised."""
    try:
        if is_url(job.out):
            return _do_mirrored(job, progress)
        found = state(job) if job.again else None
        if found and found.state == "done":
            return Outcome("complete", str(found.run.path))
        return _finished(found.run if found and found.state == "to resume" else None, job, progress)
    except (RunFailed, RunInterrupted) as error:
        return _stopped(error)
    except WorkbenchError as error:
        return Outcome("refused", None, str(error))
    except KeyboardInterrupt:
        return Outcome("interrupted", None, "stopped before it began")


def state(job: Job) -> State:
    """What the folder of the job's study holds of it now."""
    source = shipped.notebook(job.notebook)
    now = Now(source, manifest.sha256(source), manifest.versions(), None)
    return look(Cell(job.label, digest(job.parameters), dict(job.parameters)), Path(job.out, job.experiment or ""), now)


def _finished(run: RunFolder | None, job: Job, progress: bool) -> Outcome:
    """Go on with the run, or do the job as a new one."""
    if run is None and job.experiment not in (None, job.parameters.get("experiment")):
        run = begun(job)
    if run is None:
        run = run_notebook(job.notebook, job.parameters, job.out, progress=progress)
    else:
        run = run_notebook(resume=run.path, progress=progress, changed_notebook="ignore")  # its code is the same
    return Outcome("complete", str(run.path))


def begun(job: Job) -> RunFolder:
    """A new run, in the folder of the job's study whatever the notebook would call it."""
    return plan(job.notebook, job.parameters).begin(job.out, job.experiment)


def _stopped(error: RunFailed | RunInterrupted) -> Outcome:
    status = "failed" if isinstance(error, RunFailed) else "interrupted"
    return Outcome(status, str(error.run.path), error.why or status)


def _do_mirrored(job: Job, progress: bool) -> Outcome:
    """Do the job in a scratch folder that is mirrored at the job's URL; the scratch stays where that did not work."""
    scratch = Path(tempfile.mkdtemp(prefix="workbench-")).resolve()
    here = replace(job, out=str(scratch))
    try:
        mirror = Mirror(job.out, job.experiment, scratch / job.experiment)
        mirror.headers(digest(job.parameters))
        found = state(here)
        if found.state == "to resume":
            mirror.pull(found.run.path.name)
        run = found.run or _apart(begun(here))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    where, outcome = f"{mirror.url}/{run.path.name}", None
    if found.state == "done":
        shutil.rmtree(scratch)
        return Outcome("complete", where)
    try:
        with mirror.following(run):
            try:
                outcome = _finished(run, here, progress)
            except (RunFailed, RunInterrupted) as error:
                outcome = _stopped(error)
    except WorkbenchError as error:
        return Outcome("failed", None, f"{error}; the run is left in {run.path}")
    shutil.rmtree(scratch)
    return replace(outcome, run=where)


def _apart(run: RunFolder) -> RunFolder:
    """The run under a name that no other machine gives in this second: a URL does not refuse one that is taken."""
    return RunFolder(run.path.rename(run.path.with_name(f"{run.path.name}-{secrets.token_hex(4)}")))


def _stop_with_stdin() -> None:
    while os.read(0, 1 << 16):  # not sys.stdin, whose lock would abort an interpreter that ends meanwhile
        pass
    os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    job = Job(**json.loads(sys.stdin.buffer.readline()))
    for number in (signal.SIGINT, signal.SIGTERM):  # both: a shell has its background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    threading.Thread(target=_stop_with_stdin, daemon=True).start()
    outcome = do(job)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(json.dumps(asdict(outcome) | {"error": printable(outcome.error)}), flush=True)
    return 0 if outcome.status == "complete" else 1


if __name__ == "__main__":
    sys.exit(main())
