"""Each check finds a planted fault, counted exactly, and is silent on the clean twin that it did look at."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import synthetic_run
from make_batch import make_batch, make_episodes, make_gaps, take_rows

from workbench import links, shipped
from workbench.audit import CHECKS, audit, batch_episodes, groups, section
from workbench.credit import agent_opsd, grpo
from workbench.credit.agent_opsd import saturation
from workbench.errors import WorkbenchError
from workbench.formats import SourceEpisode, SourceTurn, open_source
from workbench.formats.write import import_run
from workbench.runs.folder import RunFolder

END = 2
PRIVILEGED = np.arange(60, 80, dtype=np.int32)
REWARDS, TURNS = (0.0, 1.0, 1.0), (2, 3, 4)  # of a group's episodes
OBSERVATION = "word30 word31 word32 word33"
MARK = 99


class Words:
    """A tokenizer whose tokens are words; 2 is the special end token."""

    def decode(self, ids, skip_special_tokens=False):
        kept = [i for i in ids if i != END or not skip_special_tokens]
        return " ".join({END: "<end>", MARK: "<|im_start|>user"}.get(i, f"word{i}") for i in kept)


def _turn(rng, ids, context, **given) -> SourceTurn:
    ids = np.asarray(ids, np.int32)
    n = len(ids)
    logprobs = -rng.uniform(0.1, 2.0, n).astype(np.float32)
    near = (0.01 * rng.standard_normal((3, n))).astype(np.float32)
    values = dict(
        response=Words().decode(ids.tolist(), True),
        observation="word5 word6",
        token_ids=ids,
        context_ids=np.asarray(context, np.int32),
        logprobs=logprobs,
        trainer_logprobs=np.minimum(logprobs + near[0], 0),
        teacher_logprobs=np.minimum(logprobs + 20 * near[1], 0),
        reference_logprobs=np.minimum(logprobs + near[2], 0),
        mask=np.ones(n, np.int8),
        truncated=False,
        info={
            "belief": 0.4,
            "scored_logprobs": logprobs + near[0],
            "teacher_context_ids": np.concatenate([PRIVILEGED, context]).astype(np.int32),
        },
    )
    return SourceTurn(**values | given)


def clean() -> list[SourceEpisode]:
    """Two steps of two groups of three episodes that hold everything a check looks at, and nothing it objects to."""
    rng = np.random.default_rng(0)
    episodes = []
    scores = np.array(REWARDS)
    advantage = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
    for i in range(12):
        step, group, member = i // 6, i // 3, i % 3
        turns, context = [], rng.integers(3, 30, 12)
        for k in range(TURNS[member]):
            ids = [*rng.integers(3, 30, rng.integers(9, 13)), END]
            last = k == TURNS[member] - 1
            given = dict(turn=k, advantages=np.full(len(ids), advantage[member], np.float32))
            turns.append(_turn(rng, ids, context, reward=REWARDS[member] if last else 0.0, **given))
            context = np.concatenate([context, ids, rng.integers(30, 60, 6)])
        episodes.append(
            SourceEpisode(
                tuple(turns), step, f"e{i}", f"g{group}", "task", REWARDS[member], bool(REWARDS[member]),
                stop_reason="stop", fidelity="token", where=f"dump.jsonl:{i + 1}",
                info={"prior": 2 / 3, "n_turns": len(turns), "privileged_ids": PRIVILEGED, "optimizer_steps": (1, 0)},
            )
        )  # fmt: skip
    return episodes


def found(episodes, **options) -> dict[str, int]:
    return {f.check.name: f.count for f in audit(episodes, tokenizer=Words(), **options).found}


def test_clean_twin():
    report = audit(clean(), tokenizer=Words())
    assert [f.check.name for f in report.findings if not f.looked] == []  # silent, and not for lack of looking
    assert report.found == () and report.exit_status == 0
    assert (report.episodes, report.turns, report.groups) == (12, 36, 4)
    assert len(report.findings) == len(CHECKS) == report.frame().height


def turn_fault(change: Callable[[SourceTurn], SourceTurn], episode: int = 1, turn: int = 1):
    """Change one turn of the clean twin."""

    def plant(episodes):
        turns = list(episodes[episode].turns)
        turns[turn] = change(turns[turn])
        episodes[episode] = replace(episodes[episode], turns=tuple(turns))
        return episodes

    return plant


def episode_fault(change: Callable[[SourceEpisode], SourceEpisode], *which: int):
    def plant(episodes):
        return [change(e) if i in which else e for i, e in enumerate(episodes)]

    return plant


def _info(holder, **more):
    return replace(holder, info=holder.info | more)


def _at(values, index, value):
    out = values.copy()
    out[index] = value
    return out


def _retold(turn, more):
    """The turn with tokens more, all of them sampled as far as the source says."""
    ids = np.concatenate([turn.token_ids, more])
    own = _turn(np.random.default_rng(9), ids, turn.context_ids, turn=turn.turn, reward=turn.reward)
    return replace(own, advantages=np.full(len(ids), turn.advantages[0], np.float32))


def _collapsed(episodes):
    """The observation after turn 1 counted to the response: ids, log-probs and mask agree, and yet they train it."""
    turns = list(episodes[1].turns)
    gap = turns[2].context_ids[len(turns[1].context_ids) + len(turns[1].token_ids) :]
    turns[1] = replace(_retold(turns[1], gap), response="")
    return [episodes[0], replace(episodes[1], turns=tuple(turns)), *episodes[2:]]


def _echoed(episodes):
    """The same seen in the text alone."""
    turns = list(episodes[1].turns)
    turns[1] = replace(_retold(turns[1], [30, 31, 32, 33]), context_ids=None)
    turns[2] = replace(turns[2], observation=OBSERVATION)
    return [episodes[0], replace(episodes[1], turns=tuple(turns)), *episodes[2:]]


def _emptied(turn):
    none = np.empty(0, np.float32)
    arrays = ("logprobs", "trainer_logprobs", "teacher_logprobs", "reference_logprobs", "advantages")
    masked = replace(turn, token_ids=none.astype(np.int32), response="", mask=np.zeros(7, np.int8))
    return replace(masked, **dict.fromkeys(arrays, none))


def _without(index):
    return lambda e: replace(e, turns=e.turns[:index] + e.turns[index + 1 :])


def _all_turns(change):
    return lambda e: replace(e, turns=tuple(change(t) for t in e.turns))


def _rewarded(episodes, rewards, which=(0, 1, 2)):
    """Other rewards for the first group."""
    for i, reward in zip(which, rewards, strict=True):
        e = episodes[i]
        turns = (*(replace(t, reward=0.0) for t in e.turns[:-1]), replace(e.turns[-1], reward=reward))
        episodes[i] = replace(e, reward=reward, turns=turns)
    return episodes


def _equal(episodes):
    episodes = _rewarded(episodes, (1.0, 1.0, 1.0))
    flat = _all_turns(lambda t: replace(t, advantages=np.zeros_like(t.advantages)))
    return [_info(replace(flat(e), success=True), prior=1.0) if i < 3 else e for i, e in enumerate(episodes)]


def _raw_prior(episodes):
    episodes = _rewarded(episodes, (0.0, 10.0, 10.0))
    return [_info(e, prior=0.9999) if i < 3 else e for i, e in enumerate(episodes)]


def _cut(episodes):
    """Three responses of 40 tokens without an end."""
    for i in (1, 4, 7):
        turn = episodes[i].turns[-1]
        ids = np.concatenate([turn.token_ids[:-1], np.arange(3, 44)])[:40]
        more = _turn(np.random.default_rng(i), ids, turn.context_ids, turn=turn.turn, reward=turn.reward)
        more = replace(more, advantages=np.full(len(ids), turn.advantages[0], np.float32))
        episodes[i] = replace(episodes[i], turns=(*episodes[i].turns[:-1], more))
    return episodes


FAULTS = {
    "length_mismatch": (turn_fault(lambda t: replace(t, reference_logprobs=t.reference_logprobs[:-1])), 1),
    "length_mismatch mask": (turn_fault(lambda t: replace(t, mask=np.append(t.mask, 1))), 1),
    "empty_mask": (turn_fault(_emptied), 1),
    "environment_tokens": (_collapsed, 1),
    "environment_tokens text": (_echoed, 1),
    "environment_tokens mark": (turn_fault(lambda t: _retold(t, [MARK, 8]), turn=2), 1),
    "zero_credit": (turn_fault(lambda t: replace(t, advantages=_at(t.advantages, slice(3), 0))), 1),
    "zero_credit episode": (
        episode_fault(lambda e: replace(_all_turns(lambda t: replace(t, advantages=None))(e), advantage=0.0), 1), 3
    ),
    "groups_without_variance": (_equal, 1),
    "duplicate_turns": (episode_fault(lambda e: replace(e, turns=(*e.turns, e.turns[0])), 1, 5), 2),
    "duplicate_turns rows": (lambda episodes: [*episodes, episodes[1]], 3),
    "turn_gaps": (episode_fault(lambda e: replace(e, turns=(e.turns[0], e.turns[3])), 2), 2),
    "turn_gaps end": (episode_fault(_without(3), 2), 1),
    "text_realigned": (turn_fault(lambda t: replace(t, response=t.response.replace(" ", "  ", 1))), 1),
    "text_forked": (turn_fault(lambda t: replace(t, response="word1 " + t.response)), 1),
    "positive_logprobs": (
        turn_fault(lambda t: replace(t, reference_logprobs=_at(t.reference_logprobs, [0, 4], 0.5))), 2
    ),
    "missing_logprobs": (
        turn_fault(lambda t: replace(t, teacher_logprobs=_at(t.teacher_logprobs, slice(3), np.nan))), 3
    ),
    "missing_logprobs absent": (turn_fault(lambda t: replace(_retold(t, []), logprobs=None)), None),
    "missing_logprobs placeholder": (
        turn_fault(lambda t: _info(replace(t, logprobs=np.zeros_like(t.logprobs), trainer_logprobs=None),
                                   scored_logprobs=None)), None
    ),
    "not_finite": (turn_fault(lambda t: replace(t, advantages=_at(t.advantages, [0, 3], [np.nan, np.inf]))), 2),
    "not_finite ids": (turn_fault(lambda t: replace(t, token_ids=_at(t.token_ids, 2, -5), response="")), 1),
    "not_finite belief": (turn_fault(lambda t: _info(t, belief=np.nan, turn_advantage=np.nan)), 2),
    "not_finite return": (episode_fault(lambda e: _info(replace(e, reward=np.nan), **{"return": np.nan}), 1), 1),
    "not_finite return alone": (episode_fault(lambda e: _info(e, **{"return": np.inf}), 1), 1),
    "rescore_differs": (turn_fault(lambda t: _info(t, scored_logprobs=t.logprobs - np.float32(0.2))), 1),
    "trainer_mismatch": (turn_fault(lambda t: replace(t, trainer_logprobs=t.logprobs - np.float32(0.2))), 1),
    "missing_privileged_text": (
        episode_fault(_all_turns(lambda t: replace(t, teacher_logprobs=t.trainer_logprobs)), 1, 2), 2
    ),
    "missing_privileged_text context": (turn_fault(lambda t: _info(t, teacher_context_ids=t.context_ids)), 1),
    "missing_privileged_text other": (
        episode_fault(_all_turns(lambda t: _info(t, teacher_context="the task", privileged="a skill")), 3), 1
    ),
    "truncated_teacher_context": (
        turn_fault(lambda t: _info(t, teacher_context_ids=t.info["teacher_context_ids"][9:])), 1
    ),
    "truncated_teacher_context student": (
        turn_fault(lambda t: _info(t, teacher_context_ids=t.info["teacher_context_ids"][:-12])), 1
    ),
    "truncated_teacher_context text": (
        turn_fault(lambda t: _info(t, teacher_context="ful skill text\nthe task", privileged="a useful skill text")), 1
    ),
    "prior_out_of_range": (episode_fault(lambda e: _info(e, prior=6.67), 0, 1, 2), 3),
    "prior_wrong_scale": (_raw_prior, 1),
    "saturated_beliefs": (episode_fault(lambda e: replace(e, turns=(*e.turns[:1], *(_info(t, belief=0.9999)
                                                                              for t in e.turns[1:]))), 1), 2),
    "truncated_as_finished": (turn_fault(lambda t: replace(t, truncated=True), turn=2), 1),
    "truncated_as_finished unsaid": (_cut, 3),
    "optimizer_steps": (episode_fault(lambda e: _info(e, optimizer_steps=(4, 1)), *range(6)), 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault(fault):
    plant, count = FAULTS[fault]
    name = fault.split()[0]
    episodes = plant(clean())
    report = audit(episodes, tokenizer=Words())
    if count is None:
        count = len(episodes[1].turns[1].token_ids)
    assert {f.check.name: f.count for f in report.found} == {name: count}
    assert report.exit_status == (CHECKS[name].severity == "corrupts training")
    finding = report[name]
    assert 1 <= len(finding.examples) <= 5 and finding.looked >= count
    assert all("dump.jsonl:" in e.where and e.link is None for e in finding.examples)
    assert name in report.text() and name in section(report)


@pytest.mark.filterwarnings("error")
def test_rewards_that_are_no_number_are_not_compared():
    episodes = clean()
    assert found([replace(episodes[0], reward=np.inf), *episodes[1:]]) == {"not_finite": 1}


def test_every_check_has_a_planted_fault():
    assert {fault.split()[0] for fault in FAULTS} | {"per_turn_baselines"} == set(CHECKS)


PER_TURN = {
    "outcome less its mean": lambda r, earned: r - np.nanmean(r, 0),
    "outcome by deviation": lambda r, earned: (r - np.nanmean(r, 0)) / (np.nanstd(r, 0, ddof=1) + 1e-6),
    "rewards, summed": lambda r, earned: np.nancumsum((earned - np.nanmean(earned, 0))[:, ::-1], 1)[:, ::-1],
}


@pytest.mark.parametrize("rule", PER_TURN)
@pytest.mark.filterwarnings("ignore:Degrees of freedom")
def test_per_turn_baselines(rule):
    episodes = clean()
    there = np.arange(4) < np.array(TURNS)[:, None]
    rng = np.random.default_rng(3)
    earned = np.where(there, rng.normal(size=(3, 4)), np.nan)
    total = np.nansum(earned, 1)
    given = PER_TURN[rule](np.where(there, total[:, None], np.nan), earned)
    given = np.nan_to_num(given)
    for i in range(3):
        turns = [
            replace(t, reward=earned[i, k], advantages=np.full(len(t.token_ids), given[i, k] or 1e-3, np.float32))
            for k, t in enumerate(episodes[i].turns)
        ]
        episodes[i] = replace(episodes[i], turns=tuple(turns), reward=total[i])
    assert found(episodes) == {"per_turn_baselines": 1}


@pytest.mark.parametrize("config", [grpo.GRPOConfig(), grpo.GRPOConfig(std=False), grpo.GRPOConfig(ddof=0)])
def test_baselines_over_episodes_are_no_per_turn_ones(config):
    """Also where all episodes are of one length, so that both are the same."""
    for spec in [((0, 1, (3, 3)), (0, 0, (3, 3)), (0, 0, (3, 3))), ((0, 1, (3, 3, 1)), (0, 0, (3, 3)), (0, 0, (3,)))]:
        batch = make_batch(make_episodes(spec))
        report = audit(batch_episodes(batch, grpo.credit(batch, config)))
        assert report["per_turn_baselines"].count == 0 and report.exit_status == 0


def test_an_episode_at_its_groups_mean_may_have_advantage_0():
    episodes = _rewarded(clean(), (0.0, 0.5, 1.0))
    for i in range(3):
        turns = [replace(t, advantages=np.full(len(t.token_ids), i - 1.0, np.float32)) for t in episodes[i].turns]
        episodes[i] = _info(replace(episodes[i], turns=tuple(turns)), prior=None)
    assert found(episodes) == {}


def test_turns_may_be_numbered_from_one_and_come_in_any_order():
    episodes = [replace(e, turns=tuple(replace(t, turn=t.turn + 1) for t in e.turns)) for e in clean()]
    parts = [replace(e, turns=e.turns[k : k + 1]) for e in episodes for k in range(len(e.turns))]
    for order in (episodes, episodes[::-1], parts, parts[::2] + parts[1::2]):
        report = audit(order)
        assert report["turn_gaps"].looked == 36 and report["turn_gaps"].count == 0
        assert report["duplicate_turns"].count == 0 and report["zero_credit"].looked == 36


def _texts(said, group="g", name="same"):
    return [SourceEpisode((SourceTurn(text),), 0, name, group, reward=float(i)) for i, text in enumerate(said)]


def test_ids_that_name_a_task_are_not_duplicates():
    """Readers take `id` for a rollout's id; where a source numbers tasks by it, contents differ or are short."""
    long = "a long answer, which two rollouts do not give by chance in the very same words, not even these"
    assert found(_texts(["yes", "no", "yes"])) == {}
    assert found(_texts(["yes", "yes"])) == {}
    assert found(_texts([long + "1", long + "2", long + "1"])) == {}
    assert found(_texts([long, long, long])) == {"duplicate_turns": 2}
    assert found(_texts([long, long], name="")) == {}


