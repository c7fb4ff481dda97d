"""Self-verification in the Trainer: when it updates and on what; killed or switched off, it changes nothing."""

import numpy as np
import polars as pl
import pytest
import torch
from make_batch import make_batch, make_episodes
from polars.testing import assert_frame_equal

from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer
from workbench.verification import Schedule, VerificationConfig
from workbench.verifying import learn

SMALL = {
    "steps": 1, "tasks_per_step": 3, "group_size": 4, "live_episodes": 12, "eval_games": 1, "eval_every": 4,
    "checkpoint_every": 1, "seed": 3, "max_turns": 4, "teacher": False,
    "eval_panels": "heldout",
}  # fmt: skip
# The shipped small model knows no yes and no: two words of its own stand for them.
WORDS = {"yes": "put", "no": "take", "size": 4, "max_tokens": 6}
ALTERNATE = WORDS | {"interval": 2}


class Killed(Exception):
    pass


def train(path, name, options=None, folder=None, stop=None, say=lambda line: None, **changes):
    config = TrainConfig(method=name, method_options=options or {}, **(SMALL | changes))
    folder = folder or RunFolder.create(path, name, {})
    trainer = Trainer(config, folder, say)

    def halt(trainer):
        if trainer.step == stop:
            raise Killed

    trainer.run(on_step=halt)
    return trainer, folder


def weights(trainer):
    return [p.detach().clone() for p in trainer.policy.model.parameters()]


def same(a, b):
    return all(x.equal(y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    return train(tmp_path_factory.mktemp("grpo"), "grpo")


def test_switched_off_it_is_grpo_bit_for_bit(tmp_path, grpo):
    trainer, folder = train(tmp_path, "self_verification", method("self_verification").off)
    assert same(weights(grpo[0]), weights(trainer))
    assert folder.tables == grpo[1].tables and "verifications" not in folder.tables
    for table in ("steps", "updates", "episodes", "turns", "evals", "modules"):
        assert_frame_equal(grpo[1].read(table), folder.read(table), check_exact=True)


def test_a_vocabulary_without_the_words_is_refused_before_anything_is_played(tmp_path):
    for options, said in (({}, "'Yes' and 'No'"), (WORDS | {"no": "maybe"}, "lacks 'maybe',")):
        with pytest.raises(WorkbenchError, match=f"{said}.* set the options yes and no") as caught:
            train(tmp_path, "self_verification", options)
        assert "\n" not in str(caught.value)


def test_games_of_a_step_that_only_verifies_get_no_credit():
    batch = make_batch(make_episodes())
    plain = method("grpo").credit(batch)
    own = method("self_verification", schedule="init", first=1)
    verified, generated = own.credit(batch, 0), own.credit(batch, 1)
    assert not verified.advantages.any() and not verified.turns["turn_advantage"].any() and plain.advantages.any()
    assert generated.advantages.equal(plain.advantages)


def test_a_killed_run_resumes_with_its_attempts_and_tables_keep_the_two_apart(tmp_path):
    whole, folder = train(tmp_path, "self_verification", ALTERNATE, steps=2)
    broken = RunFolder.create(tmp_path, "broken", {})
    with pytest.raises(Killed):
        train(tmp_path, "self_verification", ALTERNATE, broken, stop=1, steps=2)
    resumed, _ = train(tmp_path, "self_verification", ALTERNATE, broken, steps=2)
    assert same(weights(whole), weights(resumed))
    for table in ("steps", "updates", "episodes", "verifications", "evals"):
        assert_frame_equal(folder.read(table), broken.read(table), check_exact=True)

    told, episodes, steps = (folder.read(t) for t in ("verifications", "episodes", "steps"))
    assert told["step"].unique().to_list() == [1] and whole.verifier.kept == []
    assert told["played"].unique().sort().to_list() == [0, 1], "attempts from before the kill are asked about too"
    for (_,), part in told.group_by("step"):
        questions = part.group_by("question").agg(pl.col("truth").first(), pl.len())
        assert questions["truth"].sum() * 2 == questions.height and (questions["len"] == 4).all()
    about = told.join(
        episodes.select(pl.col("step").alias("played"), "episode", "outcome", "prior"), on=["played", "episode"]
    )
    assert about.height == told.height and (about["outcome"] == about["truth"]).all()
    assert about["pass_rate"].to_list() == pytest.approx(about["prior"].to_list())
    earned = pl.when(pl.col("verdict") == pl.col("truth")).then(pl.min_horizontal("pass_rate", 0.5)).otherwise(0.0)
    assert told["reward"].to_list() == told.select(earned).to_series().to_list()
    assert told["applied"].any() and told["verdict"].n_unique() > 1
    assert steps["n_drawn"].to_list() == [12] * 2 and episodes.height == 24
    by_step = episodes.group_by("step").agg(pl.col("outcome").mean()).sort("step")["outcome"]
    assert steps["success"].to_list() == pytest.approx(by_step.to_list())


def test_schedule_of_steps_that_play():
    def plan(**options):
        schedule = Schedule(**options)
        return [(schedule.generates(n), schedule.verifications(n)) for n in range(4)]

    assert plan(interval=2, loops=3) == [(True, 0), (True, 3), (True, 0), (True, 3)]
    assert plan(kind="init", first=2) == [(False, 1), (False, 1), (True, 0), (True, 0)]
    assert plan(kind="mixed") == [(True, 1)] * 4
    assert plan(kind="verify") == [(False, 1)] * 4 and plan(kind="generate") == [(True, 0)] * 4


def test_groups_of_different_steps_are_not_one_and_what_does_not_fit_is_not_asked(tmp_path):
    config = TrainConfig(method="self_verification", method_options=ALTERNATE, **SMALL)
    trainer = Trainer(config, RunFolder.create(tmp_path, "run", {}), lambda line: None)
    verifier, episodes, before = trainer.verifier, make_episodes(), weights(trainer)
    batch = trainer.rows(episodes, "return")
    assert learn(trainer, batch, torch.zeros_like(batch.old_logprobs)) is False
    assert same(before, weights(trainer)), "answers without any signal move nothing"
    groups = len({e.group for e in episodes})
    verifier.keep(0, episodes)
    one = len(verifier.batch(1, 0))
    verifier.keep(1, episodes)
    assert one == groups // 2 * 2 and len(verifier.batch(1, 0)) == groups * 2 // 2 * 2
    orders = {tuple(s.index for s in verifier.batch(step, 0)) for step in range(8)}
    assert len(orders) > 1 and verifier.batch(5, 0) == verifier.batch(5, 0)
    asked = verifier.batch(1, 0)
    state = verifier.state()
    verifier.load(state)
    assert verifier.batch(1, 0) == asked and np.shape(state) == (len(episodes) * 2,)
    verifier.run = TrainConfig(**(SMALL | {"max_context": 7}))
    verifier.kept = []
    verifier.keep(0, episodes)
    assert not any(k.valid for k in verifier.kept) and verifier.batch(0, 0) == []


def test_what_cannot_be_asked_is_refused_before_a_run_begins():
    for options in (
        {"schedule": "alternating"}, {"size": 1}, {"cap": 0.0}, {"shown": "answer"}, {"yes": "No"}, {"no": "not so"},
        {"interval": 0}, {"max_tokens": 0},
    ):  # fmt: skip
        with pytest.raises(WorkbenchError) as caught:
            TrainConfig(method="self_verification", method_options=options, **SMALL)
        assert "\n" not in str(caught.value)
    assert VerificationConfig().plan == Schedule()
