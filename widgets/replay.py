"""What would the signals have been with other settings? Sliders over a run's stored log-probs and gradient energies.

The numbers come from the functions that training uses (credit.agent_opsd, distill.sdar, reuse.dgg), by way of
figures.replay.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ipywidgets
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from workbench.credit.agent_opsd import AgentOPSDConfig
from workbench.distill.sdar import SDARConfig
from workbench.figures import beliefs, gates, lm_head, replay, style, tokens
from workbench.reuse.dgg import DGGConfig, Gate
from workbench.runs import RunFolder

from .sliders import Drawn, View, choice, slider

EVIDENCE = {"sum of gaps (paper)": "sum", "mean gap per token": "mean", "sum less the episode's mean": "centred"}
MODES = {"discard the update and stop (paper)": "both", "discard the update": "discard", "stop the reuse": "stop"}


def belief_view(run: RunFolder | str | Path, step: int = -1, episode: int = -1) -> View:
    """One episode's beliefs and credit under another gamma, band, lam and kind of evidence, beside the recorded ones.

    -1: the episode that figures.beliefs.choose picks. Raises WorkbenchError without teacher log-probs, or where the run
    has no such episode.
    """
    source = _opened(run)
    episodes, turns = source.read("episodes"), _turns(source, step)
    recorded = replay.beliefs_of(turns, episodes)
    step, _, episode = beliefs.choose(recorded, episodes, step, -1, episode)
    base = style.pick(recorded, "turns", step=step, episode=episode).sort("turn")
    label = "as recorded" if replay.has_beliefs(turns) else "the paper's rule"
    raw = style.pick(turns, "turns", step=step, episode=episode)
    start = _recorded(source, "agent_opsd", replay.PAPER)

    def draw(**changes: Any) -> Drawn:
        config = replace(start, **changes)
        now = replay.with_beliefs(raw, episodes, config)
        return [belief_figure(now, base, episodes, label)], belief_words(now, base, episodes, config, label)

    controls = {
        "gamma": slider("gamma", start.gamma, 0, 1, 0.01),
        "band": slider("band", start.band, 0, 1, 0.01),
        "lam": slider("lam", start.lam, 0, 1, 0.01),
        "evidence": choice("evidence", EVIDENCE, start.evidence),
    }
    return View(controls, draw)


def gate_view(run: RunFolder | str | Path, step: int = -1, episode: int = -1) -> View:
    """SDAR's token gate under another beta: over the tokens of a step, and over the text of one turn.

    -1: the episode that figures.beliefs.choose picks. Raises WorkbenchError without teacher log-probs, or where the run
    has no such episode.
    """
    source = _opened(run)
    episodes, turns = source.read("episodes"), replay.with_gap(_turns(source, step))
    step, _, episode = beliefs.choose(replay.beliefs_of(turns, episodes), episodes, step, -1, episode)
    turns = style.pick(turns, "turns", step=step)
    mine = style.pick(turns, "turns", step=step, episode=episode)
    start = _recorded(source, "sdar", SDARConfig()).beta

    def draw(beta: float, turn: int) -> Drawn:
        held = gates.tokens_by_outcome(turns, episodes, beta)
        figures = [gate_figure(held, beta, step), tokens.cells(mine, step, episode, turn, beta=beta)]
        return figures, gate_words(held, beta)

    names = {f"turn {t + 1}: {_line(a, 40)}": t for t, a in mine.sort("turn").select("turn", "action").rows()}
    controls = {
        "beta": slider("beta", start, 0, max(20.0, start), 0.1),
        "turn": choice("text", {"all its turns": -1} | names, gates.pick_turn(mine, step, episode)),
    }
    return View(controls, draw)


def lm_head_view(run: RunFolder | str | Path) -> View:
    """The gate on the output head's gradient under another threshold, window and mode, over the recorded energies.

    Raises WorkbenchError where the run has no updates table.
    """
    source = _opened(run)
    updates = source.read("updates").sort("update")
    start = _recorded(source, "dgg", DGGConfig())
    style.need(updates, [_column(start)], "updates", "the trainer records it for every computed gradient")
    start = replace(start, max_reuse=max(start.max_reuse, updates["reuse"].max()))

    def draw(**changes: Any) -> Drawn:
        config = replace(start, **changes)
        now = regate(updates, config)
        return [lm_head.gate(now), lm_head.reuse(now)], gate_decisions(now, updates, config)

    top = max(5.0, start.threshold, *(z for z in updates["z"].to_list() if z is not None))
    controls = {
        "threshold": slider("threshold", start.threshold, min(-1.0, start.threshold), float(int(top) + 1), 0.05),
        "window": ipywidgets.IntSlider(
            start.window, 1, max(64, start.window), description="window", style={"description_width": "initial"}
        ),
        "mode": choice("a trip", MODES, start.mode),
    }
    return View(controls, draw)


# Belief


def belief_figure(now: pl.DataFrame, base: pl.DataFrame, episodes: pl.DataFrame, label: str) -> go.Figure:
    """One episode's turns by two rules, `now` and `base` (named `label`): belief paths, and each turn's advantage as a
    bar from the advantage that GRPO gives every turn."""
    rows, was = now.sort("turn").to_dicts(), base.sort("turn").to_dicts()
    step, episode = rows[0]["step"], rows[0]["episode"]
    head = style.pick(episodes, "episodes", step=step, episode=episode).row(0, named=True)
    mean = head["advantage"]
    fig = make_subplots(
        1, 2, horizontal_spacing=0.1, subplot_titles=["belief after each turn", "advantage of each turn"]
    )
    paths = ((was, label, style.MUTED, "dot", 1.8), (rows, "with these settings", style.BLUE, "solid", 2.6))
    for data, name, colour, dash, width in paths:
        flags = [False] + [abs(r["z"]) > 1 for r in data]
        fig.add_scatter(
            x=[0] + [r["turn"] + 1 for r in data],
            y=[data[0]["belief_before"]] + [r["belief"] for r in data],
            mode="lines+markers",
            name=name,
            legendgroup=name,
            line=dict(color=colour, width=width, dash=dash),
            marker=dict(symbol=["diamond" if f else "circle" for f in flags], size=[12 if f else 6 for f in flags]),
            hovertext=["prior"] + [beliefs.hover(r) for r in data],
            hoverinfo="text",
            meta=dict(panel="belief", rule=name),
            row=1,
            col=1,
        )
    fig.add_bar(
        x=[r["turn"] + 1 for r in rows],
        y=[r["turn_advantage"] - mean for r in rows],
        base=mean,
        width=0.62,
        marker=dict(color=style.BLUE),
        hovertext=[f"{beliefs.hover(r)}<br>advantage {style.number(r['turn_advantage'])}" for r in rows],
        hoverinfo="text",
        showlegend=False,
        meta=dict(panel="advantage", rule="with these settings"),
        row=1,
        col=2,
    )
    fig.add_scatter(
        x=[r["turn"] + 1 for r in was],
        y=[r["turn_advantage"] for r in was],
        mode="markers",
        marker=dict(symbol="line-ew-open", size=22, color=style.INK, line=dict(width=2)),
        name=f"advantage, {label}",
        hovertemplate=f"turn %{{x}}: %{{y:+.3f}} {label}<extra></extra>",
        meta=dict(panel="advantage", rule=label),
        row=1,
        col=2,
    )
    style.dress(
        fig,
        "What would credit have been?",
        f"Step {step}, episode {episode}, {'a success' if head['outcome'] else 'a failure'}; GRPO gives every turn "
        f"{style.number(mean)}. Diamonds: pivotal, |z| > 1.",
        height=270,
        panel_titles=True,
    )
    style.panel_titles(fig)
    fig.add_hline(y=mean, line=dict(color="#9aa5b1", width=1), row=1, col=2)
    ticks = 1 if len(rows) < 16 else 5
    values = [r["turn_advantage"] for r in (*rows, *was) if r["turn_advantage"] is not None]
    room = max(0.25 * abs(mean), 1.1 * max((abs(v - mean) for v in values), default=0), 1e-3)
    fig.update_xaxes(title_text="turns played", range=[-0.3, len(rows) + 0.3], dtick=ticks, col=1)
    fig.update_xaxes(title_text="turn", range=[0.4, len(rows) + 0.6], dtick=ticks, showgrid=False, col=2)
    fig.update_yaxes(title_text="belief B", range=[-0.03, 1.03], col=1)
    fig.update_yaxes(title_text="advantage", range=[mean - room, mean + room], col=2)
    return fig


def belief_words(
    now: pl.DataFrame, base: pl.DataFrame, episodes: pl.DataFrame, config: AgentOPSDConfig, label: str
) -> list[str]:
    """The settings, which turns are pivotal under both rules, and the turn whose credit changes most."""
    kind = next(name for name, rule in EVIDENCE.items() if rule == config.evidence)
    out = [f"gamma = {config.gamma:g}, band = {config.band:g}, lam = {config.lam:g}, evidence: {kind}."]
    pair = now.select("step", "episode", "turn", "z", "turn_advantage").join(
        base.select("turn", pl.col("z").alias("z_was"), pl.col("turn_advantage").alias("was")), on="turn"
    )
    pair = pair.with_columns(change=(pl.col("turn_advantage") - pl.col("was")).abs())
    named = [
        ", ".join(str(t + 1) for t in pair.filter(pl.col(z).abs() > 1).sort("turn")["turn"]) or "none"
        for z in ("z", "z_was")
    ]
    out.append(f"Pivotal turns: {named[0]}; {label}: {named[1]}.")
    at = style.pick(episodes, "episodes", step=pair["step"][0], episode=pair["episode"][0])
    if at["advantage"][0] == 0:
        return out + ["All of its group ended alike, so the advantage is 0 and no setting gives any credit."]
    top = pair.sort("change", "turn", descending=[True, False], nulls_last=True).row(0, named=True)
    if top["change"] is None or top["change"] < 5e-4:
        return out + [f"No turn's advantage differs from {label} by 0.0005 or more."]
    before, after = style.number(top["was"]), style.number(top["turn_advantage"])
    return out + [f"The advantage of turn {top['turn'] + 1} changes most: {before} {label}, {after} now."]


# Token gate


def gate_figure(held: pl.DataFrame, beta: float, step: int, bins: int = 40) -> go.Figure:
    """How the gates of a step's tokens are spread over 0 to 1, in successes and failures. held: tokens_by_outcome."""
    fig = go.Figure()
    place = (pl.col("gate") * bins).floor().clip(0, bins - 1).cast(pl.Int64)
    for outcome, name, colour in ((1, "successes", style.SUCCESS), (0, "failures", style.FAILURE)):
        part = held.filter(pl.col("outcome") == outcome)
        if part.is_empty():
            continue
        counts = dict(part.group_by(place.alias("bin")).len().rows())
        fig.add_scatter(
            x=[(i + 0.5) / bins for i in range(bins)],
            y=[counts.get(i, 0) / part.height for i in range(bins)],
            mode="lines",
            line=dict(color=colour, width=2, shape="hvh"),
            name=f"{name} ({part.height:,} tokens)",
            hovertemplate="gate about %{x:.2f}: %{y:.1%} of tokens<extra></extra>",
            meta=dict(outcome=outcome),
        )
    style.dress(
        fig,
        "How far does the gate open?",
        f"Step {step}, beta = {beta:g}: gate = sigmoid(beta × gap), one half where teacher and student agree. At "
        "beta 0 every token is let through by half; with a large beta the gate is a switch on the gap's sign.",
        height=200,
    )
    fig.add_vline(x=0.5, line=dict(color="#9aa5b1", width=1))
    fig.update_xaxes(title_text="gate g", range=[-0.01, 1.01])
    fig.update_yaxes(title_text="share of tokens", tickformat=".0%", rangemode="tozero")
    return fig


