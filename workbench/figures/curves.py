"""Did the agent get better, and did training stay healthy? Success on fixed panels, and the loss's small multiples."""

import math

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from . import style

Z95 = 1.959964


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a success rate from n independent games; (0, 1) where n is 0."""
    if n <= 0:
        return 0.0, 1.0
    p, w = successes / n, z * z / n
    half = z * math.sqrt(p * (1 - p) / n + w / (4 * n)) / (1 + w)
    middle = (p + w / 2) / (1 + w)
    return max(0.0, middle - half), min(1.0, middle + half)


def rates(evals: pl.DataFrame, by: tuple[str, ...] = ("panel", "role", "step")) -> pl.DataFrame:
    """Success by group of evaluation games: the columns of `by`, n, won, success, low, high (95 % Wilson)."""
    style.need(evals, ["outcome"], "evals", "the trainer evaluates at the first and the last step")
    frame = evals.group_by(by).agg(pl.len().alias("n"), pl.col("outcome").sum().alias("won")).sort(by)
    bounds = [wilson(w, n) for w, n in frame.select("won", "n").rows()]
    return frame.with_columns(
        (pl.col("won") / pl.col("n")).alias("success"),
        pl.Series("low", [b[0] for b in bounds], dtype=pl.Float64),
        pl.Series("high", [b[1] for b in bounds], dtype=pl.Float64),
    )


def _fill(colour: str, share: float = 0.16) -> str:
    return f"rgba({','.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))},{share})"


def band(fig: go.Figure, x: list, low: list, high: list, colour: str, group: str, **where: int) -> None:
    """A pale band between two lines, drawn under its own curve and toggled with it."""
    fig.add_scatter(
        x=x + x[::-1],
        y=high + low[::-1],
        fill="toself",
        fillcolor=_fill(colour),
        line=dict(width=0),
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=group,
        **where,
    )


def success(evals: pl.DataFrame, steps: pl.DataFrame | None = None) -> go.Figure:
    """Success on every evaluation panel over training, with 95 % Wilson intervals; the teacher's beside the student's,
    and in grey the success of the training rollouts where `steps` is given, each task counting alike: where groups
    differ in size, a mean over rollouts would show which tasks got many."""
    frame = rates(evals)
    panels = evals["panel"].unique(maintain_order=True).to_list()
    fig = go.Figure()
    if steps is not None and not steps.is_empty():
        by_task = "success_tasks" in steps.columns  # older runs, of equal groups, have the one mean
        fig.add_scatter(
            x=steps["step"].to_list(),
            y=steps["success_tasks" if by_task else "success"].to_list(),
            mode="lines",
            line=dict(color="#aab4be", width=1.4),
            name="training rollouts",
            hovertemplate="step %{x}: %{y:.1%} of training rollouts, a mean over tasks<extra></extra>",
        )
    for (panel, role), part in frame.group_by("panel", "role", maintain_order=True):
        colour = style.SERIES[panels.index(panel) % len(style.SERIES)]
        student = role == "student"
        x, low, high = (part[c].to_list() for c in ("step", "low", "high"))
        label = style.escape(panel if student else f"{panel}, {role}")
        if student and len(x) > 1:
            band(fig, x, low, high, colour, label)
        bars = dict(
            type="data",
            array=(part["high"] - part["success"]).to_list(),
            arrayminus=(part["success"] - part["low"]).to_list(),
            width=5,
            thickness=1.3,
        )
        fig.add_scatter(
            x=x,
            y=part["success"].to_list(),
            mode="lines+markers" if len(x) > 1 else "markers",
            name=f"{label} (n = {part['n'][0]})",
            legendgroup=label,
            line=dict(color=colour, width=2.6 if student else 1.6, dash="solid" if student else "dot"),
            marker=dict(size=7 if student else 9, symbol="circle" if student else "diamond-open", color=colour),
            error_y=None if student and len(x) > 1 else bars,
            customdata=part.select("won", "n", "low", "high").rows(),
            hovertemplate=f"step %{{x}}, {label}: %{{y:.1%}}<br>%{{customdata[0]}} of %{{customdata[1]}} "
            "games, 95 % interval %{customdata[2]:.1%} to %{customdata[3]:.1%}<extra></extra>",
        )
    style.dress(
        fig,
        "Does the agent win more games it was not trained on?",
        "Fixed panels, the same games at every evaluation. Bands and bars: 95 % Wilson intervals over games, which say "
        "nothing of how another seed would train.",
        height=330,
    )
    fig.update_xaxes(title_text="training step")
    fig.update_yaxes(title_text="success rate", tickformat=".0%", range=[0, 1.02])
    return fig


HEALTH = {
    "loss": "loss",
    "pg_loss": "policy loss",
    "aux_loss": "distillation loss",
    "kl": "KL from the sampler (nats)",
    "kl_reference": "KL to the reference (nats)",
    "entropy": "entropy (nats)",
    "grad_norm": "gradient norm",
    "clip_fraction": "clipped tokens (share)",
    "advantage_std": "spread of advantages",
    "n_mixed_groups": "groups with both outcomes",
    "turns_mean": "turns an episode",
    "invalid_rate": "invalid actions (share)",
    "gap_mean": "teacher gap (nats)",
}


def health(steps: pl.DataFrame, columns: int = 3) -> go.Figure:
    """Small multiples of the steps table: losses, KL, entropy, gradient norm, and what the rollouts were like.

    Columns that this run has no values for are left out.
    """
    names = [n for n in HEALTH if n in steps.columns and steps[n].null_count() < steps.height]
    if not names:
        raise WorkbenchError("steps: no rows, or none of the columns that are drawn here; is this a training run?")
    lines = math.ceil(len(names) / columns)
    fig = make_subplots(
        lines,
        columns,
        shared_xaxes="all",
        horizontal_spacing=0.075,
        vertical_spacing=0.2 / lines,
        subplot_titles=[HEALTH[n] for n in names],
    )
    for i, name in enumerate(names):
        fig.add_scatter(
            x=steps["step"].to_list(),
            y=steps[name].to_list(),
            mode="lines",
            line=dict(color=style.BLUE, width=1.8),
            name=HEALTH[name],
            showlegend=False,
            hovertemplate=f"step %{{x}}: {HEALTH[name]} %{{y:.4g}}<extra></extra>",
            row=i // columns + 1,
            col=i % columns + 1,
        )
    style.dress(
        fig,
        "Did training stay healthy?",
        "One value a training step. Losses are of the first pass over a batch, KL and clipping of its last.",
        height=122 * lines,
        legend=False,
        panel_titles=True,
        left=62,
    )
    style.panel_titles(fig)
    fig.update_yaxes(nticks=5, exponentformat="power", tickfont=dict(size=11))
    for i, name in enumerate(names):
        if flat := style.flat_axis(steps[name].to_list()):
            fig.update_yaxes(**flat, row=i // columns + 1, col=i % columns + 1)
    fig.update_xaxes(nticks=6, showticklabels=False, tickfont=dict(size=11))
    for i in range(max(0, len(names) - columns), len(names)):
        fig.update_xaxes(showticklabels=True, title_text="step", row=i // columns + 1, col=i % columns + 1)
    return fig
