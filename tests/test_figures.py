"""Figures: their numbers, what they say, what they refuse, and that no rollout text gets out of its quotes."""

import json
import math
import re

import numpy as np
import plotly.graph_objects as go
import polars as pl
import pytest
import synthetic_run
from make_batch import make_batch, make_episodes, make_gaps

from workbench import tables as run_tables
from workbench.credit import agent_opsd, grpo
from workbench.errors import WorkbenchError
from workbench.figures import (
    beliefs,
    curves,
    display,
    evidence,
    gates,
    lm_head,
    replay,
    style,
    tokens,
    words,
)  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return synthetic_run.tables(size=8)


@pytest.fixture(scope="module")
def plain():
    """A run without teacher and gate, as plain GRPO can leave it."""
    return synthetic_run.tables(n_steps=3, teacher=False, gate=False, tied=False)


@pytest.fixture(scope="module")
def chosen(run):
    return beliefs.choose(run["turns"], run["episodes"])


def every_figure(run, step, group, episode) -> dict[str, go.Figure]:
    turns, episodes, rules = run["turns"], run["episodes"], evidence.by_rule(run["turns"], run["episodes"])
    return {
        "paths": beliefs.paths(turns, episodes, step, group, highlight=episode),
        "revisions": beliefs.revisions(turns, episodes, step, group),
        "turn_bars": beliefs.turn_bars(turns, episodes, step, episode),
        "transcript": beliefs.transcript(turns, episodes, step, episode),
        "saturation": evidence.saturation(turns, episodes),
        "compare_rules": evidence.compare(rules, episodes, step, episode),
        **{f"cells_{q}": tokens.cells(turns, step, episode, color=q) for q in tokens.QUANTITIES},
        "coefficients": tokens.coefficients(turns, step, episode),
        "gap_distribution": gates.gap_distribution(turns, episodes),
        "gate_over_training": gates.over_training(turns, episodes),
        "changes": lm_head.changes(run["modules"]),
        "cumulative": lm_head.changes(run["modules"], "cumulative_change"),
        "gate": lm_head.gate(run["updates"]),
        "reuse": lm_head.reuse(run["updates"]),
        "signals": lm_head.signals(run["updates"]),
        "success": curves.success(run["evals"], run["steps"]),
        "health": curves.health(run["steps"]),
    }


