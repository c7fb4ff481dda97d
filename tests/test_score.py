import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from workbench import cli, shipped
from workbench.errors import WorkbenchError
from workbench.runs import RunFolder
from workbench.score import score_run
from workbench.train import TrainConfig, Trainer

MODEL, SKILLS = shipped.data("models", "twc-small"), shipped.data("skills", "twc")
SIGNALS = ("teacher_logprobs", "gap", "gate", "entropy")
BELIEFS = ("evidence", "belief_before", "belief", "revision", "z", "weight", "turn_advantage", "pivotal")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """One step of AgentOPSD: its rollouts were sampled and scored by the shipped model."""
    small = {"tasks_per_step": 2, "group_size": 4, "live_episodes": 8, "eval_games": 1, "eval_panels": "heldout"}
    config = TrainConfig(method="agent_opsd", steps=1, **small)
    run = RunFolder.create(tmp_path_factory.mktemp("runs"), "train", {})
    Trainer(config, run, lambda line: None).run()
    return run


@pytest.fixture(scope="module")
def bare(recorded, tmp_path_factory):
    """The same rollouts as if they came from elsewhere: tokens, contexts and rewards, no signals."""
    run = RunFolder.create(tmp_path_factory.mktemp("bare"), "import", {})
    run.write_table("turns", 0, recorded.read("turns").drop(*SIGNALS, *BELIEFS, "advantage", "dloss_dlogp"))
    run.write_table("episodes", 0, recorded.read("episodes"))
    return run


def test_scores_are_those_that_training_recorded(recorded, bare, tmp_path):
    said = []
    scored = score_run(bare, tmp_path, MODEL, SKILLS, message=said.append)
    want, got = recorded.read("turns").sort("episode", "turn"), scored.read("turns")
    assert got.select("episode", "turn").equals(want.select("episode", "turn"))
    for name in SIGNALS:
        np.testing.assert_allclose(got[name].explode(), want[name].explode(), atol=2e-4)
    np.testing.assert_allclose(got["scored_logprobs"].explode(), want["old_logprobs"].explode(), atol=2e-4)
    assert got["old_logprobs"].equals(want["old_logprobs"])  # as sampled, not scored again
    for name in ("evidence", "belief", "turn_advantage"):
        np.testing.assert_allclose(got[name], want[name], atol=2e-3)
    assert scored.is_complete and len(said) == 1 and "scored" in said[0]
    assert_frame_equal(bare.read("episodes"), scored.read("episodes"))
    assert "teacher_logprobs" not in bare.read("turns").columns


def test_log_probs_that_are_missing_are_the_scored_ones(bare, tmp_path):
    run = RunFolder.create(tmp_path, "import", {})
    run.write_table("turns", 0, bare.read("turns").with_columns(old_logprobs=pl.lit(None, dtype=pl.List(pl.Float32))))
    run.write_table("episodes", 0, bare.read("episodes"))
    turns = score_run(run, tmp_path, MODEL, SKILLS, position="front", message=lambda line: None).read("turns")
    assert turns["old_logprobs"].equals(turns["scored_logprobs"]) and turns["gap"].list.len().min() > 0


def test_what_cannot_be_scored_is_one_line(bare, tmp_path, capsys):
    foreign = RunFolder.create(tmp_path, "import", {})
    shifted = pl.col("context_ids").list.reverse()
    foreign.write_table("turns", 0, bare.read("turns").with_columns(shifted))
    foreign.write_table("episodes", 0, bare.read("episodes"))
    with pytest.raises(WorkbenchError, match="does not begin with the .* tokens of the model's chat template"):
        score_run(foreign, tmp_path, MODEL, SKILLS)
    large = pl.col("token_ids").list.eval(pl.element() + 100_000)
    foreign.write_table("turns", 0, bare.read("turns").with_columns(large))
    with pytest.raises(WorkbenchError, match="token 100... is not among the model's"):
        score_run(foreign, tmp_path, MODEL, SKILLS)
    old = str(shipped.data("recorded_run"))
    assert cli.main(["score", old, "--model", str(MODEL), "--skills", "twc", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "context" in error and error.count("\n") == 1
    assert not list((tmp_path / "score").iterdir())  # nothing half-written
