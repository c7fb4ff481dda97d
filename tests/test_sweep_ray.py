"""The same study on a Ray cluster of this machine, and at a URL."""

import threading
import time
from pathlib import Path

import psutil
import pytest
from sweep_notebook import assert_whole, finished, write_study

from workbench import cli
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder
from workbench.sweep import local
from workbench.sweep.place import Place
from workbench.sweep.ray import Cluster, room

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # Ray takes minutes to start where cores are shared
pytest.importorskip("ray", reason="ray is not installed (requirements/ray.txt)")


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default its workers starve where other tests run beside them


def skip_if_busy(why: str) -> None:
    """Ray gives its processes 15 seconds to start and has no setting for it; too few say nothing here."""
    if "timed out during startup" in why:
        pytest.skip("Ray could not start in the time it gives itself: the machine is too busy")


def started() -> Cluster:
    try:
        return Cluster("local", size=1)
    except WorkbenchError as error:
        skip_if_busy(str(error))
        raise


def test_a_killed_worker_loses_nothing(tmp_path):
    """A worker is killed in the middle of a run; another goes on from its checkpoint, and the tables are the same."""
    with started() as cluster:
        for out, where in (("runs", tmp_path / "runs"), (f"file://{tmp_path}/bucket", tmp_path / "bucket")):
            killed_in_the_middle(cluster, tmp_path, out, where / "tiny")


def killed_in_the_middle(cluster: Cluster, folder: Path, out: str, where: Path) -> None:
    go = folder / f"go on in {where.parent.name}"
    study = write_study(folder, seeds=2, wait_for=str(go))
    killed = []

    def kill() -> None:
        while not (begun := list(where.glob("*/checkpoints/step=000000/checkpoint.json"))):
            time.sleep(0.1)
        run = RunFolder.open(begun[0].parents[2])
        (worker,) = [p for p in psutil.Process().children(recursive=True) if p.cmdline()[:1] == ["ray::_do"]]
        kernels = worker.children(recursive=True)
        worker.kill()
        psutil.wait_procs(kernels, timeout=60)
        killed.append(run.config["seed"])
        go.touch()

    threading.Thread(target=kill, daemon=True).start()
    place = Place(out, study.name)
    states = local.prepare(study, place, False, print)
    account = local.run_cells(study, states, place, cluster.submit, cluster.size)
    assert account.line == "2 finished, 0 done already, 0 failed"
    runs = finished(where)
    assert set(runs) == {0, 1} and len(list(where.glob("2*"))) == 2
    for run in runs.values():
        assert_whole(run)
    assert runs[killed[0]].manifest["result"]["first"] == 1 and len(runs[killed[0]].manifest["attempts"]) == 2


def test_a_sweep_by_ray_from_the_command_line(tmp_path, capfd):
    write_study(tmp_path, text='[[case]]\nmethod = "a"\n[[case]]\nmethod = "b"\nfail = true\n', seeds=1)
    status = cli.main(["sweep", "tiny.toml", "--ray", "local"])
    out, said = capfd.readouterr()
    if status == 2:
        skip_if_busy(said)
    assert status == 1, said
    assert "tiny: 1 finished, 0 done already, 1 failed" in out and "AssertionError: told to fail" in out
    (run,) = finished(tmp_path / "runs" / "tiny").values()
    assert_whole(run)


def test_a_cluster_without_room_is_refused():
    assert room({"CPU": 7.0, "GPU": 2.0}, 2, 0) == 3 and room({"CPU": 8.0, "GPU": 2.0}, 1, 0.5) == 4
    with pytest.raises(WorkbenchError, match="a run asks for 1 CPUs and 1 GPUs, the cluster has 8 CPUs and 0 GPUs now"):
        room({"CPU": 8.0}, 1, 1)
