"""Sweeps on this machine: what is done is passed over, what was stopped goes on, two share the work, all is told."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from sweep_notebook import assert_whole, finished, write_study

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder, files
from workbench.runs.execute import RunFailed
from workbench.sweep import cell, local, pool
from workbench.sweep.cell import Job, Outcome
from workbench.sweep.mirror import Mirror
from workbench.sweep.place import Claims, Place
from workbench.sweep.state import Now, look, survey, told_changes


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def begun(job: Job) -> RunFolder:
    """The folder of a job, as the runner makes it, with nothing executed."""
    return cell.begun(job)


def quickly(job: Job, claim: int = -1) -> "Future[Outcome]":
    """Do a job without a kernel: the folder, a table and COMPLETE."""
    done: Future[Outcome] = Future()
    try:
        found = cell.state(job)
        run = found.run if found.state == "to resume" else begun(job)
        if job.parameters["fail"]:
            run.update_manifest(status="failed", error="told to fail")
            done.set_result(Outcome("failed", str(run.path), "told to fail"))
            return done
        for step in range(3):
            run.write_table("steps", step, pl.DataFrame({"value": [job.parameters["seed"] * 100 + step]}))
        run.update_manifest(status="complete")
        run.complete()
        done.set_result(Outcome("complete", str(run.path)))
    except WorkbenchError as error:
        done.set_result(Outcome("refused", None, str(error)))
    return done


def swept(study, out="runs", submit=quickly, slots=2, limit=None, accept_changed=False):
    place = Place(out, study.name)
    states = local.prepare(study, place, accept_changed, lambda line: print(line))
    return local.run_cells(study, states, place, submit, slots, limit)


def test_finished_cells_are_passed_over(tmp_path, capsys):
    study = write_study(tmp_path, seeds=4)
    assert swept(study, limit=3).line == "3 finished, 0 done already, 0 failed"
    assert [s.state for s in survey(study, tmp_path / "runs" / "tiny")] == ["done"] * 3 + ["to run"]
    wider = write_study(tmp_path, seeds=5)
    assert swept(wider).line == "2 finished, 3 done already, 0 failed"
    assert "tiny: 5 cells, 3 done already, 2 to run" in capsys.readouterr().err
    runs = finished(tmp_path / "runs" / "tiny")
    assert set(runs) == set(range(5))
    stored = json.loads((tmp_path / "runs" / "tiny" / "study.json").read_text())
    assert {c["digest"] for c in stored["cells"]} == {run.path.name.split("-")[1] for run in runs.values()}


def test_only_full_equality_makes_a_cell_done(tmp_path):
    """A folder of the same digest with other parameters, as a collision would give, is not the cell's."""
    study = write_study(tmp_path, seeds=1)
    swept(study)
    (run,) = finished(tmp_path / "runs" / "tiny").values()
    config = json.loads((run.path / "config.json").read_text())
    config["config"]["method"] = "b"
    (run.path / "config.json").write_text(json.dumps(config))
    assert [s.state for s in survey(study, tmp_path / "runs" / "tiny")] == ["to run"]


def test_what_was_stopped_is_gone_on_with(tmp_path, capsys):
    study = write_study(tmp_path, seeds=1)
    job = Job("tiny", str(study.notebook), study.cells[0].parameters, "runs", "tiny", True)
    run = begun(job)
    assert run.state == "interrupted"
    assert swept(study).finished == 1
    assert finished(tmp_path / "runs" / "tiny")[0].path == run.path
    assert "resumed  tiny" in capsys.readouterr().err


def test_a_folder_that_another_process_writes_is_left_alone(tmp_path, monkeypatch):
    study = write_study(tmp_path, seeds=1)
    run = begun(Job("tiny", str(study.notebook), study.cells[0].parameters, "runs", "tiny", True))
    monkeypatch.setattr(local, "POLL", 0.01)
    with run.lock():
        assert look(study.cells[0], run.path.parent, Now.of(study)).state == "running"
        calls = []

        def complete(_: float) -> None:
            calls.append(1)
            if len(calls) == 3:
                run.complete()

        monkeypatch.setattr(local.time, "sleep", complete)
        assert swept(study).line == "0 finished, 0 done already, 0 failed, 1 finished by another sweep"


def test_a_failing_cell_does_not_stop_the_others(tmp_path, capsys):
    study = write_study(tmp_path, text='[[case]]\nmethod = "a"\nfail = true\n[[case]]\nmethod = "b"\n', seeds=2)
    account = swept(study)
    assert account.line == "2 finished, 0 done already, 2 failed"
    told = local.told_account(study, account)
    assert "failed  a (seed=0): told to fail" in told and "workbench run --resume runs/tiny/" in told


