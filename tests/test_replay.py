"""A recorded step becomes the batch it was, and every method's credit on it is the credit of the original."""

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from make_batch import by_token, make_batch, make_episodes, make_gaps, take_rows

from workbench import loss, shipped, tables
from workbench.credit import cast, gigpo, grpo
from workbench.errors import WorkbenchError
from workbench.figures.replay import with_beliefs
from workbench.methods import METHODS, method
from workbench.records import Batch, Credit
from workbench.replay import batch_of, credit_by_method, credit_of, episodes_of, recorded_values
from workbench.runs import RunFolder

STEP = 7
OBSERVATIONS = ("You are in the hall.", "You are in the hall.", "You see a lamp.")
VOCABULARY = ["opsd", "dear"]  # methods that compare whole distributions
TEACHER = {"agent_opsd", "agent_opsd_dgg", "rlsd", "step_opsd", "sdar", "grpo_opsd", "skill_sd", "opd", *VOCABULARY}


def single(values):
    """As a run's tables keep them."""
    return values.float().double()


def played():
    rng = np.random.default_rng(5)
    return [
        replace(
            episode,
            turns=[
                replace(
                    turn,
                    observation=OBSERVATIONS[rng.integers(3)],
                    action=f"go {k}",
                    reward=rng.integers(-4, 5) / 4,
                    solver_before=4.0,
                    solver_after=math.inf,
                    solver_advantage=float(rng.integers(-4, 2)),
                )
                for k, turn in enumerate(episode.turns)
            ],
        )
        for episode in make_episodes()
    ]


def recorded(layout="episode", reward="outcome"):
    """A batch, and the tables that a training step leaves of it."""
    episodes = played()
    batch = make_batch(episodes, make_gaps(episodes), layout, reward=reward)
    entropy = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    batch = batch.with_(
        teacher_logprobs=single(batch.teacher_logprobs), entropy=single(entropy), anchors=gigpo.anchors(episodes),
        solver_advantages=cast.solver_advantages(episodes),
        prior_rate=torch.tensor([0.6, 0.3, 0.9], dtype=torch.float64)[batch.group_index],
    )  # fmt: skip
    tokens = {name: getattr(batch, name) for name in ("old_logprobs", "teacher_logprobs", "entropy")}
    plain = grpo.credit(batch)
    turns = tables.turns_frame(
        STEP, episodes, batch, Credit(plain.advantages), tokens, lambda ids: [str(i) for i in ids]
    )
    heads = tables.episodes_frame(STEP, episodes, plain.turns["turn_advantage"][:, 0], batch.outcome, batch.prior_rate)
    return batch, turns, heads


@pytest.fixture(scope="module")
def run():
    return recorded()


@pytest.mark.parametrize(("layout", "reward"), [("episode", "outcome"), ("turn", "outcome"), ("turn", "return")])
def test_credit_on_the_rebuilt_batch_is_credit_on_the_original_for_every_method(layout, reward):
    batch, turns, heads = recorded(layout, reward)
    shuffled = turns.sample(fraction=1, shuffle=True, seed=1), heads.sample(fraction=1, shuffle=True, seed=2)
    again, _ = batch_of(*shuffled, STEP, reward)
    for name in METHODS:
        built = method(name)
        want, got = built.credit(batch, 3), built.credit(again, 3)
        mine, theirs = by_token(again, got.advantages), by_token(batch, want.advantages)
        assert mine == pytest.approx(theirs, abs=1e-6), name
        assert any(theirs.values()), name
        for column, table in want.turns.items():
            torch.testing.assert_close(got.turns[column], table, atol=1e-6, rtol=0)
    done, _ = credit_by_method(again)
    for name, each in done.items():
        original = credit_of(batch, method(name))
        for field in ("push", "slope"):
            mine = by_token(again, getattr(each, field))
            assert mine == pytest.approx(by_token(batch, getattr(original, field)), abs=1e-6), (name, field)


