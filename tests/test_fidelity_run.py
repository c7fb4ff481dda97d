"""The fidelity of a run that was just trained: the command, its tables, the notebook, and what it refuses."""

import json
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest

from workbench import cli, shipped
from workbench.errors import WorkbenchError
from workbench.fidelity import frames, text
from workbench.fidelity.measure import FidelityConfig, measure
from workbench.figures import fidelity as figure
from workbench.figures.display import MIME
from workbench.runs import RunFolder
from workbench.runs.execute import run_notebook
from workbench.settings import TrainConfig
from workbench.train import Trainer

CONFIG = TrainConfig(
    method="agent_opsd", steps=2, tasks_per_step=2, group_size=4, live_episodes=8, max_turns=5, eval_games=1,
    eval_every=2, eval_panels="heldout", checkpoint_every=1, lr=3e-3,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), "train", asdict(CONFIG))
    Trainer(CONFIG, folder, lambda line: None).run()
    return folder


@pytest.fixture(scope="module")
def found(run):
    """Measured once by the command."""
    assert cli.main(["fidelity", str(run.path), "--episodes", "12", "--rolls", "4", "--live", "48"]) == 0
    return frames.load(run.path)


def test_the_command_values_the_episodes_whose_policy_is_there(run, found):
    assert found.facts["policies"] == {"0": 0, "1": 1}  # what training began with, and the checkpoint of step 1
    assert found.facts["logprob_gap"] < 1e-5 and not found.facts["excluded"]
    assert found.facts["episodes"] == 12 and found.turns.select("step", "episode").n_unique() == 12
    assert (found.states["value"] >= found.states["low"] - 1e-9).all()
    joined = found.turns.join(run.read("turns"), on=["step", "episode", "turn"], suffix="_run")
    assert joined.height == found.turns.height and (joined["action"] == joined["action_run"]).all()
    last = found.turns.group_by("step", "episode").agg(pl.all().sort_by("turn").last())
    assert (last["after"] == last["outcome"]).all()
    ends = found.states.filter(pl.col("key").is_in(["won", "lost"]))
    assert (ends["rolls"] == 0).all() and ends["value"].is_in([0.0, 1.0]).all()
    shared = found.states.filter(pl.col("state") == 0).group_by("step", "group").agg(pl.col("value", "key").n_unique())
    assert (shared["key"] == 1).all() and (shared["value"] == 1).all()


def test_recorded_credit_is_what_the_run_was_trained_with(run, found):
    at = ["step", "episode", "turn"]
    recorded = run.read("turns").join(found.turns, on=at, how="semi").sort(at)

    def measured(signal, teacher=""):
        return found.credit.filter(pl.col("signal") == signal, pl.col("teacher") == teacher).sort(at)

    own, again = measured("advantage of the run"), measured("agent_opsd", "as recorded")
    revision = measured("belief revision", "as recorded")
    assert own.select(at).equals(recorded.select(at)) and own.select(at).equals(found.turns.select(at).sort(at))
    assert np.allclose(own["credit"], recorded["turn_advantage"], atol=1e-5)
    assert np.allclose(again["credit"], recorded["turn_advantage"], atol=1e-5)
    assert np.allclose(revision["credit"], recorded["revision"], atol=1e-5)
    assert np.allclose(revision["belief"], recorded["belief"], atol=1e-5)


def test_the_right_text_read_again_says_what_it_said_and_a_wrong_one_does_not(found):
    """It takes the weights of each step, not of one of them, and every token in its place."""

    def evidence(teacher):
        own = found.credit.filter(pl.col("signal") == "evidence", pl.col("teacher") == teacher)
        return own.sort("step", "episode", "turn")["credit"].to_numpy()

    assert np.allclose(evidence("right"), evidence("as recorded"), atol=1e-4)
    assert np.abs(evidence("wrong") - evidence("as recorded")).max() > 0.05
    assert set(found.facts["teacher_gains"]["evidence"]) == {"random", "wrong"}


def test_scores_hold_baselines_and_a_ceiling(found):
    rows = {(r["signal"], r["teacher"]): r for r in found.scores.to_dicts()}
    assert {"uniform", "random", "turn length", "ceiling", "solver's advantage", "grpo"} <= {name for name, _ in rows}
    assert rows["grpo", ""]["told"] == 0 and rows["grpo", ""]["correlation"] == 0
    assert rows["random", ""]["correlation_low"] < 0 < rows["random", ""]["correlation_high"]
    assert {"opsd", "dear"} <= set(found.facts["left_out"])
    said = " ".join(text.sentences(found))
    assert "by the policy that sampled it" in said and "Noise bounds what can be seen" in said
    assert any(line.startswith("grpo, dr_grpo and") for line in text.table(found.scores))
    assert text.by_teacher(found)[0].split() == ["skill", "text", "right", "random", "wrong", "right", "less", "wrong"]


