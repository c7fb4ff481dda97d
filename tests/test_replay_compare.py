"""Another method's credit beside the recorded one: a method against itself is the same, others differ where they do."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from make_batch import by_token, make_batch, make_episodes, make_gaps

from workbench import cli, links, shipped, tables
from workbench.compare_credit import compare, sentences, text
from workbench.credit import gigpo
from workbench.errors import WorkbenchError
from workbench.figures import replayed
from workbench.formats.write import import_run
from workbench.methods import method
from workbench.replay import credit_of
from workbench.runs import RunFolder

STEPS = (3, 8)
SIZES = {"max_turns": 6, "max_response_tokens": 5}
OBSERVATIONS = ("You are in the hall.", "You see a lamp.")


def played(seed):
    rng = np.random.default_rng(seed)
    return [
        replace(
            e, turns=[replace(t, observation=OBSERVATIONS[rng.integers(2)], action=f"go {k}")
                      for k, t in enumerate(e.turns)],
        )
        for e in make_episodes(seed=seed)
    ]  # fmt: skip


def train(out, name, change=None, config=None, **options):
    """A run folder with the tables that training with a method leaves, and its batches by step."""
    run = RunFolder.create(out, "train", {"method": name, "method_options": options} | SIZES | (config or {}))
    batches = {}
    for step in STEPS:
        episodes = played(step)
        batch = make_batch(episodes, make_gaps(episodes, seed=step))
        batch = batches[step] = batch.with_(anchors=gigpo.anchors(episodes))
        built = method(name, **options)
        each = credit_of(batch, built, step, max_tokens=30)
        tokens = {
            "old_logprobs": batch.old_logprobs, "teacher_logprobs": batch.teacher_logprobs,
            "advantage": each.credit.advantages, "dloss_dlogp": each.slope,
        }  # fmt: skip
        turns = tables.turns_frame(step, episodes, batch, each.credit, tokens, lambda ids: [f"<{i}>" for i in ids])
        heads = tables.episodes_frame(step, episodes, batch.outcome, batch.outcome)
        turns, heads = (turns, heads) if change is None else change(turns, heads)
        run.write_table("turns", step, turns.sample(fraction=1, shuffle=True, seed=step))
        run.write_table("episodes", step, heads.sample(fraction=1, shuffle=True, seed=step))
    run.complete()
    return run, batches


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(out):
    return train(out, "agent_opsd")


@pytest.mark.parametrize(
    ("name", "options"),
    [("grpo", {}), ("dr_grpo", {}), ("agent_opsd", {"gamma": 0.5}), ("rlsd", {"decay_steps": 20}), ("sdar", {}),
     ("gspo", {}), ("gigpo", {}), ("sdar", {"aggregation": "turn_sum"}), ("skill_sd", {"pg_coef": 0.5}), ("opd", {})],
)  # fmt: skip
def test_a_method_against_its_own_record_is_the_same(tmp_path, name, options):
    run, batches = train(tmp_path, name, **options)
    found = compare(run, name, options)
    assert found.against == "recorded" and found.summary["step"].to_list() == list(STEPS)
    assert found.summary["other_slope"].min() > 0
    assert (found.summary["change"] < 1e-5 * found.summary["other_slope"]).all()
    assert found.turns["change"].abs().max() < 1e-5 * found.turns["other_credit"].abs().max()
    assert not found.turns["flipped"].any() and found.flips.is_empty()
    ranks = found.episodes["rank_correlation"].drop_nulls()
    assert ranks.to_list() == pytest.approx([1] * len(ranks))
    varying = {"agent_opsd", "rlsd", "sdar", "gigpo", "skill_sd", "opd"}
    assert (len(ranks) > 0) == (name in varying)
    for step, batch in batches.items():
        push = batch.turn_sum(credit_of(batch, method(name, **options), step, 30).push) / batch.turn_tokens
        mine = found.turns.filter(pl.col("step") == step)
        assert mine["baseline_credit"].to_list() == pytest.approx(push[batch.turn_mask].tolist(), abs=1e-5)


def test_frames_are_what_two_methods_give_each_turn_and_token(run):
    folder, batches = run
    found = compare(folder, "opd", against="sdar", top=7)
    assert (found.method, found.against, found.baseline) == ("opd", "sdar", "sdar")
    turns, tokens = [], []
    for step, batch in batches.items():
        sides = [credit_of(batch, method(name), step, 30) for name in ("sdar", "opd")]
        push, slope = ([by_token(batch, getattr(side, what)) for side in sides] for what in ("push", "slope"))
        for e, k in {key[:2]: None for key in push[0]}:
            here = [key for key in push[0] if key[:2] == (e, k)]
            base, other = (np.mean([values[key] for key in here]) for values in push)
            turns.append((step, e, k, base, other, base * other < 0))
        tokens += [(abs(slope[1][key] - v), step, *key, v, slope[1][key]) for key, v in slope[0].items()]
    turns.sort()
    got = found.turns.sort("step", "episode", "turn")
    for i, name in enumerate(("step", "episode", "turn", "baseline_credit", "other_credit", "flipped")):
        assert got[name].to_list() == pytest.approx([row[i] for row in turns], abs=1e-6), name
    assert 0 < got["flipped"].sum() < got.height
    assert got["action"].to_list() == [f"go {k}" for k in got["turn"]]
    flips = found.flips
    assert flips.height == got["flipped"].sum() and flips["change"].abs().is_sorted(descending=True)
    per = got.group_by("step", "episode", maintain_order=True)
    want = per.agg(
        pl.corr("baseline_credit", "other_credit", method="spearman").fill_nan(None), flips=pl.sum("flipped")
    )
    heads = found.episodes.sort("step", "episode")
    assert heads["flips"].to_list() == want["flips"].to_list()
    assert heads["rank_correlation"].to_list() == pytest.approx(want["baseline_credit"].to_list(), abs=1e-6)
    assert heads["rank_correlation"].null_count() == 2, "an episode of one turn has no order"
    tokens.sort(reverse=True)
    assert found.tokens["change"].abs().to_list() == pytest.approx([t[0] for t in tokens[:7]], rel=1e-4)
    for row, (_, *key, base, other) in zip(found.tokens.to_dicts(), tokens, strict=False):
        assert [row[n] for n in ("step", "episode", "turn", "position")] == key
        assert (row["baseline_slope"], row["other_slope"]) == pytest.approx((base, other), rel=1e-4)
        step, episode, turn, position = key
        token = played(step)[episode].turns[turn].response_ids[position]
        assert (row["token_id"], row["piece"]) == (token, f"<{token}>")
        assert links.parse(row["link"]) == links.Link(folder.path.name, *key, position + 1)
    summary = found.summary
    assert summary["change"].sum() == pytest.approx(sum(t[0] for t in tokens), rel=1e-4)
    assert summary["flips"].to_list() == [got.filter(pl.col("step") == s)["flipped"].sum() for s in STEPS]
    assert summary["tokens"].sum() == len(tokens) and summary["ranked"].to_list() == [6, 6]


def test_steps_options_and_the_return_are_heeded(run, tmp_path):
    folder, batches = run
    assert compare(folder, "grpo", steps=[8]).summary["step"].to_list() == [8]
    off = compare(folder, "agent_opsd", {"lam": 0.0}, against="grpo", against_options={"advantage_std": False})
    plain = compare(folder, "agent_opsd", {"lam": 0.0, "advantage_std": False}, against="grpo")
    assert off.summary["change"].to_list() == plain.summary["change"].to_list() and off.summary["change"].min() > 0
    assert compare(folder, "agent_opsd", {"lam": 0.0}, against="grpo").summary["change"].sum() == 0
    tuned = compare(folder, "agent_opsd", {"gamma": 0.1})
    assert tuned.summary["change"].sum() > 0
    plain, returns = (compare(folder, "dr_grpo", steps=[8], reward=reward) for reward in (None, "return"))
    ten = returns.turns["other_credit"].to_numpy()
    assert ten == pytest.approx(10 * plain.turns["other_credit"].to_numpy()), "returns are 10 for a success"
    assert not returns.notes
    trained, _ = train(tmp_path, "dr_grpo", config={"more": {"reward": "return"}, "kl_coef": 0.1})
    found = compare(trained, "dr_grpo", steps=[8])
    assert found.turns["other_credit"].to_list() == pytest.approx(ten.tolist())
    assert found.notes == ("The recorded dloss/dlogp holds the slope of the run's KL penalty; the replay has none.",)


def bare(turns, heads):
    """What an import may leave: no dloss/dlogp, no outcome, a reward on a scale of its own."""
    heads = heads.with_columns(pl.col("return") / 4, outcome=pl.lit(None, pl.Int64))
    return turns.drop("dloss_dlogp", "pieces").with_columns(valid=pl.lit(None, pl.Boolean)), heads


def test_imported_advantages_are_compared_and_outcomes_never_guessed(tmp_path):
    run, batches = train(tmp_path, "grpo", change=bare, config={"method": None, "method_options": None})
    found = compare(run, "grpo")
    assert (found.summary["change"] < 1e-5).all() and found.summary["other_slope"].min() > 0
    assert found.notes == ("Groups compare returns, as the run does not say of every episode whether it succeeded.",)
    assert found.tokens["piece"].null_count() == found.tokens.height and "token " in text(found)
    assert compare(run, "rlsd").summary["change"].min() > 0.01
    assert compare(run, "agent_opsd", {"prior": "half"}).summary["change"].min() > 0.01
    with pytest.raises(
        WorkbenchError, match="agent_opsd reads which episodes succeeded, and step 3 of the run does not say"
    ):
        compare(run, "agent_opsd")
    with pytest.raises(WorkbenchError, match="method grpo reads which episodes succeeded"):
        compare(run, "grpo", reward="outcome")


def dump(turns, heads):
    """What a trainer's debug dump may leave: tokens, log-probs and nothing of groups or rewards."""
    nothing = {"group": None, "outcome": None, "return": None}
    return turns.drop("advantage", "dloss_dlogp"), heads.with_columns(
        pl.lit(value, heads.schema[name]).alias(name) for name, value in nothing.items()
    )


