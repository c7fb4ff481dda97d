"""Is a predicted value any guide, and where do rollouts go by it? V0's values against outcomes, and its allocation."""

import math

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..budget import v0
from ..errors import WorkbenchError
from . import style

BINS = 5


def _rows(budget: pl.DataFrame) -> pl.DataFrame:
    """Groups that were allocated by a predicted value: those of the first step are equal, as nothing was known."""
    style.need(budget, ["rate", "rollouts", "success", "why"], "budget", "a run of method v0 records it")
    found = budget.filter((pl.col("why") == "allocated") & pl.col("alpha").is_null()).sort("step", "group")
    if found.is_empty():
        raise WorkbenchError("budget: no group was allocated by a predicted value; a run of method v0 does so")
    return found


def calibration_frame(budget: pl.DataFrame) -> pl.DataFrame:
    """Groups in BINS bins of equally wide predicted value: value and success (means over rollouts), tasks, rollouts."""
    won = pl.col("success") * pl.col("rollouts")
    return (
        _rows(budget)
        .group_by((pl.col("rate") * BINS).floor().clip(0, BINS - 1).cast(pl.Int64).alias("bin"))
        .agg(
            ((pl.col("rate") * pl.col("rollouts")).sum() / pl.col("rollouts").sum()).alias("value"),
            (won.sum() / pl.col("rollouts").sum()).alias("success"),
            pl.len().alias("tasks"),
            pl.col("rollouts").sum(),
        )
        .sort("bin")
    )


def auc_frame(budget: pl.DataFrame) -> pl.DataFrame:
    """step, auc (of pairs of rollouts of two of its tasks, one won and one lost; nan without any), pairs."""
    rows = []
    for (step,), part in _rows(budget).group_by("step", maintain_order=True):
        won = (part["success"] * part["rollouts"]).round().to_torch()
        lost = part["rollouts"].to_torch() - won
        pairs = int(won.sum() * lost.sum() - (won * lost).sum())
        auc = v0.auc_between_groups(part["rate"].to_torch(), won, lost)
        rows.append({"step": step, "auc": auc if pairs else math.nan, "pairs": pairs})
    return pl.DataFrame(rows)


def calibration(budget: pl.DataFrame) -> go.Figure:
    """Predicted value against the success then found, and how well values order the tasks of each step."""
    bins, order = calibration_frame(budget), auc_frame(budget)
    fig = make_subplots(
        1, 2, horizontal_spacing=0.12, subplot_titles=["predicted and found", "order within a step"]
    )  # fmt: skip
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line=dict(color="#aab4be", width=1.2, dash="dot"), hoverinfo="skip",
        row=1, col=1,
    )  # fmt: skip
    fig.add_scatter(
        x=bins["value"].to_list(), y=bins["success"].to_list(), mode="lines+markers+text",
        text=[f"{t} / {n}" for t, n in bins.select("tasks", "rollouts").rows()], textposition="top center",
        line=dict(color=style.PURPLE, width=1.6),
        marker=dict(size=[7 + math.sqrt(n) for n in bins["rollouts"]], color=style.PURPLE),
        hovertemplate="predicted %{x:.0%}, found %{y:.0%}<extra></extra>", row=1, col=1,
    )  # fmt: skip
    known = order.filter(pl.col("pairs") > 0)
    fig.add_scatter(
        x=known["step"].to_list(), y=known["auc"].to_list(), mode="lines+markers",
        line=dict(color=style.GREEN, width=1.6), marker=dict(size=8, color=style.GREEN),
        customdata=known["pairs"].to_list(),
        hovertemplate="step %{x}: %{y:.2f} of %{customdata} pairs in order<extra></extra>", row=1, col=2,
    )  # fmt: skip
    fig.add_hline(y=0.5, line=dict(color=style.INK, width=1.2, dash="dash"), row=1, col=2)
    style.dress(
        fig,
        "Is the predicted value any guide to the outcome?",
        f"Left: {bins['tasks'].sum()} groups, {bins['rollouts'].sum()} rollouts, by predicted value; labels: groups / "
        "rollouts. Right: share of pairs of rollouts of two tasks, one won and one lost, that the values put in order; "
        "half is chance.",
        height=360,
        legend=False,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.update_xaxes(title_text="value before the step", tickformat=".0%", range=[-0.03, 1.03], col=1)
    fig.update_yaxes(title_text="success in the step", tickformat=".0%", range=[-0.05, 1.15], col=1)
    fig.update_xaxes(title_text="step", dtick=1 if order.height <= 12 else None, col=2)
    fig.update_yaxes(title_text="AUC", range=[-0.03, 1.03], col=2)
    return fig


def allocation(budget: pl.DataFrame) -> go.Figure:
    """Rollouts of each task over its predicted value, step by step."""
    frame = _rows(budget)
    steps = frame["step"].unique().sort().to_list()
    fig = go.Figure()
    for i, step in enumerate(steps):
        part = frame.filter(pl.col("step") == step).sort("rate")
        colour = style.shade(i / max(1, len(steps) - 1), style.DEPTH)
        fig.add_scatter(
            x=part["rate"].to_list(), y=part["rollouts"].to_list(), mode="lines+markers", name=f"step {step}",
            line=dict(color=colour, width=1.4), marker=dict(size=8, color=colour),
            customdata=[style.shorten(kind, 24) for kind in part["kind"]],
            hovertemplate="%{customdata}: %{y} rollouts at a value of %{x:.0%}<extra></extra>",
        )  # fmt: skip
    equal = frame["rollouts"].mean()
    fig.add_hline(
        y=equal, line=dict(color=style.INK, width=1.2, dash="dash"),
        annotation=dict(text=f"equal groups: {equal:g}", font=dict(size=12, color=style.INK)),
        annotation_position="top right",
    )  # fmt: skip
    style.dress(
        fig,
        "Which tasks get the rollouts, by their predicted value?",
        "The total utility of a step is the largest that its rollouts allow. A task that mostly fails is worth many "
        "rollouts or few, as only many are likely to hold a win, so near values can get very different numbers.",
        height=380,
    )
    fig.update_xaxes(title_text="value before the step", tickformat=".0%", range=[-0.02, 1.02])
    fig.update_yaxes(title_text="rollouts", rangemode="tozero")
    return fig


def order(budget: pl.DataFrame) -> float | None:
    """Share of all steps' pairs, as those of `auc_frame`, that the values put in order; None without any."""
    found = auc_frame(budget).filter(pl.col("pairs") > 0)
    return (found["auc"] * found["pairs"]).sum() / found["pairs"].sum() if found.height else None


def sentences(budget: pl.DataFrame) -> list[str]:
    """How near values came to outcomes, and how they ordered the tasks of a step."""
    frame, found, pairs = _rows(budget), order(budget), auc_frame(budget)["pairs"].sum()
    off = ((frame["rate"] - frame["success"]).abs() * frame["rollouts"]).sum() / frame["rollouts"].sum()
    first = f"A predicted value was {100 * off:.0f} points off the success of its group, weighed by its rollouts."
    if found is None:
        return [first, "No step had a win and a loss of two tasks, so the values' order cannot be judged."]
    return [first, f"Within a step they put {100 * found:.0f} % of {pairs} pairs in order; half is chance."]
