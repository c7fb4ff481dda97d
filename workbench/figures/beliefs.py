"""Which turns moved the belief in success? Paths, revisions and pivotal turns of AgentOPSD (arXiv 2608.05987).

The belief B_k is relative support for success, not a calibrated probability (the paper's App. A.1 says so). A turn is
called pivotal where |z| > 1, z being its aligned revision standardised over the turns of its own episode; the paper
names no threshold, this one is a reading aid.
"""

import math

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from . import style

NEEDS = ["evidence", "belief_before", "belief", "revision", "z"]
NO_BELIEF = (
    "beliefs need a teacher: record with a method that has one, or recompute them with figures.replay.with_beliefs"
)
KEY = ["step", "episode"]


def outcomes(turns: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    heads = episodes.select(*KEY, "outcome", pl.col("advantage").alias("episode_advantage"))
    return turns.join(heads, on=KEY, how="left")


def _late(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of the last third of the recorded steps, where the policy has learnt something; all of them if few."""
    steps = frame["step"].unique().sort().to_list()
    return frame.filter(pl.col("step") >= steps[(2 * len(steps)) // 3]) if len(steps) > 2 else frame


def pick_group(turns: pl.DataFrame, episodes: pl.DataFrame, step: int = -1) -> tuple[int, int]:
    """(step, group) of the group with both outcomes whose episodes hold the largest revisions, late steps preferred.

    It is a choice of what is worth looking at, not of what is typical. WorkbenchError where no group is mixed.
    """
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    scored = (
        outcomes(turns, episodes)
        .group_by("step", "group", "episode")
        .agg(pl.col("outcome").first(), pl.col("revision").abs().max().alias("largest"))
        .group_by("step", "group")
        .agg(pl.col("outcome").n_unique().alias("outcomes"), pl.col("largest").mean())
    )
    scored = style.pick(scored, "turns", step=step) if step >= 0 else scored
    mixed = scored.filter(pl.col("outcomes") > 1, pl.col("largest").is_not_null())
    style.need(mixed, [], "episodes", "no group has both a success and a failure, so no turn earned any credit")
    best = _late(mixed).sort(["largest", "step", "group"], descending=[True, True, False])
    return best["step"][0], best["group"][0]


def pick_episode(turns: pl.DataFrame, episodes: pl.DataFrame, step: int = -1, group: int = -1) -> tuple[int, int]:
    """(step, episode) of the success with the clearest pivotal turn: of valid actions with z > 1, the one that raised
    the belief most. Late steps are preferred. Where no turn is such, any that raised a success's belief may decide, and
    where nothing succeeded, the turn that moved a failure's belief most.

    Like `pick_group` it picks what is worth looking at, not what is typical.
    """
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    for name, value in (("step", step), ("group", group)):
        turns = style.pick(turns, "turns", **{name: value}) if value >= 0 else turns
    raised = outcomes(turns, episodes).filter(pl.col("outcome") == 1, pl.col("revision") > 0)
    if raised.is_empty():
        moved = _late(turns).sort([pl.col("revision").abs(), "step", "episode"], descending=True)
        return moved["step"][0], moved["episode"][0]
    clear = raised.filter(pl.col("z") > 1, pl.col("valid"))
    best = _late(raised if clear.is_empty() else clear).sort(["revision", "step", "episode"], descending=True)
    return best["step"][0], best["episode"][0]


def choose(
    turns: pl.DataFrame, episodes: pl.DataFrame, step: int = -1, group: int = -1, episode: int = -1
) -> tuple[int, int, int]:
    """(step, group, episode) to look at, -1 meaning free: a given episode, else the one that `pick_episode` finds.

    A given episode without a step is looked for at the last recorded step. WorkbenchError where there is no such one.
    """
    if episode >= 0:
        step = turns["step"].max() if step < 0 else step
        rows = style.pick(turns, "turns", step=step, episode=episode)
        if group >= 0 and rows["group"][0] != group:
            raise WorkbenchError(f"turns: episode {episode} of step {step} is in group {rows['group'][0]}, not {group}")
        return step, rows["group"][0], episode
    step, episode = pick_episode(turns, episodes, step, group)
    return step, style.pick(turns, "turns", step=step, episode=episode)["group"][0], episode


def top_turn(turns: pl.DataFrame, step: int, episode: int) -> int:
    """The most pivotal turn of an episode: of those with |z| > 1 the one with the largest |dB|, the first of equals."""
    rows = style.pick(turns, "turns", step=step, episode=episode).with_columns(
        (pl.col("z").abs() > 1).alias("_pivotal")
    )
    by = [pl.col("_pivotal"), pl.col("revision").abs(), pl.col("turn")]
    return rows.sort(by, descending=[True, True, False], nulls_last=True)["turn"][0]


def hover(row: dict) -> str:
    """What a turn was, for a hover label."""
    head = f"<b>turn {row['turn'] + 1}</b> of episode {row['episode']}"
    flag = "  ◆ pivotal" if row["z"] is not None and abs(row["z"]) > 1 else ""
    return (
        f"{head}{flag}<br>action: <b>{style.wrap(row.get('action'), 60, 3)}</b><br>"
        f"evidence e = {style.number(row['evidence'])} nats<br>"
        f"belief {style.number(row['belief_before'], '.3f')} → {style.number(row['belief'], '.3f')}, "
        f"ΔB = {style.number(row['revision'])}, z = {style.number(row['z'], '+.2f')}<br>"
        f"<span style='color:{style.MUTED}'>saw: {style.wrap(row.get('observation'), 64, 4)}</span>"
    )


def _pivotal(z: float | None) -> bool:
    return z is not None and abs(z) > 1


def paths(
    turns: pl.DataFrame, episodes: pl.DataFrame, step: int, group: int, highlight: int = -1, note: str = ""
) -> go.Figure:
    """Belief of every episode of one group over its turns, from the shared prior B_0 to the last turn.

    Colour is the outcome, a diamond a pivotal turn; `highlight` thickens one episode.
    """
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    rows = style.pick(outcomes(turns, episodes), "turns", step=step, group=group).sort("episode", "turn")
    fig, counts, longest = go.Figure(), {1: 0, 0: 0}, rows["turn"].max() + 1
    for episode, part in rows.group_by("episode", maintain_order=True):
        data = part.to_dicts()
        won, shown = data[0]["outcome"], episode[0] == highlight
        colour = style.mix(style.SUCCESS if won else style.FAILURE, "#ffffff", 0.0 if shown or highlight < 0 else 0.3)
        pivotal = [False] + [_pivotal(r["z"]) for r in data]
        fig.add_scatter(
            x=[0] + [r["turn"] + 1 for r in data],
            y=[data[0]["belief_before"]] + [r["belief"] for r in data],
            mode="lines+markers",
            name="succeeded" if won else "failed",
            legendgroup=str(won),
            showlegend=not counts[won],
            legendrank=2 - won,
            line=dict(color=colour, width=4.5 if shown else 1.8),
            marker=dict(
                symbol=["diamond" if p else "circle" for p in pivotal],
                size=[12 if p else 6 for p in pivotal],
                color=colour,
                line=dict(color="#ffffff", width=1.2),
                opacity=1,
            ),
            hovertext=[f"prior B<sub>0</sub> = {data[0]['belief_before']:.3f}"] + [hover(r) for r in data],
            hoverinfo="text",
            meta=dict(episode=episode[0], outcome=won),
        )
        counts[won] += 1
    for trace in fig.data:
        trace.name = f"{trace.name} ({counts[trace.meta['outcome']]})"
    fig.add_scatter(
        x=[None],
        y=[None],
        mode="markers",
        name="pivotal turn, |z| > 1",
        marker=dict(symbol="diamond", size=10, color=style.MUTED),
    )
    prior = rows["belief_before"].filter(rows["turn"] == 0)[0]
    fig.add_hline(y=prior, line=dict(color=style.MUTED, width=1, dash="dot"))
    fig.add_annotation(
        x=longest + 0.1,
        y=prior,
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        text=f"prior B<sub>0</sub> = {prior:.2f}",
        font=dict(size=12, color=style.MUTED),
    )
    task = episodes.filter(pl.col("step") == step, pl.col("group") == group)["task"][0]
    style.dress(
        fig,
        "When did each episode gain or lose support for success?",
        f"Step {step}, group {group} ({task}): {counts[1]} of {sum(counts.values())} episodes succeeded, "
        f"and every path starts from that rate. {note}",
        height=360,
    )
    fig.update_xaxes(title_text="turns played", range=[-0.15, longest + 0.15], dtick=1 if longest < 20 else 5)
    fig.update_yaxes(title_text="belief B (0 to 1, relative support)", range=[-0.03, 1.03])
    return fig


def _bar_colour(revision: float | None, pivotal: bool) -> str:
    colour = style.SUCCESS if (revision or 0) >= 0 else style.FAILURE
    return colour if pivotal else style.mix(colour, "#ffffff", 0.55)


def revisions(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, group: int, columns: int = 4) -> go.Figure:
    """Revisions dB_k of every episode of one group, a small panel each: signed bars, pivotal ones in full colour."""
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    rows = style.pick(outcomes(turns, episodes), "turns", step=step, group=group).sort("episode", "turn")
    parts = [(e[0], p.to_dicts()) for e, p in rows.group_by("episode", maintain_order=True)]
    lines = math.ceil(len(parts) / columns)
    fig = make_subplots(
        lines,
        min(columns, len(parts)),
        shared_yaxes=True,
        shared_xaxes=True,
        horizontal_spacing=0.025,
        vertical_spacing=0.16 / lines,
        subplot_titles=[f"episode {e} · {'won' if d[0]['outcome'] else 'failed'}" for e, d in parts],
    )
    for i, (episode, data) in enumerate(parts):
        flags = [_pivotal(r["z"]) for r in data]
        fig.add_bar(
            x=[r["turn"] + 1 for r in data],
            y=[r["revision"] for r in data],
            width=0.75,
            hoverinfo="text",
            marker=dict(color=[_bar_colour(r["revision"], p) for r, p in zip(data, flags, strict=True)]),
            hovertext=[hover(r) for r in data],
            text=["◆" if p else "" for p in flags],
            textposition="outside",
            textfont=dict(size=9, color=style.INK),
            cliponaxis=False,
            showlegend=False,
            meta=dict(episode=episode),
            row=i // columns + 1,
            col=i % columns + 1,
        )
    keys = (
        (_bar_colour(s, p), f"{'raised' if s > 0 else 'lowered'} belief{', pivotal ◆' if p else ''}")
        for s in (1, -1)
        for p in (1, 0)
    )
    for colour, name in keys:
        fig.add_bar(x=[None], y=[None], name=name, marker=dict(color=colour), row=1, col=1)
    limit = max(abs(v) for v in rows["revision"].fill_null(0).to_list()) * 1.25 or 1
    style.dress(
        fig,
        "Which turns moved the belief, and which way?",
        f"Step {step}, group {group}. Each bar is one turn's revision ΔB = B(k) − B(k−1); hover for the action. "
        "z is standardised within an episode, so an episode of near-equal revisions has pivotal turns too.",
        height=165 * lines,
        panel_titles=True,
        bottom=54,
    )
    style.panel_titles(fig)
    fig.update_layout(barmode="overlay")
    fig.update_yaxes(range=[-limit, limit], zeroline=True)
    fig.update_yaxes(title_text="revision ΔB", col=1)
    fig.update_xaxes(showgrid=False, dtick=1 if rows["turn"].max() < 10 else 5)
    fig.update_xaxes(title_text="turn", row=lines)
    return fig


def turn_bars(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, episode: int, note: str = "") -> go.Figure:
    """One episode, a bar a turn beside the action's text: evidence in nats on the left, revision on the right."""
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    data = style.pick(outcomes(turns, episodes), "turns", step=step, episode=episode).sort("turn").to_dicts()
    flags = [_pivotal(r["z"]) for r in data]
    labels = [f"{style.shorten(r.get('action'), 38) or '(no action)'}  <b>{r['turn'] + 1}</b>" for r in data]
    fig = make_subplots(
        1,
        2,
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=["evidence of the turn", "what it did to the belief"],
    )
    for col, name, unit in ((1, "evidence", " nats"), (2, "revision", "")):
        fig.add_bar(
            x=[r[name] for r in data],
            y=[r["turn"] for r in data],
            orientation="h",
            width=0.66,
            hoverinfo="text",
            hovertext=[hover(r) for r in data],
            name=name + unit,
            row=1,
            col=col,
            text=[f"  {style.number(r[name], '+.2f')}  " for r in data],
            textposition="outside",
            textfont=dict(size=12, color=style.INK),
            cliponaxis=False,
            marker=dict(color=[_bar_colour(r[name], p) for r, p in zip(data, flags, strict=True)]),
        )
        values = [r[name] or 0 for r in data]
        room = 0.65 * max(*map(abs, values), 1e-3)
        low, high = (max(0, *(sign * v for v in values)) + room for sign in (-1, 1))
        fig.update_xaxes(range=[-low, high], zeroline=True, row=1, col=col)
    won = data[0]["outcome"]
    style.dress(
        fig,
        "Which of its turns would the rule call pivotal?",
        f"Step {step}, episode {episode}, {'a success' if won else 'a failure'}: belief from "
        f"{data[0]['belief_before']:.2f} to {data[-1]['belief']:.2f}. Full colour and ◆: |z| > 1. {note}",
        height=34 * len(data) + 16,
        legend=False,
        panel_titles=True,
        right=92,
    )
    style.panel_titles(fig)
    for row, pivotal in zip(data, flags, strict=True):
        fig.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            y=row["turn"],
            showarrow=False,
            text=f"  {'◆ ' if pivotal else ''}z = {style.number(row['z'], '+.2f')}",
            font=dict(size=12, color=style.INK if pivotal else style.MUTED),
        )
    fig.update_yaxes(range=[len(data) - 0.4, -0.6], showgrid=False, ticks="")
    fig.update_yaxes(
        tickvals=[r["turn"] for r in data], ticktext=labels, tickfont=dict(family=style.MONO, color=style.INK), col=1
    )
    fig.update_xaxes(title_text="e (nats)", col=1)
    fig.update_xaxes(title_text="ΔB", col=2)
    return fig


def transcript(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, episode: int) -> go.Figure:
    """One episode as a table: what was seen and done, evidence, belief, revision, z and the advantage it was given."""
    style.need(turns, NEEDS, "turns", NO_BELIEF)
    data = style.pick(outcomes(turns, episodes), "turns", step=step, episode=episode).sort("turn").to_dicts()
    mean = data[0]["episode_advantage"]
    seen, did = (
        [style.shorten(r.get(name), width) for r in data] for name, width in (("observation", 146), ("action", 60))
    )
    columns = [
        ("turn", [f"{r['turn'] + 1}{' ◆' if _pivotal(r['z']) else ''}" for r in data], None),
        ("observation", seen, None),
        (
            "action",
            [f"<b>{a}</b>" + ("" if r["valid"] else " (invalid)") for a, r in zip(did, data, strict=True)],
            None,
        ),
        ("e, nats", [style.number(r["evidence"], "+.2f") for r in data], [r["evidence"] for r in data]),
        ("B", [style.number(r["belief"], ".3f") for r in data], None),
        ("ΔB", [style.number(r["revision"]) for r in data], [r["revision"] for r in data]),
        ("z", [style.number(r["z"], "+.2f") for r in data], [r["z"] for r in data]),
        ("A", [style.number(r["turn_advantage"]) for r in data], [(r["turn_advantage"] or 0) - mean for r in data]),
    ]
    white = ["#ffffff"] * len(data)
    fills = [
        white if v is None else [style.mix(style.diverging(x, style.spread(v, 1.0)), "#ffffff", 0.45) for x in v]
        for *_, v in columns
    ]
    fig = go.Figure(
        go.Table(
            columnwidth=[40, 300, 150, 58, 54, 60, 56, 62],
            header=dict(
                values=[f"<b>{n}</b>" for n, *_ in columns],
                align=["left"] * 3 + ["right"] * 5,
                fill_color="#eef1f4",
                line_color=style.GRID,
                height=28,
                font=dict(size=12, color=style.INK),
            ),
            cells=dict(
                values=[v for _, v, _ in columns],
                align=["left"] * 3 + ["right"] * 5,
                fill_color=fills,
                line_color=style.GRID,
                height=24,
                font=dict(size=12, color=style.INK),
            ),
        )
    )
    wide = [(min(len(r.get("observation") or ""), 146) / 49, min(len(r.get("action") or ""), 60) / 21) for r in data]
    lines = [max(1, *map(math.ceil, w)) for w in wide]
    style.dress(
        fig,
        "What was seen, done and credited, turn by turn?",
        f"Step {step}, episode {episode}, {'a success' if data[0]['outcome'] else 'a failure'}. A is the turn's "
        f"advantage; the episode's own, before reshaping, is {style.number(mean)}, and colour is the distance from it. "
        "◆: |z| > 1.",
        height=sum(16 + 16 * n for n in lines) + 34,
        legend=False,
        left=16,
        right=16,
        bottom=10,
    )
    return fig