def test_methods_that_read_no_outcome_need_none(tmp_path):
    run, _ = train(tmp_path, "sdar", change=dump)
    whole, _ = train(tmp_path, "sdar")
    found, want = (compare(each, "opd", against="opd", against_options={"coef": 0.5}) for each in (run, whole))
    for column in ("baseline_credit", "other_credit"):
        assert found.turns.sort("step", "episode", "turn")[column].to_list() == pytest.approx(
            want.turns.sort("step", "episode", "turn")[column].to_list()
        )
    for name in (
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp_baseline",
        "gigpo",
        "agent_opsd",
        "rlsd",
        "step_opsd",
        "sdar",
        "grpo_opsd",
        "skill_sd",
    ):
        with pytest.raises(WorkbenchError, match=f"method {name} reads w.*, and step 3 of the run does not say"):
            compare(run, "opd", against=name)
    single, _ = train(tmp_path, "sdar", change=lambda *both: [f.filter(pl.col("episode") == 0) for f in dump(*both)])
    assert compare(single, "opd", against="opd").summary["change"].sum() == 0
    with pytest.raises(WorkbenchError, match="method grpo reads which episodes are of one group"):
        compare(single, "grpo", against="opd")


def one_less(turns, heads):
    return turns.with_columns(teacher_logprobs=pl.lit(None, pl.List(pl.Float32)), advantage=pl.lit(None)), heads