@pytest.mark.parametrize("accept", [False, True])
def test_an_edited_notebook_is_said_and_not_mixed(tmp_path, capsys, accept):
    study = write_study(tmp_path, seeds=1)
    account = local.run_cells(study, survey(study, tmp_path), Place("runs", "tiny"), _executed, 1)
    assert account.finished == 1
    text = (tmp_path / "small.ipynb").read_text()
    (tmp_path / "small.ipynb").write_text(text.replace("# small", "# Small, with other words"))
    assert survey(write_study(tmp_path, seeds=1), tmp_path / "runs" / "tiny")[0].changed == ()
    (tmp_path / "small.ipynb").write_text(text.replace("seed * 100", "seed * 200"))
    argv = ["sweep", "tiny.toml", "--jobs", "1"] + (["--accept-changed"] if accept else [])
    assert cli.main([*argv, "--dry-run"]) == 0
    assert ("this would be refused: --accept-changed" in capsys.readouterr().out) != accept
    assert cli.main(argv) == (0 if accept else 2)
    said = capsys.readouterr().err
    assert "1 finished cell was made with other code in small.ipynb" in said
    assert ("accepted" in said) == accept and ("--accept-changed counts them all the same" in said) != accept
    assert set(finished(tmp_path / "runs" / "tiny")) == {0}
    for _ in range(2):
        stored = json.loads((tmp_path / "runs" / "tiny" / "study.json").read_text())
        assert stored["notebook_sha256"] == study.notebook_sha256, "the code that made the runs stays on record"
        edited = [entry["notebook_sha256"] for entry in stored.get("accepted", [])]
        assert edited == ([write_study(tmp_path, seeds=1).notebook_sha256] if accept else [])
        cli.main(argv)


def _executed(job: Job, claim: int) -> "Future[Outcome]":
    """As `quickly`, and with the code that it would have executed on record."""
    done = quickly(job)
    path = Path(done.result().run)
    (path / "executed.ipynb").write_bytes((path / "notebook.ipynb").read_bytes())
    return done


def test_other_versions_are_said_and_commits_only_noted(tmp_path):
    study = write_study(tmp_path, seeds=3)
    swept(study)
    later = replace(study, versions=study.versions | {"workbench": "9.0"}, git={"commit": "f" * 40, "dirty": False})
    changed, noted = told_changes(survey(later, tmp_path / "runs" / "tiny"))
    assert changed == [f"3 finished cells were made with workbench {study.versions['workbench']}, now 9.0"]
    assert len(noted) == 1 and noted[0].endswith(", now fffffff")
    with pytest.raises(WorkbenchError, match=r"runs/tiny: 3 finished cells were made with workbench"):
        local.prepare(later, Place("runs", "tiny"), False, print)
    newer = replace(study, git={"commit": "f" * 40, "dirty": False})
    assert [s.state for s in local.prepare(newer, Place("runs", "tiny"), False, print)] == ["done"] * 3


def test_what_any_attempt_of_a_run_was_made_with_counts(tmp_path):
    """A run that was gone on with by hand, under other code or versions, is not taken for one of this study's."""
    study, folder = write_study(tmp_path, seeds=1), tmp_path / "runs" / "tiny"
    swept(study)
    (run,) = finished(folder).values()
    same = {"notebook_sha256": study.notebook_sha256}
    run.update_manifest(attempts=[{"notebook_sha256": "0" * 64}, same])
    assert survey(study, folder)[0].changed == ("with other code in small.ipynb",)
    run.update_manifest(attempts=[same, same | {"versions": {"torch": "1.0"}}])
    assert survey(study, folder)[0].changed == (f"with torch 1.0, now {study.versions['torch']}",)
    begun_at, other = {"commit": "d" * 40, "dirty": False}, {"commit": "e" * 40, "dirty": True}
    run.update_manifest(git=begun_at, attempts=[same, same | {"git": other}])
    found = survey(replace(study, git=begun_at), folder)[0]
    assert found.changed == () and found.noted == ("at commit eeeeeee with uncommitted changes, now ddddddd",)


