"""A run in a process of its own, which outlives the terminal that started it."""

import subprocess
import sys
import time
from pathlib import Path

from ..errors import WorkbenchError
from .files import told
from .folder import RunFolder
from .text import one_line

LOG = "run.log"


def go_on_detached(run: RunFolder, changed_notebook: str = "refuse", patience: float = 120.0) -> int:
    """Start a process that executes the run in its folder, in a session of its own, and return its id.

    What it tells goes to run.log in the folder. It returns once that process holds the folder's lock; raises
    WorkbenchError with its last words where it ended before, or where another process is writing there.
    """
    with run.lock():
        pass
    # The interpreter is the present one, and -P keeps files of the working directory from being imported.
    command = [sys.executable, "-P", "-m", "workbench.cli", "run", "--resume", str(run.path)]
    command += ["--changed-notebook", changed_notebook]
    with told(run.path / LOG), open(run.path / LOG, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended = process.poll()
        if ended == 0 or (ended is None and run.writer.startswith(f"process {process.pid} ")):
            return process.pid
        if ended is not None:
            raise WorkbenchError(f"the run ended at once: {last_line(run) or f'exit code {ended}'}")
        time.sleep(0.05)
    raise WorkbenchError(f"process {process.pid} did not start to write to {run.path} within {patience:.0f} s")


def last_line(run: RunFolder) -> str:
    """The last line of a detached run's log, fit for a terminal; empty where there is none."""
    return next(iter(tail(run.path / LOG, 1)), "")


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file that are not blank, each in printable form; none where it cannot be read."""
    try:
        with open(path, "rb") as handle:
            handle.seek(max(0, path.stat().st_size - 16384))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    found = [one_line(line, 200) for line in text.splitlines()]
    return [line for line in found if line][-lines:]