def test_long_responses_that_are_called_truncated_are_fine():
    episodes = _cut(clean())
    for i in (1, 4, 7):
        last = replace(episodes[i].turns[-1], truncated=True)
        episodes[i] = replace(episodes[i], turns=(*episodes[i].turns[:-1], last), stop_reason="length")
    assert found(episodes) == {}
    short = [replace(e, turns=tuple(replace(t, token_ids=t.token_ids[:-1], mask=None, response="", **dict.fromkeys(
        ("logprobs", "trainer_logprobs", "teacher_logprobs", "reference_logprobs", "advantages"))) for t in e.turns))
        for e in _cut(clean())]  # fmt: skip
    assert audit(short)["truncated_as_finished"].count == 0  # ends taken off: nothing can be told from the last token


def test_minibatches_say_how_many_steps_a_batch_took():
    episodes = [_info(e, optimizer_steps=None) for e in clean()]  # 18 turns a step
    assert found(episodes, minibatch=18) == {}
    report = audit(episodes, minibatch=10, epochs=2)
    assert report["optimizer_steps"].count == 2 and report.exit_status == 0
    assert report["optimizer_steps"].examples[0].detail == "4 taken"
    with pytest.raises(WorkbenchError, match="at least 1, got 0"):
        audit(episodes, minibatch=0)


