"""Is the belief right where truth is known? Belief revisions held against the true advantages of a walk on a line.

What `workbench.toy_world` says of its scope holds here: actions determine the next state, and the teacher is exactly
the policy conditioned on success. A language model with a skill text in its context need not be near such a teacher, so
this shows what the recursion makes of ideal evidence, not how good recorded evidence is.
"""

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from ..credit.agent_opsd import AgentOPSDConfig, reshape_turns
from ..toy_world import (
    Trajectories,
    posterior_revisions,
    random_walk,
    rank_correlation,
    sample,
    success_rate,
    with_success_rate,
)
from . import style

RATES = (0.05, 0.1, 0.3, 0.5, 0.7, 0.9)
SEEDS = tuple(range(8))
GOAL = 2
SHOWN = {
    "posterior": ("exact posterior (multiplicative)", style.INK, "diamond"),
    "gamma=1": ("revision, γ = 1", style.BLUE, "circle"),
    "gamma=0.95": ("revision, γ = .95 (paper)", style.SKY, "circle"),
    "gamma=0.8": ("revision, γ = .8", style.PURPLE, "circle"),
    "raw": ("raw evidence", style.AMBER, "square"),
    "centred": ("revision of centred evidence, γ = 1", style.VERMILION, "square"),
}


def signals(played: Trajectories, value: float) -> dict[str, Tensor]:
    """(E,K) what each rule says of every turn; value: the true V(s_0), which only the exact posterior knows."""
    plain = torch.ones_like(played.prior)

    def revision(evidence: Tensor, gamma: float) -> Tensor:
        turns = reshape_turns(evidence, played.turn_mask, played.prior, plain, AgentOPSDConfig(gamma=gamma))
        return turns["revision"]

    centred = played.evidence - played.evidence.mean(1, keepdim=True)
    return {
        "posterior": posterior_revisions(played.evidence, value),
        **{f"gamma={gamma:g}": revision(played.evidence, gamma) for gamma in (1.0, 0.95, 0.8)},
        "raw": played.evidence,
        "centred": revision(centred, 1.0),
    }


def measure(
    rates: Sequence[float] = RATES, seeds: Sequence[int] = SEEDS, episodes: int = 200, goal: int = GOAL
) -> pl.DataFrame:
    """One row a (success rate, seed, rule): rate, seed, rule, correlation, counted.

    A seed draws a policy, which is shifted to the success rate, and its episodes. correlation: mean over episodes of
    Spearman's correlation of the rule's signal with the true advantage Q - V over the episode's turns; counted: the
    episodes in which it exists, as neither is constant.
    """
    rows = []
    for rate in rates:
        for seed in seeds:
            walk = with_success_rate(random_walk(goal, seed=seed), rate)
            played = sample(walk, episodes, seed)
            for rule, signal in signals(played, success_rate(walk)).items():
                found = rank_correlation(signal, played.advantage, played.turn_mask)
                mean, counted = torch.nanmean(found).item(), int(torch.isfinite(found).sum())
                rows.append({"rate": rate, "seed": seed, "rule": rule, "correlation": mean, "counted": counted})
    return pl.DataFrame(rows)


def summary(frame: pl.DataFrame) -> pl.DataFrame:
    """rate, rule, mean, low, high (over seeds), from `measure`."""
    value = pl.col("correlation")
    stats = (value.mean().alias("mean"), value.min().alias("low"), value.max().alias("high"))
    return frame.group_by("rate", "rule", maintain_order=True).agg(*stats)


def overall(frame: pl.DataFrame) -> dict[str, float]:
    """Each rule's mean correlation over success rates and seeds, from `measure`."""
    return dict(frame.group_by("rule", maintain_order=True).agg(pl.col("correlation").mean()).rows())


