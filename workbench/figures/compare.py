"""Which method is better, and is the difference more than chance? Several runs on one panel of games.

Every function takes the evals table of workbench.collected; tables and sentences are those of workbench.comparison.
"""

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go
import polars as pl

from ..comparison import ENOUGH_SEEDS, at_step, differences, on_panel, points
from . import style
from .curves import band, rates

GREY = "#9aa5b1"  # of what names no winner
DASHES = ("solid", "dash", "dot")
_TONES = tuple(c for c in style.SERIES if c != "#5b5b5b")  # grey is the control's
MOST_BANDS = 4  # more methods than this have lines alone


def finals(evals: pl.DataFrame, panel: str = "", step: int = -1) -> pl.DataFrame:
    """A row a run at the last step all share, or `step`: label, model, seed, run, step, n, won, success, low, high."""
    return rates(at_step(evals, panel, step), ("label", "model", "seed", "run", "step"))


def colours(labels: Iterable[str], control: str) -> dict[str, tuple[str, str]]:
    """Colour and dash of each label: the control in grey, the others in the series' colours by name, dashed where those
    come round again."""
    others = sorted(set(labels) - {control})
    looks = {m: (_TONES[i % len(_TONES)], DASHES[i // len(_TONES) % 3]) for i, m in enumerate(others)}
    return {control: (style.MUTED, "solid")} | looks


def named_rows(fig: go.Figure, labels: Sequence[str]) -> None:
    """Name the rows 0, 1, … of a figure from the top, in the ink of text."""
    told = [f"{style.shorten(label, 32)}  " for label in labels]
    names = dict(tickvals=list(range(len(told))), ticktext=told, tickfont=dict(size=13, color=style.INK))
    fig.update_yaxes(range=[len(told) - 0.45, -0.55], showgrid=False, ticks="", **names)


def beside(fig: go.Figure, row: int, text: str) -> None:
    """A number to the right of a row."""
    place = dict(x=1.0, xref="paper", xanchor="left", y=row, showarrow=False)
    fig.add_annotation(text=f"  {text}", font=dict(size=12, color=style.INK), **place)


def curves(evals: pl.DataFrame, panel: str = "", control: str = "grpo") -> go.Figure:
    """Success over training, a line a method: the mean over its runs; of few, a band from the worst to the best."""
    rows = on_panel(evals, panel)
    banded = rows["label"].n_unique() <= MOST_BANDS
    runs = rates(rows, ("label", "seed", "run", "step"))
    fig = go.Figure()
    for method, (colour, dash) in colours(rows["label"], control).items():
        part = runs.filter(pl.col("label") == method)
        if part.is_empty():
            continue
        ends = (
            pl.col("success").mean().alias("mean"),
            pl.col("success").min().alias("low"),
            pl.col("success").max().alias("high"),
        )
        line = part.group_by("step").agg(*ends, pl.len().alias("runs")).sort("step")
        seeds, x = part["run"].n_unique(), line["step"].to_list()
        if seeds > 1 and banded:
            band(fig, x, line["low"].to_list(), line["high"].to_list(), colour, style.escape(method))
        fig.add_scatter(
            x=x,
            y=line["mean"].to_list(),
            mode="lines+markers",
            name=f"{style.escape(method)} ({seeds} run{'s' * (seeds > 1)})",
            legendgroup=style.escape(method),
            line=dict(color=colour, width=2.6, dash=dash),
            marker=dict(size=6),
            customdata=line.select("low", "high", "runs").rows(),
            hovertemplate=f"{style.escape(method)}, step %{{x}}: %{{y:.1%}}<br>runs %{{customdata[0]:.1%}} to "
            "%{customdata[1]:.1%} (%{customdata[2]} runs)<extra></extra>",
        )
    style.dress(
        fig,
        "Which method learns faster on games it was not trained on?",
        f"Panel {rows['panel'][0]}, {rows['task'].n_unique()} games, the same for every run. Line: mean over runs"
        + ("; band: worst to best run, which is not a confidence interval." if banded else "."),
        height=330,
    )
    fig.update_xaxes(title_text="training step")
    fig.update_yaxes(title_text="success rate", tickformat=".0%", range=[0, 1.02])
    return fig


def final_figure(evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1) -> go.Figure:
    """Final success: a small point a run with its 95 % Wilson interval, a bar at each method's mean."""
    table = finals(evals, panel, step)
    fig, labels = go.Figure(), []
    for place, (method, (colour, _)) in enumerate(colours(table["label"], control).items()):
        part = table.filter(pl.col("label") == method).sort("model", "seed")
        labels.append(method)
        if part.is_empty():
            continue
        n = part.height
        at = [place + (i - (n - 1) / 2) * min(0.16, 0.6 / n) for i in range(n)]
        fig.add_scatter(
            x=part["success"].to_list(),
            y=at,
            mode="markers",
            name=style.escape(method),
            marker=dict(size=8, color=colour),
            error_x=dict(
                type="data",
                array=(part["high"] - part["success"]).to_list(),
                arrayminus=(part["success"] - part["low"]).to_list(),
                thickness=1.3,
                width=3,
                color=colour,
            ),
            customdata=[
                (style.escape(r[0]), *r[1:]) for r in part.select("model", "seed", "won", "n", "low", "high").rows()
            ],
            hovertemplate=f"{style.escape(method)}, %{{customdata[0]}}, seed %{{customdata[1]}}: %{{x:.1%}}<br>"
            "%{customdata[2]} of %{customdata[3]} games, 95 % interval %{customdata[4]:.1%} to %{customdata[5]:.1%}"
            "<extra></extra>",
        )
        mean = part["success"].mean()
        fig.add_shape(type="line", x0=mean, x1=mean, y0=place - 0.4, y1=place + 0.4, line=dict(color=colour, width=3))
        beside(fig, place, f"{style.percent(mean, 1)} (n = {n})")
    style.dress(
        fig,
        "Where did each run end?",
        f"Step {table['step'][0]}, {table['n'][0]} games a run. Points: runs with 95 % Wilson intervals "
        "over games; upright bars and numbers: means over runs.",
        height=max(64 * len(labels), 110),
        legend=False,
        right=110,
    )
    fig.update_xaxes(title_text="success rate", tickformat=".0%", range=[0, 1.0])
    named_rows(fig, labels)
    return fig


def difference_figure(
    evals: pl.DataFrame, panel: str = "", control: str = "grpo", step: int = -1, table: pl.DataFrame | None = None
) -> go.Figure:
    """Each method's final success less the control's: 95 % interval, thin its corrected one; grey where no winner is
    named. table: the differences, where they are known already."""
    table = differences(evals, control, panel, step) if table is None else table
    looks, fig = colours(evals["label"], control), go.Figure()
    fig.add_vline(x=0, line=dict(color=style.INK, width=1.4))
    for place, row in enumerate(table.to_dicts()):
        colour = looks[row["label"]][0] if row["named"] else GREY
        for low, high, width in (("corrected_low", "corrected_high", 1.6), ("low", "high", 5)):
            fig.add_scatter(
                x=[100 * row[low], 100 * row[high]],
                y=[place, place],
                mode="lines",
                line=dict(color=colour, width=width),
                hoverinfo="skip",
            )
        fig.add_scatter(
            x=[100 * row["difference"]],
            y=[place],
            mode="markers",
            name=style.escape(row["label"]),
            marker=dict(size=13, color=colour, line=dict(color="#ffffff", width=2)),
            hovertext=[
                f"{style.escape(row['label'])} less {style.escape(control)}: {points(row['difference'])} points<br>"
                f"95 % interval {points(row['low'])} to {points(row['high'])}<br>"
                f"corrected {points(row['corrected_low'])} to {points(row['corrected_high'])}<br>"
                f"{row['runs']} and {row['control_runs']} runs, {row['games']} games"
            ],
            hoverinfo="text",
        )
        beside(fig, place, f"{points(row['difference'])} (n = {row['runs']}, {row['control_runs']})")
    limit = 112 * max([0.05] + [abs(v) for v in table["corrected_low"].to_list() + table["corrected_high"].to_list()])
    style.dress(
        fig,
        f"Is any method ahead of {control} by more than chance?",
        "Points of interquartile mean success over the control. Thick: 95 % bootstrap interval over runs and games; "
        f"thin: corrected for {table.height} comparison{'s' * (table.height > 1)} (Holm). Grey: that includes zero, or "
        f"fewer than {ENOUGH_SEEDS} runs. n: runs of the method and of the control.",
        height=max(54 * table.height, 90),
        legend=False,
        right=130,
    )
    fig.update_xaxes(title_text="difference in success rate (points)", tickformat="+.0f", range=[-limit, limit])
    named_rows(fig, table["label"].to_list())
    return fig
