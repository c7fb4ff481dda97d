"""Does the belief stay free to move, and does it matter how token gaps become a turn's evidence?

The paper sums gaps over a turn's tokens, which drifts down and can saturate the belief; beside it the mean per token
and the centred sum.

All is computed again from the recorded gaps by the library's own rule, so any run with teacher log-probs will do.
"""

from dataclasses import replace

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..credit.agent_opsd import AgentOPSDConfig
from . import beliefs, style
from .replay import KEY, PAPER, with_beliefs

RULES = {"sum": style.BLUE, "mean": style.AMBER, "centred": style.GREEN}
NAMES = {"sum": "sum (paper)", "mean": "mean per token", "centred": "sum less the episode's mean"}


def shares(turns: pl.DataFrame) -> pl.DataFrame:
    """Per step, shares of its `turns`: saturated (B outside [.01, .99]), tiny (|dB| < .001), pivotal (|z| > 1)."""
    return (
        turns.filter(pl.col("belief").is_not_null())
        .group_by("step")
        .agg(
            ((pl.col("belief") < 0.01) | (pl.col("belief") > 0.99)).mean().alias("saturated"),
            (pl.col("revision").abs() < 1e-3).mean().alias("tiny"),
            (pl.col("z").abs() > 1).mean().alias("pivotal"),
            pl.len().alias("turns"),
        )
        .sort("step")
    )


def saturation_frame(turns: pl.DataFrame, episodes: pl.DataFrame) -> pl.DataFrame:
    """`shares` over the turns of groups with both outcomes. The others start saturated and are given no credit."""
    style.need(turns, beliefs.NEEDS, "turns", beliefs.NO_BELIEF)
    rows = beliefs.outcomes(turns, episodes)
    mixed = rows.filter(pl.col("outcome").n_unique().over("step", "group") > 1)
    style.need(mixed, [], "episodes", "no group has both a success and a failure, so no turn earned any credit")
    return shares(mixed)


SHARES = (
    ("saturated", "belief saturated: B outside [0.01, 0.99]", style.VERMILION),
    ("tiny", "revision tiny: |ΔB| < 0.001", style.AMBER),
    ("pivotal", "pivotal: |z| > 1", style.BLUE),
)


def saturation(turns: pl.DataFrame, episodes: pl.DataFrame) -> go.Figure:
    """Is the belief still free to move? Shares of saturated beliefs, tiny revisions and pivotal turns over training."""
    frame = saturation_frame(turns, episodes)
    fig = go.Figure()
    for name, label, colour in SHARES:
        fig.add_scatter(
            x=frame["step"].to_list(),
            y=frame[name].to_list(),
            mode="lines+markers",
            name=label,
            line=dict(color=colour, width=2.2),
            marker=dict(size=6),
            customdata=frame["turns"].to_list(),
            hovertemplate="step %{x}: %{y:.1%} of %{customdata} turns<extra></extra>",
        )
    style.dress(
        fig,
        "Does the belief stay free to move, or does it saturate?",
        "Turns of groups with both outcomes. A saturated belief gives revisions near zero, and credit then hangs on "
        "the first turns alone: evidence drifts down, since its expectation is minus a KL divergence.",
        height=290,
    )
    fig.update_xaxes(title_text="training step")
    fig.update_yaxes(title_text="share of turns", tickformat=".0%", range=[-0.02, 1.02])
    return fig


def by_rule(turns: pl.DataFrame, episodes: pl.DataFrame, config: AgentOPSDConfig = PAPER) -> dict[str, pl.DataFrame]:
    """The turns table under each evidence rule, all else equal: {"sum" | "mean" | "centred": turns}."""
    return {rule: with_beliefs(turns, episodes, replace(config, evidence=rule)) for rule in RULES}