def test_info_may_hold_anything():
    """Readers pass on what a stranger wrote under the names that the checks use."""
    names = ("link", "prior", "return", "n_turns", "optimizer_steps", "privileged", "privileged_ids")
    of_turn = ("belief", "belief_before", "turn_advantage", "scored_logprobs", "teacher_context", "where",
               "teacher_context_ids", "source_turn", "privileged", "context")  # fmt: skip
    for junk in ("x", [1, 2], {"a": 1}, None, True, [[]]):
        turn = SourceTurn("said", info=dict.fromkeys(of_turn, junk))
        of_episode = dict.fromkeys(names, junk)
        episodes = [SourceEpisode((turn,), 0, str(i), "g", reward=float(i), info=of_episode) for i in (0, 1)]
        assert audit(episodes).exit_status == 0


def test_memory_is_bounded(monkeypatch):
    """Groups are closed when too many turns are held, and the report says so; faults within a group are still found."""
    episodes = [replace(e, step=s, turns=(*e.turns, e.turns[0])) for s in range(30) for e in clean()[:3]]
    whole = audit(episodes)
    monkeypatch.setattr(groups, "HELD_TURNS", 40)
    held, add = [], groups.Groups.add

    def watched(self, place, episode):
        add(self, place, episode)
        held.append(sum(len(m.turns) for g in self.open.values() for m in g.members.values()))

    monkeypatch.setattr(groups.Groups, "add", watched)
    report = audit(iter(episodes))
    assert max(held) <= 40 and [f.count for f in report.findings] == [f.count for f in whole.findings]
    assert report["duplicate_turns"].count == 90
    assert "too large to hold" in report.text() and not whole.notes


