"""Where does another method's credit part from the recorded one? From a `workbench.compare_credit.ReplayComparison`.

Turns of one episode side by side, how far the two orders of turns agree over all episodes, and the tokens whose
gradient coefficient changes most.
"""

import html

import plotly.graph_objects as go
import polars as pl
from IPython.display import display
from plotly.subplots import make_subplots

from ..compare_credit import ReplayComparison
from . import style
from .display import MARK
from .tokens import show_piece

ROOM = 12  # up to how many turns there is room for what was done and for numbers
BIN = 0.1


def choose(comparison: ReplayComparison, step: int = -1, episode: int = -1) -> tuple[int, int]:
    """(step, episode) to look at, -1 meaning free: the most turns flipped, then the lowest rank correlation, then the
    most turns; late steps first among equals."""
    rows = comparison.episodes
    if step >= 0:
        rows = style.pick(rows, "episodes", step=step)
    if episode >= 0:
        rows = style.pick(rows, "episodes", episode=episode)
    order = [pl.col("flips"), pl.col("rank_correlation"), pl.col("n_turns"), pl.col("step"), pl.col("episode")]
    rows = rows.sort(order, descending=[True, False, True, True, False], nulls_last=True)
    return rows.select("step", "episode").row(0)


def turns(comparison: ReplayComparison, step: int, episode: int) -> go.Figure:
    """Credit of each turn of an episode, the baseline's above the other method's, each on a scale of its own."""
    rows = style.pick(comparison.turns, "turns", step=step, episode=episode).sort("turn")
    head = style.pick(comparison.episodes, "episodes", step=step, episode=episode).row(0, named=True)
    sides = (("baseline_credit", comparison.baseline), ("other_credit", comparison.method))
    titles = [style.escape(name[0].upper() + name[1:] if k == 0 else name) for k, (_, name) in enumerate(sides)]
    fig = make_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.16, subplot_titles=titles)
    wide = rows.height <= ROOM
    x, hover = rows["turn"].to_list(), [_turn_hover(row, comparison) for row in rows.to_dicts()]
    for line, (column, _) in enumerate(sides, start=1):
        values = rows[column].to_list()
        for name, colour, keep in (("raises its tokens", style.BLUE, 1), ("lowers its tokens", style.VERMILION, -1)):
            shown = [v if v * keep > 0 else None for v in values]
            fig.add_bar(
                x=x,
                y=shown,
                name=name,
                legendgroup=name,
                showlegend=line == 1,
                marker_color=colour,
                width=0.62,
                text=["" if v is None or not wide else style.number(v, "+.3g") for v in shown],
                textposition="outside",
                textfont=dict(size=11, color=style.INK),
                cliponaxis=False,
                hovertext=hover,
                hoverinfo="text",
                row=line,
                col=1,
            )
        largest = max(map(abs, values)) or 1.0
        low, high = min(0.0, *values) / largest, max(0.0, *values) / largest
        room = [(low - 0.22 * (low < 0)) * largest, (high + 0.22 * (high > 0)) * largest]
        fig.update_yaxes(range=room if any(room) else [-1, 1], nticks=5, zeroline=True, row=line, col=1)
    flipped = rows.filter("flipped")
    if flipped.height:
        fig.add_scatter(
            x=flipped["turn"].to_list(),
            y=[0] * flipped.height,
            mode="markers",
            name="the sign flips",
            marker=dict(symbol="diamond", size=10, color=style.INK, line=dict(width=1.5, color=style.PAPER)),
            hovertext=[hover[k] for k in flipped["turn"]],
            hoverinfo="text",
            row=2,
            col=1,
        )
    rank = head["rank_correlation"]
    order = (
        "one of the two gives all its turns the same, so there is no order to compare."
        if rank is None
        else f"the rank correlation of its turns' credit is {style.number(rank, '+.2f')}."
    )
    won = {1: ", a success", 0: ", a failure"}.get(head.get("outcome"), "")
    style.dress(
        fig,
        f"Which turns does {comparison.method} credit otherwise?",
        f"Step {step}, episode {episode}{won}: {order} Credit: the push of the whole loss on the log-prob of a turn's "
        "tokens, their mean. Each panel has a scale of its own.",
        height=380,
        panel_titles=True,
        bottom=124 if wide else 58,
    )  # fmt: skip
    fig.update_layout(barmode="overlay")
    style.panel_titles(fig)
    fig.update_xaxes(range=[-0.6, rows.height - 0.4], showgrid=False)
    fig.update_xaxes(ticks="", row=1)
    fig.update_yaxes(title_text="credit")
    if wide:
        labels = [f"{style.shorten(r['action'], 20) or '(no action)'} <b>{r['turn'] + 1}</b>" for r in rows.to_dicts()]
        fig.update_xaxes(tickvals=x, ticktext=labels, tickangle=-40, tickfont_color=style.INK, row=2)
    else:
        shown = [k for k in x if k == 0 or k % 5 == 4]
        fig.update_xaxes(tickvals=shown, ticktext=[str(k + 1) for k in shown], title_text="turn", row=2)
    return fig