def test_code_that_unfinished_cells_were_begun_with_is_said(tmp_path):
    study, folder = write_study(tmp_path, seeds=2), tmp_path / "runs" / "tiny"
    study = replace(study, git={"commit": "d" * 40, "dirty": False})
    jobs = [Job("tiny", str(study.notebook), c.parameters, "runs", "tiny", True) for c in study.cells]
    older, other = map(begun, jobs)
    older.update_manifest(git={"commit": "e" * 40, "dirty": False})
    other.update_manifest(versions=study.versions | {"torch": "1.0"})
    assert told_changes(survey(study, folder)) == ([], [
        "1 unfinished cell was begun at commit eeeeeee, now ddddddd, to go on",
        f"1 unfinished cell was begun with torch 1.0, now {study.versions['torch']}, to begin anew",
    ])  # fmt: skip


def test_labels_cannot_move_the_cursor(tmp_path, capsys):
    text = '[[case]]\nmethod = "a"\nlabel = "x\\u001b[2J"\nfail = true\n'
    study = write_study(tmp_path, text=text, seeds=1)
    told = local.told_account(study, swept(study))
    assert cli.main(["sweep", "tiny.toml", "--dry-run"]) == 0
    said = capsys.readouterr()
    for text in (told, said.out, said.err):
        assert "\x1b" not in text and "x\\x1b[2J" in text


def test_a_run_that_only_another_machine_has_is_not_called_finished(tmp_path):
    study = write_study(tmp_path, seeds=1)

    def far_away(job: Job, claim: int) -> "Future[Outcome]":
        done: Future[Outcome] = Future()
        done.set_result(Outcome("complete", str(tmp_path / "elsewhere")))
        return done

    account = swept(study, submit=far_away)
    assert account.line == "0 finished, 0 done already, 1 failed"
    assert "of another machine: --out must be a folder that all share, or a URL" in local.told_account(study, account)
    account.failed[0] = (study.cells[0], Outcome("failed", str(tmp_path / "gone"), "why"))
    assert "workbench run --resume gone" in local.told_account(study, account)