def gate_words(held: pl.DataFrame, beta: float) -> list[str]:
    """The mean gate, the share of tokens above one half, and how many tokens share the push."""
    gate = held["gate"]
    evenly = gate.sum() ** 2 / (gate**2).sum() / len(gate) if gate.sum() else None
    by = dict(held.group_by("outcome").agg(pl.col("gate").mean()).rows())
    words = [
        f"{style.number(by[o], '.3f')} in {n}" for o, n in ((1, "successes"), (0, "failures")) if by.get(o) is not None
    ]
    return [
        f"beta = {beta:g}: mean gate {gate.mean():.3f} ({', '.join(words)}); {style.percent((gate > 0.5).mean())} of "
        f"tokens above one half, which no beta above 0 changes.",
        f"The push is spread as if over {style.percent(evenly)} of the tokens, (Σg)² / (n Σg²).",
    ]


# Gate on the head's gradient


def regate(updates: pl.DataFrame, config: DGGConfig) -> pl.DataFrame:
    """The updates table as the gate would have decided it, from what it watches (the energy), in recorded order.

    What follows a stop in its batch is left out, as it would not have been computed. What the recorded run did not
    compute stays unknown, and what is watched is as it was in the run.
    """
    gate, rows, stopped = Gate(config), [], None
    for row in updates.sort("update").to_dicts():
        if row["step"] == stopped:
            continue
        decision = gate.observe(row[_column(config)], row["reuse"])
        stopped = row["step"] if decision.stop else None
        found = dict(applied=decision.apply, stop=decision.stop, increment=decision.increment, z=decision.z)
        rows.append(row | found | {"threshold": config.threshold})
    return pl.DataFrame(rows, schema=updates.schema)


