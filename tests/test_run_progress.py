"""The line that follows a training run on a terminal, and plain lines elsewhere."""

import io

import nbformat
import pytest

from workbench.runs.progress import Narrator, Pace
from workbench.runs.text import duration, first_line, one_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step(k: int, n: int = 20, took: float = 2.0) -> str:
    return f"step {k}/{n}  success 0.{k:02d}  loss +0.1000  updates 1  {took:.1f} s\n"


def told(stream: io.StringIO) -> list[str]:
    """What a terminal shows in the end: a carriage return goes back, and what was there is cleared or overwritten."""
    return [line.rpartition("\r")[2].replace("\x1b[K", "") for line in stream.getvalue().split("\n")]


def test_training_is_one_line_on_a_terminal():
    times = iter([0.0, 3.0, 6.0])
    stream = Terminal()
    narrator = Narrator(True, stream, lambda: next(times))
    narrator.write(step(1))
    assert told(stream) == ["step 1/20  success 0.01  2.0 s a step  38 s left"]
    narrator.write(step(2)[:3])  # lines come in pieces
    narrator.write(step(2)[3:] + "step 2: heldout success 0.50 of 4 games\n")
    heldout, now = told(stream)
    assert heldout == "step 2: heldout success 0.50 of 4 games"
    assert now == "step 2/20  success 0.02  3.0 s a step  54 s left"
    narrator.write("\x1b[2Jstep by step\nloading")
    narrator.write(" more\n")
    narrator.write(step(3))
    narrator.finish()
    assert told(stream)[1:] == ["step by step", "loading more", "step 3/20  success 0.03  3.0 s a step  51 s left", ""]
    assert "\x1b[2J" not in stream.getvalue()


def test_elsewhere_every_line_is_passed_on_as_it_is():
    stream = io.StringIO()
    narrator = Narrator(True, stream)
    cells = [nbformat.v4.new_code_cell("# why\ntrain()")]
    narrator.count(nbformat.v4.new_notebook(cells=cells))
    narrator.cell(cells[0], 0)
    for text in (step(1), step(2), "half"):
        narrator.write(text)
    narrator.cell(cells[0], 1)
    narrator.finish()
    assert stream.getvalue() == "[1/1] train()\n" + step(1) + step(2) + "half\n[2/1] train()\n"
    silent = Terminal()
    Narrator(False, silent).write(step(1))
    assert silent.getvalue() == ""


def test_a_terminal_that_goes_away_does_not_end_the_run():
    class Gone(Terminal):
        def write(self, text):
            raise OSError(5, "Input/output error")

    narrator = Narrator(True, Gone())
    narrator.write(step(1))
    narrator.finish()
    assert not narrator.on


def test_the_pace_is_of_this_process_alone():
    """A resumed run starts at a later step, and another training in the same notebook starts anew."""
    now = 1000.0
    pace = Pace(lambda: now)
    assert pace.left(20) is None
    pace.step(11, 4.0)
    assert pace.left(20) == 36.0
    now += 5
    pace.step(12, 4.0)
    assert pace.left(20) == 40.0 and pace.left(12) == 0.0 and pace.left(3) == 0.0
    pace.step(1, 1.0)
    assert pace.left(20) == 19.0


@pytest.mark.parametrize(
    ("seconds", "said"), [(-3, "0.0 s"), (4.25, "4.2 s"), (59.6, "60 s"), (185, "3 min 05 s"), (7830, "2 h 10 min")]
)
def test_durations_as_a_person_says_them(seconds, said):
    assert duration(seconds) == said


def test_text_of_others_is_one_harmless_line():
    assert one_line("a\x1b]0;title\x07b\n\tc\x1b[31m \u202eback\x00") == "ab c \\u202eback"
    assert len(one_line("x" * 1000, 50)) == 50
    assert [first_line(cell) for cell in ("\n# only\n\n", "", "# a\nx = 1")] == ["# only", "(empty)", "x = 1"]