def agreement(frame: pl.DataFrame) -> go.Figure:
    """Mean within-episode rank correlation with the true advantage, by success rate and rule: every seed, and means."""
    style.need(frame, ["rate", "rule", "correlation"], "toy world", "draw it from figures.toy_world.measure")
    table, split = summary(frame), 0.8
    rates = table["rate"].unique().sort().to_list()
    fig = make_subplots(
        2,
        1,
        shared_xaxes=True,
        row_heights=[0.68, 0.32],
        vertical_spacing=0.1,
        subplot_titles=[f"{split:g} to 1, enlarged", f"below {split:g}"],
    )
    for row in (1, 2):
        fig.add_traces(_traces(frame, table, rates, legend=row == 1), rows=row, cols=1)
    style.dress(
        fig,
        "Is the belief right where truth is known?",
        "Walks on a line with deterministic moves and an ideal, success-conditioned teacher. Small points are "
        f"{frame['seed'].n_unique()} random policies at each success rate, large ones their means. Of the exact "
        "posterior, 1 is true by construction.",
        height=430,
        panel_titles=True,
    )
    style.panel_titles(fig)
    ticks = dict(tickvals=list(range(len(rates))), ticktext=[f"{100 * r:g} %" for r in rates])
    fig.update_xaxes(range=[-0.5, len(rates) - 0.5], showgrid=False, **ticks)
    fig.update_xaxes(title_text="success rate of the policy, V(s<sub>0</sub>)", row=2)
    low = min(frame["correlation"].min(), split - 0.1)
    fig.update_yaxes(range=[split - 0.005, 1.01], title_text="rank correlation with Q − V", row=1)
    fig.update_yaxes(range=[low - 0.05, split], row=2)
    return fig


def _traces(frame: pl.DataFrame, table: pl.DataFrame, rates: list[float], legend: bool) -> list[go.Scatter]:
    """Of every rule its seeds and, over them, its means; rules stand side by side at each rate."""
    out = []
    for i, (rule, (label, colour, symbol)) in enumerate(SHOWN.items()):
        shift = 0.11 * (i - (len(SHOWN) - 1) / 2)
        seeds = frame.filter(pl.col("rule") == rule)
        means = table.filter(pl.col("rule") == rule).sort("rate")
        out += [
            go.Scatter(
                x=[rates.index(r) + shift for r in seeds["rate"]],
                y=seeds["correlation"].to_list(),
                mode="markers",
                marker=dict(size=5, color=style.mix(colour, "#ffffff", 0.45)),
                customdata=seeds.select("seed", "counted").rows(),
                hovertemplate=f"{label}<br>seed %{{customdata[0]}}: %{{y:.3f}} over %{{customdata[1]}} episodes"
                "<extra></extra>",
                showlegend=False,
                legendgroup=rule,
            ),
            go.Scatter(
                x=[rates.index(r) + shift for r in means["rate"]],
                y=means["mean"].to_list(),
                mode="lines+markers",
                name=label,
                line=dict(color=colour, width=1.6),
                marker=dict(size=9, symbol=symbol, color=colour, line=dict(color="#ffffff", width=1)),
                customdata=means.select("low", "high").rows(),
                hovertemplate=f"{label}<br>mean over seeds %{{y:.3f}}, %{{customdata[0]:.3f}} to %{{customdata[1]:.3f}}"
                "<extra></extra>",
                showlegend=legend,
                legendgroup=rule,
            ),
        ]
    return out


def sentences(frame: pl.DataFrame) -> list[str]:
    """What the figure shows, from `measure`; and what it does not."""
    table = summary(frame)
    means = {rule: dict(part.select("rate", "mean").rows()) for (rule,), part in table.group_by("rule")}

    def between(rule: str) -> str:
        return f"{min(means[rule].values()):.3f} to {max(means[rule].values()):.3f}"

    level = [r for r, v in means["raw"].items() if v >= means["gamma=1"][r]]
    listed = ", ".join(f"{100 * r:g} %" for r in sorted(level))
    versus = f"does as well at success rates of {listed} and worse at the others" if level else "does worse at all"
    return [
        f"With an ideal teacher, revisions at gamma = 1 rank an episode's turns much as the true advantages do: mean "
        f"correlation {between('gamma=1')} over the success rates, against {between('gamma=0.95')} at gamma = .95 and "
        f"{between('gamma=0.8')} at .8.",
        f"The raw evidence, {between('raw')}, {versus}. Less its episode's mean it drives the belief worse: "
        f"{between('centred')}.",
        "Scope: moves are deterministic, which makes the exact posterior's 1 true by construction, and the teacher is "
        "the policy conditioned on success. How close a model that reads a skill text comes to that is not shown here.",
    ]