def test_the_batch_holds_what_was_recorded(run):
    batch, turns, heads = run
    again, order = batch_of(turns, heads, STEP)
    assert again.old_logprobs.dtype == torch.float64
    for name in ("old_logprobs", "teacher_logprobs", "entropy", "input_ids"):
        assert by_token(again, getattr(again, name)) == by_token(batch, getattr(batch, name)), name
    for name in ("outcome", "reward", "turn_rewards", "group_index", "turn_tokens", "solver_advantages"):
        assert torch.equal(getattr(again, name), getattr(batch, name).to(getattr(again, name).dtype)), name
    same = batch.anchors[:, :, None, None] == batch.anchors
    assert torch.equal((again.anchors[:, :, None, None] == again.anchors), same)
    assert again.lengths.tolist() == [1 + sum(len(t.response_ids) for t in e.turns) for e in played()]
    assert order == turns.sort("episode", "turn").select("episode", "turn").rows()
    rows, columns = again.response_mask.nonzero(as_tuple=True)
    found = zip(rows.tolist(), again.turn_index[rows, columns].tolist(), strict=True)
    assert list(dict.fromkeys(found)) == order, "in the order of the batch's tokens"
    assert again.reference_logprobs is None
    values = recorded_values(turns.sample(fraction=1, shuffle=True, seed=6), STEP, "entropy", again)
    assert torch.equal(values, again.entropy) and recorded_values(turns, STEP, "gate", again) is None


def test_episodes_keep_their_texts_and_numbers(run):
    _, turns, heads = run
    shifted = [f.with_columns(episode=pl.col("episode") * 10 + 3) for f in (turns, heads)]
    got = episodes_of(*shifted, STEP)
    for mine, original in zip(got, played(), strict=True):
        assert (mine.task, mine.group, mine.outcome) == (original.task, original.group, original.outcome)
        assert mine.total_reward == original.total_reward and mine.contiguous
        for a, b in zip(mine.turns, original.turns, strict=True):
            assert (a.observation, a.action, a.reward, a.valid) == (b.observation, b.action, b.reward, b.valid)
            assert (a.solver_before, a.solver_after, a.solver_advantage) == (4, math.inf, b.solver_advantage)
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.logprobs.tolist() == b.logprobs.tolist()
    assert batch_of(*shifted, STEP)[1][0] == (3, 0)


@pytest.mark.parametrize("name", [n for n in METHODS if n not in VOCABULARY])
def test_slopes_are_the_gradient_of_the_whole_loss(name, run):
    batch, _ = batch_of(*run[1:], STEP)
    built, old = method(name), batch.old_logprobs
    each = credit_of(batch, built, max_tokens=40)
    logp = old.clone().requires_grad_()
    own = built.loss
    ratio_logp = loss.sequence_form(logp, old, batch.turn_index, own.ratio)
    weights, mean = loss.token_weights(batch, own.aggregation, 40), loss.token_weights(batch, "token_mean")
    total = (weights * own.pg_coef * loss.surrogate(ratio_logp, old, each.credit.advantages, **own.clip)).sum()
    assert (each.aux_slope is None) == (built.aux is None)
    if built.aux:
        aux = (mean * built.aux.loss(logp, batch.teacher_logprobs, old, batch.entropy)).sum()
        torch.testing.assert_close(each.aux_slope, torch.autograd.grad(aux, logp, retain_graph=True)[0])
        total = total + aux
    torch.testing.assert_close(each.slope, torch.autograd.grad(total, logp)[0])
    added = 0 if each.aux_slope is None else each.aux_slope * batch.counted.sum()
    torch.testing.assert_close(each.push, own.pg_coef * each.credit.advantages - added)
    assert not each.push[~batch.response_mask].any() and not each.slope[~batch.response_mask].any()


def test_what_the_sampling_engine_recorded_weighs_the_slopes_of_a_method_that_reads_it(run):
    _, turns, heads = run
    plain, _ = batch_of(turns, heads, STEP)
    less = pl.col("old_logprobs").list.eval(pl.element() - math.log(1.5)).alias("sampled_logprobs")
    engine, _ = batch_of(turns.with_columns(less), heads, STEP)
    assert plain.sampled_logprobs is None
    for name, factor in (("dora", 1.5), ("grpo", 1.0)):
        one, other = (credit_of(batch, method(name)) for batch in (plain, engine))
        torch.testing.assert_close(other.slope, factor * one.slope, atol=0, rtol=1e-5)
        torch.testing.assert_close(other.push, factor * one.push, atol=0, rtol=1e-5)