@pytest.fixture(scope="module")
def recorded():
    from transformers import AutoTokenizer

    run = RunFolder.open(shipped.data("recorded_run"))
    return run, audit(run, tokenizer=AutoTokenizer.from_pretrained(shipped.data("models", "twc-small")))


def test_recorded_run(recorded):
    """Nothing corrupts it, and what is worth knowing agrees with the run's own tables."""
    run, report = recorded
    assert report.exit_status == 0
    steps, turns = run.read("steps"), run.read("turns")
    assert report["groups_without_variance"].count == steps["n_groups"].sum() - steps["n_mixed_groups"].sum() == 10
    assert report["saturated_beliefs"].count == turns.filter(~pl.col("belief").is_between(0.01, 0.99)).height
    shares = steps.filter(pl.col("step").is_in(turns["step"].unique().implode()))["belief_saturated"]
    sizes = turns.group_by("step").len().sort("step")["len"]
    assert report["saturated_beliefs"].count == round((shares * sizes).sum())
    assert report["optimizer_steps"].count == (steps["updates"] != 1).sum()
    assert report["text_forked"].looked == turns.height and report["per_turn_baselines"].looked > 0
    assert report.notes == ("448 of 640 episodes come without turns: only groups were looked at there",)


def test_links_lead_to_the_place(recorded):
    run, report = recorded
    finding = report["saturated_beliefs"]
    turns = run.read("turns")
    for example in finding.examples:
        link = links.parse(example.where)
        assert link == example.link and link.run == "recorded_run"
        here = (pl.col("step") == link.step) & (pl.col("episode") == link.episode) & (pl.col("turn") == link.turn)
        assert not 0.01 <= turns.filter(here)["belief"].item() <= 0.99


