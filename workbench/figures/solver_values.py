"""Does the belief move as an exact solver says it should? Distances, solver advantages and beliefs, turn by turn.

The solver's advantage of a turn is CAST's (arXiv 2607.25308): actions left before it less those left after it. The
belief is AgentOPSD's (arXiv 2608.05987): it is raised by a turn that a privileged reader finds likelier. The solver
speaks of best play from there on, the belief of this policy's; where their signs differ, rules that read them credit a
turn against each other.
"""

import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from . import beliefs, style
from .boards import colour_of, said, worth
from .replay import KEY

COLUMNS = ["solver_before", "solver_after", "solver_advantage"]
NO_SOLVER = "the run was recorded without an exact solver: set record_solver to on, in an environment that has one"
TINY = 1e-3  # a belief that moved by less is taken not to have moved
# What a solver calls a turn, from worst to best.
SIDES = ("lost the game", "harmful", "wasted", "progress")


def compared(turns: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    """Turns of groups with both outcomes that have a solver's value and a belief, with `side` (one of SIDES) and
    `differ`: whether solver advantage and revision have opposite signs.

    turns: with beliefs, as figures.replay.beliefs_of gives them. Raises WorkbenchError where a signal was not recorded
    or no group is mixed.
    """
    style.need(turns, COLUMNS, "turns", NO_SOLVER)
    style.need(turns, beliefs.NEEDS, "turns", beliefs.NO_BELIEF)
    rows = beliefs.outcomes(turns, episodes).filter(
        pl.col("outcome").n_unique().over("step", "group") > 1,
        pl.all_horizontal(pl.col(*COLUMNS, "revision").is_not_null()),
    )
    style.need(rows, [], "turns", "no group has both a success and a failure, so every belief is saturated")
    value, dead = pl.col("solver_advantage"), pl.col("solver_after").is_infinite() & (pl.col("solver_advantage") < 0)
    side = pl.when(dead).then(0).when(value < 0).then(1).when(value == 0).then(2).otherwise(3)
    return rows.with_columns(
        side.replace_strict(dict(enumerate(SIDES)), return_dtype=pl.String).alias("side"),
        ((value * pl.col("revision") < 0) & (pl.col("revision").abs() > TINY)).alias("differ"),
    )


def choose(turns: pl.DataFrame, episodes: pl.DataFrame, step: int = -1, episode: int = -1) -> tuple[int, int]:
    """(step, episode) to look at: a given one, else that of `compared` with the most turns that differ, and of those
    the one with the largest revisions. It is worth looking at, not typical."""
    if episode >= 0:
        return beliefs.choose(turns, episodes, step, -1, episode)[::2]
    rows = compared(turns, episodes)
    rows = style.pick(rows, "turns", step=step) if step >= 0 else rows
    apart = pl.col("revision").abs().filter("differ")
    scored = rows.group_by(KEY).agg(pl.col("differ").sum(), apart.sum().alias("by"))
    best = scored.sort(["differ", "by", *KEY], descending=[True, True, True, False])
    return best["step"][0], best["episode"][0]


def agreement(rows: pl.DataFrame) -> dict[str, float | int]:
    """Of `compared` turns: how many, how many have a sign in both signals, the share of those whose signs agree, and
    the mean revision by side (null where there is no such turn)."""
    signed = rows.filter(pl.col("solver_advantage") != 0, pl.col("revision").abs() > TINY)
    means = dict(rows.group_by("side").agg(pl.col("revision").mean()).rows())
    return {
        "turns": rows.height,
        "signed": signed.height,
        "agree": 1 - signed["differ"].mean() if signed.height else None,
    } | {f"revision.{side}": means.get(side) for side in SIDES}


def sentences(rows: pl.DataFrame) -> list[str]:
    """What `agreement` found, in words."""
    found = agreement(rows)
    if not found["signed"]:
        return [f"Of {found['turns']} turns none has a sign in both signals."]
    listed = ", ".join(
        f"{side} {style.number(found[f'revision.{side}'])} ({n} turns)"
        for side, n in rows.group_by("side").len().sort("len", descending=True).rows()
    )
    return [
        f"Solver and belief give a sign each to {found['signed']} of {found['turns']} turns, and the same one to "
        f"{style.percent(found['agree'])} of those.",
        f"Mean revision of the belief, by what the solver calls the turn: {listed}.",
    ]


def along(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, number: int) -> go.Figure:
    """One episode: fewest actions left, the solver's advantage of each turn, and the belief; a band where their signs
    differ. Turns without a belief or a solver's value leave gaps."""
    style.need(turns, COLUMNS, "turns", NO_SOLVER)
    style.need(turns, beliefs.NEEDS, "turns", beliefs.NO_BELIEF)
    data = style.pick(beliefs.outcomes(turns, episodes), "turns", step=step, episode=number).sort("turn").to_dicts()
    head = style.pick(episodes, "episodes", step=step, episode=number).to_dicts()[0]
    fig = make_subplots(
        3,
        1,
        shared_xaxes=True,
        vertical_spacing=0.09,
        row_heights=[0.36, 0.28, 0.36],
        subplot_titles=[
            "actions left to a win, by the solver (none: it sees no way to win)",
            "solver advantage of the turn",
            "belief in success",
        ],
    )
    hover = [_hover(row) for row in data]
    n = len(data)
    left = [data[0]["solver_before"], *(row["solver_after"] for row in data)]
    _distance(fig, left, hover, n)
    fig.add_bar(
        x=list(range(1, n + 1)),
        y=[row["solver_advantage"] for row in data],
        width=0.6,
        marker=dict(color=[colour_of(row["solver_advantage"]) for row in data]),
        text=["" if row["solver_advantage"] is None else worth(row["solver_advantage"]) for row in data],
        textposition="outside",
        textfont=dict(size=12, color=style.INK),
        cliponaxis=False,
        hovertext=hover,
        hoverinfo="text",
        row=2,
        col=1,
    )
    fig.add_scatter(
        x=list(range(n + 1)),
        y=[data[0]["belief_before"], *(row["belief"] for row in data)],
        mode="lines+markers",
        line=dict(color=style.PURPLE, width=2.4),
        marker=dict(size=8),
        hovertext=["before the first turn", *hover],
        hoverinfo="text",
        row=3,
        col=1,
    )
    apart = [turn + 1 for turn in differing(turns, step, number)]
    for turn in apart:
        span = dict(x0=turn - 0.5, x1=turn + 0.5, row="all", col=1)
        fig.add_vrect(fillcolor="#f6d9c4", opacity=0.55, line_width=0, layer="below", **span)
    listed = ", ".join(map(str, apart)) or "none"
    style.dress(
        fig,
        "Where do solver and belief disagree?",
        f"Step {step}, episode {number} ({head['task']}), {'won' if head['outcome'] else 'not won'}. Shaded: turns "
        f"whose solver advantage and revision of the belief have opposite signs ({listed}): rules that read "
        "them credit it against each other. A turn's point is what was left after it.",
        height=430,
        legend=False,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.update_xaxes(range=[-0.3, n + 0.6], tickvals=list(range(n + 1)), showgrid=False)
    labels = ["start", *(f"{row['turn'] + 1} {style.shorten(row['action'], 16)}" for row in data)]
    fig.update_xaxes(ticktext=labels, tickangle=-35 if n > 5 else 0, row=3, col=1)
    values = [row["solver_advantage"] or 0 for row in data]
    room = 0.5 * max(*map(abs, values), 1)
    fig.update_yaxes(title_text="advantage", range=[min(0, *values) - room, max(0, *values) + room], row=2, col=1)
    fig.update_yaxes(zeroline=True, row=2, col=1)
    fig.update_yaxes(title_text="belief B", range=[-0.05, 1.05], row=3, col=1)
    return fig


def differing(turns: pl.DataFrame, step: int, number: int) -> list[int]:
    """The turns of one episode on which solver and belief disagree, from 0."""
    data = style.pick(turns, "turns", step=step, episode=number).sort("turn").to_dicts()
    return [row["turn"] for row in data if differs(row)]


def differs(row: Mapping[str, Any]) -> bool:
    """Whether solver advantage and revision of one turn have opposite signs, neither being next to nothing."""
    value, moved = row["solver_advantage"], row["revision"]
    return value is not None and moved is not None and value * moved < 0 and abs(moved) > TINY


def _distance(fig: go.Figure, left: list[float | None], hover: list[str], n: int) -> None:
    """The first panel. A state without a win is drawn above all others, where the axis says none."""
    known = [v for v in left if v is not None and math.isfinite(v)]
    top = max(known, default=1) + 1.5
    shown = [top if v is not None and math.isinf(v) else v for v in left]
    fig.add_scatter(
        x=list(range(n + 1)),
        y=shown,
        mode="lines+markers",
        line=dict(color=style.INK, width=2.4, shape="linear"),
        marker=dict(
            size=9,
            color=[style.FAILURE if v is not None and math.isinf(v) else style.INK for v in left],
            symbol=["x" if v is not None and math.isinf(v) else "circle" for v in left],
        ),
        hovertext=["before the first turn", *hover],
        hoverinfo="text",
        row=1,
        col=1,
    )
    whole = range(0, math.ceil(top), max(1, round(top / 5)))
    dead = any(v is not None and math.isinf(v) for v in left)
    fig.update_yaxes(
        title_text="actions left",
        range=[-0.6, top + (0.6 if dead else -0.4)],
        tickvals=[*whole, *([top] if dead else [])],
        ticktext=[*map(str, whole), *(["none"] if dead else [])],
        row=1,
        col=1,
    )


def _hover(row: Mapping[str, Any]) -> str:
    return (
        f"<b>turn {row['turn'] + 1}</b>: {style.shorten(row['action'], 40)}{'' if row['valid'] else ' (invalid)'}<br>"
        f"solver: {said(row)}<br>"
        f"belief {style.number(row['belief_before'], '.3f')} → {style.number(row['belief'], '.3f')}, "
        f"ΔB = {style.number(row['revision'])}"
    )


def by_side(rows: pl.DataFrame) -> go.Figure:
    """Revisions of the belief by what the solver calls the turn: a box and its turns for each of SIDES."""
    fig = go.Figure()
    sides = [side for side in SIDES if side in set(rows["side"])]
    for side in sides:
        part = rows.filter(pl.col("side") == side).to_dicts()
        colour = style.MUTED if side == "wasted" else style.SUCCESS if side == "progress" else style.FAILURE
        fig.add_box(
            x=[row["revision"] for row in part],
            name=f"{side}  ({len(part)})",
            orientation="h",
            boxpoints="all",
            jitter=0.6,
            pointpos=0,
            marker=dict(size=4, color=colour, opacity=0.45),
            line=dict(color=style.INK, width=1.4),
            fillcolor="rgba(0,0,0,0)",
            hovertext=[f"step {row['step']}, episode {row['episode']}<br>{_hover(row)}" for row in part],
            hoverinfo="text",
            hoveron="points",
        )
    fig.add_vline(x=0, line=dict(color=style.INK, width=1.2))
    style.dress(
        fig,
        "Does the belief rise on good turns and fall on bad ones?",
        "Turns of groups with both outcomes, by what the exact solver calls them (how many); a box holds the middle "
        "half. A belief that knew the game would lie right of zero for progress and left of it for the others.",
        height=64 * len(sides) + 20,
        legend=False,
        left=140,
    )
    fig.update_xaxes(title_text="revision of the belief, ΔB")
    fig.update_yaxes(showgrid=False, ticks="", tickfont=dict(size=13, color=style.INK))
    return fig