def lone(turns, heads):
    return turns, heads.with_columns(group=pl.when(pl.col("episode") != 2).then("group"))


def lost(turns, heads):
    return turns.drop("old_logprobs"), heads


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (one_less, {"method": "rlsd", "against": "grpo"},
         "method rlsd reads the log-probs of a privileged teacher, and the run was recorded without one; "
         "`workbench score` makes a run with a teacher's log-probs"),
        (one_less, {"method": "grpo", "against": "sdar"}, "method sdar reads the log-probs of a privileged teacher"),
        (one_less, {"method": "grpo"}, "step 3 was recorded without advantages, so there is no credit to compare "
         "with; name a method to compare against, such as grpo"),
        (lost, {"method": "grpo"}, "recorded without old_logprobs, which a replay needs; `workbench score` adds them"),
        (lone, {"method": "grpo"}, "method grpo reads which episodes are of one group, and step 3 of the run does not"),
        (None, {"method": "grpo", "steps": [3, 4]}, "turns: step 4 was not recorded; recorded: 3, 8"),
        (None, {"method": "grpo", "steps": []}, "no step to replay"),
        (None, {"method": "gripo"}, "unknown method 'gripo'; did you mean 'g"),
        (None, {"method": "grpo", "against": "rlds"}, "unknown method 'rlds'; did you mean 'rlsd'"),
        (None, {"method": "rlsd", "options": {"lamb": 1}}, "unknown option of method 'rlsd' 'lamb'"),
        (None, {"method": "grpo", "against_options": {"lam": 1}}, "options lam are of no method"),
        (None, {"method": "opsd"}, "method opsd compares whole distributions over the vocabulary"),
        (None, {"method": "grpo", "reward": "success"}, "reward must be outcome or return, got 'success'"),
    ],
)  # fmt: skip
def test_what_a_run_cannot_answer_is_one_line(tmp_path, run, change, given, message):
    folder = run[0] if change is None else train(tmp_path, "agent_opsd", change)[0]
    with pytest.raises(WorkbenchError) as caught:
        compare(folder, **given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("table", "column"), [("turns", "step"), ("turns", "token_ids"), ("episodes", "outcome")])