def texts(value) -> list[str]:
    """Every string anywhere in plain data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in texts(v)]
    return [t for v in value for t in texts(v)] if isinstance(value, list) else []


def test_every_figure_has_title_units_and_plain_data(run, chosen):
    for name, fig in every_figure(run, *chosen).items():
        spec = display.spec(fig)
        text = json.dumps(spec, allow_nan=False)
        assert "bdata" not in text, f"{name}: packed arrays, which older renderers cannot draw"
        assert fig.layout.meta["title"].endswith("?"), f"{name}: the title asks its question"
        assert fig.layout.width == style.WIDTH and 150 < fig.layout.height < 1200, name
        assert len(text) < 400_000, name
        axes = [a.title.text for pick in (fig.select_xaxes, fig.select_yaxes) for a in pick() if a.title.text]
        assert axes or name == "transcript" or name.startswith("cells"), f"{name}: no axis title"


# Beliefs


def test_paths_start_at_the_prior_and_end_at_prior_plus_revisions(run, chosen):
    step, group, _ = chosen
    fig = beliefs.paths(run["turns"], run["episodes"], step, group)
    rows = run["turns"].filter(pl.col("step") == step, pl.col("group") == group)
    drawn = {t.meta["episode"]: t for t in fig.data if t.meta}
    assert sorted(drawn) == sorted(rows["episode"].unique())
    for episode, trace in drawn.items():
        mine = rows.filter(pl.col("episode") == episode).sort("turn")
        assert list(trace.x) == list(range(mine.height + 1))
        assert trace.y[0] == mine["belief_before"][0]
        assert trace.y[-1] == pytest.approx(mine["belief_before"][0] + mine["revision"].sum())
        assert [s == "diamond" for s in trace.marker.symbol[1:]] == (mine["z"].abs() > 1).to_list()
    colours = {t.line.color for t in drawn.values() if t.meta["outcome"]}
    assert colours == {style.SUCCESS}


def test_beliefs_need_no_texts(run, chosen):
    step, group, episode = chosen
    turns = run["turns"].drop("observation", "action")
    fig = beliefs.transcript(turns, run["episodes"], step, episode)
    assert set(fig.data[0].cells.values[1]) == {""}
    assert beliefs.paths(turns, run["episodes"], step, group).data
    assert beliefs.turn_bars(turns, run["episodes"], step, episode).data


def test_revision_bars_are_signed_and_pivotal_ones_flagged(run, chosen):
    step, group, episode = chosen
    fig = beliefs.revisions(run["turns"], run["episodes"], step, group)
    trace = next(t for t in fig.data if t.meta and t.meta["episode"] == episode)
    mine = run["turns"].filter(pl.col("step") == step, pl.col("episode") == episode).sort("turn")
    assert list(trace.y) == mine["revision"].to_list()
    assert [t == "◆" for t in trace.text] == (mine["z"].abs() > 1).to_list()
    top = int(mine["z"].abs().arg_max())
    assert style.escape(mine["action"][top]) in trace.hovertext[top] and "pivotal" in trace.hovertext[top]


def test_the_chosen_episode_is_a_success_with_the_clearest_pivotal_turn(run, chosen):
    step, group, episode = chosen
    rows = run["turns"].join(run["episodes"].select("step", "episode", "outcome"), on=["step", "episode"])
    late = rows.filter(pl.col("step") >= 6, pl.col("outcome") == 1, pl.col("z") > 1, pl.col("valid"))
    mine = late.filter(pl.col("step") == step, pl.col("episode") == episode)
    assert mine["revision"].max() == late["revision"].max() > 0
    assert rows.filter(pl.col("step") == step, pl.col("episode") == episode)["group"][0] == group
    assert beliefs.choose(run["turns"], run["episodes"], step, -1, episode) == chosen
    step, group = beliefs.pick_group(run["turns"], run["episodes"])
    outcomes = run["episodes"].filter(pl.col("step") == step, pl.col("group") == group)["outcome"]
    assert outcomes.n_unique() == 2 and step >= 6


def test_choices_that_do_not_exist_are_told_in_one_line(run):
    turns, episodes = run["turns"], run["episodes"]
    with pytest.raises(WorkbenchError, match="no step 99 here; nearest is 8"):
        beliefs.paths(turns, episodes, 99, 0)
    with pytest.raises(WorkbenchError, match="in group 0, not 2"):
        beliefs.choose(turns, episodes, 8, 2, 1)
    lost = episodes.with_columns(outcome=pl.lit(0))
    with pytest.raises(WorkbenchError, match="no group has both"):
        beliefs.pick_group(turns, lost)
    with pytest.raises(WorkbenchError, match="no group has both"):
        evidence.saturation(turns, lost)
    step, episode = beliefs.pick_episode(turns, lost)
    assert not turns.filter((turns["step"] == step) & (turns["episode"] == episode)).is_empty()


def test_saturation_counts_turns_of_mixed_groups():
    turns = pl.DataFrame(
        {
            "step": [1] * 6, "episode": [0, 0, 1, 1, 2, 2], "group": [0, 0, 0, 0, 1, 1], "turn": [0, 1] * 3,
            "evidence": [1.0] * 6, "belief_before": [0.5] * 6, "belief": [0.995, 0.5, 0.004, 0.9, 0.999, 0.999],
            "valid": [True] * 6,
            "revision": [0.2, 0.0005, -0.3, 0.3, 0.0, 0.0], "z": [1.5, -0.2, -1.1, 0.9, 2.0, 2.0],
        }
    )  # fmt: skip
    episodes = pl.DataFrame(
        {"step": [1] * 3, "episode": [0, 1, 2], "group": [0, 0, 1], "outcome": [1, 0, 1], "advantage": [1.0, -1.0, 0.0]}
    )
    row = evidence.saturation_frame(turns, episodes).row(0, named=True)
    assert row == {"step": 1, "saturated": 0.5, "tiny": 0.25, "pivotal": 0.5, "turns": 4}
    fig = evidence.saturation(turns, episodes)
    assert [t.y[0] for t in fig.data] == [0.5, 0.25, 0.5]


# Replay by the library's rules


@pytest.fixture(scope="module")
def trained():
    """Tables as the trainer writes them, from a random batch, and the batch."""
    episodes = make_episodes()
    batch = make_batch(episodes, make_gaps(episodes))
    credit = grpo.credit(batch)
    advantage = grpo.group_advantage(batch.reward, batch.group_index)
    names = {
        "old_logprobs": batch.old_logprobs,
        "teacher_logprobs": batch.teacher_logprobs,
        "advantage": credit.advantages,
    }
    rows = dict.fromkeys(run_tables.TOKEN_LISTS) | names
    turns = run_tables.turns_frame(0, episodes, batch, credit, rows, lambda ids: [str(i) for i in ids])
    return turns, run_tables.episodes_frame(0, episodes, advantage, agent_opsd.prior(batch)), batch


@pytest.mark.parametrize("rule", ["sum", "mean", "centred"])
def test_beliefs_computed_again_are_those_of_the_credit_rule(trained, rule):
    turns, episodes, batch = trained
    config = agent_opsd.AgentOPSDConfig(evidence=rule, gamma=0.9)
    want = agent_opsd.credit(batch, config).turns
    got = replay.with_beliefs(turns, episodes, config)
    at = got["episode"].to_numpy(), got["turn"].to_numpy()
    for name in ("evidence", "belief_before", "belief", "revision", "z", "weight", "turn_advantage"):
        assert got[name].to_numpy() == pytest.approx(want[name].numpy()[at], abs=2e-4), name
    assert got["pivotal"].to_list() == want["pivotal"].numpy()[at].tolist()


def test_a_run_of_another_method_is_read_by_agent_opsd_and_sdar(trained):
    turns, episodes, _ = trained
    assert not replay.has_beliefs(turns)
    read = replay.beliefs_of(turns, episodes)
    step, group = beliefs.pick_group(read, episodes)
    assert beliefs.paths(read, episodes, step, group).data
    assert "computed again" in words.belief_source(turns, -1.0)
    gap = (np.array(turns["teacher_logprobs"].explode()) - np.array(turns["old_logprobs"].explode())).astype(float)
    for beta in (0.0, 2.0, 5.0):
        gate = replay.with_gate(turns, beta)["gate"].explode().to_numpy()
        assert gate == pytest.approx(1 / (1 + np.exp(-beta * gap)), abs=1e-6)
    assert replay.with_gate(turns)["gate"].explode().to_numpy() == pytest.approx(gate)


def test_recorded_beliefs_are_left_alone_and_match_the_paper_rule(run):
    turns, episodes = run["turns"], run["episodes"]
    assert replay.beliefs_of(turns, episodes) is turns
    again = replay.beliefs_of(turns, episodes, 0.95)
    both = turns.join(again, on=["step", "episode", "turn"])
    for name in ("evidence", "belief", "revision", "z", "weight", "turn_advantage"):
        assert both[f"{name}_right"].to_numpy() == pytest.approx(both[name].to_numpy(), abs=1e-9), name
    faded = replay.beliefs_of(turns, episodes, 0.5)
    assert not np.allclose(faded["belief"], again["belief"])


def test_evidence_rules_are_compared_with_the_sum(run, chosen):
    step, _, episode = chosen
    rules = evidence.by_rule(run["turns"], run["episodes"])
    frame = evidence.summary(rules)
    assert frame["rule"].to_list() == ["sum", "mean", "centred"]
    assert frame.row(0, named=True)["same_sign"] == frame.row(0, named=True)["same_top"] == 1
    mean = rules["mean"].filter(pl.col("step") == step, pl.col("episode") == episode)
    assert mean["evidence"].to_list() == pytest.approx([sum(g) / len(g) for g in mean["gap"]])
    said = " ".join(evidence.sentences(frame))
    assert style.percent(frame["saturated"][0]) in said and style.percent(frame["same_top"][2]) in said


# Tokens and gates


def test_cells_show_every_token_once_with_its_gate(run, chosen):
    step, _, episode = chosen
    fig = tokens.cells(run["turns"], step, episode, beta=5.0)
    mine = run["turns"].filter(pl.col("step") == step, pl.col("episode") == episode).sort("turn")
    cells, gap = fig.data[0], np.array(mine["gap"].explode())
    assert list(cells.text) == [style.escape(tokens.show_piece(p)) for p in mine["pieces"].explode()]
    assert list(cells.customdata) == pytest.approx((1 / (1 + np.exp(-5 * gap))).tolist())
    assert list(cells.marker.color) == [style.shade(g, style.DIVERGING) for g in cells.customdata]
    for place, token_id in enumerate(mine["token_ids"].explode()):
        assert f"id {token_id}," in cells.hovertext[place]
    signed = tokens.cells(run["turns"], step, episode, color="gap").data
    assert signed[1].marker.cmin == -signed[1].marker.cmax, "signed quantities are centred at zero"


def test_cells_wrap_within_the_page_and_do_not_overlap(run):
    turns = run["turns"].head(1).with_columns(
        pieces=pl.Series([[" word"] * 90]), token_ids=pl.Series([list(range(90))]),
        **{c: pl.Series([[-0.5] * 90]) for c in run_tables.TOKEN_LISTS},
    )  # fmt: skip
    step, episode = turns["step"][0], turns["episode"][0]
    fig = tokens.cells(turns, step, episode)
    cells, wide = fig.data[0], fig.layout.xaxis.range[1]
    assert len(set(cells.y)) > 3
    ends = [b + w for b, w in zip(cells.base, cells.x, strict=True)]
    assert max(ends) <= wide
    for i in range(1, 90):
        assert cells.y[i] > cells.y[i - 1] or cells.base[i] >= ends[i - 1]
    short = tokens.cells(turns, step, episode, limit=20)
    assert len(short.data[0].y) == 20 and "last 70 tokens are not drawn" in short.layout.meta["subtitle"]


def test_pieces_are_made_visible():
    assert [tokens.show_piece(p) for p in ("Ġtake", "▁cup", "\n", " ", "", "a\nb")] == [
        "take",
        "cup",
        "⏎",
        "␣",
        "∅",
        "a⏎b",
    ]


def test_coefficients_are_minus_advantage_and_minus_coef_gate(run, chosen):
    step, _, episode = chosen
    fig = tokens.coefficients(run["turns"], step, episode, beta=5.0, coef=0.01)
    mine = run["turns"].filter(pl.col("step") == step, pl.col("episode") == episode).sort("turn")
    gap = np.array(mine["gap"].explode())
    assert list(fig.data[0].y) == pytest.approx([-a for a in mine["advantage"].explode()])
    assert list(fig.data[1].y) == pytest.approx((-0.01 / (1 + np.exp(-5 * gap))).tolist())
    assert max(fig.data[1].y) < 0, "the gated loss only ever raises a sampled token's probability"
    assert list(fig.data[2].y) == pytest.approx(mine["dloss_dlogp"].explode().to_list())


def test_gap_distribution_and_training_curves_add_up(run):
    turns, episodes = run["turns"], run["episodes"]
    rows = turns.join(episodes.select("step", "episode", "outcome"), on=["step", "episode"]).explode("gap")
    fig = gates.gap_distribution(turns, episodes, beta=5.0)
    for trace, outcome in zip(fig.data, (1, 0), strict=False):
        gap = rows.filter(pl.col("outcome") == outcome)["gap"]
        limit = fig.data[2].x[-1]
        inside = (gap.abs() <= limit).mean()
        assert sum(y or 0 for y in trace.y) == pytest.approx(inside, abs=1e-3)
        assert f"{len(gap):,} tokens" in trace.name
    middle = fig.data[2].y[len(fig.data[2].y) // 2]
    assert middle == pytest.approx(0.5, abs=0.02), "a gap of zero is a gate of one half"
    frame = gates.over_training_frame(turns, episodes, beta=5.0)
    last = rows.filter(pl.col("step") == frame["step"][-1])["gap"]
    assert frame["gate_active"][-1] == pytest.approx((last > 0).mean())
    assert frame["gap_mean"][-1] == pytest.approx(last.mean())
    assert gates.over_training_frame(turns, episodes, beta=0.0)["gate_active"].to_list() == [0.0] * frame.height


# The output head


def head_modules(tied: bool) -> pl.DataFrame:
    names = [
        ("embed", -1, 0.08),
        ("a", 0, 0.01),
        ("b", 0, 0.02),
        ("c", 1, 0.03),
        ("norm", 2, 0.03),
        ("lm_head", 2, 0.06),
    ]
    rows = [
        {
            "step": u, "update": u, "reuse": 1, "module": n, "layer": layer, "is_head": n == "lm_head",
            "tied": tied and n in ("embed", "lm_head"), "params": 10, "grad_norm": 1.0,
            "relative_change": c * u, "cumulative_change": 2 * c * u,
        }
        for u in (1, 2)
        for n, layer, c in names
    ]  # fmt: skip
    return pl.DataFrame(rows)


def test_head_ratio_is_against_the_median_of_what_does_not_share_its_weights():
    loose, tied = (lm_head.head_ratio(head_modules(t)) for t in (False, True))
    assert loose["head"].to_list() == [0.06, 0.12]
    assert loose["ratio"].to_list() == pytest.approx([2.0, 2.0])
    assert tied["median"].to_list() == pytest.approx([0.025, 0.05]), "the tied embedding is the head itself"
    assert lm_head.head_ratio(head_modules(False), "cumulative_change")["head"].to_list() == [0.12, 0.24]
    fig = lm_head.changes(head_modules(True))
    assert "tied to the input embedding" in fig.layout.meta["subtitle"]
    lines = {t.name: list(t.y) for t in fig.data if t.yaxis in (None, "y")}
    assert lines["lm_head"] == [0.06, 0.12] and lines["layer 1"] == [0.015, 0.03] and "embedding" not in lines
    assert "not tied" in lm_head.changes(head_modules(False)).layout.meta["subtitle"]


def test_gate_figure_marks_every_decision(run):
    updates = run["updates"]
    fig = lm_head.gate(updates)
    gone = updates.filter(~pl.col("applied"))
    assert gone.height > 0
    for axis, name in (("y", "energy"), ("y2", "increment"), ("y3", "z")):
        marks = [t for t in fig.data if t.mode == "markers" and (t.yaxis or "y") == axis]
        assert sum(len(t.x) for t in marks) == updates.height
        dropped = next(t for t in marks if t.name.startswith("discarded"))
        assert list(dropped.x) == gone["update"].to_list() and list(dropped.y) == gone[name].to_list()
    assert f"discarded ({gone.height})" in {t.name for t in fig.data}
    frame = lm_head.reuse_frame(updates)
    assert frame["applied"].sum() == updates["applied"].sum() and frame["discarded"].sum() == gone.height
    assert [sum(t.y) for t in lm_head.reuse(updates).data] == [updates["applied"].sum(), gone.height]


def test_updates_can_be_windowed(run):
    part = lm_head.window(run["updates"], 3, 7)
    assert part["update"].to_list() == [3, 4, 5, 6, 7]
    with pytest.raises(WorkbenchError, match="no update from 500 to -1 in this run; it has 1 to"):
        lm_head.window(run["updates"], 500)


# Curves


def test_wilson_interval():
    assert curves.wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-5)
    assert curves.wilson(0, 20)[0] == 0 and curves.wilson(20, 20)[1] == 1
    assert curves.wilson(0, 0) == (0, 1)


def test_success_curve_matches_the_games_played(run):
    evals = run["evals"]
    fig = curves.success(evals, run["steps"])
    trace = next(t for t in fig.data if t.name and t.name.startswith("heldout (n"))
    want = (
        evals.filter(pl.col("panel") == "heldout", pl.col("role") == "student")
        .group_by("step")
        .agg(pl.col("outcome").mean())
    )
    assert dict(zip(trace.x, trace.y, strict=True)) == dict(want.rows())
    assert {t.name.split(" (n")[0] for t in fig.data if t.name} >= {
        "heldout",
        "unseen",
        "heldout, teacher",
        "training rollouts",
    }


def test_the_training_curve_counts_tasks_alike_whatever_the_size_of_their_groups(run):
    steps = run["steps"]
    uneven = steps.with_columns((pl.col("success") / 2).alias("success_tasks"))
    for frame, column in ((steps, "success"), (uneven, "success_tasks")):
        trace = next(t for t in curves.success(run["evals"], frame).data if t.name == "training rollouts")
        assert list(trace.y) == frame[column].to_list()


# What is not there


def test_a_run_without_teacher_says_so_in_one_line(plain):
    turns, episodes = plain["turns"], plain["episodes"]
    for attempt in (
        lambda: beliefs.choose(turns, episodes), lambda: beliefs.paths(turns, episodes, 1, 0),
        lambda: beliefs.transcript(turns, episodes, 1, 0), lambda: replay.beliefs_of(turns, episodes),
        lambda: evidence.by_rule(turns, episodes), lambda: tokens.cells(turns, 1, 0),
        lambda: tokens.coefficients(turns, 1, 0),
        lambda: gates.gap_distribution(turns, episodes), lambda: gates.over_training(turns, episodes),
    ):  # fmt: skip
        with pytest.raises(WorkbenchError) as caught:
            attempt()
        assert "teacher" in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_without_gate_or_distillation_still_has_its_other_figures(plain):
    names = {t.name for t in curves.health(plain["steps"]).data}
    assert "policy loss" in names and "distillation loss" not in names and "teacher gap (nats)" not in names
    gate = lm_head.gate(plain["updates"])
    assert "No gate scored this run" in gate.layout.meta["subtitle"]
    assert not any(t.name and t.name.startswith("discarded") for t in gate.data)
    assert {t.yaxis or "y" for t in gate.data} == {"y", "y2"}, "no panel for scores that are not there"
    assert lm_head.signals(plain["updates"]).data and lm_head.changes(plain["modules"]).data
    with pytest.raises(WorkbenchError, match="no column relative_change"):
        lm_head.changes(plain["modules"].drop("relative_change"))
    with pytest.raises(WorkbenchError, match="no rows"):
        curves.success(plain["evals"].clear())


# Display


HOSTILE = (
    '</script><img src=x onerror="alert(1)"> <a href="javascript:alert(2)">go</a> <b>x</b> $x^2$ %{x} '
    "\u202e\u2028 &amp; \\"
)


def assert_quoted(name: str, fig: go.Figure) -> int:
    """No text of a figure is live where it is shown; how many quote HOSTILE."""
    spec, page, quoted = display.spec(fig), display.html(fig), 0
    for text in texts(spec):
        tags = set(re.findall(r"<\s*/?\s*([a-z]+)", text, re.I))
        assert tags <= {"b", "i", "br", "span", "sub", "sup", "extra"}, f"{name}: {text[:200]}"
        assert "<a" not in text and "$x" not in text and "%{x} \ufffd" not in text and "\u202e" not in text, (
            f"{name}: {text[:200]}"
        )
        quoted += "&lt;img" in text or "&lt;/script" in text
    assert page.count("<script") == page.count("</script>") == 2, name
    assert "<img" not in page and "\u2028" not in page, name
    inner = re.search(r'type="application/json"[^>]*>(.*?)</script>', page, re.S)[1]
    assert json.loads(inner) == spec, name
    return quoted


def test_hostile_rollout_text_stays_text(run, chosen):
    step, group, episode = chosen
    here = pl.col("step") == step
    bad = dict(run)
    bad["turns"] = run["turns"].with_columns(
        pl.when(here).then(pl.lit(HOSTILE)).otherwise(pl.col(c)).alias(c) for c in ("action", "observation", "response")
    )
    bad["turns"] = bad["turns"].with_columns(pieces=pl.col("pieces").list.eval(pl.lit(HOSTILE)))
    bad["episodes"] = run["episodes"].with_columns(task=pl.lit(HOSTILE), kind=pl.lit(HOSTILE))
    bad["evals"] = run["evals"].with_columns(panel=pl.lit(HOSTILE), role=pl.lit(HOSTILE))
    figures = every_figure(bad, step, group, episode)
    quoted = sum(assert_quoted(name, fig) for name, fig in figures.items())
    assert quoted > 50


def test_json_in_a_page_cannot_close_its_script():
    fig = go.Figure(go.Scatter(x=[1], y=[1], text=[HOSTILE]))
    page = display.html(fig)
    assert page.count("</script>") == 2 and "<img" not in page and "<!--" not in display.script_json("<!-- </SCRIPT>")
    assert json.loads(display.script_json({"a": HOSTILE})) == {"a": HOSTILE}


def test_show_gives_plotly_and_offline_html_and_setup_gives_the_library_once(run, monkeypatch):
    shown = []
    monkeypatch.setattr(display, "display", lambda data, raw: shown.append(data))
    fig = curves.health(run["steps"])
    display.setup()
    display.show(fig)
    display.say("a <b> & c", "second")
    library, figure, said = shown
    assert set(figure) == {"application/vnd.plotly.v1+json", "text/html", "text/plain"}
    assert figure["text/plain"] == "Did training stay healthy?"
    assert figure["application/vnd.plotly.v1+json"]["config"]["showSendToCloud"] is False
    assert figure["text/html"].startswith('<div data-workbench-figure="1"') and len(figure["text/html"]) < 60_000
    assert library["text/html"].startswith('<div data-workbench-figure="plotly.js"')
    assert len(library["text/html"]) > 3e6 and "window.Plotly" in library["text/html"]
    assert library["text/html"].count("</script>") == 1
    for data in (figure, said):
        assert "http" not in data["text/html"] and "cdn" not in data["text/html"]
    assert "a &lt;b&gt; &amp; c" in said["text/html"] and said["text/plain"] == "a <b> & c\nsecond"
    one, other = display.html(fig), display.html(fig)
    ids = [re.search(r'id="(workbench-figure-[^"]+)"', h)[1] for h in (one, other)]
    assert ids[0] != ids[1], "the same figure twice in a page needs two places"


def test_figures_survive_export_to_html(run):
    import nbformat
    from nbconvert import HTMLExporter

    library = {"text/html": '<div data-workbench-figure="plotly.js"><script>window.Plotly = {};</script></div>'}
    fig = curves.health(run["steps"])
    outputs = [nbformat.v4.new_output("display_data", data=d) for d in (library, display.bundle(fig))]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show(fig)", outputs=[o]) for o in outputs])
    page, _ = HTMLExporter().from_notebook_node(notebook)
    inner = re.search(r'<script[^>]*id="workbench-figure-[^"]+-json"[^>]*>(.*?)</script>', page, re.S)
    assert json.loads(inner[1])["layout"]["meta"]["title"] == "Did training stay healthy?"
    assert page.index("window.Plotly = {}") < page.index("window.Plotly.newPlot")


# Style


def test_text_and_numbers():
    assert style.percent(0.004) == "0.4 %" and style.percent(0.0) == "0 %" and style.percent(0.5) == "50 %"
    assert style.flat_axis([0.0, 1e-13, None])["tickvals"] == [0.0] and style.flat_axis([1.0, 2.0]) == {}
    assert style.number(-0.5, "+.2f") == "−0.50" and style.number(None) == "–" == style.number(math.nan)
    assert style.wrap("a" * 5 + " <b>", 6) == "aaaaa<br>&lt;b&gt;"
    assert style.wrap("one two three four", 4, 2).endswith("…") and style.wrap("") == "–"
    assert style.shorten("a\n b  c", 10) == "a b c" and len(style.shorten("x" * 50, 10)) == 10
    assert style.diverging(0.0, 1.0) == style.DIVERGING[2][1] and style.diverging(None, 1.0) == "#eceef0"
    assert style.diverging(5.0, 1.0) == style.DIVERGING[-1][1]
    ticks = style.log_ticks([0.002, 0.05])
    assert ticks["ticktext"] == ["0.002", "0.005", "0.01", "0.02", "0.05"]
    assert ticks["range"][0] < math.log10(0.002) and ticks["range"][1] > math.log10(0.05)


def test_words_quote_the_numbers_of_the_tables(run, chosen):
    step, group, episode = chosen
    turns, episodes = run["turns"], run["episodes"]
    mine = turns.filter(pl.col("step") == step, pl.col("episode") == episode, pl.col("z").abs() > 1)
    top = mine.sort(pl.col("revision").abs(), descending=True).row(0, named=True)
    said = " ".join(words.episode(turns, episodes, step, episode))
    assert f"number {top['turn'] + 1}, “{top['action']}”" in said and style.number(top["evidence"], "+.2f") in said
    won = episodes.filter(pl.col("step") == step, pl.col("group") == group)["outcome"].sum()
    paths = turns.sort("turn").group_by("step", "group", "episode").agg("belief")
    paths = paths.join(episodes.select("step", "episode", "outcome"), on=["step", "episode"])
    above = []
    for _, part in paths.group_by("step", "group"):
        for a in part.filter(outcome=1)["belief"]:
            for b in part.filter(outcome=0)["belief"]:
                last = min(len(a), len(b)) - 1
                above.append((a[last] > b[last]) + 0.5 * (a[last] == b[last]))
    assert words.order(turns, episodes) == (pytest.approx(np.mean(above)), len(above))
    assert f"{np.mean(above):.0%}".replace("%", " %") in words.trust(turns, episodes)[0]
    assert words.group(turns, episodes, step, group)[0].startswith(f"{won} of 8 episodes")
    assert "2.00 times per update" in words.head(head_modules(False))[0]
    gap = words.gap(turns, episodes, 5.0)
    assert "tells something of the outcome" in gap[1]
    shuffled = episodes.with_columns(outcome=pl.Series(np.random.default_rng(0).integers(0, 2, episodes.height)))
    assert "tells little" in words.gap(turns, shuffled, 5.0)[1]
