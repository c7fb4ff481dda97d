"""Trackers: told what the tables say, once a step, whatever happens to the run or to them."""

import json
import sys
import threading

import polars as pl
import pytest
import synthetic_run
import torch
from polars.testing import assert_frame_equal

from workbench import trackers
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

TABLES = ("steps", "updates", "modules", "episodes", "turns", "evals")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(trackers.VARIABLE, raising=False)


class Fake:
    """Remembers what it was told; `fails` says in which of its methods it raises, and what."""

    name = "fake"

    def __init__(self, **fails):
        self.fails, self.told, self.known, self.status = fails, [], [], None

    def _do(self, what):
        if what in self.fails:
            raise self.fails[what]

    def start(self, config, known):
        self._do("start")
        self.config, self.known = config, [*self.known, known]
        return "its-id"

    def __call__(self, step, numbers):
        self._do("call")
        self.told.append((step, numbers))

    def finish(self, status):
        self._do("finish")
        self.status = status


@pytest.fixture
def run(tmp_path):
    return synthetic_run.write(tmp_path, n_steps=4, groups=1)


def test_numbers_are_those_of_the_tables(run):
    told = trackers.numbers(run, 4)
    row = run.read("steps").filter(pl.col("step") == 4).row(0, named=True)
    assert told["train/success"] == row["success"] and told["train/loss"] == row["loss"] and "train/step" not in told
    evals = run.read("evals").filter(pl.col("step") == 4, pl.col("panel") == "unseen", pl.col("role") == "teacher")
    assert told["eval/unseen/teacher"] == evals["outcome"].mean()
    run.write_table("steps", 9, pl.DataFrame({"loss": [float("nan")], "kl": [None], "ok": [True], "name": ["x"]}))
    run.write_table("timings", 9, pl.DataFrame({"stage": ["update"], "seconds": [2.5]}))
    assert trackers.numbers(run, 9) == {"train/ok": 1.0, "seconds/update": 2.5}


def test_a_run_is_told_step_by_step_and_its_end(run):
    fake = Fake()
    with trackers.follow(run, {"seed": 1}, more=[fake]) as tell:
        for done in (2, 3):
            tell(done)
    assert [step for step, _ in fake.told] == [1, 2, 3, 4] and fake.status == "complete" and fake.config == {"seed": 1}
    assert fake.told[0][1] == trackers.numbers(run, 1)


def test_a_step_is_told_without_a_listing_of_all(run, monkeypatch):
    listed = []
    monkeypatch.setattr(RunFolder, "table_files", lambda run, name: listed.append(name) or [])
    fake = Fake()
    with trackers.follow(run, {}, more=[fake]) as tell:
        for done in (2, 3, 5):
            tell(done)
    assert [step for step, _ in fake.told] == [1, 2, 3, 4]
    assert listed == list(trackers.TABLES)  # once, at the end


@pytest.mark.parametrize(("raised", "status"), [(KeyboardInterrupt(), "interrupted"), (ValueError(), "failed")])
def test_a_resumed_run_goes_on_without_a_step_twice(run, raised, status):
    fake = Fake()
    with pytest.raises(type(raised)), trackers.follow(run, {}, more=[fake]) as tell:
        tell(3)  # steps 1 and 2
        raise raised
    assert fake.status == status and [step for step, _ in fake.told] == [1, 2]
    with trackers.follow(run, {}, more=[fake]) as tell:
        tell(2)  # played again from an earlier checkpoint
    assert [step for step, _ in fake.told] == [1, 2, 3, 4] and fake.known == [None, "its-id"]


def test_what_a_tracker_missed_is_told_later(run):
    said, broken, whole = [], Fake(call=OSError("no network")), Fake()
    with trackers.follow(run, {}, (), said.append, [broken]) as tell:
        tell(2), tell(3)
    assert said == ["tracker fake is off: no network; the run goes on without it"]
    with trackers.follow(run, {}, (), said.append, [whole]):
        pass
    assert [step for step, _ in whole.told] == [1, 2, 3, 4] and len(said) == 1


