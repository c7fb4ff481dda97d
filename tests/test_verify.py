"""A run executed again: the same to the last bit, or the first value that differs, named."""

import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import polars as pl
import pytest
from make_notebook import make_notebook

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, manifest, verify
from workbench.runs.execute import run_notebook
from workbench.runs.files import read_json, write_json

PLAY = """
import os, time
import numpy as np, polars as pl
from workbench.runs import RunFolder, record_result
from workbench.trackers import VARIABLE
folder, rng = RunFolder.open(run_dir), np.random.default_rng(seed)
for step in range(steps):
    turns = {"episode": [0, 0, 1], "turn": [0, 1, 0], "gap": [rng.normal(size=n).tolist() for n in (2, 0, 3)]}
    folder.write_table("turns", step, pl.DataFrame(turns))
    folder.write_table("steps", step, pl.DataFrame({"loss": [rng.normal()], "threads": os.environ["OMP_NUM_THREADS"]}))
    folder.write_table("timings", step, pl.DataFrame({"stage": "all", "seconds": [time.perf_counter()]}))
    time.sleep(pause)
"""
RESULT = 'record_result({"run": folder.path.name, "seconds": time.time(), "mean": [rng.normal(), {"steps": steps}]})'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with OMP_NUM_THREADS 3, which the tests' own process has not."""
    out = tmp_path_factory.mktemp("out")
    parameters = "run_dir: str = ''\nseed: int = 1\nsteps: int = 3\npause: float = 0.0"
    notebook = make_notebook(out / "play.ipynb", parameters, PLAY, RESULT)
    before, os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS"), "3"
    try:
        return run_notebook(notebook, {"seed": 5}, out / "runs", progress=False)
    finally:
        os.environ["OMP_NUM_THREADS"] = before or "1"


@pytest.fixture
def copied(run, tmp_path):
    shutil.copytree(run.path, tmp_path / run.path.name)
    return RunFolder(tmp_path / run.path.name)


class Done:
    """A second execution that has ended, with a folder or a reason why there is none."""

    ended = True

    def __init__(self, folder=None, failure=None):
        self.folder, self.failure, self.out = folder, failure, Path("nowhere")

    def __call__(self, *args):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def run(self):
        return self.folder


def hidden(run):
    return list(run.path.parent.glob(".verify-*"))


def test_an_untouched_run_is_the_same(run):
    said = []
    found = verify.verify(run.path, say=said.append)
    assert found.difference is None and found.result and (found.files, found.rows) == (9, 15)
    assert not hidden(run) and not [line for line in said if "the code" not in line], said


