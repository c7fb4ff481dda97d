"""Dry runs, how a run stands, and runs in a process of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from make_notebook import make_notebook

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, detach
from workbench.runs.status import folder_lines, status

PARAMETERS = """
from typing import Literal
method: Literal['grpo', 'sdar'] = 'grpo'
steps: int = 3
model: 'str | None' = None
"""
WAITS = """
import time
from pathlib import Path
print('here', flush=True)
while not Path('go').exists():
    time.sleep(.05)
"""


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def training(steps: int = 10, done: int = 4, **facts) -> RunFolder:
    run = RunFolder.create("runs", "train", {"steps": steps, **facts})
    for step in range(done):
        run.write_table("steps", step, pl.DataFrame({"success": [step / 10]}))
        stages = {"stage": ["rollout", "update"], "seconds": [1.5, 0.5]}
        run.write_table("timings", step, pl.DataFrame(stages))
    started = (datetime.now(UTC) - timedelta(seconds=30)).isoformat()
    attempts = [{"started": started, "status": "failed", "seconds": 20.0}, {"started": started, "seconds": 0.0}]
    run.update_manifest(parameters={"steps": steps}, notebook="train", attempts=attempts, **facts)
    return run


def test_a_dry_run_tells_everything_and_makes_nothing(tmp_path, capsys):
    make_notebook(tmp_path / "small.ipynb", PARAMETERS)
    assert cli.main(["run", "small.ipynb", "--dry-run", "-p", "steps", "5", "--out", "o"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "notebook    small.ipynb" and lines[1].startswith("run folder  o/small/2")
    assert [line.split(maxsplit=2) for line in lines[3:]] == [
        ["steps", "int", "given    5"],
        ["model", "str", "| None               default  None"],
    ]
    assert lines[2].split() == ["method", "Literal['grpo',", "'sdar']", "default", "'grpo'"]
    assert cli.main(["run", "small.ipynb", "--dry-run", "-p", "steps", "many"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.ipynb"]


def test_a_running_run_says_how_far_it_is():
    run = training()
    with run.lock():
        now = status(run)
        lines = "\n".join(now.lines())
    assert (now.state, now.step, now.steps, now.success) == ("running", 4, 10, pytest.approx(0.15))
    assert now.left == pytest.approx(12.0) and 45 < now.seconds < 80  # 6 steps of 2 s; both attempts
    assert f"process {os.getpid()} on " in lines and "step 4/10 success 0.15" in lines and "about 12 s" in lines
    with run.lock():  # a clock that jumped back behind the start of the attempt
        assert status(run, now=datetime.now(UTC) - timedelta(days=1)).seconds == 20.0


def test_runs_that_stopped_say_where_and_how_to_go_on():
    cells = [{"cell": 1, "status": "completed", "line": "a"}, {"cell": 2, "status": "failed", "line": "b(\x1b[2J)"}]
    trace = ["File x.py:3: raise ValueError()"]
    failed = training(status="failed", error="ValueError: \x1b[31mno", cells=cells, traceback=trace)
    lines = status(failed).lines()
    assert "run failed in cell 2 of 2: b(\\x1b[2J)" in lines and "    at File x.py:3: raise ValueError()" in lines
    assert f"  resume: workbench run --resume runs/train/{failed.path.name}" in lines
    assert not [line for line in lines if "\x1b" in line or "left" in line]
    killed = training(steps=11)
    assert "the process that ran it is gone" in status(killed).lines()
    killed.complete()
    assert status(killed).lines()[-1].startswith("report ")


def test_a_folder_is_a_line_a_run_with_the_running_ones_first(capsys):
    assert cli.main(["status"]) == 0 and capsys.readouterr().out == "no runs under runs\n"
    failed, running = training(steps=5, status="failed", error="ValueError: \x1b[2Jx"), training(steps=8)
    with running.lock():
        first, second = folder_lines("runs")
        assert cli.main(["status", "runs"]) == 0
    assert first.split()[:2] == [f"runs/train/{running.path.name}", "running"] and "step 4/8  success 0.15" in first
    assert second.split()[:2] == [f"runs/train/{failed.path.name}", "failed"] and second.endswith("\\x1b[2Jx")
    assert cli.main(["status", "nowhere"]) == 2


def test_a_detached_run_outlives_its_terminal(tmp_path):
    """The command returns at once; SIGHUP to its session does not reach the run, and SIGHUP to the run is a Ctrl-C."""
    make_notebook(tmp_path / "waits.ipynb", "steps: int = 3", WAITS)
    command = [sys.executable, "-m", "workbench.cli", "run", "waits.ipynb", "--detach"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, start_new_session=True, check=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may themselves run under nohup
    )  # fmt: skip
    run = RunFolder.open(done.stdout.splitlines()[0].split()[1])
    assert done.stdout.splitlines()[2].split(maxsplit=1)[1] == f"workbench status runs/waits/{run.path.name}"
    process = int(run.writer.split()[1])
    try:
        assert run.state == "running" and os.getsid(process) == process
        with pytest.raises(WorkbenchError, match=f"is being written by process {process}"):
            detach.go_on_detached(run)
        _until(lambda: "here" in (run.path / "run.log").read_text())
        assert status(run).log == "here"
        os.kill(process, signal.SIGHUP)
        _until(lambda: not run.is_locked)
        assert run.state == "interrupted" and run.manifest["error"] == "SIGHUP, the terminal was closed"
        assert "run interrupted in cell 2 of 2" in (run.path / "run.log").read_text()
        (tmp_path / "go").touch()
        detach.go_on_detached(run)
        _until(lambda: run.is_complete)
    finally:
        if run.is_locked:
            os.kill(int(run.writer.split()[1]), signal.SIGKILL)
    assert [attempt["status"] for attempt in run.manifest["attempts"]] == ["interrupted", "complete"]


def test_a_detached_run_that_ends_at_once_says_why(tmp_path):
    run = RunFolder.create("runs", "imported", {})
    with pytest.raises(WorkbenchError, match="the run ended at once: workbench: .* was not made by the runner"):
        detach.go_on_detached(run)


def _until(true, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_status_survives_a_manifest_of_another_kind():
    run = RunFolder.create("runs", "imported", {})
    manifest = json.loads((run.path / "manifest.json").read_text()) | {"parameters": [1], "notebook": 3}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    assert status(run).lines()[:2] == [f"run        runs/imported/{run.path.name}", "state      interrupted"]
