"""Which method learns each game, on boards like those it trained on and on harder ones?

A study that crosses methods with environments names its runs `method env=game`; games and panels are compared apart, as
a rate on one says nothing of another. Intervals and differences are those of workbench.comparison.
"""

from collections.abc import Iterator

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from .. import comparison, statistics
from ..collected import Collected
from ..errors import WorkbenchError
from . import style
from .compare import colours

TABLE = {
    "game": pl.String, "panel": pl.String, "label": pl.String, "runs": pl.Int64, "games": pl.Int64,
    "before": pl.Float64, "success": pl.Float64, "low": pl.Float64, "high": pl.Float64, "difference": pl.Float64,
    "corrected_low": pl.Float64, "corrected_high": pl.Float64, "named": pl.Boolean,
}  # fmt: skip


def apart(evals: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """(game, its rows of a study's evals with the game taken out of their labels), in the order of their tasks.

    The game of a task is what stands before the first slash of its id. Raises WorkbenchError where a run played two.
    """
    rows = evals.with_columns(pl.col("task").str.split("/").list.first().alias("_game"))
    mixed = rows.group_by("run").agg(pl.col("_game").n_unique()).filter(pl.col("_game") > 1)
    if not mixed.is_empty():
        raise WorkbenchError(f"evals: run {mixed['run'][0]} was evaluated on more than one game")
    for (game,), part in rows.group_by("_game", maintain_order=True):
        label = pl.col("label").str.replace(f" env={game}", "", literal=True)
        yield game, part.with_columns(label).drop("_game")


def table(data: Collected, control: str = "grpo") -> pl.DataFrame:
    """A row a game, panel and label, the control first: columns as TABLE.

    before: mean success of its runs at step 0, null where they were not evaluated then; success: interquartile mean at
    the last step that the game's runs share, low and high its 95 % interval; difference to the control, its interval
    corrected for how many methods there are, and whether a winner may be named.
    """
    out = []
    for game, evals in apart(data.evals):
        for panel in evals.filter(pl.col("role") == "student")["panel"].unique(maintain_order=True):
            rows = comparison.on_panel(evals, panel)
            start = rows.filter(pl.col("step") == 0).group_by("label").agg(pl.col("outcome").mean())
            before = dict(start.rows())
            other = {r["label"]: r for r in comparison.differences(evals, control, panel).to_dicts()}
            runs = comparison.matrices(comparison.at_step(evals, panel))
            for label in [control, *sorted(set(runs) - {control})]:
                games, strata = runs[label]
                found = other.get(label, {})
                names = ("difference", "corrected_low", "corrected_high", "named")
                out.append(
                    (game, panel, label, len(games), games.shape[1], before.get(label))
                    + statistics.aggregate(games, strata)
                    + tuple(found.get(name) for name in names)
                )
    return pl.DataFrame(out, schema=TABLE, orient="row")


def sentences(found: pl.DataFrame, control: str = "grpo") -> list[str]:
    """What may be said of each game and panel, from a `table`."""
    out = []
    for (game, panel), part in found.group_by("game", "panel", maintain_order=True):
        base = part.filter(pl.col("label") == control).row(0, named=True)
        named = part.filter("named").sort("difference", descending=True).to_dicts()
        told = (
            ", ".join(
                f"{r['label']} {comparison.points(r['difference'])} points ({comparison.points(r['corrected_low'])} to "
                f"{comparison.points(r['corrected_high'])})"
                for r in named
            )
            or f"no method differs from {control} by more than chance"
        )
        ran = f"{base['runs']} run{'s' * (base['runs'] != 1)}"
        rise = f"{style.percent(base['before'])} to {style.percent(base['success'])}"
        many = f"{ran} of each method, {base['games']} games"
        out.append(f"{game}, {panel}: {control} went from {rise} ({many}); {told}.")
    return out


def success(found: pl.DataFrame, control: str = "grpo") -> go.Figure:
    """Success after training by game and panel: a dot and its interval for each method, a tick where it began."""
    games, panels = (found[name].unique(maintain_order=True).to_list() for name in ("game", "panel"))
    labels = found["label"].unique(maintain_order=True).to_list()
    looks = colours(labels, control)
    fig = make_subplots(
        len(games),
        len(panels),
        shared_xaxes="columns",
        shared_yaxes="rows",
        horizontal_spacing=0.04,
        vertical_spacing=0.09,
        subplot_titles=[f"{game}, {panel}" for game in games for panel in panels],
    )
    for row in found.to_dicts():
        at = dict(row=games.index(row["game"]) + 1, col=panels.index(row["panel"]) + 1)
        place, colour = labels.index(row["label"]), looks[row["label"]][0]
        line = dict(color=colour, width=5)
        fig.add_scatter(x=[row["low"], row["high"]], y=[place] * 2, mode="lines", line=line, hoverinfo="skip", **at)
        far = "" if row["difference"] is None else f"<br>{comparison.points(row['difference'])} points to {control}"
        fig.add_scatter(
            x=[row["success"]],
            y=[place],
            mode="markers",
            marker=dict(size=12, color=colour, line=dict(color="#ffffff", width=2)),
            hovertext=[
                f"{style.escape(row['label'])}: {style.percent(row['success'], 1)}<br>95 % interval "
                f"{style.percent(row['low'], 1)} to {style.percent(row['high'], 1)}, {row['runs']} runs{far}"
            ],
            hoverinfo="text",
            **at,
        )
        fig.add_scatter(
            x=[row["before"]],
            y=[place],
            mode="markers",
            marker=dict(symbol="line-ns", size=16, line=dict(width=1.6, color=style.INK)),
            hovertemplate="before training %{x:.1%}<extra></extra>",
            **at,
        )
    style.dress(
        fig,
        "Which credit learns each game?",
        "Interquartile mean of the runs' success after training (dot) with its 95 % bootstrap interval over runs and "
        "games; tick: before training. Unseen boards are harder. Games and panels are not compared with each other.",
        height=(34 * len(labels) + 40) * len(games),
        legend=False,
        panel_titles=True,
        left=110,
    )
    style.panel_titles(fig)
    fig.update_xaxes(range=[-0.02, 1.02], tickformat=".0%", dtick=0.25)
    fig.update_xaxes(title_text="success rate", row=len(games))
    names = [style.shorten(label, 20) for label in labels]
    fig.update_yaxes(range=[len(labels) - 0.4, -0.6], showgrid=False, ticks="", tickvals=list(range(len(labels))))
    fig.update_yaxes(ticktext=names, tickfont=dict(size=13, color=style.INK))
    return fig
