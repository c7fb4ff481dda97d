"""What goes wrong around a run: it ends in a clear message, and what was finished is kept."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from make_notebook import make_notebook

from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, execute, plan
from workbench.runs.execute import RunFailed, RunInterrupted, run_notebook

WRITES = """
import polars as pl
from workbench.runs import RunFolder
run = RunFolder.open(run_dir)
for step in range(len(run.table_files("steps")), 40):
    run.write_table("steps", step, pl.DataFrame({"x": [bytes(200_000)]}) if big else pl.DataFrame({"x": [step]}))
"""


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def executed(monkeypatch):
    """Notebooks as they were executed; none fails unless `stop` is set, and no kernel is started."""
    seen = []

    def papermill(run, notebook, injected, cwd, narrator):
        content = json.loads(Path(notebook).read_text())
        seen.append(["".join(cell["source"]) for cell in content["cells"][1:]])
        raise WorkbenchError("the kernel died")

    monkeypatch.setattr(execute, "_papermill", papermill)
    return seen


def failed(**options) -> RunFolder:
    with pytest.raises(RunFailed) as failure:
        run_notebook(progress=False, **options)
    return failure.value.run


def test_a_run_executes_the_notebook_as_it_was_when_it_began(tmp_path, executed, monkeypatch):
    notebook = make_notebook(tmp_path / "edited.ipynb", "a = 1", "first")
    begin = plan.Plan.begin

    def edited_meanwhile(self, out):
        run = begin(self, out)
        make_notebook(notebook, "a = 1", "second")
        return run

    monkeypatch.setattr(plan.Plan, "begin", edited_meanwhile)
    run = failed(notebook=notebook)
    assert executed == [["a = 1", "first"]]
    assert run.manifest["notebook_sha256"] == run.manifest["attempts"][0]["notebook_sha256"]


def test_an_edited_notebook_is_never_mixed_in_silence(tmp_path, executed, capsys):
    notebook = make_notebook(tmp_path / "edited.ipynb", "a = 1", "first")
    run = failed(notebook=notebook)
    make_notebook(notebook, "a = 1", "second")
    with pytest.raises(WorkbenchError, match="edited.ipynb has changed since this run began: --changed") as error:
        run_notebook(resume=run.path, progress=False)
    assert "\n" not in str(error.value) and len(run.manifest["attempts"]) == 1

    failed(resume=run.path, changed_notebook="ignore")
    assert "goes on with the notebook as it was" in capsys.readouterr().err
    failed(resume=run.path, changed_notebook="use")
    assert "goes on with it as it is now" in capsys.readouterr().err
    failed(resume=run.path)  # it is now what the run last executed
    notebook.unlink()
    failed(resume=run.path)
    assert "is gone; the run goes on with its copy" in capsys.readouterr().err
    assert [cells[1] for cells in executed] == ["first", "first", "second", "second", "second"]
    hashes = [attempt["notebook_sha256"] for attempt in run.manifest["attempts"]]
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3] == hashes[4]
    with pytest.raises(WorkbenchError, match="did you mean 'use'"):
        run_notebook(resume=run.path, changed_notebook="uses")


def test_other_versions_of_libraries_are_said_and_recorded(tmp_path, executed, capsys, monkeypatch):
    run = failed(notebook=make_notebook(tmp_path / "a.ipynb", "a = 1"))
    real = plan.manifest.versions()
    monkeypatch.setattr(plan.manifest, "versions", lambda: real | {"torch": "9.9"})
    failed(resume=run.path)
    assert f"versions have changed since this run began: torch {real['torch']} to 9.9" in capsys.readouterr().err
    assert "versions" not in run.manifest["attempts"][0] and run.manifest["attempts"][1]["versions"] == {"torch": "9.9"}


def test_another_commit_of_the_code_is_said_and_recorded(tmp_path, executed, capsys, monkeypatch):
    commits = ["a" * 40]
    monkeypatch.setattr(plan.manifest, "git_state", lambda folder: {"commit": commits[-1], "dirty": False})
    run = failed(notebook=make_notebook(tmp_path / "a.ipynb", "a = 1"))
    failed(resume=run.path)
    assert "the code is at" not in capsys.readouterr().err
    commits.append("b" * 40)
    failed(resume=run.path)
    assert f"note: the code is at {'b' * 10} and was at {'a' * 10} when this run began" in capsys.readouterr().err
    assert [a.get("git") for a in run.manifest["attempts"]] == [None, None, {"commit": "b" * 40, "dirty": False}]


def test_a_report_that_cannot_be_made_leaves_a_failed_run(tmp_path, executed, monkeypatch):
    rows = [{"cell": 1, "status": "completed", "seconds": 0.1, "line": "a = 1"}]

    def broken(run):
        raise KeyError("kind")

    monkeypatch.setattr(execute, "_papermill", lambda *args: None)
    monkeypatch.setattr(execute.account, "cells", lambda *args: rows)
    monkeypatch.setattr("workbench.report.build_report", broken)
    run = failed(notebook=make_notebook(tmp_path / "a.ipynb", "a = 1"))
    assert (run.state, run.manifest["status"], run.manifest["error"]) == ("failed", "failed", "KeyError: 'kind'")


def test_a_clock_that_jumps_back_never_gives_negative_times(tmp_path, executed, capsys, monkeypatch):
    run = failed(notebook=make_notebook(tmp_path / "a.ipynb", "a = 1"))

    class Back(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) - timedelta(hours=3)

    for module in (execute, plan, sys.modules[RunFolder.__module__]):
        monkeypatch.setattr(module, "datetime", Back)
    failed(resume=run.path)
    manifest = run.manifest
    assert manifest["attempts"][1]["started"] >= manifest["attempts"][0]["started"]
    assert manifest["ended"] >= manifest["attempts"][1]["started"] and manifest["seconds"] >= 0
    later = failed(notebook=tmp_path / "a.ipynb")
    assert later.path.name[:16] > run.path.name[:16]
    assert "note: the clock says " in capsys.readouterr().err


def test_two_that_resume_one_run_at_once_do_not_both_write(tmp_path, executed, monkeypatch):
    run = failed(notebook=make_notebook(tmp_path / "a.ipynb", "a = 1"))
    inside, go = threading.Event(), threading.Event()

    def papermill(*args):
        inside.set()
        assert go.wait(60)
        raise WorkbenchError("the kernel died")

    monkeypatch.setattr(execute, "_papermill", papermill)
    first = threading.Thread(target=lambda: failed(resume=run.path))
    first.start()
    assert inside.wait(60)
    command = [sys.executable, "-m", "workbench.cli", "run", "--resume", str(run.path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    go.set()
    first.join(60)
    assert second.returncode == 2 and f"is being written by process {os.getpid()} on " in second.stderr
    assert second.stderr.count("\n") == 1 and len(run.manifest["attempts"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_waits_for_the_first_and_a_third_leaves(tmp_path, executed, monkeypatch, capsys, number):
    notebook = make_notebook(tmp_path / "a.ipynb", "a = 1")
    before = {n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGTERM, signal.SIGHUP)}
    more = 1

    def papermill(*args):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            for _ in range(more):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(execute, "_papermill", papermill)
    try:
        with pytest.raises(RunInterrupted, match="resume: workbench run --resume") as stop:
            run_notebook(notebook, progress=False)
        assert stop.value.run.manifest["status"] == stop.value.run.state == "interrupted"
        assert stop.value.run.manifest["error"].startswith({signal.SIGINT: "Ctrl-C"}.get(number, number.name))
        assert capsys.readouterr().err == "stopping: one moment, a third signal leaves at once\n"
        more = 2
        with pytest.raises(KeyboardInterrupt):
            run_notebook(notebook, progress=False)
        assert {RunFolder(path).state for path in (tmp_path / "runs" / "a").iterdir()} == {"interrupted"}
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


@contextmanager
def small_disk(path: Path, size: str):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_keeps_the_steps_that_were_written(tmp_path):
    notebook = make_notebook(tmp_path / "fills.ipynb", "big: bool = False\nrun_dir: str = ''", WRITES)
    notebook.write_text(notebook.read_text().replace("bytes(200_000)", "__import__('os').urandom(200_000)"))
    with small_disk(tmp_path / "disk", "2m"):
        with pytest.raises(RunFailed, match=r".* was not written: the disk is full") as failure:
            run_notebook(notebook, {"big": True}, tmp_path / "disk", progress=False)
        run, told = failure.value.run, str(failure.value)
        assert "Traceback" not in told and "resume: workbench run --resume disk/fills/" in told
        assert 2 <= len(run.read("steps")) < 40 and run.state in ("failed", "interrupted")
        assert not list(run.path.glob("tables/*/.*"))
        subprocess.run(["mount", "-o", "remount,size=40m", tmp_path / "disk"], check=True)
        again = run_notebook(resume=run.path, progress=False)
        assert again.is_complete and len(again.read("steps")) == 40


def test_a_place_that_takes_no_files_is_one_line(tmp_path):
    notebook = make_notebook(tmp_path / "a.ipynb", "a = 1")
    (tmp_path / "file").write_text("")
    places = ["file", "file/runs", "/proc/runs"] if Path("/proc/self").exists() else ["file"]
    if os.getuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        places.append("locked")
    for place in places:
        with pytest.raises(WorkbenchError, match="was not written") as error:
            run_notebook(notebook, out=place, progress=False)
        assert "\n" not in str(error.value)