def test_a_full_disk_stops_the_sweep_in_one_line_with_finished_cells_kept(tmp_path, monkeypatch, capsys):
    study = write_study(tmp_path, seeds=6)
    real, written = files.os.replace, []

    def full(draft, path):
        written.append(path)
        if len(finished(tmp_path / "runs" / "tiny")) >= 2 and not str(path).endswith("study.json"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(draft, path)

    monkeypatch.setattr(files.os, "replace", full)
    account = swept(study, slots=1)
    assert account.line == "2 finished, 0 done already, 1 failed, 3 not run"
    said = capsys.readouterr().err
    assert "no more cells are started: " in said and "was not written: the disk is full" in said
    monkeypatch.setattr(files.os, "replace", real)
    assert swept(study).line == "4 finished, 2 done already, 0 failed"
    for run in finished(tmp_path / "runs" / "tiny").values():
        assert_whole(run)


def test_why_a_run_failed_is_told_also_where_the_disk_took_no_word_of_it(tmp_path, monkeypatch):
    study = write_study(tmp_path)
    job = Job("a", str(study.notebook), study.cells[0].parameters, str(tmp_path / "runs"), study.name, again=True)

    def full(*args, **options):
        raise RunFailed("run failed in cell 3 of 3", begun(job), "report.html was not written: the disk is full")

    monkeypatch.setattr(cell, "run_notebook", full)
    outcome = cell.do(job)
    assert (outcome.status, outcome.error) == ("failed", "report.html was not written: the disk is full")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(tmp_path, capsys):
    write_study(tmp_path)
    (tmp_path / "runs").mkdir(mode=0o555)
    assert cli.main(["sweep", "tiny.toml"]) == 2
    assert "permission denied: " in capsys.readouterr().err


def test_what_is_no_folder_is_told(tmp_path, capsys):
    write_study(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert cli.main(["sweep", "tiny.toml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "Not a directory" in said[0] and "was not written" in said[0], said


def test_a_claim_is_one_process_at_a_time(tmp_path):
    """The claim outlives the sweep for as long as the process that it started."""
    with Claims(tmp_path / "c") as mine, Claims(tmp_path / "c") as other:
        handle = mine.take("00000000")
        assert other.take("00000000") is None and mine.take("00000000") is None
        child = subprocess.Popen(["sleep", "60"], pass_fds=(handle,))
        mine.drop("00000000")
        assert other.take("00000000") is None
        child.kill()
        child.wait()
        assert other.take("00000000") is not None


def test_two_sweeps_at_once_share_the_cells(tmp_path, monkeypatch):
    """Each cell is run once, and each sweep ends when all are done."""
    study = write_study(tmp_path, seeds=12)
    monkeypatch.setattr(local, "POLL", 0.01)

    def slowly(job: Job, claim: int) -> "Future[Outcome]":
        done: Future[Outcome] = Future()
        threading.Timer(0.02, lambda: done.set_result(quickly(job).result())).start()
        return done

    accounts = []
    sweeps = [threading.Thread(target=lambda: accounts.append(swept(study, submit=slowly))) for _ in range(2)]
    for thread in sweeps:
        thread.start()
    for thread in sweeps:
        thread.join()
    assert sum(a.finished for a in accounts) == 12 and not any(a.failed for a in accounts)
    assert all(a.finished + a.elsewhere + a.earlier == 12 for a in accounts)
    assert set(finished(tmp_path / "runs" / "tiny")) == set(range(12))
    assert len(list((tmp_path / "runs" / "tiny").glob("2*"))) == 12


def test_what_another_sweep_drops_is_run(tmp_path, monkeypatch):
    study = write_study(tmp_path, seeds=2)
    monkeypatch.setattr(local, "POLL", 0.01)
    with Claims(Place("runs", "tiny").claims) as other:
        other.take(study.cells[0].digest)
        monkeypatch.setattr(local.time, "sleep", lambda _: other._held and other.drop(study.cells[0].digest))
        assert swept(study).finished == 2


def test_how_many_fit(monkeypatch):
    monkeypatch.setattr(pool, "gpus", lambda: 0)
    monkeypatch.setattr(pool, "cores", lambda: 8)
    monkeypatch.setattr(pool, "available_memory", lambda: 3 * pool.RUN_BYTES)
    assert pool.fitting() == 3
    monkeypatch.setattr(pool, "available_memory", lambda: 100)
    assert pool.fitting() == 1
    monkeypatch.setattr(pool, "available_memory", lambda: 100 * pool.RUN_BYTES)
    assert pool.fitting() == 8
    monkeypatch.setattr(pool, "gpus", lambda: 2)
    assert pool.fitting() == 2


def test_what_a_process_of_a_run_is_given(monkeypatch):
    """Threads as the caller says, no imports from the working directory; one that cannot start is told."""
    given = []

    def start(command, env, **_):
        given.extend([*command, env["OMP_NUM_THREADS"]])
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pool.subprocess, "Popen", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with pool.Pool(1) as one:
        outcome = one.submit(Job("tiny", "small", {}, "runs")).result()
    assert outcome == Outcome("failed", None, "its process did not start: Cannot allocate memory")
    assert given[1] == "-P" and given[-1] == "3"


def test_the_outcome_is_found_among_what_a_process_says():
    done = '{"status": "complete", "run": "runs/a", "error": ""}'
    assert pool.answer(["step 1", done, "resource_tracker: leaked 1"], 0) == Outcome("complete", "runs/a")
    assert pool.answer([done, "Killed"], -9).error == "its process ended (signal 9); its last words: Killed"
    assert pool.answer([done], 1).status == "failed"
    assert pool.answer(["null", "3"], 1).error.endswith("(exit status 1); its last words: 3")
    assert pool.answer([], 0).error.endswith("it said nothing")


def test_memory_is_measured():
    assert 1 << 20 < pool.available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_run_at_a_url_can_be_gone_on_with_at_any_moment(tmp_path, monkeypatch):
    """Whatever the last file that arrived, what lies at the URL is resumable and complete only when all of it is."""
    study = write_study(tmp_path, seeds=1)
    run = RunFolder(
        quickly(Job("tiny", str(study.notebook), study.cells[0].parameters, "runs", "tiny", True)).result().run
    )
    run.save_checkpoint(2, lambda path: (path / "state").write_text("2"))
    mirror = Mirror(f"file://{tmp_path}/bucket", "tiny", run.path.parent)
    order: list[str] = []
    files_there = mirror._files
    put = files_there.put_file

    def spied(source, target):
        order.append(target.rpartition("/")[2])
        return put(source, target)

    monkeypatch.setattr(files_there, "put_file", spied)
    mirror.push(run)
    assert order[-3:] == ["checkpoint.json", ".manifest.json", "COMPLETE"]
    assert "LOCK" not in order and {name for name in order if name.startswith(".")} == {".manifest.json"}
    sent = len(order)
    mirror.push(run)
    assert len(order) == sent, "nothing has changed, so nothing is sent"

    def torn(source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:10])
        raise OSError("killed")

    run.update_manifest(note="another")
    monkeypatch.setattr(files_there, "put_file", torn)
    with pytest.raises(WorkbenchError, match="cannot be used: OSError: killed"):
        mirror.push(run)
    monkeypatch.setattr(files_there, "put_file", put)
    assert RunFolder.open(tmp_path / "bucket" / "tiny" / run.path.name).manifest["status"] == "complete"
    run.save_checkpoint(3, lambda path: (path / "state").write_text("3"), keep=1)
    mirror.push(run)
    back = Mirror(f"file://{tmp_path}/bucket", "tiny", tmp_path / "back")
    back.headers()
    assert survey(study, tmp_path / "back")[0].state == "done"
    back.pull(run.path.name)
    assert [p.name for p in (tmp_path / "back" / run.path.name / "checkpoints").iterdir()] == ["step=000003"]
    assert RunFolder.open(tmp_path / "back" / run.path.name).latest_checkpoint() is not None


def test_names_that_lead_out_of_a_url_and_files_that_vanish_are_told(tmp_path, monkeypatch):
    mirror = Mirror(f"file://{tmp_path}/bucket", "tiny", tmp_path / "here" / "tiny")
    monkeypatch.setattr(mirror._files, "find", lambda path: [f"{mirror._root}/run/../../evil"])
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "evil").write_text("")
    with pytest.raises(WorkbenchError, match="holds 'run/../../evil', which leads out of it"):
        mirror.pull("run")
    assert not list(tmp_path.rglob("here/**/*evil*"))
    monkeypatch.setattr(mirror._files, "find", lambda path: [f"{mirror._root}/run/config.json"])
    with pytest.raises(WorkbenchError, match="cannot be used: FileNotFoundError"):
        mirror.pull("run")


def test_a_url_that_cannot_be_used_is_told(tmp_path, capsys, monkeypatch):
    study = write_study(tmp_path)
    monkeypatch.setattr(cell.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    job = Job("tiny", str(study.notebook), study.cells[0].parameters, "nowhere://bucket", "tiny", True)
    assert cell.do(job).status == "refused" and not list((tmp_path / "scratch").iterdir())
    assert cli.main(["sweep", "tiny.toml", "--out", "nowhere://bucket"]) == 2
    assert "nowhere://bucket/tiny cannot be used: ValueError: Protocol not known" in capsys.readouterr().err


def test_a_sweep_at_a_url(tmp_path):
    """The whole way in this process: scratch folders are gone afterwards, runs and study.json are at the URL."""
    study = write_study(tmp_path, seeds=1)
    out = f"file://{tmp_path}/bucket"

    def here(job: Job, claim: int) -> "Future[Outcome]":
        done: Future[Outcome] = Future()
        done.set_result(cell.do(job, progress=False))
        return done

    assert swept(study, out, here).line == "1 finished, 0 done already, 0 failed"
    (run,) = finished(tmp_path / "bucket" / "tiny").values()
    assert len(run.path.name.split("-")) == 3, "two machines could give one name in the same second"
    assert_whole(run)
    assert (run.path / "report.html").is_file() and (tmp_path / "bucket" / "tiny" / "study.json").is_file()
    assert swept(study, out, here).line == "0 finished, 1 done already, 0 failed"


# The command line, in processes of its own


def sweep(*argv: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "workbench.cli", "sweep", "tiny.toml", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for(condition, seconds=280):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stop", "seeds"), [(signal.SIGINT, 2), (signal.SIGKILL, 1)])
def test_a_stopped_sweep_goes_on(tmp_path, stop, seeds):
    """Ctrl-C, or a kill of the sweep itself, leaves no process behind, and the same command finishes the runs."""
    write_study(tmp_path, seeds=seeds, wait_for=str(tmp_path / "go"))
    folder = tmp_path / "runs" / "tiny"
    first = sweep("--jobs", "2")
    wait_for(lambda: len(list(folder.glob("*/checkpoints/step=000000/checkpoint.json"))) == seeds)
    first.send_signal(stop)
    _, said = first.communicate(timeout=280)
    if stop == signal.SIGINT:
        assert first.returncode == 130
        assert "stopped; what ran can be resumed. To go on: workbench sweep tiny.toml --jobs 2" in said
    wait_for(lambda: not any(RunFolder.open(path).is_locked for path in folder.glob("2*")))
    (tmp_path / "go").touch()
    second = sweep("--jobs", "2")
    out, said = second.communicate(timeout=280)
    assert second.returncode == 0 and said.count("resumed") == seeds, said
    assert out == f"tiny: {seeds} finished, 0 done already, 0 failed\n"
    runs = finished(folder)
    assert set(runs) == set(range(seeds)) and len(list(folder.glob("2*"))) == seeds
    for run in runs.values():
        assert_whole(run)
        assert run.manifest["result"]["first"] == 1, "it began anew"
