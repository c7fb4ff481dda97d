"""The run folder: whole writes, tables across steps, checkpoints that survive a kill, one writer."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import polars as pl
import pytest

from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, checkpoint_step, files, list_runs
from workbench.runs.folder import step_of


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path, "train", {"method": "grpo", "steps": 3})


def leftovers(run: RunFolder) -> list[str]:
    return [p.name for p in run.path.rglob(".*")]


def test_layout_of_a_new_run(run, tmp_path):
    assert run.path.parent == tmp_path / "train"
    assert run.path.name.endswith("Z-" + run.manifest["digest"])
    assert run.config == {"method": "grpo", "steps": 3} and run.experiment == "train"
    assert sorted(p.name for p in run.path.iterdir()) == ["config.json", "manifest.json"]
    assert [p.name for p in run.path.parent.iterdir()] == [run.path.name]
    assert RunFolder.open(run.path).config == run.config


def test_runs_of_the_same_second_do_not_meet(tmp_path):
    paths = {RunFolder.create(tmp_path, "train", {"seed": 1}).path for _ in range(4)}
    assert len(paths) == 4


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_an_experiment_is_a_plain_name(tmp_path, name):
    with pytest.raises(WorkbenchError, match="experiment"):
        RunFolder.create(tmp_path, name, {})
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_folder_is_said(tmp_path, run):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(WorkbenchError, match="is not a run folder"):
            RunFolder.open(path)
    (run.path / "config.json").write_text("{torn")
    with pytest.raises(WorkbenchError, match="cannot be read as JSON"):
        RunFolder.open(run.path)


def test_a_folder_of_another_version_is_refused_and_still_listed(run, tmp_path):
    config = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps(config | {"format_version": 2}))
    with pytest.raises(WorkbenchError, match="format version 2; version 1 is expected") as error:
        RunFolder.open(run.path)
    assert "\n" not in str(error.value)
    listed = list_runs(tmp_path).to_dicts()
    assert [row["state"] for row in listed] == ["unreadable"] and "version 2" in listed[0]["error"]


def test_tables_are_read_in_order_and_keep_types_that_some_steps_lack(run):
    run.write_table("steps", 10, pl.DataFrame({"step": [10], "kl": [0.5], "gap": [[0.1, 0.2]]}))
    run.write_table("steps", 2, pl.DataFrame({"step": [2], "kl": [None], "gap": [[]]}))
    run.write_table("steps", 1, pl.DataFrame({"kl": [1]}))
    table = run.read("steps")
    assert table["step"].to_list() == [1, 2, 10]
    assert table["kl"].to_list() == [1.0, None, 0.5]
    assert table.schema["gap"] == pl.List(pl.Float64)
    assert table["gap"].to_list() == [None, [], [0.1, 0.2]]
    assert run.scan("steps").filter(pl.col("step") > 1).select("kl").collect().height == 2
    assert [p.name for p in run.table_files("steps")] == [f"step={n:06d}.parquet" for n in (1, 2, 10)]


def test_the_files_of_a_step_are_those_a_listing_has_of_it(run):
    for step in (7, 1_234_567):
        first = run.write_table("turns", step, pl.DataFrame({"turn": [0]}))
        for number in range(1, 12):
            first.with_name(f"{first.stem}.{number}.parquet").write_bytes(first.read_bytes())
    for step in (7, 1_234_567, 1):
        assert run.step_files("turns", step) == [f for f in run.table_files("turns") if step_of(f) == step]
    assert run.step_files("steps", 7) == []


def test_writing_a_step_again_replaces_it_and_is_deterministic(run):
    frame = pl.DataFrame({"step": [1, 1], "text": ["a", "b"]})
    path = run.write_table("turns", 1, frame)
    first = path.read_bytes()
    run.write_table("turns", 1, frame.reverse())
    run.write_table("turns", 1, frame)
    assert path.read_bytes() == first and run.read("turns").equals(frame)
    assert leftovers(run) == []


def test_a_row_of_another_step_is_refused(run):
    with pytest.raises(WorkbenchError, match="a row of step 4 was given for step 3"):
        run.write_table("steps", 3, pl.DataFrame({"step": [3, 4]}))
    with pytest.raises(WorkbenchError, match="step must be 0 or more"):
        run.write_table("steps", -1, pl.DataFrame({"a": [1]}))
    with pytest.raises(WorkbenchError, match="table '../x'"):
        run.write_table("../x", 1, pl.DataFrame({"a": [1]}))
    assert run.tables == []


def test_an_absent_table_brings_those_present(run):
    with pytest.raises(WorkbenchError, match="holds no tables yet"):
        run.scan("steps")
    run.write_table("turns", 1, pl.DataFrame({"a": [1]}))
    run.write_table("steps", 1, pl.DataFrame({"a": [1]}))
    with pytest.raises(WorkbenchError, match="did you mean 'turns'. known: steps, turns"):
        run.read("turn")


def test_truncate_drops_later_steps_and_leftovers(run):
    for step in range(5):
        run.write_table("steps", step, pl.DataFrame({"a": [step]}))
        run.write_table("turns", step, pl.DataFrame({"a": [step]}))
    (run.path / "tables" / "steps" / ".step=000009.parquet.77").write_bytes(b"half")
    run.truncate(2)
    assert run.read("steps")["a"].to_list() == run.read("turns")["a"].to_list() == [0, 1, 2]
    assert leftovers(run) == []
    run.truncate(-1)
    assert run.tables == []


def full_disk(monkeypatch):
    real = os.fsync

    def fsync(handle):
        if os.path.isfile(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(run, monkeypatch):
    run.write_table("steps", 1, pl.DataFrame({"a": [1]}))
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    full_disk(monkeypatch)
    for write in (
        lambda: run.write_table("steps", 2, pl.DataFrame({"a": [2]})),
        lambda: run.write_table("steps", 1, pl.DataFrame({"a": [9]})),
        lambda: run.save_checkpoint(1, lambda path: (path / "weights").write_bytes(b"w")),
        lambda: run.update_manifest(status="complete"),
        run.complete,
    ):
        with pytest.raises(WorkbenchError, match=".* was not written: the disk is full") as error:
            write()
        assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    with pytest.raises(WorkbenchError, match="the disk is full"):
        RunFolder.create(run.path.parents[1], "other", {})
    assert list((run.path.parents[1] / "other").iterdir()) == []
    monkeypatch.undo()
    assert run.read("steps")["a"].to_list() == [1]


def save(run: RunFolder, step: int, text: str = "", keep: int = 2):
    return run.save_checkpoint(step, lambda path: (path / "weights.bin").write_text(text or f"weights {step}"), keep)


def test_checkpoints_keep_the_newest(run):
    assert run.latest_checkpoint() is None
    for step in (0, 5, 10, 15):
        save(run, step)
    latest = run.latest_checkpoint()
    assert checkpoint_step(latest) == 15 and (latest / "weights.bin").read_text() == "weights 15"
    assert sorted(p.name for p in run.checkpoint_dir.iterdir()) == ["step=000010", "step=000015"]


def test_a_checkpoint_of_the_same_step_is_replaced_by_a_whole_one(run):
    save(run, 5)
    save(run, 10, "first")

    def dies(path):
        (path / "weights.bin").write_text("half")
        assert (run.latest_checkpoint() / "weights.bin").read_text() == "first"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(10, dies)
    assert (run.latest_checkpoint() / "weights.bin").read_text() == "first" and leftovers(run) == []
    save(run, 10, "second")
    assert (run.latest_checkpoint() / "weights.bin").read_text() == "second"
    assert sorted(checkpoint_step(p) for p in run.checkpoint_dir.iterdir()) == [5, 10]


def test_torn_and_temporary_checkpoints_are_passed_over(run):
    whole = save(run, 5)
    torn = save(run, 10)
    (torn / "weights.bin").write_text("w")
    (run.checkpoint_dir / ".step=000015.1").mkdir()
    unmarked = run.checkpoint_dir / "step=000020"
    unmarked.mkdir()
    (unmarked / "weights.bin").write_text("weights 20")
    assert run.latest_checkpoint() == whole
    (torn / "weights.bin").unlink()
    assert run.latest_checkpoint() == whole


def test_a_killed_save_leaves_the_last_checkpoint(run):
    save(run, 5)
    child = f"""