def test_a_table_without_a_column_is_one_line(tmp_path, table, column):
    run, _ = train(tmp_path, "grpo")
    for file in run.table_files(table):
        pl.read_parquet(file, hive_partitioning=False).drop(column).write_parquet(file)
    with pytest.raises(WorkbenchError, match=f"{table}: no column {column}, which a replay needs"):
        compare(run, "rloo")


def test_runs_of_text_alone_are_refused_with_the_reason(tmp_path, capsys):
    source = tmp_path / "chat.jsonl"
    said = '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "north"}], "reward": 1}'
    source.write_text(f"{said}\n{said}\n")
    imported = import_run(source, tmp_path / "imported")
    assert cli.main(["replay", str(imported.path), "--method", "grpo", "--against", "rloo"]) == 2
    line = capsys.readouterr().err
    assert "recorded without tokens, which credit is given to; they are not made from text" in line
    assert line.count("\n") == 1
    empty = RunFolder.create(tmp_path, "train", {})
    with pytest.raises(WorkbenchError, match="no turns are recorded in it, so there is nothing to replay"):
        compare(empty, "grpo")


def test_the_command_prints_a_summary_and_the_flips_and_writes_the_turns(run, tmp_path, capsys):
    folder, _ = run
    frame = tmp_path / "new folder" / "turns.parquet"
    argv = ["replay", str(folder.path), "--method", "opd", "--option", "coef=0.5", "--step", "8", "--out", str(frame)]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    found = compare(folder, "opd", {"coef": 0.5}, steps=[8])
    assert shown.startswith(text(found)) and str(frame) in shown
    assert all(sentence in shown for sentence in sentences(found))
    assert found.flips["link"][0] in shown and found.tokens["link"][0] in shown
    assert pl.read_parquet(frame).equals(found.turns)
    assert compare(folder, "opd", steps=[8]).summary["change"][0] != found.summary["change"][0]
    for wrong, message in (
        (["--out", str(tmp_path / "turns.csv")], "turns.csv"),
        (["--option", "coef"], "NAME=VALUE"),
        (["--option", "coef=1", "--option", "coef=2"], "given more than once"),
        (["--option", "coef=much"], "option coef of method 'opd' must be float"),
        (["--against", "opsd"], "method opsd compares whole distributions"),
    ):
        assert cli.main(["replay", str(folder.path), "--method", "opd", *wrong]) == 2
        line = capsys.readouterr().err
        assert message in line and line.count("\n") == 1


def test_text_of_rollouts_obeys_no_terminal(tmp_path):
    def hostile(turns, heads):
        evil = "\x1b]0;x\x07go\n\u202eback" + "x" * 99
        return turns.with_columns(action=pl.lit(evil), pieces=pl.col("pieces").list.eval(pl.lit(evil))), heads

    run, _ = train(tmp_path, "agent_opsd", hostile)
    found = compare(run, "opd")
    assert not found.flips.is_empty()
    shown = text(found, limit=3)
    assert all(c.isprintable() or c == "\n" for c in shown) and "\\x1b]0;x" in shown
    rows = [line for line in shown.splitlines() if line.startswith("  ")]
    assert len(rows) == 6 and max(map(len, rows)) < 200
    assert f"{found.flips.height - 3} more turns flip" in shown


