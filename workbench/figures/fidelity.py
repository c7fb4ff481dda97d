"""How right is the credit? Scores of signals with intervals, a belief's reliability, an episode beside its truth."""

import html
from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl
from IPython.display import display
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from ..fidelity import text
from ..fidelity.frames import CEILING, RANDOM, SOLVER, Fidelity
from ..fidelity.signals import RECORDED, TEACHERS
from ..fidelity.text import merged
from . import style
from .display import MARK

COLOURS = {"method": style.BLUE, "recorded": style.SKY, "signal": style.PURPLE, "solver": style.GREEN}
KINDS = {
    "method": "credit of a method", "recorded": "advantage that was recorded", "signal": "what a belief is made of",
    "solver": "exact solver",
}  # fmt: skip
TEXTS = {"right": style.BLUE, "random": style.AMBER, "wrong": style.VERMILION}
METRICS = {"correlation": "rank correlation in an episode", "sign": "right sign", "precision": "flagged, pivotal"}
KEY = ("step", "episode")


def scores(found: Fidelity, limit: int = 14) -> go.Figure:
    """Each signal's rank correlation, sign agreement and precision with 95 % intervals; random credit as a band, the
    ceiling as a line."""
    frame = found.scores.filter(~pl.col("kind").is_in(["ceiling"]))
    rows = [r for r in merged(frame).to_dicts() if r["kind"] in COLOURS and r["correlation"] is not None]
    rows = sorted(rows, key=lambda r: -r["correlation"])[:limit]
    rows += [r for r in merged(frame).to_dicts() if r["kind"] == "baseline" and r["signal"] != RANDOM]
    chance = found.scores.filter(pl.col("signal") == RANDOM).row(0, named=True)
    fig = make_subplots(
        1, 3, shared_yaxes=True, horizontal_spacing=0.03, column_widths=[0.46, 0.27, 0.27],
        subplot_titles=list(METRICS.values()),
    )  # fmt: skip
    names = [style.shorten(r["signal"], 38) for r in rows]
    for col, metric in enumerate(METRICS, 1):
        for kind, colour in (*COLOURS.items(), ("baseline", style.MUTED)):
            own = [(n, r) for n, r in zip(names, rows, strict=True) if r["kind"] == kind and r[metric] is not None]
            if own:
                fig.add_trace(_dots(own, metric, colour, kind, legend=col == 1 and kind in KINDS), row=1, col=col)
        low, high = chance[f"{metric}_low"], chance[f"{metric}_high"]
        if low is not None:
            fig.add_vrect(
                x0=low, x1=high, fillcolor="#dfe3e8", opacity=0.7, line_width=0, layer="below", col=col, row=1
            )
    if found.ceiling is not None:
        line = dict(color=style.INK, width=1.2, dash="dot")
        fig.add_vline(x=found.ceiling, line=line, col=1, row=1)
    facts = found.facts
    counted = found.scores.filter(pl.col("signal") == CEILING)["counted"].item()
    top = "" if found.ceiling is None else f" Dotted: about what perfect credit would reach ({found.ceiling:.2f})."
    style.dress(
        fig,
        "Does the credit go to the turns that earned it?",
        f"{facts['env']}: {counted} of {facts['episodes']} episodes in {facts['groups']} groups, {facts['rolls']} "
        f"rolls a state. Bars: 95 % intervals over groups. Grey: where 95 % of random credit falls.{top}",
        height=25 * len(rows) + 20,
        panel_titles=True,
        left=230,
    )
    style.panel_titles(fig)
    fig.update_yaxes(
        range=[len(rows) - 0.4, -0.6], categoryorder="array", categoryarray=names, ticks="", showgrid=False
    )
    fig.update_yaxes(automargin=False)
    fig.update_xaxes(zeroline=True, col=1)
    return fig


