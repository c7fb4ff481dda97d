"""The curve that grows with a run: what it shows, and that it opens no file twice."""

import polars as pl
import pytest

from workbench.figures import curves, display, live
from workbench.runs import RunFolder

EVERY = 3
scan_files = live.scan_files


class Watched:
    """A run that is written step by step, its live curve, the files that were opened and the figures shown."""

    def __init__(self, out, monkeypatch):
        self.folder, self.opened, self.shown = RunFolder.create(out, "live", {}), [], []
        monkeypatch.setattr(live, "scan_files", self.scan)
        monkeypatch.setattr(live, "bundle", lambda figure: {display.MIME: figure, "text/html": figure})
        monkeypatch.setattr(live, "display", self.display)
        self.live = live.Live(self.folder)

    def scan(self, files):
        self.opened += [f"{file.parent.name} {file.stem}" for file in files]
        return scan_files(files)

    def display(self, figure, **options):
        self.update(figure)
        return self

    def update(self, figure, **options):
        self.shown.append(figure["text/html"])

    def evaluate(self, step, won):
        rows = {"panel": "heldout", "role": "student", "task": ["a", "b"], "outcome": [1, won]}
        self.folder.write_table("evals", step, pl.DataFrame(rows))

    def train(self, first, last, won):
        """Steps first to last - 1, with an evaluation where one is due; the files that each call opened, by step."""
        by_step = {}
        for step in range(first, last):
            loss = None if step % 2 else 0.5
            row = {"success": won / 2, "success_tasks": won / 4 + step, "loss": loss}
            self.folder.write_table("steps", step, pl.DataFrame([row]))
            if (step + 1) % EVERY == 0:
                self.evaluate(step + 1, won)
            self.opened.clear()
            self.live()
            by_step[step + 1] = len(self.opened)
        return by_step

    def is_up_to_date(self):
        """Whether the figure last shown is the one of everything on disk."""
        whole = curves.success(self.folder.read("evals"), self.folder.read("steps"))
        return self.shown[-1].to_json() == whole.to_json()


@pytest.fixture
def run(tmp_path, monkeypatch):
    watched = Watched(tmp_path, monkeypatch)
    watched.live()  # nothing is there yet
    watched.evaluate(0, 0)
    return watched


def test_each_evaluation_opens_only_the_files_that_came_since(run):
    opened = run.train(0, 12, 1)
    # Its first steps bring the evaluation before training with them, then each evaluation comes with EVERY steps.
    assert opened.pop(1) == 2
    assert opened.pop(3) == 3
    assert opened == {step: 1 + EVERY if step % EVERY == 0 else 0 for step in opened}
    assert len(run.shown) == 5 and run.is_up_to_date()


def test_what_a_resumed_run_writes_anew_is_read_anew(run):
    run.train(0, 8, 0)
    run.folder.truncate(3)
    opened = run.train(3, 6, 1)
    # First all that is left, which is evaluations 0 and 3 and steps 0 to 3, then evaluation 6 and steps 4 and 5.
    assert opened == {4: 6, 5: 0, 6: 3}
    assert run.is_up_to_date()
    run.train(6, 12, 1)
    assert run.is_up_to_date()


def test_a_file_that_was_replaced_is_read_again(run):
    run.train(0, 6, 0)
    before = run.shown[-1].to_json()
    run.evaluate(6, 1)
    run.live()
    assert run.is_up_to_date() and run.shown[-1].to_json() != before


def test_evaluations_that_a_resumed_run_dropped_are_no_longer_shown(run):
    run.train(0, 6, 0)
    run.folder.truncate(3)
    run.live()
    assert run.is_up_to_date() and run.shown[-1].data[-1].x == (0, 3)
