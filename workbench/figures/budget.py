"""Where do rollouts go? Groups that grow until they know enough, an allocation that follows the policy, and when a
prior helps a baseline."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import plotly.graph_objects as go
import polars as pl
import torch
from plotly.subplots import make_subplots

from ..budget import coba, v05
from ..budget.v05 import V05Config
from ..errors import WorkbenchError
from . import style

WHY = {
    "cost": ("one more would tell too little", "circle", style.GREEN),
    "most": ("as many as a task may have", "square", style.PURPLE),
    "budget": ("the step's rollouts were spent", "triangle-up", style.AMBER),
}


def _rows(budget: pl.DataFrame, method: str, column: str) -> pl.DataFrame:
    style.need(budget, ["rate", "rollouts"], "budget", f"a run of method {method} records it")
    found = budget.filter(pl.col(column).is_not_null())
    if found.is_empty():
        raise WorkbenchError(f"budget: column {column} is empty in this run; a run of method {method} fills it")
    return found


def config_of(config: Mapping[str, Any]) -> V05Config:
    """V0.5's part of a run's recorded configuration."""
    given = config.get("method_options") or {}
    return V05Config(**{each.name: given[each.name] for each in fields(V05Config) if each.name in given})


def equal(config: Mapping[str, Any]) -> int:
    """Rollouts that a step of equal groups draws, from a run's recorded configuration."""
    return config["tasks_per_step"] * config["group_size"]


def pick_step(budget: pl.DataFrame) -> int:
    """The step whose groups differ most in size, of equals the last; the first, which has no history, only if alone."""
    spread = _rows(budget, "v05", "bias2").group_by("step").agg(pl.col("rollouts").std(ddof=0).fill_null(0))
    later = spread.filter(pl.col("step") > pl.col("step").min())
    return (spread if later.is_empty() else later).sort("rollouts", "step")["step"][-1]


def growth_frame(budget: pl.DataFrame, episodes: pl.DataFrame, step: int, config: V05Config) -> pl.DataFrame:
    """One row a rollout of V0.5's groups at a step, in the order they were drawn: group, kind, rate, why, k, outcome,
    mean (success so far), bias2, baseline (as a success rate), drop (expected, of the squared error, by one more).

    Raises WorkbenchError where the step or its groups were not recorded.
    """
    groups = style.pick(_rows(budget, "v05", "bias2"), "budget", step=step).sort("group")
    played = episodes.filter(pl.col("step") == step).sort("episode")
    rows = []
    for group in groups.to_dicts():
        outcomes = played.filter(pl.col("group") == group["group"])["outcome"].to_list()
        if len(outcomes) != group["rollouts"]:
            raise WorkbenchError(
                f"episodes: step {step}, group {group['group']} has {len(outcomes)} rollouts, but the table budget "
                f"says {group['rollouts']}"
            )
        won = torch.tensor(outcomes, dtype=torch.float64).cumsum(0)
        count = torch.arange(1, len(outcomes) + 1)
        rate = torch.full_like(won, group["rate"])
        fused = v05.fuse(v05.prior_from_rate(rate), v05.prior_from_rate(won / count), count)
        drop = v05.expected_drop(fused.bias2, count)
        for k, outcome in enumerate(outcomes):
            rows.append({
                **{name: group[name] for name in ("group", "kind", "rate", "why")}, "k": k + 1, "outcome": outcome,
                "mean": (won[k] / count[k]).item(), "bias2": fused.bias2[k].item(),
                "baseline": (1 + fused.baseline[k].item()) / 2, "drop": drop[k].item(),
            })  # fmt: skip
    return pl.DataFrame(rows)