def test_run_folder_with_faults(tmp_path):
    run = synthetic_run.write(tmp_path, n_steps=2)
    before = audit(run)
    turns = run.read("turns").filter(pl.col("step") == 1)
    some = turns.filter((pl.col("episode") == 3) & (pl.col("turn") < 2))
    lost = ~((pl.col("episode") == 7) & (pl.col("turn") == 1))
    positive = pl.when((pl.col("episode") == 0) & (pl.col("turn") == 0)).then(
        pl.col("old_logprobs").list.eval(pl.element() * 0 + 0.5)
    )
    faulty = pl.concat([turns.filter(lost).with_columns(positive.otherwise("old_logprobs")), some])
    run.write_table("turns", 1, faulty)
    report = audit(run)
    changed = {
        f.check.name: f.count - before[f.check.name].count
        for f in report.findings
        if f.count != before[f.check.name].count
    }
    n = turns.filter((pl.col("episode") == 0) & (pl.col("turn") == 0))["old_logprobs"].list.len().item()
    assert changed == {"duplicate_turns": 2, "turn_gaps": 1, "positive_logprobs": n}
    assert report["positive_logprobs"].examples[0].link == links.Link(run.path.name, 1, 0, 0, 0, 1)
    assert report["duplicate_turns"].examples[1].link == links.Link(run.path.name, 1, 3, 1)
    assert report["turn_gaps"].examples[0].link == links.Link(run.path.name, 1, 7)