def correlations(comparison: ReplayComparison) -> go.Figure:
    """Histogram over episodes of the rank correlation of the turns' credit."""
    found = comparison.episodes["rank_correlation"].drop_nulls()
    bins = round(2 / BIN)
    at = ((found + 1) / BIN + 1e-9).floor().cast(pl.Int64).clip(0, bins - 1)
    count = [int((at == k).sum()) for k in range(bins)]
    left = [-1 + k * BIN for k in range(bins)]
    fig = go.Figure()
    fig.add_bar(
        x=[low + BIN / 2 for low in left],
        y=count,
        width=BIN * 0.9,
        marker_color=[style.VERMILION if low < -1e-9 else style.BLUE for low in left],
        hovertext=[
            f"{style.number(low, '+.1f')} to {style.number(low + BIN, '+.1f')}: {n} episodes"
            for low, n in zip(left, count, strict=True)
        ],
        hoverinfo="text",
    )
    lacking = comparison.episodes.height - len(found)
    flat = f" {lacking} more have no order to compare: one of the two gives all turns the same." if lacking else ""
    style.dress(
        fig,
        "Do the two put the turns of an episode in the same order?",
        f"{comparison.method} and {comparison.baseline}, {len(found)} episodes of "
        f"{comparison.summary.height} training steps. 1: the same order, −1: the opposite one.{flat}",
        height=280,
        legend=False,
    )
    fig.update_xaxes(range=[-1.04, 1.04], dtick=0.5, title_text="rank correlation of the turns' credit", showgrid=False)
    top = max(count, default=0)
    fig.update_yaxes(title_text="episodes", rangemode="tozero", range=[0, 1.12 * top if top else 1])
    if top:
        mean = found.mean()
        fig.add_vline(x=mean, line=dict(color=style.INK, width=1, dash="dot"))
        place = dict(xanchor="right", xshift=-5) if mean > 0 else dict(xanchor="left", xshift=5)
        text, font = f"mean {style.number(mean, '+.2f')}", dict(size=12, color=style.INK)
        fig.add_annotation(x=mean, y=1, yref="paper", yanchor="top", text=text, showarrow=False, font=font, **place)
    else:
        fig.add_annotation(text="no episode has an order to compare", showarrow=False, x=0, y=0.5)
    return fig