def gate_decisions(now: pl.DataFrame, updates: pl.DataFrame, config: DGGConfig) -> list[str]:
    """The settings, how many gradients are applied, discarded and not computed, and what a replay cannot know."""
    trips = int((now["stop"] | ~now["applied"]).sum())
    scored = now.filter(pl.col("z").is_not_null(), pl.col("reuse") > 1).height
    out = [
        f"threshold = {config.threshold:g}, window = {config.window}, a trip {_trip(config.mode)}.",
        f"The gate trips {trips} times of {scored} that it could: {int(now['applied'].sum())} of {updates.height} "
        f"recorded gradients are applied, {int((~now['applied']).sum())} discarded and {updates.height - now.height} "
        f"not computed. The run applied {int(updates['applied'].sum())}.",
    ]
    if not scored:
        out.append("No gradient was scored: the window was never full at a batch's second use. A smaller one helps.")
    return out + [
        "A replay knows only the gradients that the run computed, on the weights that the run had: after the first "
        "decision that differs, it shows what would have tripped, not what training would have become."
    ]


def _column(config: DGGConfig) -> str:
    return "head_norm" if config.statistic == "norm" else config.statistic


def _trip(mode: str) -> str:
    return {"both": "discards the update and stops the reuse", "discard": "discards the update"}.get(
        mode, "stops the reuse"
    )


# Parts


def _opened(run: RunFolder | str | Path) -> RunFolder:
    return run if isinstance(run, RunFolder) else RunFolder.open(run)


def _turns(run: RunFolder, step: int) -> pl.DataFrame:
    """Turns of one step, or of all (-1); only that step's are read."""
    if step < 0:
        return run.read("turns")
    style.pick(run.scan("turns").select("step").unique().collect(), "turns", step=step)
    return run.scan("turns").filter(pl.col("step") == step).collect()


def _recorded(run: RunFolder, method: str, default: Any) -> Any:
    """`default` with the options that the run's own method gave it, where it is that method."""
    if method not in str(run.config.get("method", "")):
        return default
    names = {f.name for f in fields(default)}
    options = run.config.get("method_options") or {}
    return replace(default, **{name: value for name, value in options.items() if name in names})


def _line(text: str | None, width: int) -> str:
    line = " ".join((text or "").split()) or "(no action)"
    return line if len(line) <= width else line[: width - 1] + "…"
