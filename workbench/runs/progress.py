"""What a run tells on stderr while it goes on: its cells, what they print, and one line that follows the training."""

import re
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from .text import duration, first_line, without_controls

_STEP = re.compile(r"step (\d{1,9})/(\d{1,9})\b(?!:)")
_SUCCESS = re.compile(r"\bsuccess (\d\.\d{1,6})\b")
_SECONDS = re.compile(r"\b(\d{1,7}\.\d) s$")


class Pace:
    """Seconds a step, measured in this process by a clock that never goes back.

    What an earlier attempt of a resumed run took does not enter: the pace starts at the first step seen here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock, self.first, self.last, self.seconds = clock, (0, 0.0), None, None

    def step(self, step: int, took: float | None) -> None:
        """A step ended; took: the seconds it says of itself, which stand in until a second step has been seen."""
        now = self.clock()
        if self.last is None or step <= self.last:
            self.first, self.seconds = (step, now), took
        else:
            self.seconds = (now - self.first[1]) / (step - self.first[0])
        self.last = step

    def left(self, steps: int) -> float | None:
        """Seconds until step `steps`, None where the pace is not known."""
        return None if self.seconds is None or self.last is None else max(steps - self.last, 0) * self.seconds


class Narrator:
    """Tells on a stream which cell runs and what it prints; control sequences in what it prints are left out.

    On a terminal the lines "step k/n …" that training prints become one line that is drawn over: step, success, pace
    and time left. Elsewhere every line is passed on as it comes. A stream that goes away ends the telling, not the run.
    """

    def __init__(self, on: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream = sys.stderr if stream is None else stream
        self.on, self.live = on, on and self.stream.isatty()
        self.total, self.number, self.fresh = 0, 0, True
        self.pace, self.line, self.held = Pace(clock), "", ""

    def count(self, notebook: Any) -> None:
        self.total = sum(cell.cell_type == "code" for cell in notebook.cells)

    def cell(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            self.number += 1
            self.finish()
            line = f"[{self.number}/{self.total}] {first_line(cell.source)}\n"
            self._put(line if self.fresh else "\n" + line)

    def write(self, text: str) -> None:
        text = without_controls(text)
        if not self.live:
            self._put(text)
            return
        for piece in re.findall(r"[^\n]*\n|[^\n]+", text):
            self.held += piece
            whole = self.held.endswith("\n")
            if self.fresh and not whole and "step ".startswith(self.held[:5]):
                continue  # it may become a line of training
            found = _STEP.match(self.held) if self.fresh and whole else None
            if found:
                self._draw(int(found[1]), int(found[2]))
            else:
                self._put(("\r\x1b[K" if self.line and self.fresh else "") + self.held)
                if whole:
                    self._put(self.line, marks=False)
            self.held = ""

    def flush(self) -> None:
        if self.on:
            self._do(self.stream.flush)

    def finish(self) -> None:
        """Leave the line that was drawn over as it is and go below it."""
        if self.held:
            self._put(("\r\x1b[K" if self.line else "") + self.held)
        elif self.line:
            self._put("\n")
        self.line = self.held = ""

    def _draw(self, step: int, steps: int) -> None:
        success, took = _SUCCESS.search(self.held), _SECONDS.search(self.held.rstrip())
        self.pace.step(step, float(took[1]) if took else None)
        parts = [f"step {step}/{steps}", f"success {success[1]}" if success else ""]
        if self.pace.seconds is not None:
            parts += [f"{duration(self.pace.seconds)} a step", f"{duration(self.pace.left(steps))} left"]
        width = shutil.get_terminal_size().columns - 1
        self.line = "  ".join(filter(None, parts))[:width]
        self._put(f"\r{self.line}\x1b[K", marks=False)

    def _put(self, text: str, marks: bool = True) -> None:
        if self.on and text:
            self._do(lambda: (self.stream.write(text), self.stream.flush()))
            if marks:
                self.fresh = text.endswith("\n")

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError:  # the terminal was closed
            self.on = self.live = False