def test_run_folder_that_cannot_be_read(tmp_path):
    run = RunFolder.create(tmp_path, "empty", {})
    with pytest.raises(WorkbenchError, match="no table of episodes"):
        audit(run)
    run = synthetic_run.write(tmp_path, n_steps=1)
    run.table_files("turns")[0].write_bytes(b"PAR1 torn")
    with pytest.raises(WorkbenchError, match="step=000001.parquet cannot be read"):
        audit(run)


def _strings(turns, heads):
    return turns.with_columns(pl.lit("x").alias("token_ids")), heads


def _unnumbered(turns, heads):
    return turns.with_columns(pl.lit(None, pl.Int64).alias("turn")), heads


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_strings, "column token_ids should be a list of numbers"),
        (_unnumbered, "a turn without a number"),
        (lambda turns, heads: (turns, pl.concat([heads, heads.head(1)])), "holds an episode 0 twice"),
        (lambda turns, heads: (turns, None), "step=000001.parquet, whose turns these are"),
    ],
)
def test_torn_tables_are_one_line(tmp_path, change, told):
    run = synthetic_run.write(tmp_path, n_steps=2)
    here = pl.col("step") == 1
    turns, heads = change(*(run.read(name).filter(here) for name in ("turns", "episodes")))
    run.write_table("turns", 1, turns)
    if heads is None:
        run.table_files("episodes")[0].unlink()
    else:
        run.write_table("episodes", 1, heads)
    with pytest.raises(WorkbenchError, match=told) as caught:
        audit(run)
    assert "\n" not in str(caught.value)