def tokens(comparison: ReplayComparison, limit: int = 20) -> go.Figure:
    """The tokens whose dloss/dlogp changes most, each with its two coefficients joined by a line."""
    rows = comparison.tokens.head(limit).to_dicts()
    y, fig = list(range(len(rows))), go.Figure()
    ends = [[row["baseline_slope"], row["other_slope"], None] for row in rows]
    fig.add_scatter(
        x=[v for pair in ends for v in pair],
        y=[v for k in y for v in (k, k, None)],
        mode="lines",
        line=dict(color="#9aa5b1", width=2),
        showlegend=False,
        hoverinfo="skip",
    )
    hover = [_token_hover(row, comparison) for row in rows]
    for column, name, colour in (
        ("baseline_slope", comparison.baseline, "#5b5b5b"),
        ("other_slope", comparison.method, style.PURPLE),
    ):
        fig.add_scatter(
            x=[row[column] for row in rows],
            y=y,
            mode="markers",
            name=style.escape(name),
            marker=dict(size=9, color=colour),
            hovertext=hover,
            hoverinfo="text",
        )
    fig.add_vline(x=0, line=dict(color="#9aa5b1", width=1))
    style.dress(
        fig,
        "Which tokens does it change most?",
        f"dloss/dlogp of the {len(rows)} sampled tokens where the change is largest. Below 0 an update raises the "
        "token's probability, above 0 it lowers it.",
        height=max(23 * len(rows), 60),
        left=270,
    )
    labels = [f"<b>{style.escape(_piece(row)[:24])}</b>  {_place(row)}  " for row in rows]
    fig.update_yaxes(
        range=[len(rows) - 0.4, -0.6], tickvals=y, ticktext=labels, automargin=False, ticks="", showgrid=False
    )
    fig.update_xaxes(title_text="dloss/dlogp, per nat", exponentformat="power", nticks=7)
    return fig


def flips_table(comparison: ReplayComparison, limit: int = 12) -> str:
    """HTML table of the turns whose sign flips, the largest change first. Nothing in it is markup but the table."""
    flips = comparison.flips
    if flips.is_empty():
        return f'<div {MARK}="text"><p>The sign of no turn\'s credit flips.</p></div>'
    head = ("step", "episode", "turn", "action", comparison.baseline, comparison.method, "link")
    look = "text-align:left;vertical-align:top;white-space:normal;padding:4px 14px 4px 0"
    lines = []
    for row in flips.head(limit).to_dicts():
        action = style.shorten(row["action"], 60) or "(no action)"
        values = [style.number(row[name], "+.3g") for name in ("baseline_credit", "other_credit")]
        link = f"<code>{html.escape(row['link'])}</code>"
        cells = [row["step"], row["episode"], row["turn"] + 1, action, *values, link]
        lines.append("<tr>" + "".join(f'<td style="{look}">{cell}</td>' for cell in cells) + "</tr>")
    top = "".join(f'<th style="{look}">{html.escape(text)}</th>' for text in head)
    rest = f"<p>and {flips.height - limit} more</p>" if flips.height > limit else ""
    whole = f"max-width:{style.WIDTH}px;border-collapse:collapse;font-size:13px"
    body = f'<table style="{whole}"><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div {MARK}="text">{body}{rest}</div>'


def show_flips(comparison: ReplayComparison, limit: int = 12) -> None:
    """Display `flips_table`."""
    text = f"{comparison.flips.height} turns whose sign flips"
    display({"text/html": flips_table(comparison, limit), "text/plain": text}, raw=True)


def _piece(row: dict) -> str:
    return f"token {row['token_id']}" if row["piece"] is None else show_piece(row["piece"])


def _place(row: dict) -> str:
    return f"step {row['step']}, episode {row['episode']}, turn {row['turn'] + 1}"


def _turn_hover(row: dict, comparison: ReplayComparison) -> str:
    base, other = (style.number(row[name], "+.4g") for name in ("baseline_credit", "other_credit"))
    return (
        f"<b>turn {row['turn'] + 1}</b>: {style.shorten(row['action'], 60) or '(no action)'}<br>"
        f"{style.escape(comparison.baseline)}: {base}<br>{style.escape(comparison.method)}: {other}"
    )


def _token_hover(row: dict, comparison: ReplayComparison) -> str:
    base, other = (style.number(row[name], "+.4g") for name in ("baseline_slope", "other_slope"))
    return (
        f"<b>{style.escape(_piece(row))}</b>, token {row['position'] + 1} of the turn<br>"
        f"{style.escape(comparison.baseline)}: {base}<br>{style.escape(comparison.method)}: {other}<br>"
        f"{style.escape(row['link'])}"
    )
