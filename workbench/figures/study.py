"""A study as a whole: aggregates, chance of improvement, profiles, cost to a target, task types, horizon, budget.

Each figure draws a table of workbench.comparison. Where many methods would lie over one another they have a panel each,
with the control in grey.
"""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from .. import comparison, statistics
from ..collected import Collected
from . import style
from .compare import beside, colours, named_rows
from .curves import band

THRESHOLDS = np.linspace(0, 1, 41)
COLUMNS = 3
UNITS = {"rollouts": "rollouts", "tokens": "tokens", "updates": "updates", "seconds": "seconds", "step": "steps"}
_SHORT = {"seconds": "s"}


def _interval_rows(fig: go.Figure, table: pl.DataFrame, names: Sequence[str], looks: dict, told: str) -> None:
    """A row a label: a thick line from low to high, a dot at the value; names are the columns (value, low, high)."""
    for place, row in enumerate(table.to_dicts()):
        colour, (value, low, high) = looks[row["label"]][0], (row[n] for n in names)
        fig.add_scatter(x=[low, high], y=[place] * 2, mode="lines", line=dict(color=colour, width=5), hoverinfo="skip")
        fig.add_scatter(
            x=[value],
            y=[place],
            mode="markers",
            marker=dict(size=13, color=colour, line=dict(color="#ffffff", width=2)),
            hovertext=[
                f"{style.escape(row['label'])}: {told} {style.percent(value, 1)}<br>"
                f"95 % interval {style.percent(low, 1)} to {style.percent(high, 1)}, {row['runs']} runs"
            ],
            hoverinfo="text",
        )
        beside(fig, place, f"{style.percent(value, 1)} (n = {row['runs']})")


def aggregates(summary: pl.DataFrame, control: str = "grpo") -> go.Figure:
    """Interquartile mean success of each label with its 95 % interval, the control first, a tick at the plain mean."""
    table, fig = summary.sort(pl.col("label") != control, "label"), go.Figure()
    looks = colours(table["label"], control)
    _interval_rows(fig, table, ("iqm", "low", "high"), looks, "interquartile mean")
    fig.add_scatter(
        x=table["success"].to_list(),
        y=list(range(table.height)),
        mode="markers",
        marker=dict(symbol="line-ns", size=18, line=dict(width=1.6, color=style.INK)),
        hovertemplate="plain mean %{x:.1%}<extra></extra>",
    )
    style.dress(
        fig,
        "How good is each method without its luckiest and unluckiest runs?",
        "Interquartile mean of the runs' success on the panel (dot; tick: plain mean), 95 % bootstrap interval over "
        "runs within their warm start and over games.",
        height=max(40 * table.height, 90),
        legend=False,
        right=120,
    )
    reach = [max(0.0, table["low"].min() - 0.04), min(1.0, table["high"].max() + 0.04)]
    fig.update_xaxes(title_text="success rate", tickformat=".0%", range=reach)
    named_rows(fig, table["label"].to_list())
    return fig


def improvement(summary: pl.DataFrame, control: str = "grpo") -> go.Figure:
    """Chance that a run of each label ends above a run of the control, with a 95 % interval."""
    table = summary.filter(pl.col("label") != control).sort("label")
    fig, looks = go.Figure(), colours(summary["label"], control)
    fig.add_vline(x=0.5, line=dict(color=style.INK, width=1.4))
    _interval_rows(fig, table, ("better", "better_low", "better_high"), looks, f"above {style.escape(control)} in")
    style.dress(
        fig,
        f"How likely does a run end above one of {control}?",
        "Share of pairs of runs of one warm start that the method wins, ties half, with a 95 % bootstrap interval. It "
        "says how often, not by how much; with few runs an interval at 100 % is too short.",
        height=max(40 * table.height, 90),
        legend=False,
        right=120,
    )
    fig.update_xaxes(title_text=f"chance to end above {style.escape(control)}", tickformat=".0%", range=[-0.03, 1.03])
    named_rows(fig, table["label"].to_list())
    return fig


def _panels(labels: Sequence[str], titles: Sequence[str]) -> tuple[go.Figure, list[dict]]:
    """A figure with a panel a label, and where each is."""
    lines, columns = _grid(len(labels))
    fig = make_subplots(
        lines,
        columns,
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.05,
        vertical_spacing=min(0.24 / lines, 0.2),
        subplot_titles=list(titles),
    )
    return fig, [_place(i, columns) for i in range(len(labels))]