def test_a_second_call_rolls_nothing_and_more_rolls_keep_the_old(run, found, capsys):
    again = ["fidelity", str(run.path), "--episodes", "12", "--teachers", "none", "--methods", "grpo,gigpo"]
    assert cli.main([*again, "--rolls", "4", "--out", str(run.path / "again")]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rolls")]
    assert lines and all(line.split()[1].split("/")[0] == line.split()[1].split("/")[1].rstrip(",") for line in lines)
    same = frames.load(run.path / "again")
    assert same.states.equals(found.states) and same.turns.equals(found.turns)
    assert set(same.scores["signal"]) & {"grpo", "gigpo", "agent_opsd"} == {"grpo", "gigpo"}


def test_measured_runs_are_compared(run, found, tmp_path, capsys):
    table = tmp_path / "table.parquet"
    folders = [str(run.path), str(shipped.data("fidelity", "twc"))]
    assert cli.main(["fidelity", "--compare", *folders, "--save", str(table)]) == 0
    said = capsys.readouterr().out
    assert said.count("rank corr.") == 2 and "twc (12 episodes)" in said and "twc (200 episodes)" in said
    assert any(line.startswith("grpo, dr_grpo and") and line.count(" +0.00") > 1 for line in said.splitlines())
    assert pl.read_parquet(table)["run"].n_unique() == 2


@pytest.mark.usefixtures("in_process")
def test_the_notebook_shows_the_shipped_measurement(tmp_path):
    done = run_notebook("fidelity", {}, tmp_path, progress=False)
    result, known = done.manifest["result"], frames.load(shipped.data("fidelity", "twc"))
    assert result["episodes"] == known.facts["episodes"] >= 200 and result["ceiling"] == known.ceiling
    notebook = json.loads((done.path / "executed.ipynb").read_text())
    shown = [o for c in notebook["cells"] for o in c.get("outputs", []) if MIME in o.get("data", {})]
    assert len(shown) == 4


def test_figures_say_what_the_tables_say(found):
    fig = figure.scores(found)
    best = max(
        r["correlation"] for r in found.scores.to_dicts() if r["kind"] == "method" and r["teacher"] not in text.TEACHERS
    )
    assert max(x for trace in fig.data for x in trace.x if trace.legendgroup == "method" and trace.xaxis == "x") == best
    step, number = figure.choose(found)
    own = found.turns.filter(pl.col("step") == step, pl.col("episode") == number).sort("turn")
    bars = [trace for trace in figure.episode(found, step, number).data if trace.type == "bar"]
    assert list(bars[0].y) == own["advantage"].to_list()
    with pytest.raises(WorkbenchError, match="was not measured"):
        figure.episode(found, step, 999)
    assert figure.reliability(found).data and figure.across([found, found]).data


@pytest.mark.parametrize(
    "given, said",
    [
        ([], "takes either a RUN to measure or --compare"),
        (["RUN", "--steps", "7"], "step 7 was not recorded; recorded: 0, 1"),
        (["RUN", "--steps", "a"], "--steps takes numbers"),
        (["RUN", "--rolls", "1"], "rolls must be at least 2, got 1"),
        (["RUN", "--methods", "gigp"], "did you mean 'gigpo'"),
        (["RUN", "--model", "/nowhere"], "model folder /nowhere does not exist"),
        (["--compare", "RUN/tables"], "holds no measured fidelity"),
        (["RUN", "--save", "x.parquet"], "--save takes a file"),
    ],
)
def test_bad_input_is_one_line(run, given, said, capsys):
    assert cli.main(["fidelity", *[part.replace("RUN", str(run.path)) for part in given]]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.count("\n") == 0


def test_a_run_that_cannot_be_replayed_says_so(run, tmp_path):
    config = asdict(CONFIG)
    other = RunFolder.create(tmp_path, "other", config)
    heads = run.read("episodes").filter(pl.col("step") == 0)
    turns = run.read("turns").filter(pl.col("step") == 0)
    changed = pl.when(pl.col("turn") == 0).then(pl.lit("You see nothing.")).otherwise("observation")
    other.write_table("episodes", 0, heads)
    other.write_table("turns", 0, turns.with_columns(changed.alias("observation")))
    with pytest.raises(
        WorkbenchError, match="no episode could be restored; step 0, episode .: twc/train.*You see nothing"
    ):
        measure(other, FidelityConfig(episodes=4, rolls=2, live=2), lambda line: None)
    other.write_table("turns", 0, turns.drop("context_ids"))
    with pytest.raises(WorkbenchError, match="context tokens were not recorded"):
        measure(other, FidelityConfig(episodes=4, rolls=2, live=2), lambda line: None)
    imported = RunFolder.create(tmp_path, "imported", {"source": "x"})
    imported.write_table("episodes", 0, heads)
    imported.write_table("turns", 0, turns)
    with pytest.raises(WorkbenchError, match="names no environment"):
        measure(imported, FidelityConfig(), lambda line: None)