def test_figures_draw_what_the_frames_hold(run):
    found = compare(run[0], "opd")
    step, episode = replayed.choose(found)
    most = found.episodes.filter(pl.col("flips") == pl.col("flips").max())
    assert (step, episode) in most.select("step", "episode").rows()
    assert replayed.choose(found, 3)[0] == 3 and replayed.choose(found, 3, 2) == (3, 2)
    fig = replayed.turns(found, step, episode)
    rows = found.turns.filter(pl.col("step") == step, pl.col("episode") == episode).sort("turn")
    for axis, column in (("y", "baseline_credit"), ("y2", "other_credit")):
        up, down = (bar for bar in fig.data if bar.type == "bar" and bar.yaxis == axis)
        assert (up.name, down.name) == ("raises its tokens", "lowers its tokens")
        drawn = [a if a is not None else b for a, b in zip(up.y, down.y, strict=True)]
        assert drawn == rows[column].to_list() and all(v is None or v > 0 for v in up.y)
    assert list(fig.data[-1].x) == rows.filter("flipped")["turn"].to_list() and fig.data[-1].name == "the sign flips"
    counts = replayed.correlations(found).data[0]
    ranks = found.episodes["rank_correlation"].drop_nulls()
    assert sum(counts.y) == len(ranks) > 0 and counts.y[-1] == (ranks >= 0.9 - 1e-9).sum()
    assert counts.y[0] == (ranks < -0.9 - 1e-9).sum()
    _, base, other = replayed.tokens(found, limit=9).data
    assert list(base.x) == found.tokens["baseline_slope"].head(9).to_list()
    assert list(other.x) == found.tokens["other_slope"].head(9).to_list()
    table = replayed.flips_table(found, limit=4)
    assert table.count("<tr>") == 5 and f"and {found.flips.height - 4} more" in table
    assert all(link.replace("&", "&amp;") in table for link in found.flips["link"].head(4))


def test_figures_of_ties_and_markup(tmp_path):
    def hostile(turns, heads):
        evil = "<img src=x onerror=alert(1)> $x$ %{y}"
        return turns.with_columns(action=pl.lit(evil), pieces=pl.col("pieces").list.eval(pl.lit(evil))), heads

    run, _ = train(tmp_path, "grpo", hostile)
    same, other = compare(run, "grpo"), compare(run, "opd")
    assert replayed.correlations(same).layout.annotations[0].text == "no episode has an order to compare"
    assert "no turn's credit flips" in replayed.flips_table(same)
    for found in (same, other):
        place = replayed.choose(found)
        made = [replayed.turns(found, *place), replayed.correlations(found), replayed.tokens(found)]
        drawn = "".join(fig.to_json() for fig in made)
        assert "<img" not in replayed.flips_table(found) and "img src" in drawn
        assert found is same or "&lt;img src=x onerror=alert(1)&gt;" in replayed.flips_table(found)
        assert not any(live in drawn for live in ("<img", "\\u003cimg", "$x$", "%{y}"))


def test_the_shipped_run_replays_its_own_method():
    if not shipped.data("recorded_run", "config.json").is_file():
        pytest.skip("no recorded run is shipped in data/recorded_run")
    run = RunFolder.open(shipped.data("recorded_run"))
    found = compare(run, run.config["method"], run.config["method_options"])
    assert (found.summary["change"] < 1e-5).all() and not found.turns["flipped"].any()
    assert found.episodes["rank_correlation"].min() == pytest.approx(1)
    assert "run=recorded_run&step=" in found.tokens["link"][0]


def test_a_run_of_nothing_but_ties_says_so(tmp_path):
    def never(turns, heads):
        return turns.with_columns(advantage=pl.col("advantage").list.eval(pl.element() * 0)), heads

    run, _ = train(tmp_path, "grpo", never)
    found = compare(run, "grpo")
    assert found.episodes["rank_correlation"].null_count() == found.episodes.height
    assert found.summary["rank_correlation"].null_count() == found.summary.height
    assert "no order of turns to compare" in sentences(found)[1] and found.flips.is_empty()