def _grid(n: int) -> tuple[int, int]:
    columns = min(COLUMNS, n)
    return math.ceil(n / columns), columns


def _place(i: int, columns: int) -> dict:
    return dict(row=i // columns + 1, col=i % columns + 1)


def _dress_panels(fig: go.Figure, n: int, title: str, subtitle: str, x_title: str, x: dict, y: dict) -> go.Figure:
    lines, columns = _grid(n)
    height = 165 * lines if lines > 1 else 240
    style.dress(fig, title, subtitle, height=height, legend=False, panel_titles=True, left=60)
    style.panel_titles(fig)
    fig.update_xaxes(**x, showticklabels=False)
    fig.update_yaxes(**y)
    for i in range(max(0, n - columns), n):
        fig.update_xaxes(showticklabels=True, title_text=x_title, **_place(i, columns))
    for i in range(n, lines * columns):  # a corner without a method
        fig.update_xaxes(visible=False, **_place(i, columns))
        fig.update_yaxes(visible=False, **_place(i, columns))
    return fig


def _shown(labels: Sequence[str], control: str) -> list[str]:
    return sorted(set(labels) - {control}) or [control]


def profiles(
    evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1, of: str = "runs"
) -> go.Figure:
    """Performance profiles: the share of runs (or of games, of="games") above each success rate, with 95 % bands."""
    runs = comparison.matrices(comparison.at_step(evals, panel, step))
    take = statistics.run_profile if of == "runs" else statistics.game_profile
    found = {label: take(games, strata, THRESHOLDS) for label, (games, strata) in runs.items()}
    looks, shown = colours(runs, control), _shown(runs, control)
    fig, places = _panels(shown, [style.shorten(label, 34) for label in shown])
    for label, place in zip(shown, places, strict=True):
        for name in dict.fromkeys((control, label)):
            profile, colour = found[name], looks[name][0]
            x = profile.thresholds.tolist()
            # The share is what lies above x, so it holds until the next threshold and falls there.
            band(fig, *_steps(x, profile.low.tolist(), profile.high.tolist()), colour, style.escape(name), **place)
            fig.add_scatter(
                x=x,
                y=profile.share.tolist(),
                mode="lines",
                line=dict(color=colour, width=2.4, shape="hv"),
                hovertemplate=f"{style.escape(name)}: %{{y:.0%}} of {of} above %{{x:.1%}}<extra></extra>",
                **place,
            )
    what = "success on the panel" if of == "runs" else "runs that win the game"
    title = (
        "Which share of runs gets above a given success?" if of == "runs" else "Which share of games do most runs win?"
    )
    subtitle = f"Higher is better; grey is {control}. Pointwise 95 % bootstrap bands over runs and games."
    y = dict(tickformat=".0%", range=[-0.02, 1.02])
    return _dress_panels(fig, len(shown), title, subtitle, what, dict(range=[0, 1], tickformat=".0%"), y)


def _steps(x: list, *lines: list) -> list[list]:
    """Of a step function that holds to the right, x and each line's values with the corners put in."""
    return [[v for v in x for _ in range(2)][1:], *([v for v in y for _ in range(2)][:-1] for y in lines)]


def targets(
    data: Collected, share: float = comparison.TARGET, panel: str = "", control: str = "grpo"
) -> list[go.Figure]:
    """`target` by rollouts and by seconds, each where every run recorded it; by steps alone where neither was."""
    table = comparison.costs(data, share, panel)
    found = [cost for cost in ("rollouts", "seconds") if table[cost].null_count() == 0] or ["rollouts"]
    return [target(data, share, panel, control, cost) for cost in found]


def target(data: Collected, target: float = comparison.TARGET, panel: str = "", control: str = "grpo",
           cost: str = "rollouts") -> go.Figure:  # fmt: skip
    """Share of runs that reached the target success, by what they had spent (Kaplan-Meier); crosses where a run
    ended without it. cost: one of UNITS; steps, which is said, where some run did not record it."""
    table = comparison.costs(data, target, panel)
    asked, cost = cost, cost if table[cost].null_count() == 0 else "step"
    curves = comparison.to_target(data, target, panel, cost, table)
    looks, shown = colours(curves, control), _shown(curves, control)
    titles = []
    for label in shown:
        got, name, short = curves[label], style.shorten(label, 20), _SHORT.get(cost, UNITS[cost])
        half = f"half by {got.median:,.0f} {short}" if got.median is not None else "not half of them"
        titles.append(f"{name}: {got.reached} of {got.runs}, {half}")
    fig, places = _panels(shown, titles)
    end = float(table[cost].max() or 1)
    for label, place in zip(shown, places, strict=True):
        for name in dict.fromkeys((control, label)):
            got, colour = curves[name], looks[name][0]
            x, y = [0.0, *got.cost.tolist()], [0.0, *(1 - got.waiting).tolist()]
            x, y = [*x, 1.1 * end], [*y, y[-1]]
            fig.add_scatter(
                x=x,
                y=y,
                mode="lines",
                line=dict(color=colour, width=2.4, shape="hv"),
                hovertemplate=f"{style.escape(name)}: %{{y:.0%}} of runs by %{{x:,.0f}} {UNITS[cost]}<extra></extra>",
                **place,
            )
            short = table.filter((pl.col("label") == name) & ~pl.col("reached"))[cost].to_list()
            at = [y[np.searchsorted(x, value, side="right") - 1] for value in short]
            fig.add_scatter(
                x=short,
                y=at,
                mode="markers",
                marker=dict(symbol="x-thin", size=11, line=dict(width=2.4, color=colour)),
                hovertemplate=f"{style.escape(name)}: a run ended at %{{x:,.0f}} {UNITS[cost]} without it"
                "<extra></extra>",
                **place,
            )
    unit = "seconds of training" if cost == "seconds" else UNITS[cost]
    title = f"How many {unit} does it take to succeed in {style.percent(target)} of the games?"
    subtitle = (
        f"Share of runs whose success was at least {style.percent(target)} at an evaluation, by the {UNITS[cost]} "
        f"spent until then; grey is {control}. Crosses: runs that ended without (right-censored)."
    )
    if cost != asked:
        subtitle = f"Not every run recorded {UNITS[asked]}, so steps stand in. {subtitle}"
    y = dict(tickformat=".0%", range=[-0.04, 1.06])
    return _dress_panels(fig, len(shown), title, subtitle, unit, dict(range=[0, 1.1 * end], nticks=5), y)


def kinds(evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> go.Figure:
    """Success by label and task type, coloured by the difference to the control."""
    table = comparison.kinds(evals, control, panel, step)
    labels = [control, *sorted(set(table["label"]) - {control})]
    columns = table.filter(pl.col("label") == control).sort("kind").select("kind", "games").rows()
    cells = {(r["label"], r["kind"]): r for r in table.to_dicts()}
    limit = max(0.1, style.spread(table["difference"].to_list()))
    fig = go.Figure(
        go.Heatmap(
            x=list(range(len(columns))),
            y=list(range(len(labels))),
            z=[[100 * (cells[label, kind]["difference"] or 0) for kind, _ in columns] for label in labels],
            zmin=-100 * limit,
            zmax=100 * limit,
            colorscale=[list(c) for c in style.DIVERGING],
            xgap=2,
            ygap=2,
            showscale=False,
            hoverinfo="skip",
        )
    )
    for i, label in enumerate(labels):
        for k, (kind, _) in enumerate(columns):
            cell = cells[label, kind]
            ink = style.ink_on(style.diverging(cell["difference"], limit))
            apart = (
                ""
                if label == control
                else f' <span style="font-size:10px">{comparison.points(cell["difference"])}</span>'
            )
            text = f"{100 * cell['success']:.0f} %{apart}"
            fig.add_annotation(x=k, y=i, text=text, showarrow=False, font=dict(size=12, color=ink))
    style.dress(
        fig,
        "Which kinds of task does each method win?",
        f"Success over a label's runs; small and by colour: points over {control}. Few games of a kind make "
        "large differences by chance; no interval is drawn and no winner is meant.",
        height=max(32 * len(labels), 90),
        legend=False,
        bottom=76,
    )
    named_rows(fig, labels)
    told = [f"{style.shorten(kind, 16)}<br>{n} games" for kind, n in columns]
    fig.update_xaxes(tickvals=list(range(len(columns))), ticktext=told, showgrid=False, ticks="")
    return fig


def horizon(evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> go.Figure:
    """Success by the turns that a game needs, a panel a label, with the slope in its title."""
    needed = comparison.needed_turns(evals, panel)
    played = comparison.at_step(evals, panel, step)
    rows = played.join(needed, on="task")
    slopes = {r["label"]: r for r in comparison.horizon(evals, panel, step).to_dicts()}
    table = rows.group_by("label", "needed").agg(pl.col("outcome").mean(), pl.col("task").n_unique().alias("games"))
    labels = rows["label"].unique().to_list()
    looks, shown = colours(labels, control), _shown(labels, control)
    titles = []
    for label in shown:
        s = slopes.get(label, dict.fromkeys(("slope", "low", "high")))  # no game was ever won: no row
        between = f"{comparison.points(s['low'])} to {comparison.points(s['high'])}"
        titles.append(f"{style.shorten(label, 18)}: {comparison.points(s['slope'])} ({between})")
    fig, places = _panels(shown, titles)
    for label, place in zip(shown, places, strict=True):
        for name in dict.fromkeys((control, label)):
            part, colour = table.filter(pl.col("label") == name).sort("needed"), looks[name][0]
            fig.add_scatter(
                x=part["needed"].to_list(),
                y=part["outcome"].to_list(),
                mode="lines+markers",
                line=dict(color=colour, width=2),
                marker=dict(size=(5 + 1.2 * part["games"].sqrt()).to_list(), color=colour),
                customdata=part["games"].to_list(),
                hovertemplate=f"{style.escape(name)}: %{{y:.0%}} of %{{customdata}} games that need %{{x}} turns"
                "<extra></extra>",
                **place,
            )
    won, all_games = rows["task"].n_unique(), played["task"].n_unique()
    subtitle = (
        f"Length: the fewest turns in which any run ever won the game; {won} of {all_games} games were won at all. In "
        "the titles: points of success for each further turn, with a 95 % interval. Larger dots: more games; grey is "
        f"{control}."
    )
    x, y = dict(dtick=1 if needed["needed"].n_unique() < 12 else None), dict(tickformat=".0%", range=[-0.05, 1.05])
    title = "How does success fall with the turns a game needs?"
    return _dress_panels(fig, len(shown), title, subtitle, "turns a game needs", x, y)


def budget(table: pl.DataFrame, control: str = "grpo") -> go.Figure:
    """What a run of each label spent: bars of rollouts, tokens, updates and seconds (medians), the control first; the
    figure says so where nothing was recorded."""
    names = comparison.recorded(table)
    labels = [control, *sorted(set(table["label"]) - {control})]
    rows, looks = {r["label"]: r for r in table.to_dicts()}, colours(labels, control)
    heads = dict(rollouts="rollouts drawn", tokens="tokens trained on", updates="updates applied", seconds="seconds")
    fig = make_subplots(
        1, max(len(names), 1), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[heads[n] for n in names]
    )
    for k, name in enumerate(names):
        values = [rows[label][name] for label in labels]
        fig.add_bar(
            x=values,
            y=list(range(len(labels))),
            orientation="h",
            marker=dict(color=[looks[label][0] for label in labels]),
            text=[style.number(v, ",.0f") for v in values],
            textposition="inside",
            insidetextanchor="start",
            hovertemplate=f"%{{x:,.0f}} {heads[name]}<extra></extra>",
            row=1,
            col=k + 1,
        )
    if not names:
        fig.add_annotation(text="These runs recorded no budget.", xref="paper", yref="paper", x=0, y=1, showarrow=False)
    style.dress(
        fig,
        "Did the methods train at one budget?",
        "Medians over a method's runs. Seconds are wall-clock of training without evaluations, on whatever machine and "
        "load the runs had.",
        height=max(28 * len(labels), 90),
        legend=False,
        panel_titles=True,
        bottom=30,
    )
    style.panel_titles(fig)
    named_rows(fig, labels if names else [])
    fig.update_xaxes(showticklabels=False, ticks="", showgrid=False, rangemode="tozero")
    return fig