import os, signal
from workbench.runs import RunFolder
def write(path):
    (path / "weights.bin").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
RunFolder.open({str(run.path)!r}).save_checkpoint(10, write)
"""
    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == -signal.SIGKILL
    assert checkpoint_step(run.latest_checkpoint()) == 5


def test_complete_is_the_last_mark(run, tmp_path):
    assert not run.is_complete and run.state == "interrupted"
    run.update_manifest(status="failed")
    assert run.state == "failed"
    run.complete()
    assert run.is_complete and run.state == "complete"
    assert list_runs(tmp_path)["state"].to_list() == ["complete"]
    assert list_runs(tmp_path / "nowhere").is_empty()


def _hold(path, held, release):
    with RunFolder.open(path).lock():
        held.set()
        release.wait(60)


def test_one_writer_a_folder_and_a_dead_one_holds_nothing(run):
    with run.lock():
        assert run.is_locked and run.state == "running"
        with pytest.raises(WorkbenchError, match=f"is being written by process {os.getpid()} on ") as error:
            with RunFolder.open(run.path).lock():
                pass
        assert "\n" not in str(error.value)
    assert not run.is_locked

    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(run.path, held, release))
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(WorkbenchError, match=f"process {other.pid}"):
            with run.lock():
                pass
    finally:
        other.kill()
        other.join()
    assert (run.path / "LOCK").read_text().startswith(f"process {other.pid}")
    with run.lock():
        assert f"process {os.getpid()}" in (run.path / "LOCK").read_text()


def test_a_notebook_writes_under_the_lock_of_its_runner(run, monkeypatch):
    with run.lock():
        monkeypatch.setenv("WORKBENCH_LOCKED_RUN", str(run.path))
        with RunFolder.open(run.path).lock():
            pass
        monkeypatch.setenv("WORKBENCH_LOCKED_RUN", str(run.path) + "x")
        with pytest.raises(WorkbenchError, match="being written"), RunFolder.open(run.path).lock():
            pass
    assert not run.is_locked