def _dots(own: Sequence[tuple[str, dict]], metric: str, colour: str, kind: str, legend: bool) -> go.Scatter:
    values = [r[metric] for _, r in own]
    return go.Scatter(
        x=values,
        y=[n for n, _ in own],
        mode="markers",
        name=KINDS.get(kind, "baseline"),
        legendgroup=kind,
        showlegend=legend,
        marker=dict(color=colour, size=9),
        error_x=dict(
            array=[None if r[f"{metric}_high"] is None else r[f"{metric}_high"] - r[metric] for _, r in own],
            arrayminus=[None if r[f"{metric}_low"] is None else r[metric] - r[f"{metric}_low"] for _, r in own],
            color=colour,
            thickness=1.6,
            width=4,
        ),
        hoverinfo="text",
        hovertext=[
            f"<b>{style.escape(r['signal'])}</b><br>{METRICS[metric]} {style.number(r[metric], '+.2f')}, 95 % interval "
            f"{style.number(r[metric + '_low'], '+.2f')} to {style.number(r[metric + '_high'], '+.2f')}<br>tells turns "
            f"apart in {style.percent(r['told'])} of the episodes"
            for _, r in own
        ],
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of rows of cells, the first a heading. Nothing in it is markup but the table."""
    look = "text-align:{};padding:3px 16px 3px 0;white-space:nowrap"
    lines = []
    for n, row in enumerate(rows):
        tag = "td" if n else "th"
        cells = [
            f'<{tag} style="{look.format("right" if k else "left")}">{html.escape(cell)}</{tag}>'
            for k, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div {MARK}="text"><table style="border-collapse:collapse;font-size:13px">{"".join(lines)}</table></div>'


def show_table(found: Fidelity) -> None:
    """Display every score."""
    _show(text.score_rows(found.scores), "scores of every signal")


def show_teachers(found: Fidelity) -> None:
    """Display rank correlations by skill text, or that there are none."""
    rows = text.teacher_rows(found) or [["No signal of this run was credited again under other skill texts."]]
    _show(rows, "rank correlation by skill text")


def _show(rows: Sequence[Sequence[str]], plain: str) -> None:
    display({"text/html": table(rows), "text/plain": plain}, raw=True)


def reliability(found: Fidelity) -> go.Figure:
    """Mean value of the states where the belief is about so high, with 95 % intervals, by skill text; the area of a
    marker is the number of states."""
    frame = found.reliability.filter(pl.col("signal") == "belief revision")
    if frame.is_empty():
        raise WorkbenchError("fidelity: no belief was measured, as the run has no teacher's log-probs")
    texts = frame["teacher"].unique().to_list()
    shown = [t for t in (*TEACHERS, RECORDED) if t in texts and not (t == RECORDED and "right" in texts)]
    fig = go.Figure()
    fig.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=dict(color="#9aa5b1", dash="dot"), showlegend=False,
                    hoverinfo="skip")  # fmt: skip
    most = frame["states"].max()
    for n, teacher in enumerate(shown):
        rows, colour = frame.filter(pl.col("teacher") == teacher), TEXTS.get(teacher, style.BLUE)
        shift = 0.006 * (n - (len(shown) - 1) / 2)
        fig.add_scatter(
            x=(rows["belief"] + shift).to_list(),
            y=rows["value"].to_list(),
            mode="lines+markers",
            name=f"{teacher} skill text" if teacher in TEXTS else teacher,
            line=dict(color=colour, width=1.4),
            marker=dict(color=colour, size=[6 + 16 * (s / most) ** 0.5 for s in rows["states"]], opacity=0.85),
            error_y=dict(
                array=(rows["value_high"] - rows["value"]).fill_null(0).to_list(),
                arrayminus=(rows["value"] - rows["value_low"]).fill_null(0).to_list(),
                color=colour, thickness=1.2, width=3,
            ),
            hovertext=[
                f"{r['states']} states: belief {r['belief']:.2f}, value {r['value']:.2f}" for r in rows.to_dicts()
            ],
            hoverinfo="text",
        )  # fmt: skip
    style.dress(
        fig,
        "Is the belief the chance to win?",
        "States by the belief after the turn that led to them: on the dotted line a belief is calibrated. Areas are "
        "numbers of states. The paper calls the belief relative support, and does not claim that it is a chance.",
        height=360,
    )
    fig.update_xaxes(range=[-0.03, 1.03], title_text="belief")
    fig.update_yaxes(range=[-0.03, 1.03], title_text="V of the state, from rolls")
    return fig


def choose(found: Fidelity) -> tuple[int, int]:
    """The episode with the largest clear change of value, the first of equals: not a typical one."""
    clear = pl.when("pivotal").then(pl.col("advantage").abs()).otherwise(0.0)
    rows = found.turns.group_by(KEY, maintain_order=True).agg(clear.max().alias("most"), pl.len().alias("turns"))
    return rows.filter(pl.col("turns") > 2).sort("most", descending=True, maintain_order=True).select(KEY).row(0)


def episode(found: Fidelity, step: int, number: int, methods: Sequence[str] = ("agent_opsd", "gigpo")) -> go.Figure:
    """One episode: V of every state with its interval beside the belief, the true advantage of every turn, and the
    credit that methods gave."""
    here = (pl.col("step") == step) & (pl.col("episode") == number)
    turns, states = found.turns.filter(here).sort("turn"), found.states.filter(here).sort("state")
    if turns.is_empty():
        raise WorkbenchError(f"fidelity: episode {number} of step {step} was not measured")
    credit = found.credit.filter(here)
    rows = [
        (n, credit.filter((pl.col("signal") == n) & ~pl.col("teacher").is_in(TEACHERS))) for n in (*methods, SOLVER)
    ]
    rows = [(n, own.sort("turn")) for n, own in rows if not own.is_empty()]
    labels = ["V and belief", "true advantage", *[f"{_titled(n)}, less its mean" for n, _ in rows]]
    heights = [2.2, 1.6, *[1.0] * len(rows)]
    total = sum(heights)
    fig = make_subplots(
        len(labels), 1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[h / total for h in heights],
        subplot_titles=labels,
    )  # fmt: skip
    fig.add_trace(_value_line(states), row=1, col=1)
    belief = credit.filter((pl.col("signal") == "belief revision") & ~pl.col("teacher").is_in(TEACHERS)).sort("turn")
    if not belief.is_empty():
        fig.add_scatter(
            x=[t + 1 for t in belief["turn"]], y=belief["belief"].to_list(), mode="lines+markers", name="belief",
            line=dict(color=style.PURPLE, width=1.6), marker=dict(size=7, symbol="diamond"), row=1, col=1,
        )  # fmt: skip
    at, action = [t + 0.5 for t in turns["turn"]], [style.shorten(a, 40) for a in turns["action"]]
    fig.add_trace(_bars(at, turns["advantage"].to_list(), action, turns), row=2, col=1)
    for n, (_, own) in enumerate(rows, 3):
        fig.add_trace(_bars(at, (own["credit"] - own["credit"].mean()).to_list(), action), row=n, col=1)
    fig.update_yaxes(nticks=4, zeroline=True)
    fig.update_yaxes(range=[-0.05, 1.05], row=1, col=1)
    ticks = dict(tickvals=at, ticktext=[f"{k}. {style.shorten(a, 22)}" for k, a in enumerate(turns["action"], 1)])
    fig.update_xaxes(tickangle=-28, range=[-0.15, turns.height + 0.15], row=len(labels), col=1, **ticks)
    outcome = "won" if turns["outcome"][0] else "not won"
    style.dress(
        fig,
        "One episode beside its truth",
        f"Step {step}, episode {number}, {outcome}. V is the share of the rolls from a state that won, bars are 95 % "
        "intervals; a turn's true advantage is what it changed of V. Of credit, what sets turns apart is shown, each "
        "on a scale of its own.",
        height=int(72 * total),
        bottom=100,
        panel_titles=True,
    )
    style.panel_titles(fig)
    return fig


def _titled(name: str) -> str:
    return name if name == SOLVER else f"credit of {name}"


def _value_line(states: pl.DataFrame) -> go.Scatter:
    return go.Scatter(
        x=states["state"].to_list(),
        y=states["value"].to_list(),
        mode="lines+markers",
        name="V of the state",
        line=dict(color=style.INK, width=1.6),
        marker=dict(size=8, symbol=["circle" if n else "square" for n in states["rolls"]]),
        error_y=dict(
            array=(states["high"] - states["value"]).to_list(),
            arrayminus=(states["value"] - states["low"]).to_list(),
            color=style.INK, thickness=1.2, width=4,
        ),
        hovertext=[
            f"V {r['value']:.2f}, " + (f"{r['rolls']} rolls" if r["rolls"] else "decided") for r in states.to_dicts()
        ],
        hoverinfo="text",
    )  # fmt: skip


def _bars(at: list[float], values: list[float], action: list[str], turns: pl.DataFrame | None = None) -> go.Bar:
    errors = {}
    if turns is not None:
        errors = dict(error_y=dict(
            array=(turns["high"] - turns["advantage"]).to_list(),
            arrayminus=(turns["advantage"] - turns["low"]).to_list(), color=style.INK, thickness=1.2, width=4,
        ))  # fmt: skip
    return go.Bar(
        x=at,
        y=values,
        width=0.62,
        marker_color=[style.BLUE if v > 0 else style.VERMILION for v in values],
        hovertext=[f"<b>{a}</b><br>{style.number(v, '+.3f')}" for a, v in zip(action, values, strict=True)],
        hoverinfo="text",
        showlegend=False,
        **errors,
    )


def across(frames: Sequence[Fidelity], limit: int = 8) -> go.Figure:
    """Rank correlations over environments, a panel each: the best signals of any of them."""
    if not frames:
        raise WorkbenchError("fidelity: nothing was measured")
    tables = {f.facts["env"]: merged(f.scores) for f in frames}
    best: dict[str, float] = {}
    for table in tables.values():
        for row in table.filter(pl.col("kind").is_in(list(COLOURS))).to_dicts():
            name = row["signals"][0]  # the others on the row are the same everywhere
            best[name] = max(best.get(name, -1.0), row["correlation"] or -1.0)
    names = sorted(best, key=lambda n: -best[n])[:limit]
    fig = make_subplots(1, len(frames), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=list(tables))
    for col, found in enumerate(frames, 1):
        rows = found.scores.filter(~pl.col("teacher").is_in(TEACHERS), pl.col("signal").is_in(names)).to_dicts()
        for kind, colour in COLOURS.items():
            own = [(style.escape(r["signal"]), r) for r in rows if r["kind"] == kind and r["correlation"] is not None]
            if own:
                fig.add_trace(_dots(own, "correlation", colour, kind, legend=col == 1), row=1, col=col)
        chance = found.scores.filter(pl.col("signal") == RANDOM).row(0, named=True)
        if chance["correlation_low"] is not None:
            fig.add_vrect(x0=chance["correlation_low"], x1=chance["correlation_high"], fillcolor="#dfe3e8", opacity=0.7,
                          line_width=0, layer="below", row=1, col=col)  # fmt: skip
        if found.ceiling is not None:
            fig.add_vline(x=found.ceiling, line=dict(color=style.INK, width=1.2, dash="dot"), row=1, col=col)
    style.dress(
        fig,
        "Is a signal right everywhere?",
        "Rank correlation with the true advantage within an episode, by environment. Bars: 95 % intervals over groups; "
        "grey: random credit; dotted: about what perfect credit would reach.",
        height=30 * len(names) + 20,
        panel_titles=True,
        left=150,
    )
    style.panel_titles(fig)
    fig.update_yaxes(categoryorder="array", categoryarray=[style.escape(n) for n in names][::-1], ticks="")
    return fig
