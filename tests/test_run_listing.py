"""Listings of many runs: the index makes them quick and never decides what is told."""

import json
import multiprocessing
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

from workbench import cli
from workbench.runs import RunFolder, folder, list_runs, listing


@pytest.fixture(autouse=True)
def indexed_from_three(monkeypatch):
    monkeypatch.setattr(listing, "INDEX_FROM", 3)


def finished(out, seed: int, experiment: str = "train") -> RunFolder:
    run = RunFolder.create(out, experiment, {"seed": seed})
    run.update_manifest(status="complete", notebook="train", seconds=float(seed))
    run.complete()
    return run


@pytest.fixture
def out(tmp_path):
    for seed in range(4):
        finished(tmp_path / "out", seed)
    list_runs(tmp_path / "out")
    assert (tmp_path / "out" / listing.INDEX).is_file()
    return tmp_path / "out"


@pytest.fixture
def read(monkeypatch):
    """Names of the runs whose manifest a listing reads."""
    names = []
    real = RunFolder.open
    monkeypatch.setattr(RunFolder, "open", lambda path: (names.append(path), real(path))[1])
    return names


def seconds(out) -> list[float]:
    return list_runs(out)["seconds"].to_list()


def test_only_what_is_new_is_read_again(out, read):
    assert seconds(out) == [0, 1, 2, 3] and read == []
    new = finished(out, 9)
    assert seconds(out) == [0, 1, 2, 3, 9] and read == [str(new.path)]
    assert list_runs(out)["state"].to_list() == ["complete"] * 5 and len(read) == 1


def test_it_lists_what_a_listing_without_index_does(out):
    RunFolder.create(out, "other", {}).update_manifest(status="failed", error="ValueError: x", seconds=2)
    (out / "other" / "no run").mkdir()
    with_index = [list_runs(out), list_runs(out)]
    (out / listing.INDEX).unlink()
    assert all(frame.equals(list_runs(out)) for frame in with_index) and len(with_index[0]) == 5


def test_small_folders_stay_free_of_an_index(tmp_path):
    for seed in range(2):
        finished(tmp_path, seed)
    assert len(list_runs(tmp_path)) == 2 and not (tmp_path / listing.INDEX).exists()


def test_deleted_moved_and_replaced_runs_are_told_as_they_are(out):
    paths = [Path(path) for path in list_runs(out)["path"]]
    shutil.rmtree(paths[0])
    paths[1].rename(out / "elsewhere")
    (out / "moved").mkdir()
    (out / "elsewhere").rename(out / "moved" / paths[1].name)
    shutil.rmtree(paths[2])
    paths[3].rename(paths[2])  # the place of one run is taken by another
    rows = {row["path"]: row["seconds"] for row in list_runs(out).to_dicts()}
    assert rows == {str(out / "moved" / paths[1].name): 1.0, str(paths[2]): 3.0}


def test_unfinished_runs_change_state_without_a_manifest_being_written(out):
    run = RunFolder.create(out, "train", {"seed": 7})
    assert list_runs(out)["state"][-1] == "interrupted"
    with run.lock():
        assert list_runs(out)["state"][-1] == "running"
    run.update_manifest(status="failed", error="ValueError: y")
    assert list_runs(out).row(-1, named=True)["error"] == "ValueError: y"
    run.complete()
    assert list_runs(out)["state"][-1] == "complete"


@pytest.mark.parametrize("content", [b"", b"PAR1 torn", "other"])
def test_an_index_that_cannot_be_used_is_made_anew(out, content, read):
    if content == "other":
        pl.DataFrame({"place": ["train/x"], "mark": [3]}).write_parquet(out / listing.INDEX)
    else:
        (out / listing.INDEX).write_bytes(content)
    assert seconds(out) == [0, 1, 2, 3] and len(read) == 4
    assert seconds(out) == [0, 1, 2, 3] and len(read) == 4


def test_an_index_that_cannot_be_written_is_done_without(out):
    (out / listing.INDEX).unlink()
    (out / listing.INDEX).mkdir()  # stands in for a read-only folder, which root may write to
    assert seconds(out) == [0, 1, 2, 3]


def test_hostile_manifests_do_not_break_a_listing(out):
    run = finished(out, 9)
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest |= {"seconds": "long", "error": ["a"], "started": 5, "status": {}}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    torn = finished(out, 10)
    (torn.path / "manifest.json").write_text("{")
    rows = {row["path"]: row for row in list_runs(out).to_dicts()}
    assert rows[str(run.path)]["seconds"] is None and rows[str(run.path)]["error"] == "['a']"
    assert rows[str(torn.path)]["state"] == "unreadable" and len(rows) == 6


def _list_often(out, add):
    listing.INDEX_FROM = 3
    for seed in range(5):
        finished(out, add + seed)
        list_runs(out)


def test_processes_that_write_the_index_at_once_lose_no_run(out):
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_list_often, args=(out, 100 * (n + 1))) for n in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert [other.exitcode for other in others] == [0, 0]
    assert sorted(seconds(out)) == [0, 1, 2, 3, *range(100, 105), *range(200, 205)]
    assert not list(out.glob(f".{listing.INDEX}.*"))


def test_runs_keep_their_order_when_the_clock_jumps_back(tmp_path, monkeypatch):
    now = datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC)

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return now

    monkeypatch.setattr(folder, "datetime", Clock)
    runs = [RunFolder.create(tmp_path, "train", {"seed": 0})]
    now -= timedelta(hours=1)
    runs += [RunFolder.create(tmp_path, "train", {"seed": seed % 2}) for seed in range(1, 4)]
    now += timedelta(hours=2)
    runs += [RunFolder.create(tmp_path, "train", {"seed": 0})]
    assert [run.path.name[:16] for run in runs] == [
        "20260301T120000Z", "20260301T120001Z", "20260301T120002Z", "20260301T120003Z", "20260301T130000Z",
    ]  # fmt: skip
    assert list_runs(tmp_path)["path"].to_list() == [str(run.path) for run in runs]


def test_the_folder_of_one_experiment_is_listed_too(tmp_path, monkeypatch, capsys):
    for experiment in ("train", "other"):
        RunFolder.create(tmp_path / "runs", experiment, {})
    monkeypatch.chdir(tmp_path)
    (path,) = list_runs("runs/train")["path"]
    assert path.startswith("runs/train/2") and cli.main(["status", "runs/train"]) == 0
    assert capsys.readouterr().out.startswith(path)
    monkeypatch.chdir(tmp_path / "runs" / "train")
    assert list_runs(".")["experiment"].to_list() == ["train"] and list_runs("..").height == 2