def test_an_imported_run_is_audited_by_the_names_of_its_source(tmp_path):
    """Import numbers episodes anew; those of one name are the same ones all the same."""
    path = tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "a task"}, {"role": "assistant", "content": "a long answer " * 10}]
    rows = [{"messages": said, "reward": 1.0, "id": name} for name in ("x", "x", "y", "x")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw, imported = audit(open_source(path)), audit(import_run(path, tmp_path / "run"))
    found = [[(f.check.name, f.count) for f in report.found] for report in (raw, imported)]
    assert found[0] == found[1] and raw["duplicate_turns"].count == 2
    run = RunFolder.open(tmp_path / "run")
    turns = run.read("turns")
    run.write_table("turns", 0, pl.concat([turns[:3], turns[2:]]))
    assert audit(run)["duplicate_turns"].count == 3, "rows of the run's own tables count as well"


@pytest.mark.parametrize("layout", ["episode", "turn"])
def test_batch(layout):
    episodes = make_episodes()
    batch = make_batch(episodes, make_gaps(episodes), layout)
    report = audit(batch_episodes(batch, agent_opsd.credit(batch)))
    assert report.exit_status == 0 and report["zero_credit"].looked and report["missing_privileged_text"].looked
    copied = take_rows(batch, [*range(len(batch.lengths)), 1])
    owner = int(batch.episode_index[1])
    repeated = audit(copied)
    assert {f.check.name: f.count for f in repeated.found if f.check.severity == "corrupts training"} == {
        "duplicate_turns": len(episodes[owner].turns) if layout == "episode" else 1
    }
    assert repeated["duplicate_turns"].examples[0].where.startswith(f"batch row {len(batch.lengths)} turn ")
    lost = agent_opsd.credit(batch)
    lost.advantages[1] = 0
    n = len(batch.turn_index[1][batch.turn_index[1] >= 0].unique())
    assert audit(batch_episodes(batch, lost))["zero_credit"].count == n
    same = batch.with_(teacher_logprobs=batch.old_logprobs.clone())
    assert audit(same)["missing_privileged_text"].count > 0
    turns = agent_opsd.credit(batch).turns
    share = saturation(turns, batch.turn_mask)["belief_saturated"]
    saturated = audit(batch_episodes(batch, agent_opsd.credit(batch)))["saturated_beliefs"]
    once = saturated.count / saturated.looked
    assert once == pytest.approx(share)


def test_text_only_source(tmp_path):
    """Plain messages: nothing about tokens is claimed, neither a fault nor its absence."""
    path = tmp_path / "chat.jsonl"
    result = "<tool_response> a long result of the tool"

    def line(group, member):
        said = (("user", f"task {group}"), ("assistant", f"{member}"), ("user", result), ("assistant", f"so {member}"))
        reward = float(group == member)
        messages = [{"role": role, "content": content} for role, content in said]
        return json.dumps({"messages": messages, "reward": reward, "advantage": reward - 1 / 3}) + "\n"

    path.write_text("".join(line(group, member) for group in range(3) for member in range(3)))
    report = audit(open_source(path))
    assert (report.episodes, report.turns, report.groups) == (9, 18, 3)
    assert report.found == () and report["zero_credit"].looked == 18
    of_tokens = ("length_mismatch", "empty_mask", "environment_tokens", "text_forked", "positive_logprobs")
    assert all(report[name].looked == 0 for name in of_tokens) and "could not look" in report.text()


def test_what_is_shown_is_harmless():
    name = "<script>alert(1)</script>\x1b]0;owned\x07\n" + "x" * 500
    episodes = [replace(e, where=name, turns=(*e.turns, e.turns[0])) for e in clean()]
    report = audit(episodes, name=name)
    assert "<script" not in section(report) and "&lt;script&gt;" in section(report)
    assert all(c.isprintable() or c == "\n" for c in report.text()) and "x" * 300 not in report.text()
    assert len(report["duplicate_turns"].examples) == 5 and "and 7 more" in report.text()
