"""Run the cells of a study that are not done yet: here in a pool of processes, or wherever `submit` takes them."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import WorkbenchError, printable
from ..runs import RunFolder
from ..runs.account import resume_command, shown, stopped_cell
from ..runs.text import duration
from .cell import Job, Outcome
from .mirror import is_url
from .place import Claims, Place
from .state import CHANGED_WAY, Now, State, look, survey, told_changes
from .study import Cell, Study

Submit = Callable[[Job, int], "Future[Outcome]"]
POLL = 1.0  # seconds between looks at cells that another sweep is running


@dataclass
class Account:
    """What a sweep did: cells by how they ended, and the failed ones with why."""

    finished: int = 0
    earlier: int = 0
    elsewhere: int = 0  # finished by another sweep meanwhile
    failed: list[tuple[Cell, Outcome]] = field(default_factory=list)
    left: int = 0  # not run: stopped, or no place to write

    @property
    def line(self) -> str:
        parts = [f"{self.finished} finished", f"{self.earlier} done already", f"{len(self.failed)} failed"]
        parts += [f"{self.elsewhere} finished by another sweep"] if self.elsewhere else []
        parts += [f"{self.left} not run"] if self.left else []
        return ", ".join(parts)


class Teller:
    """Lines on stderr, and where that is a terminal one live line below them."""

    def __init__(self, total: int, slots: int):
        self.total, self.slots = total, slots
        self.done = self.running = self.timed = 0
        self.seconds = 0.0
        self.live = sys.stderr.isatty()

    def say(self, line: str) -> None:
        clear = "\r\x1b[2K" if self.live else ""
        print(f"{clear}{printable(line)}", file=sys.stderr, flush=True)
        self.show()

    def show(self) -> None:
        if not self.live:
            return
        left = self.total - self.done
        each = self.seconds / self.timed if self.timed else None
        wide = min(self.slots, max(left, 1))
        eta = f", about {duration(each * left / wide)} left" if each and left else ""
        line = f"{self.done}/{self.total} done, {self.running} running{eta}"
        print(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def prepare(study: Study, place: Place, accept_changed: bool, say: Callable[[str], None]) -> list[State]:
    """Look at what there is, say what was made otherwise, and refuse to mix it. Writes nothing.

    Raises WorkbenchError where finished cells were made by other code or versions and that was not accepted.
    """
    place.refresh()
    states = survey(study, place.folder)
    changed, noted = told_changes(states)
    for line in noted:
        say(f"note: {line}")
    if changed and not accept_changed:
        raise WorkbenchError(f"{place}: {'; '.join(changed)}: {CHANGED_WAY}")
    for line in changed:
        say(f"note: {line}: accepted")
    return states


def run_cells(
    study: Study, states: Sequence[State], place: Place, submit: Submit, slots: int, limit: int | None = None
) -> Account:
    """Run every cell that is not done, `slots` at once, each under its claim; wait for those that another sweep runs.

    A cell that fails does not stop the others; a folder that takes no more files does. Raises KeyboardInterrupt with
    the account as its argument; the caller stops what runs.
    """
    place.save(study, accepted=any(s.state == "done" and s.changed for s in states))
    account = Account(earlier=sum(s.state == "done" for s in states))
    todo = [s.cell for s in states if s.state != "done"][:limit]
    teller = Teller(len(todo) + account.earlier, slots)
    teller.done = account.earlier
    teller.say(f"{study.name}: {len(study.cells)} cells, {account.earlier} done already, {len(todo)} to run")
    with Claims(place.claims) as claims:
        work = _Work(study, place, submit, slots, account, teller, claims)
        try:
            work.all(todo)
        except KeyboardInterrupt:
            account.left = len(todo) - account.finished - account.elsewhere - len(account.failed)
            raise KeyboardInterrupt(account) from None
        finally:
            teller.clear()
    return account


@dataclass
class _Work:
    study: Study
    place: Place
    submit: Submit
    slots: int
    account: Account
    teller: Teller
    claims: Claims
    running: dict[Future, tuple[Cell, float]] = field(default_factory=dict)
    stuck: str = ""

    def all(self, todo: list[Cell]) -> None:
        now, waiting, told = Now.of(self.study), list(todo), False
        while waiting or self.running:
            elsewhere = []
            for number, cell in enumerate(waiting):
                if len(self.running) >= self.slots or self.stuck:
                    elsewhere += waiting[number:]
                    break
                if not self.start(cell, now):
                    elsewhere.append(cell)
            waiting = elsewhere
            if self.stuck and not self.running:
                self.account.left = len(waiting)
                return
            if self.running:
                # Not for ever: a signal that reaches another thread is seen by this one when it wakes.
                for future in wait(self.running, POLL, FIRST_COMPLETED).done:
                    self.end(future)
                self.teller.show()
            elif waiting:
                if not told:
                    self.teller.say(f"waiting for {len(waiting)} that another sweep is running")
                told = True
                time.sleep(POLL)

    def start(self, cell: Cell, now: Now) -> bool:
        """Start a cell, or see that it is done; False where another process has it."""
        claim = self.claims.take(cell.digest)
        if claim is None:
            return False
        self.place.refresh(cell.digest)
        found = look(cell, self.place.folder, now)
        if found.state in ("done", "running"):
            self.claims.drop(cell.digest)
            if found.state == "done":
                self.account.elsewhere += 1
                self.teller.done += 1
                self.teller.say(f"done by another sweep  {self.study.told(cell)}")
            return found.state == "done"
        label, study = self.study.told(cell), self.study
        job = Job(label, str(study.notebook), cell.parameters, self.place.out, study.name, again=True)
        self.running[self.submit(job, claim)] = (cell, time.monotonic())
        self.teller.running = len(self.running)
        self.teller.say(f"{'resumed' if found.state == 'to resume' else 'started'}  {label}")
        return True

    def end(self, future: Future) -> None:
        cell, since = self.running.pop(future)
        self.claims.drop(cell.digest)
        outcome, seconds, label = _here(future.result()), time.monotonic() - since, self.study.told(cell)
        self.teller.running = len(self.running)
        if outcome.status == "complete":
            self.account.finished += 1
            self.teller.seconds += seconds
            self.teller.timed += 1
            self.teller.done += 1
            self.teller.say(f"finished {label}  {duration(_spent(outcome.run, seconds))}  {_shown(outcome.run)}")
            return
        self.account.failed.append((cell, outcome))
        self.teller.say(f"failed   {label}: {outcome.error}")
        if self.stuck:
            return
        try:
            self.place.probe()
        except WorkbenchError as error:
            self.stuck = str(error)
            self.teller.say(f"no more cells are started: {error}")


def _shown(run: str) -> str:
    return run if is_url(run) else shown(Path(run))


def _spent(run: str, seconds: float) -> float:
    """What the run says that it took, all attempts, as `workbench status` does; at a URL what was seen of it here."""
    if is_url(run):
        return seconds
    with contextlib.suppress(WorkbenchError, OSError):
        seconds = RunFolder(run).manifest.get("seconds") or seconds
    return seconds


def _here(outcome: Outcome) -> Outcome:
    """The outcome; failed where the run was finished in a folder that only another machine has."""
    if outcome.status != "complete" or is_url(outcome.run) or RunFolder(outcome.run).is_complete:
        return outcome
    why = f"it finished in {outcome.run} of another machine: --out must be a folder that all share, or a URL"
    return replace(outcome, status="failed", run=None, error=why)


def told_account(study: Study, account: Account) -> str:
    """The lines a sweep ends with."""
    lines = [f"{study.name}: {account.line}"]
    for cell, outcome in account.failed:
        lines.append(f"failed  {study.told(cell)}: {outcome.error}")
        if outcome.run is None or is_url(outcome.run):
            lines += [f"        {outcome.run}; the same sweep goes on with it"] if outcome.run else []
            continue
        run = RunFolder(outcome.run)
        with contextlib.suppress(WorkbenchError):  # deleted meanwhile, or on another machine
            cells = run.manifest["cells"]
            at = stopped_cell(cells)
            lines += [f"        in cell {at['cell']} of {len(cells)}: {at['line']}"] if at else []
        lines.append(f"        {resume_command(run)}")
    return "\n".join(map(printable, lines))
