"""Which tokens does the teacher vouch for? SDAR's token gate (arXiv 2605.15155), over outcomes and over training.

The gap is teacher minus student log-prob of a sampled token (nats), the gate sigmoid(beta gap). Any run with teacher
log-probs can be read this way, whatever method trained it. The gated loss only ever raises a sampled token's
probability, by more where the gate is open; so what is shown of it is the gradient coefficient, not the loss.
"""

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from . import style
from .replay import with_gap, with_gate


def pick_turn(turns: pl.DataFrame, step: int, episode: int) -> int:
    """The turn whose gaps differ most among its own tokens, which is where a gate has something to choose."""
    rows = with_gap(style.pick(turns, "turns", step=step, episode=episode))
    spread = rows.with_columns((pl.col("gap").list.max() - pl.col("gap").list.min()).alias("_spread"))
    return spread.sort(["_spread", "turn"], descending=[True, False])["turn"][0]


def tokens_by_outcome(turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0) -> pl.DataFrame:
    """Every token with teacher log-probs: step, outcome, gap, gate."""
    rows = with_gate(turns, beta).select("step", "episode", "gap", "gate")
    return rows.join(episodes.select("step", "episode", "outcome"), on=["step", "episode"], how="left").explode(
        "gap", "gate"
    )


def gap_distribution(
    turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0, step: int = -1, bins: int = 61
) -> go.Figure:
    """Distribution of token gaps in successes and failures, above the gate that each gap gets."""
    tokens = tokens_by_outcome(turns, episodes, beta)
    tokens = style.pick(tokens, "turns", step=step) if step >= 0 else tokens
    limit = style.spread(tokens["gap"].to_list(), 0.995, 0.05)
    edges = np.linspace(-limit, limit, bins + 1)
    centres = ((edges[1:] + edges[:-1]) / 2).round(6).tolist()
    fig = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.06)
    notes, outside = [], 0
    for outcome, name, colour in ((1, "successes", style.SUCCESS), (0, "failures", style.FAILURE)):
        gap = tokens.filter(pl.col("outcome") == outcome)["gap"].to_numpy()
        if not len(gap):
            continue
        outside += int((np.abs(gap) > limit).sum())
        share = np.histogram(gap, edges)[0] / len(gap)
        notes.append(f"mean gap {style.number(float(gap.mean()))} in {name}")
        fig.add_scatter(
            x=centres,
            y=[float(s) or None for s in share],
            mode="lines",
            line=dict(color=colour, width=2, shape="hvh"),
            name=f"{name} ({len(gap):,} tokens)",
            row=1,
            col=1,
            hovertemplate="gap about %{x:.2f} nats: %{y:.2%} of tokens<extra></extra>",
        )
    grid = np.linspace(-limit, limit, 121)
    by_gap = tokens.select("gap", "gate").filter(pl.col("gap").abs() <= limit).sort("gap")
    near = np.interp(grid, by_gap["gap"].to_numpy(), by_gap["gate"].to_numpy())
    fig.add_scatter(
        x=grid.round(6).tolist(),
        y=near.round(6).tolist(),
        mode="lines",
        line=dict(color=style.INK, width=2),
        showlegend=False,
        row=2,
        col=1,
        hovertemplate="gap %{x:.2f} nats → gate %{y:.3f}<extra></extra>",
    )
    fig.add_vline(x=0, line=dict(color="#9aa5b1", width=1))
    style.dress(
        fig,
        "Does the teacher tell good tokens from bad ones?",
        f"{'All recorded steps' if step < 0 else f'Step {step}'}: {', '.join(notes)} (nats). Log scale; "
        f"{outside:,} tokens lie outside ±{limit:.2f}. Below, the gate each gap is given.",
        height=370,
    )
    shown = [y for trace in fig.data if trace.yaxis != "y2" for y in trace.y]
    fig.update_yaxes(title_text="share of tokens", **style.log_ticks(shown, percent=True), row=1)
    fig.update_yaxes(title_text="gate g", range=[-0.04, 1.04], tickvals=[0, 0.5, 1], row=2)
    fig.update_xaxes(title_text="gap = log p(teacher) − log p(student), nats", row=2)
    return fig


def over_training_frame(turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0) -> pl.DataFrame:
    """Per step: tokens, gate_active (share with gate > .5), gate_mean, gap_mean, gap_success, gap_failure (nats)."""
    gap = pl.col("gap")
    return (
        tokens_by_outcome(turns, episodes, beta)
        .group_by("step")
        .agg(
            pl.len().alias("tokens"),
            (pl.col("gate") > 0.5).mean().alias("gate_active"),
            pl.col("gate").mean().alias("gate_mean"),
            gap.mean().alias("gap_mean"),
            gap.filter(pl.col("outcome") == 1).mean().alias("gap_success"),
            gap.filter(pl.col("outcome") == 0).mean().alias("gap_failure"),
        )
        .sort("step")
    )


def over_training(turns: pl.DataFrame, episodes: pl.DataFrame, beta: float = -1.0) -> go.Figure:
    """Gate-active share and mean gate over training steps, above the mean gap, in all, in successes and in failures."""
    frame = over_training_frame(turns, episodes, beta)
    fig = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.09)
    lines = (
        (1, "gate_active", "gate-active share, g > 0.5", style.PURPLE, "solid"),
        (1, "gate_mean", "mean gate", style.GREEN, "solid"),
        (2, "gap_mean", "mean gap, all tokens", style.INK, "solid"),
        (2, "gap_success", "in successes", style.SUCCESS, "dot"),
        (2, "gap_failure", "in failures", style.FAILURE, "dot"),
    )
    for row, name, label, colour, dash in lines:
        fig.add_scatter(
            x=frame["step"].to_list(),
            y=frame[name].to_list(),
            mode="lines+markers",
            name=label,
            marker=dict(size=5),
            line=dict(color=colour, width=2.2, dash=dash),
            customdata=frame["tokens"].to_list(),
            row=row,
            col=1,
            hovertemplate=f"step %{{x}}: {label} %{{y:.3f}}<br>%{{customdata:,}} tokens<extra></extra>",
        )
    style.dress(
        fig,
        "Does the gate open as training goes on?",
        "Above: how many tokens the teacher finds likelier than the student did, and the mean gate. Below: the mean "
        "gap; its expectation under the student is minus a KL divergence, so it is negative unless the two agree.",
        height=380,
    )
    fig.add_hline(y=0, line=dict(color="#9aa5b1", width=1), row=2, col=1)
    fig.update_yaxes(title_text="share, gate", row=1)
    fig.update_yaxes(title_text="gap (nats)", row=2)
    fig.update_xaxes(title_text="training step", row=2)
    return fig