def test_a_repeated_row_changes_no_credit(run):
    batch = run[0]
    twice = take_rows(batch.with_(entropy=None), [*range(len(batch.lengths)), 0, 2])
    for name, each in credit_by_method(twice)[0].items():
        assert by_token(twice, each.push) == pytest.approx(by_token(batch, credit_of(batch, method(name)).push)), name


def test_what_was_not_recorded_leaves_methods_out_and_says_why(run):
    _, turns, heads = run
    done, left_out = credit_by_method(batch_of(turns, heads, STEP)[0])
    assert list(left_out) == VOCABULARY and all("whole distributions" in why for why in left_out.values())
    assert list(done) == [n for n in METHODS if n not in VOCABULARY]
    bare = turns.drop("teacher_logprobs").with_columns(entropy=None, observation=pl.lit(""))
    batch, _ = batch_of(bare, heads, STEP)
    assert batch.teacher_logprobs is None and batch.entropy is None and batch.anchors is None
    assert "gigpo" in credit_by_method(batch, ["gigpo"], episodes=episodes_of(bare, heads, STEP))[1]
    assert "v05" in credit_by_method(batch_of(turns, heads.drop("prior_rate"), STEP)[0])[1]
    unsolved = turns.with_columns(pl.lit(None, dtype=pl.Float64).alias("solver_advantage"))
    for kept in (unsolved, turns.drop("solver_before", "solver_after", "solver_advantage")):
        assert "without one (setting record_solver)" in credit_by_method(batch_of(kept, heads, STEP)[0])[1]["cast"]
    done, left_out = credit_by_method(batch)
    assert set(left_out) == TEACHER | {"gigpo"} and not set(done) & set(left_out)
    assert "recorded without one" in left_out["rlsd"] and "observation texts" in left_out["gigpo"]
    with pytest.raises(WorkbenchError, match="method rlsd reads the log-probs of a privileged teacher"):
        credit_of(batch, method("rlsd"))
    no_entropy, _ = batch_of(turns.drop("entropy"), heads, STEP)
    _, left_out = credit_by_method(no_entropy, ["sdar"], {"sdar": {"gate": "entropy"}})
    assert left_out == {"sdar": "opens its gate by entropy, and the policy's entropy was not recorded"}
    assert not credit_by_method(no_entropy, ["sdar", "opsd"], {"opsd": {"coef": 0.0}})[1]


def test_names_options_and_the_training_step_are_heeded(run):
    _, turns, heads = run
    batch, _ = batch_of(turns, heads, STEP)
    options = {"agent_opsd": {"lam": 0.0}, "rlsd": {"form": "released", "decay_steps": 10}}
    done, _ = credit_by_method(batch, ["grpo", "agent_opsd", "rlsd"], options, step=10)
    assert list(done) == ["grpo", "agent_opsd", "rlsd"]
    for name in ("agent_opsd", "rlsd"):
        assert torch.equal(done[name].push, done["grpo"].push)
    near = {"gigpo": {"similarity": 0.1}}
    with pytest.raises(WorkbenchError, match="option similarity labels states anew, which needs the episodes"):
        credit_by_method(batch, ["gigpo"], near)
    merged, _ = credit_by_method(batch, ["gigpo"], near, episodes=episodes_of(turns, heads, STEP))
    exact, _ = credit_by_method(batch, ["gigpo"], episodes=episodes_of(turns, heads, STEP))
    assert torch.equal(exact["gigpo"].push, credit_of(batch, method("gigpo")).push)
    assert not torch.allclose(merged["gigpo"].push, exact["gigpo"].push)
    with pytest.raises(WorkbenchError, match="unknown method 'gripo'; did you mean 'g"):
        credit_by_method(batch, ["gripo"])
    with pytest.raises(WorkbenchError, match="options are given for 'rlsd', which is not among the methods grpo"):
        credit_by_method(batch, ["grpo"], {"rlsd": {}})


def test_the_figures_beliefs_are_the_replayed_ones(run):
    _, turns, heads = run
    batch, order = batch_of(turns, heads, STEP)
    table = credit_of(batch, method("agent_opsd")).credit.turns
    rate = heads.with_columns(prior=pl.col("outcome").mean().over("group"))
    drawn = with_beliefs(turns, rate).sort("episode", "turn")
    assert drawn.select("episode", "turn").rows() == order
    for name in ("evidence", "belief", "revision", "z", "weight", "turn_advantage"):
        assert drawn[name].to_list() == pytest.approx(table[name][batch.turn_mask].tolist(), abs=1e-6), name