@pytest.mark.parametrize("where", ["start", "call", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("a\nb"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_a_tracker_raises_is_one_line(run, where, error):
    said = []
    with trackers.follow(run, {}, (), said.append, [Fake(**{where: error})]) as tell:
        tell(2)
    assert len(said) == 1 and said[0].startswith("tracker fake is off: ") and "\n" not in said[0]


def test_one_that_hangs_does_not_hold_the_run(run, monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE", 0.05)
    held, said = threading.Event(), []

    class Hangs(Fake):
        def __call__(self, step, numbers):
            held.wait(10)

    with trackers.follow(run, {}, (), said.append, [Hangs()]) as tell:
        tell(2)
    held.set()
    assert len(said) == 1 and "did not finish in time" in said[0]


@pytest.mark.parametrize("name", sorted(trackers.TRACKERS))
def test_a_missing_package_is_one_line_that_says_what_to_install(run, monkeypatch, name):
    for module in ("torch.utils.tensorboard", "mlflow", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    said = []
    with trackers.follow(run, {}, [name], said.append):
        pass
    assert len(said) == 1 and f"(pip install {name})" in said[0]
    with pytest.raises(WorkbenchError, match="pip install"):
        trackers.send(run, name)


def test_names(run, monkeypatch):
    with pytest.raises(WorkbenchError, match="did you mean 'mlflow'"):
        TrainConfig(trackers=["mlfow"])
    with pytest.raises(WorkbenchError, match="tracker"):
        trackers.send(run, "none")
    monkeypatch.setenv(trackers.VARIABLE, "wandbb, none")
    said = []
    with trackers.follow(run, {}, ["tensorboard"], said.append):
        pass
    assert len(said) == 2 and "did you mean 'wandb'" in said[0] and not (run.path / "trackers").exists()
    monkeypatch.setenv(trackers.VARIABLE, "none")
    with trackers.follow(run, {}, ["tensorboard"], said.append):
        pass
    assert len(said) == 2 and not (run.path / "trackers").exists()


def test_a_run_without_numbers_has_nothing_to_send(tmp_path):
    with pytest.raises(WorkbenchError, match="no table that a tracker is told"):
        trackers.send(RunFolder.create(tmp_path, "empty", {}), "tensorboard")


def test_training_is_the_same_whatever_a_tracker_does(tmp_path, monkeypatch):
    class Meddles(Fake):
        def start(self, config, known):
            torch.manual_seed(7)

        def __call__(self, step, numbers):
            super().__call__(step, numbers)
            torch.manual_seed(step)
            raise RuntimeError("gone")

    def trained(name, **changes):
        small = {"steps": 2, "tasks_per_step": 1, "group_size": 2, "max_turns": 2, "seed": 3}
        small |= {"eval_games": 1, "eval_panels": "heldout"}
        folder, said = RunFolder.create(tmp_path, name, {}), []
        Trainer(TrainConfig(method="grpo", teacher=False, **small | changes), folder, said.append).run()
        return folder, said

    plain, _ = trained("plain")
    monkeypatch.setitem(trackers.TRACKERS, "meddles", lambda run: Meddles())
    tracked, said = trained("tracked", trackers=["meddles"])
    assert sum("tracker" in line for line in said) == 1
    names = set(TABLES) & set(plain.tables)  # two rollouts may leave nothing to learn from
    assert names >= {"steps", "evals"} and plain.tables == tracked.tables
    for name in names:
        assert_frame_equal(plain.read(name), tracked.read(name), check_exact=True)


def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(KeyboardInterrupt), trackers.follow(run, {"a": {"b": 1}}, ["tensorboard"]) as tell:
        tell(3)
        raise KeyboardInterrupt
    assert trackers.send(run, "tensorboard") == 2
    assert trackers.send(run, "tensorboard") == 0
    events = EventAccumulator(str(run.path / "trackers" / "tensorboard")).Reload()
    for name, key in (("train/loss", "loss"), ("train/success", "success")):
        want = run.read("steps").select("step", key).rows()
        got = [(event.step, event.value) for event in events.Scalars(name)]
        assert got == [(step, pytest.approx(value, rel=1e-6)) for step, value in want]
    assert events.Tags()["tensors"] == ["config/text_summary"]


def test_mlflow(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    with pytest.raises(ValueError), trackers.follow(run, {"long": "x" * 9000}, ["mlflow"]) as tell:
        tell(3)
        raise ValueError
    client = mlflow.MlflowClient()
    known = json.loads((run.path / "trackers" / "mlflow.json").read_text())["id"]
    assert client.get_run(known).info.status == "FAILED" and client.get_run(known).info.run_name == run.path.name
    assert trackers.send(run, "mlflow") == 2 and client.get_run(known).info.status == "FINISHED"
    history = client.get_metric_history(known, "train/loss")
    assert sorted((m.step, m.value) for m in history) == run.read("steps").select("step", "loss").rows()


def test_wandb_offline(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert trackers.send(run, "wandb") == 4 and trackers.send(run, "wandb") == 0
    assert list((run.path / "trackers" / "wandb").glob(f"offline-run-*-{run.path.name}/*.wandb"))


def test_trackio(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    assert trackers.send(run, "trackio") == 4 and trackers.send(run, "trackio") == 0
    logs = sqlite_storage.SQLiteStorage.get_logs(run.experiment, run.path.name)
    want = run.read("steps").select("step", "loss").rows()
    assert [(row["step"], row["train/loss"]) for row in logs] == want