def test_one_changed_bit_is_named_with_the_circumstances(run, copied, capsys, monkeypatch):
    monkeypatch.setattr(verify, "_Again", Done(run))
    turns = copied.read("turns").filter(pl.col("step") == 1)
    gaps = turns["gap"].to_list()
    was, gaps[2][1] = gaps[2][1], math.nextafter(gaps[2][1], 9)
    copied.write_table("turns", 1, turns.with_columns(pl.Series("gap", gaps)))
    loss = copied.read("steps").filter(pl.col("step") == 1).with_columns(pl.col("loss") + 1)
    copied.write_table("steps", 1, loss)
    facts = copied.manifest
    versions, machine = facts["versions"] | {"torch": "1.0"}, facts["machine"] | {"cpu": "Z80"}
    copied.update_manifest(notebook_sha256="0" * 64, versions=versions, machine=machine)
    assert cli.main(["verify", str(copied.path), "--quiet"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "note: play.ipynb has changed since this run was made"
    assert any("torch is" in line and "was 1.0" in line for line in told) and any("was Z80" in line for line in told)
    place = told.index("differs: table turns, step 1, row 2 (episode 1, turn 0), column gap[1]")
    assert told[place + 1 : place + 3] == [f"  recorded  {gaps[2][1]!r}", f"  now       {was!r}"]
    assert told[place + 3] == "  in the same step also: steps"
    assert told[-1] == f"the second run is kept: {run.path}" and hidden(copied)


def test_an_interrupted_run_is_verified_as_far_as_it_went(copied):
    shutil.rmtree(copied.path / "tables")
    (copied.path / "COMPLETE").unlink()
    config = read_json(copied.path / "config.json")
    slow = copied.manifest["parameters"] | {"steps": 400, "pause": 0.1}
    write_json(copied.path / "config.json", config | {"config": slow})
    copied.update_manifest(parameters=slow, status="interrupted", result=None)
    with pytest.raises(WorkbenchError, match="nothing to compare"):
        verify.verify(copied.path)
    copied.write_table("timings", 0, pl.DataFrame({"stage": "all", "seconds": [0.0]}))
    copied.write_table("timings", 1, pl.DataFrame({"stage": "all", "seconds": [0.0]}))
    found = verify.verify(copied.path, say=lambda line: None)  # the whole would take 40 seconds
    assert found.difference is None and found.files == 2 and not found.result and not hidden(copied)


def test_ctrl_c_leaves_nothing(copied):
    copied.update_manifest(parameters=copied.manifest["parameters"] | {"pause": 30.0})

    def stop():
        while not list(copied.path.parent.glob(".verify-*/**/step=000000.parquet")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop, daemon=True).start()
    assert cli.main(["verify", str(copied.path), "--quiet"]) == 130
    assert not hidden(copied)


def test_a_run_that_fails_now_says_why(run, copied, monkeypatch):
    monkeypatch.setattr(verify, "_Again", Done(None, "out of memory"))
    found = verify.verify(run.path, say=lambda line: None).difference
    assert (found.where, found.now) == ("table turns, step 0, the file", "out of memory")
    monkeypatch.setattr(verify, "_Again", Done(copied, "after its tables"))
    found = verify.verify(run.path, say=lambda line: None).difference
    assert (found.where, found.now) == ("how it ended", "after its tables")


def test_other_results_and_more_tables_are_differences(run, copied, monkeypatch):
    monkeypatch.setattr(verify, "_Again", Done(copied))
    copied.update_manifest(result=copied.manifest["result"] | {"run": copied.path.name, "mean": 0})
    assert verify.verify(run.path, say=lambda line: None).difference.where == "result.mean"
    copied.write_table("budget", 2, pl.DataFrame({"n": [1]}))
    assert verify.verify(run.path, say=lambda line: None).difference.where == "table budget, step 2"
    for kept in hidden(run):
        shutil.rmtree(kept)


def test_bad_input_is_one_line(tmp_path, capsys, run):
    plain = RunFolder.create(tmp_path, "train", {})
    for argv, said in (
        (["verify", str(tmp_path)], "is not a run folder"),
        (["verify", str(plain.path)], "was not made by the runner"),
        (["verify", str(run.path), "--tolerance", "2"], "tolerance must be"),
    ):
        assert cli.main(argv) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1
    with run.lock(), pytest.raises(WorkbenchError, match="is being written"):
        verify.verify(run.path)


def frame(**columns):
    return pl.DataFrame({"step": [0, 0, 0]} | columns, strict=False)


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ([1.0, None, math.nan], [1.0, None, math.nan], None),
        ([1.0, 0.0, 2.0], [1.0, -0.0, 2.0], "row 1, column x"),
        ([1.0, 2.0, None], [1.0, 2.0, 0.0], "row 2, column x"),
        ([1.0, 2.0, math.nan], [1.0, 2.0, 3.0], "row 2, column x"),
        (["a", None, "c"], ["a", "b", "c"], "row 1, column x"),
        ([[1.0], None, [2.0, 3.0]], [[1.0], None, [2.0, 3.5]], "row 2, column x[1]"),
        ([[1.0], [], [2.0]], [[1.0], None, [2.0]], "row 1, column x"),
        ([[1.0], [2.0, 4.0], [9.0]], [[1.0], [2.0], [8.0]], "row 1, column x"),
        ([[1], [2], [3]], [[1], [2], [4]], "row 2, column x[0]"),
        ([["a"], ["b"], [None]], [["a"], ["b"], ["c"]], "row 2, column x[0]"),
        ([1, 2, 3], [1.0, 2.0, 3.0], "type of column x"),
    ],
)
def test_first_difference(old, new, where):
    found = verify.first_difference(frame(x=old), frame(x=new))
    assert (found and found.where) == where


def test_the_earliest_row_wins_and_times_are_passed_over():
    old = frame(seconds=[1.0, 2.0, 3.0], episode=[4, 5, 6], a=[1, 2, 3], b=[1, 2, 3])
    new = frame(seconds=[7.0, 2.0, 3.0], episode=[4, 5, 6], a=[1, 2, 9], b=[1, 8, 3])
    found = verify.first_difference(old, new)
    assert (found.where, found.recorded, found.now) == ("row 1 (episode 5), column b", 2, 8)
    assert verify.first_difference(old, old.head(2)) == verify.Difference("number of rows", 3, 2)
    assert verify.first_difference(old, old.drop("b")).where == "column b"
    assert verify.first_difference(old.drop("b"), old).recorded == "no such column"


def test_tolerance_is_for_floats_only():
    old, near = frame(x=[1.0, 1e6, math.inf], n=[1, 2, 3]), frame(x=[1.0005, 1e6 + 900, math.inf], n=[1, 2, 3])
    assert verify.first_difference(old, near, 1e-3) is None
    assert verify.first_difference(old, near, 1e-4).where == "row 0, column x"
    assert verify.first_difference(old, near.with_columns(n=pl.Series([1, 2, 4])), 0.5).where == "row 2, column n"


def test_result_records():
    old = {"a": {"b": [1, 2.0, None]}, "seconds": 3, "s": "x"}
    assert verify.result_difference(old, old | {"seconds": 4}) is None
    assert verify.result_difference(old, old | {"a": {"b": [1, 2.1, None]}}).where == "result.a.b[1]"
    assert verify.result_difference(old, old | {"a": {"b": [1, 2.1, None]}}, 0.1) is None
    assert verify.result_difference(old, old | {"s": 1}, 0.1).where == "result.s"
    assert verify.result_difference(old, {"a": 1}).where == "names in result"
    assert verify.result_difference({"a": True}, {"a": 1}).where == "result.a"


def test_a_machine_says_what_decides_the_last_bits(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    facts = manifest.machine()
    assert facts["environment"]["OMP_NUM_THREADS"] == "7" and facts["cores"] >= 1 and facts["arch"] and facts["cpu"]