def summary(tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
    """One row a rule, over the turns that were given credit (those of groups with both outcomes): rule, turns,
    saturated, tiny, pivotal (shares of turns, as in beliefs.saturation_frame), and against the sum same_sign (share of
    turns whose z keeps its sign) and same_top (share of episodes whose largest |z| stays on the same turn).
    """
    base = tables["sum"].select(*KEY, "turn", pl.col("z").alias("base"))
    rows = []
    for rule, table in tables.items():
        pairs = table.filter(pl.col("turn_advantage") != 0).join(base, on=[*KEY, "turn"])
        style.need(pairs, [], "turns", "no group has both a success and a failure, so no turn earned any credit")
        tops = pairs.group_by(KEY).agg(pl.col("z").abs().arg_max() == pl.col("base").abs().arg_max())
        signs = pairs.select((pl.col("z").sign() == pl.col("base").sign()).mean()).item()
        whole = shares(pairs.with_columns(step=pl.lit(0))).drop("step").row(0, named=True)
        rows.append({"rule": rule, **whole, "same_sign": signs, "same_top": tops["z"].mean()})
    return pl.DataFrame(rows)


def sentences(frame: pl.DataFrame) -> list[str]:
    """What the rules change, in words, from a summary()."""
    rows = {r["rule"]: r for r in frame.to_dicts()}
    base, p = rows["sum"], style.percent
    out = [
        f"Summed over tokens, the belief is saturated after {p(base['saturated'])} of {base['turns']} turns and "
        f"{p(base['tiny'])} of revisions are below 0.001."
    ]
    for rule in ("mean", "centred"):
        row = rows[rule]
        out.append(
            f"With the {NAMES[rule]}, {p(row['saturated'])} are saturated and {p(row['tiny'])} tiny; z keeps its sign "
            f"on {p(row['same_sign'])} of turns and the most pivotal turn stays the same in "
            f"{p(row['same_top'])} of episodes."
        )
    return out


def compare(tables: dict[str, pl.DataFrame], episodes: pl.DataFrame, step: int, episode: int) -> go.Figure:
    """One episode under the three rules: its belief path, and the weight each turn's advantage is multiplied with."""
    fig = make_subplots(
        1, 2, horizontal_spacing=0.11, subplot_titles=["belief after each turn", "weight w of each turn"]
    )
    longest = 1
    for rule, table in tables.items():
        data = style.pick(table, "turns", step=step, episode=episode).sort("turn").to_dicts()
        longest = len(data)
        hover = [beliefs.hover(r) for r in data]
        fig.add_scatter(
            x=[0] + [r["turn"] + 1 for r in data],
            y=[data[0]["belief_before"]] + [r["belief"] for r in data],
            mode="lines+markers",
            line=dict(color=RULES[rule], width=2.4),
            marker=dict(size=7),
            name=NAMES[rule],
            legendgroup=rule,
            hovertext=["prior"] + hover,
            hoverinfo="text",
            row=1,
            col=1,
        )
        fig.add_bar(
            x=[r["turn"] + 1 for r in data],
            y=[r["weight"] - 1 for r in data],
            base=1,
            marker=dict(color=RULES[rule]),
            legendgroup=rule,
            showlegend=False,
            hovertext=hover,
            hoverinfo="text",
            name=NAMES[rule],
            row=1,
            col=2,
        )
    won = episodes.filter(pl.col("step") == step, pl.col("episode") == episode)["outcome"][0]
    style.dress(
        fig,
        "Would another way of adding up evidence give other credit?",
        f"Step {step}, episode {episode}, {'a success' if won else 'a failure'}. Recomputed from the recorded gaps; "
        "only the evidence rule differs. The weight multiplies the reshaped share of the advantage.",
        height=270,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.update_xaxes(title_text="turns played", dtick=1 if longest < 16 else 5, col=1)
    fig.update_xaxes(title_text="turn", dtick=1 if longest < 16 else 5, showgrid=False, col=2)
    fig.update_yaxes(title_text="belief B", range=[-0.03, 1.03], col=1)
    fig.update_yaxes(title_text="weight w", col=2)
    fig.add_hline(y=1, line=dict(color="#9aa5b1", width=1), row=1, col=2)
    return fig