def test_the_shipped_run_recorded_what_its_method_is_replayed_to():
    if not shipped.data("recorded_run", "config.json").is_file():
        pytest.skip("no recorded run is shipped in data/recorded_run")
    source = RunFolder.open(shipped.data("recorded_run"))
    turns, heads = source.read("turns"), source.read("episodes")
    built = method(source.config["method"], **source.config["method_options"])
    for step in turns["step"].unique():
        batch, _ = batch_of(turns, heads, step)
        each = credit_of(batch, built, step)
        rows = turns.filter(pl.col("step") == step).sort("episode", "turn")
        for column, values in (("advantage", each.credit.advantages), ("dloss_dlogp", each.slope)):
            want = torch.from_numpy(rows[column].explode().to_numpy(writable=True)).double()
            torch.testing.assert_close(values[batch.response_mask], want, atol=2e-6, rtol=1e-5)


def forked(episodes):
    """The episodes, each third turn's prompt begun anew as a trainer does that summarises or drops old turns."""
    for episode in episodes:
        turns = [
            replace(turn, prompt_ids=turn.prompt_ids[len(turn.prompt_ids) // 2 :] + 1) if k % 3 == 2 else turn
            for k, turn in enumerate(episode.turns)
        ]
        yield replace(episode, turns=turns)


@pytest.mark.parametrize(
    ("layout", "change"), [("episode", list), ("turn", list), ("auto", list), ("turn", forked), ("auto", forked)]
)
def test_recorded_contexts_give_the_rows_that_were_trained_on(layout, change):
    episodes = list(change(played()))
    batch = Batch.from_episodes(episodes, layout, pad_id=3)
    frame = tables.turns_frame(
        STEP, episodes, batch, Credit(batch.old_logprobs), {"old_logprobs": batch.old_logprobs},
        lambda ids: [""] * len(ids),
    )  # fmt: skip
    heads = tables.episodes_frame(STEP, episodes, batch.outcome, batch.outcome)
    again = episodes_of(frame.sample(fraction=1, shuffle=True, seed=4), heads, STEP, contexts=True)
    assert [e.contiguous for e in again] == [e.contiguous for e in episodes]
    rebuilt = Batch.from_episodes(again, layout, pad_id=3)
    assert rebuilt.tensors().keys() == batch.tensors().keys()
    for name, tensor in batch.tensors().items():
        assert torch.equal(getattr(rebuilt, name), tensor), name


def test_contexts_without_log_probs_are_for_a_scorer_and_only_whole(run):
    _, turns, heads = run
    for bare in (turns.drop("old_logprobs"), turns.with_columns(old_logprobs=pl.lit(None, pl.List(pl.Float32)))):
        got = episodes_of(bare, heads, STEP, contexts=True)
        assert all(len(t.logprobs) == len(t.response_ids) and not t.logprobs.any() for e in got for t in e.turns)
        with pytest.raises(WorkbenchError, match="without old_logprobs, which a replay needs; `workbench score` adds"):
            episodes_of(bare, heads, STEP)
    for torn, message in (
        (put("old_logprobs", pl.lit(None))(turns), WHERE + "old_logprobs has 0 values for 2 tokens"),
        (turns.drop("continues"), "turns: no column continues: context tokens were not recorded, and a model"),
        (put("context_ids", pl.lit(None))(turns), WHERE + "its context tokens were not recorded, and a model"),
        (put("continues", True, turn=0)(turns), "turn 0: its context continues a turn before, and there is none"),
        (put("context_ids", pl.lit([], pl.List(pl.Int32)), turn=0)(turns), "must each hold at least one token"),
    ):
        with pytest.raises(WorkbenchError) as caught:
            episodes_of(torn, heads, STEP, contexts=True)
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_an_imported_run_does_not_say_is_no_guess(run):
    _, turns, heads = run
    turns = turns.with_columns(valid=pl.lit(None, pl.Boolean), truncated=pl.lit(None, pl.Boolean))
    told = heads.with_columns(outcome=pl.lit(None, pl.Int64))
    with pytest.raises(WorkbenchError, match="step 7, episode 0 has no outcome: the run does not say whether it succ"):
        episodes_of(turns, told, STEP)
    assert [e.outcome for e in episodes_of(turns, told, STEP, stand_ins=True)] == [0] * heads.height
    binary = told.with_columns(pl.col("return") / 10)
    half = binary.with_columns(pl.when(pl.col("episode") == 3).then(0.5).otherwise("return").alias("return"))
    with pytest.raises(WorkbenchError, match="step 7, episode 0 has no outcome"):
        episodes_of(turns, half, STEP)
    got = episodes_of(turns, binary, STEP)
    assert [e.outcome for e in got] == heads["outcome"].to_list()
    assert all(t.valid and not t.truncated for e in got for t in e.turns)
    late = turns.with_columns(reward=pl.lit(None, pl.Float64))
    earned = batch_of(late, half, STEP, "return", stand_ins=True)[0]
    assert torch.equal(earned.turn_rewards.sum(1), earned.reward) and earned.reward[3] == 0.5
    assert earned.turn_rewards[3, -1] == 0.5 and earned.turn_rewards[:, 0].sum() == heads["outcome"][2]
    lone = heads.with_columns(group=pl.when(pl.col("episode") != 2).then("group"))
    with pytest.raises(WorkbenchError, match="episode 2 has no group: the run does not say which others it is comp"):
        episodes_of(turns, lone, STEP)
    groups = [e.group for e in episodes_of(turns, lone, STEP, stand_ins=True)]
    assert groups.count(groups[2]) == 1 and groups[:2] == heads["group"].to_list()[:2]


def put(column, value, episode=3, turn=2):
    here = (pl.col("episode") == episode) & (pl.col("turn") == turn)
    return lambda t: t.with_columns(pl.when(here).then(value).otherwise(pl.col(column)).alias(column))


WHERE = "turns: step 7, episode 3, turn 2: "


@pytest.mark.parametrize(
    ("on_turns", "on_heads", "message"),
    [
        (lambda t: t.filter(pl.col("step") > 7), None, "turns: step 7 was not recorded; recorded: none"),
        (None, lambda h: h.with_columns(step=8), "episodes: step 7 was not recorded; recorded: 8"),
        (lambda t: t.drop("token_ids"), None, "turns: no column token_ids, which a replay needs"),
        (put("token_ids", pl.lit(None)), None, "turns: step 7 was recorded without tokens"),
        (put("old_logprobs", pl.lit(None)), None, WHERE + "old_logprobs has 0 values for 2 tokens"),
        (put("old_logprobs", pl.col("old_logprobs").list.head(1)), None, "old_logprobs has 1 values for 2 tokens"),
        (put("teacher_logprobs", pl.lit(None)), None, WHERE + "teacher_logprobs has 0 values for 2 tokens"),
        (put("entropy", pl.col("entropy") * float("nan")), None, WHERE + "entropy has a value that is not finite"),
        (put("old_logprobs", pl.col("old_logprobs") * -1), None, WHERE + "turn: log-probs must be finite"),
        (put("token_ids", pl.lit([], pl.List(pl.Int32))), None, "old_logprobs has 2 values for 0 tokens"),
        (lambda t: t.filter((pl.col("episode") != 3) | (pl.col("turn") != 1)), None,
         "episode 3 should have turns 0 to 5, recorded are 0, 2, 3, 4, 5"),
        (lambda t: t.filter((pl.col("episode") != 3) | (pl.col("turn") < 5)), None,
         "episode 3 should have turns 0 to 5, recorded are 0, 1, 2, 3, 4"),
        (lambda t: t.filter(pl.col("episode") != 3), None, "episode 3 should have turns 0 to 5, recorded are none"),
        (lambda t: pl.concat([t, t.head(1)]), None, "turns: step 7 has turn 0 of episode 0 twice"),
        (None, lambda h: pl.concat([h, h.head(1)]), "episodes: step 7 has episode 0 twice"),
        (None, lambda h: h.filter(pl.col("episode") != 3), "turns of episode 3, which the table episodes lacks"),
    ],
)  # fmt: skip
def test_torn_tables_are_one_line(on_turns, on_heads, message, run):
    _, turns, heads = run
    turns, heads = (f if change is None else change(f) for f, change in ((turns, on_turns), (heads, on_heads)))
    with pytest.raises(WorkbenchError) as caught:
        batch_of(turns, heads, STEP)
    assert message in str(caught.value) and "\n" not in str(caught.value)