def growth(budget: pl.DataFrame, episodes: pl.DataFrame, step: int, config: V05Config) -> go.Figure:
    """V0.5's groups of a step: above every rollout and its outcome, below what one more was expected to tell, and the
    cost that it is held against. config: that of the run."""
    frame = growth_frame(budget, episodes, step, config)
    groups = frame["group"].unique().sort().to_list()
    widest = frame["k"].max()
    fig = make_subplots(
        2, 1, shared_xaxes=True, row_heights=[0.5, 0.5], vertical_spacing=0.12,
        subplot_titles=["every rollout, in the order drawn", "how much of the squared error one more should take off"],
    )  # fmt: skip
    for outcome, name, colour in ((1, "success", style.SUCCESS), (0, "failure", style.FAILURE)):
        part = frame.filter(pl.col("outcome") == outcome)
        fig.add_scatter(
            x=part["k"].to_list(), y=[groups.index(g) for g in part["group"]], mode="markers", name=name,
            marker=dict(size=12, symbol="square" if outcome else "square-open", color=colour),
            customdata=part.select("rate", "mean", "baseline").rows(),
            hovertemplate="rollout %{x}: " + name + "<br>expected %{customdata[0]:.0%}, so far %{customdata[1]:.0%}, "
            "baseline %{customdata[2]:.0%}<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
    floor = config.cost / 8 or 1e-4
    last = frame.group_by("group").agg(pl.all().sort_by("k").last()).sort("group")
    for group in groups:
        part = frame.filter(pl.col("group") == group).sort("k")
        fig.add_scatter(
            x=part["k"].to_list(), y=[max(d, floor) for d in part["drop"]], mode="lines", showlegend=False,
            line=dict(color="#aab4be", width=1.3), row=2, col=1,
            customdata=part.select("mean", "rate").rows(),
            hovertemplate=f"group {group + 1}, rollout %{{x}}: %{{customdata[0]:.0%}} so far, "
            "%{customdata[1]:.0%} expected<extra></extra>",
        )  # fmt: skip
    for why, (name, symbol, colour) in WHY.items():
        part = last.filter(pl.col("why") == why)
        if part.is_empty():
            continue
        # Groups that stop alike end at one place: side by side they can be counted.
        places = Counter()
        x = []
        for k, drop in part.select("k", "drop").rows():
            spot = (k, round(math.log(max(drop, floor)), 1))
            x.append(k + 0.14 * places[spot])
            places[spot] += 1
        fig.add_scatter(
            x=x, y=[max(d, floor) for d in part["drop"]], mode="markers", name=f"stopped: {name}",
            marker=dict(size=11, symbol=symbol, color=colour, line=dict(color="#ffffff", width=1)),
            customdata=[(g + 1, k, d) for g, k, d in part.select("group", "k", "drop").rows()],
            hovertemplate="group %{customdata[0]} stopped at %{customdata[1]} rollouts: one more was expected to take "
            "%{customdata[2]:.4f} off the squared error<extra></extra>",
            row=2, col=1,
        )  # fmt: skip
        fig.add_scatter(
            x=[k + 0.55 for k in part["k"]], y=[groups.index(g) for g in part["group"]], mode="markers",
            marker=dict(size=10, symbol=symbol, color=colour), showlegend=False, hoverinfo="skip", row=1, col=1,
        )  # fmt: skip
    fig.add_hline(
        y=config.cost, line=dict(color=style.INK, width=1.2, dash="dash"), row=2, col=1,
        annotation=dict(text=f"cost {config.cost:g}", font=dict(size=12, color=style.INK)),
        annotation_position="top right",
    )  # fmt: skip
    style.dress(
        fig,
        "Which groups need more rollouts, and when do they know enough?",
        f"Step {step}: {frame.height} rollouts in {len(groups)} groups, each at least {config.first} and at most "
        f"{config.most}. A group grows while its rollouts contradict the rate that was expected of it, and one more is "
        f"expected to take more than the cost off the squared error of its baseline. Drops below {floor:.2g} are drawn "
        "there.",
        height=150 + 26 * len(groups) + 240,
        panel_titles=True,
        left=170,
    )
    style.panel_titles(fig)
    names = [f"{style.shorten(r['kind'], 14)}, expected {style.percent(r['rate'])}" for r in last.to_dicts()]
    fig.update_yaxes(
        tickvals=list(range(len(groups))), ticktext=names, range=[len(groups) - 0.4, -0.6], showgrid=False, row=1
    )
    drops = [max(d, floor) for d in frame["drop"]] + [config.cost or floor]
    fig.update_yaxes(**style.log_ticks(drops), row=2)
    fig.update_xaxes(range=[0.5, widest + 1], dtick=1 if widest <= 16 else None)
    fig.update_xaxes(title_text="rollouts of the group", row=2)
    return fig


def stops(budget: pl.DataFrame) -> dict[str, int]:
    """How many of V0.5's groups stopped for each reason of WHY, over all steps."""
    found = Counter(_rows(budget, "v05", "bias2")["why"])
    return {why: found[why] for why in WHY}


def expected_figure(budget: pl.DataFrame) -> go.Figure:
    """The success rate that was expected of each group, from the history before it, against the one it then had."""
    frame = _rows(budget, "v05 or coba", "success").sort("step", "group")
    steps = frame["step"].unique().sort().to_list()
    fig = go.Figure()
    fig.add_scatter(
        x=[0, 1], y=[0, 1], mode="lines", line=dict(color="#aab4be", width=1.2, dash="dot"), name="as expected",
        hoverinfo="skip",
    )  # fmt: skip
    for step in steps:
        part = frame.filter(pl.col("step") == step)
        fig.add_scatter(
            x=part["rate"].to_list(), y=part["success"].to_list(), mode="markers", name=f"step {step}",
            marker=dict(
                size=[5 + 2.2 * math.sqrt(n) for n in part["rollouts"]], opacity=0.8,
                color=_depth(steps, step), line=dict(color="#ffffff", width=1),
            ),
            customdata=[(style.shorten(kind, 24), n) for kind, n in part.select("kind", "rollouts").rows()],
            hovertemplate="%{customdata[0]}: expected %{x:.0%}, found %{y:.0%} of %{customdata[1]} rollouts"
            "<extra></extra>",
        )  # fmt: skip
    error = (frame["rate"] - frame["success"]).abs().mean()
    v05_filled = "bias2" in frame.columns and frame["bias2"].null_count() < frame.height
    style.dress(
        fig,
        f"Is the success rate that {'V0.5' if v05_filled else 'CoBA-RL'} expects any guide?",
        f"A point a group, larger with its rollouts; {frame.height} groups. Expected: from rollouts of the steps "
        "before, on the task, its kind and all tasks. The mean distance from what was found is "
        f"{100 * error:.0f} points, part of which is the noise of a few rollouts.",
        height=380,
    )
    fig.update_xaxes(title_text="expected before the step", tickformat=".0%", range=[-0.03, 1.03])
    fig.update_yaxes(title_text="found in the step", tickformat=".0%", range=[-0.05, 1.05])
    return fig


def _depth(steps: list[int], step: int) -> str:
    return style.shade(steps.index(step) / max(1, len(steps) - 1), style.DEPTH)


def allocation(budget: pl.DataFrame) -> go.Figure:
    """CoBA-RL's rollouts of each task over its expected success rate, step by step, above the Beta density that says
    which success rates the policy should practise."""
    frame = _rows(budget, "coba", "alpha").sort("step", "group")
    steps = frame["step"].unique().sort().to_list()
    fig = make_subplots(
        2, 1, shared_xaxes=True, row_heights=[0.62, 0.38], vertical_spacing=0.12,
        subplot_titles=["rollouts that a task gets", "density of the rates to practise"],
    )  # fmt: skip
    grid = [i / 200 for i in range(1, 200)]
    equal = budget.group_by("step").agg(pl.col("rollouts").mean())["rollouts"].mean()
    for step in steps:
        part, colour = frame.filter(pl.col("step") == step).sort("rate"), _depth(steps, step)
        alpha, beta = part.row(0, named=True)["alpha"], part.row(0, named=True)["beta"]
        fig.add_scatter(
            x=part["rate"].to_list(), y=part["rollouts"].to_list(), mode="lines+markers", name=f"step {step}",
            legendgroup=f"step {step}", line=dict(color=colour, width=1.4), marker=dict(size=8, color=colour),
            customdata=[style.shorten(kind, 24) for kind in part["kind"]],
            hovertemplate=f"step {step}, %{{customdata}}: %{{y}} rollouts at an expected success of %{{x:.0%}}"
            "<extra></extra>",
            row=1, col=1,
        )  # fmt: skip
        # With no bound on the budget, a task's value is its density.
        fig.add_scatter(
            x=grid, y=[coba.value(p, 10**9, alpha, beta, 1.0) for p in grid], mode="lines", showlegend=False,
            legendgroup=f"step {step}", line=dict(color=colour, width=1.8),
            hovertemplate=f"step {step}: Beta({alpha:.2f}, {beta:.2f})<extra></extra>",
            row=2, col=1,
        )  # fmt: skip
    fig.add_hline(
        y=equal, line=dict(color=style.INK, width=1.2, dash="dash"), row=1, col=1,
        annotation=dict(text=f"equal groups: {equal:g}", font=dict(size=12, color=style.INK)),
        annotation_position="top right",
    )  # fmt: skip
    first, last = (frame.filter(pl.col("step") == s)["alpha"][0] for s in (steps[0], steps[-1]))
    style.dress(
        fig,
        "Which tasks get the rollouts, as the policy learns?",
        "A weak policy practises tasks that it mostly solves (large α), a strong one hard tasks. α is "
        f"{first:.1f} at step {steps[0]} and {last:.1f} at step {steps[-1]}, of α + β = "
        f"{frame['alpha'][0] + frame['beta'][0]:g}. A task's own rate counts p(1 − p) as well, so rates of 0 and 1 get "
        "the least that is allowed.",
        height=440,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.update_yaxes(rangemode="tozero", title_text="rollouts", row=1)
    fig.update_yaxes(rangemode="tozero", showticklabels=False, row=2)
    fig.update_xaxes(range=[0, 1], tickformat=".0%")
    fig.update_xaxes(title_text="success rate expected of the task", row=2)
    return fig


def baseline_errors(k: int, points: int = 41) -> pl.DataFrame:
    """Exact mean squared errors, over all outcomes of k rollouts, on a grid of true and expected success rates.

    true, expected, and the errors of three baselines on the scale of rewards in -1 and 1: plain (the mean alone), prior
    (alone) and fused (V0.5's). Raises WorkbenchError where k is below 1.
    """
    if k < 1:
        raise WorkbenchError(f"baseline errors: k must be at least 1 rollout, got {k}")
    rates = torch.linspace(0, 1, points, dtype=torch.float64)
    wins = torch.arange(k + 1, dtype=torch.float64)
    pairs = torch.cartesian_prod(rates, rates)
    chance = torch.stack([
        torch.distributions.Binomial(k, probs=p).log_prob(wins).exp() for p in rates
    ]).repeat_interleave(points, 0)  # fmt: skip
    mu, prior = (v05.prior_from_rate(x)[:, None] for x in pairs.T)
    mean = v05.prior_from_rate(wins / k).expand(len(pairs), -1)
    fused = v05.fuse(prior.expand_as(mean), mean, torch.full_like(mean, k)).baseline
    errors = {
        name: (chance * (guess - mu) ** 2).sum(1)
        for name, guess in {
            "plain": mean, "prior": prior.expand_as(mean), "fused": fused
        }.items()
    }  # fmt: skip
    columns = {"true": pairs[:, 0], "expected": pairs[:, 1], **errors}
    return pl.DataFrame({name: values.numpy() for name, values in columns.items()})


def fused_worse(k: int) -> dict[str, float]:
    """Of all true rates and all expected ones: share where V0.5's baseline is worse than the plain mean; and at a true
    rate of one half the smallest distance of the expected rate at which it is, nan where there is none."""
    frame = baseline_errors(k, 101)
    worse = frame.filter(pl.col("fused") > pl.col("plain") + 1e-12)
    half = worse.filter((pl.col("true") - 0.5).abs() < 1e-9)
    nearest = (half["expected"] - 0.5).abs().min()
    return {"share": worse.height / frame.height, "distance": math.nan if nearest is None else nearest}


def fusion(few: int = 4, many: int = 16) -> go.Figure:
    """How V0.5's baseline compares with the plain mean of k rollouts, over the true and the expected success rate."""
    fig = make_subplots(1, 2, horizontal_spacing=0.1, subplot_titles=[f"{few} rollouts", f"{many} rollouts"])
    for column, k in ((1, few), (2, many)):
        frame = baseline_errors(k)
        rates = frame["true"].unique().sort().to_list()
        # A true rate of 0 or 1 leaves the mean no error at all.
        floor = 1e-3
        ratio = ((frame["fused"] + floor) / (frame["plain"] + floor)).log(2).to_list()
        size = len(rates)
        z = [[ratio[t * size + e] for t in range(size)] for e in range(size)]
        both = frame.select("fused", "plain").rows()
        fig.add_heatmap(
            x=rates, y=rates, z=z, zmid=0, zmin=-3, zmax=3, colorscale=[[1 - p, c] for p, c in style.DIVERGING[::-1]],
            customdata=[[both[t * size + e] for t in range(size)] for e in range(size)],
            hovertemplate="true %{x:.0%}, expected %{y:.0%}<br>squared error: fused %{customdata[0]:.3f}, mean alone "
            "%{customdata[1]:.3f}<extra></extra>",
            showscale=column == 2,
            colorbar=dict(
                title=dict(text="error, fused<br>over plain", font=dict(size=12)), tickvals=[-3, -1, 0, 1, 3],
                ticktext=["⅛", "½", "1", "2", "8"], thickness=12, len=0.9,
            ),
            row=1, col=column,
        )  # fmt: skip
        fig.add_contour(
            x=rates, y=rates, z=z, showscale=False, showlegend=False, hoverinfo="skip",
            contours=dict(start=0, end=0, size=1, coloring="none"), line=dict(color=style.INK, width=1.4),
            row=1, col=column,
        )  # fmt: skip
    shares = [style.percent(fused_worse(k)["share"]) for k in (few, many)]
    style.dress(
        fig,
        "When does a prior help a baseline of a few rollouts?",
        "Expected squared error of V0.5's baseline over that of the plain mean, exact over all outcomes. Blue: fused "
        f"is better; orange, beyond the line: worse, {shares[0]} of all pairs of rates with {few} rollouts, "
        f"{shares[1]} with {many}. The weight is itself estimated from the rollouts, so a prior that is off costs more "
        "than none.",
        height=330,
        legend=False,
        panel_titles=True,
        right=96,
    )
    style.panel_titles(fig)
    fig.update_xaxes(title_text="true success rate", tickformat=".0%", range=[0, 1])
    fig.update_yaxes(tickformat=".0%", range=[0, 1])
    fig.update_yaxes(title_text="expected success rate", col=1)
    return fig


def sentences(grown: pl.DataFrame, allocated: pl.DataFrame, equal: int) -> list[str]:
    """What the budgets of a V0.5 run and a CoBA-RL run came to. equal: rollouts a step of equal groups."""
    drawn = grown.group_by("step").agg(pl.col("rollouts").sum()).sort("step")["rollouts"]
    why = stops(grown)
    top = _rows(allocated, "coba", "alpha")["rollouts"].max()
    return [
        f"V0.5 drew {drawn.sum()} rollouts in {len(drawn)} steps, equal groups would have drawn {equal * len(drawn)}. "
        f"Of {sum(why.values())} groups {why['cost']} stopped as one more would have told too little, {why['most']} at "
        f"the most a task may have, {why['budget']} as the step's rollouts were spent.",
        f"CoBA-RL gave one task as many as {top} of a step's {equal} rollouts.",
    ]


def fusion_sentences(few: int, many: int) -> list[str]:
    """From which distance between true and expected rate on V0.5's baseline is worse than the plain mean."""
    out = []
    for k in (few, many):
        distance = fused_worse(k)["distance"]
        far = "at no expected rate" if math.isnan(distance) else f"from {100 * distance:.0f} points off on"
        out.append(f"With {k} rollouts of a task that is won half the time, the fused baseline is worse {far}.")
    return out
