"""What does a turn's text look like, token by token? Coloured cells for any per-token quantity of a run."""

import math

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError, unknown
from . import style
from .replay import with_gate

CHAR, LINE, CELL_GAP = 7.3, 27, 3  # px at the 12 px monospace the cells are set in
LEFT, RIGHT = 66, 104
WIDE = style.WIDTH - LEFT - RIGHT
NO_VALUE = "#eceef0"
QUANTITIES = {
    "gate": "gate g",
    "gap": "gap (nats)",
    "advantage": "advantage A",
    "dloss_dlogp": "dL / d log p",
    "entropy": "entropy (nats)",
}


TITLES = {
    "gate": "Which tokens does the gate open for?",
    "gap": "Which tokens does the teacher find likelier than the student?",
    "advantage": "What credit does each token carry?",
    "dloss_dlogp": "Which way is each token pushed?",
    "entropy": "Where was the agent undecided?",
}
MEANINGS = {
    "gate": "Blue: gate above one half, the teacher finds the token likelier.",
    "gap": "Blue: teacher likelier, orange: less likely.",
    "advantage": "Blue: reinforced, orange: discouraged.",
    "dloss_dlogp": "Blue, negative: descent raises the token's probability; orange, positive: lowers it.",
    "entropy": "Darker: more undecided.",
}


def show_piece(piece: str) -> str:
    """A token's text as it can be seen: tokenizers' space and newline signs resolved, nothing invisible."""
    text = piece.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("\n", "⏎").replace("\t", "⇥")
    text = text.strip() or ("␣" if text else "∅")
    return text if len(text) <= 40 else text[:39] + "…"


def token_rows(turns: pl.DataFrame, step: int, episode: int, turn: int = -1, beta: float = -1.0) -> list[dict]:
    """The sampled tokens of one turn, or of a whole episode (turn = -1), a dict each: turn, position, piece, token_id,
    old_logprob, teacher_logprob, gap, gate, advantage, dloss_dlogp, entropy, decision, support, support_score; None
    where the run has no such value."""
    rows = style.pick(turns, "turns", step=step, episode=episode)
    rows = with_gate(rows if turn < 0 else style.pick(rows, "turns", turn=turn), beta).sort("turn")
    names = {
        "piece": "pieces",
        "token_id": "token_ids",
        "old_logprob": "old_logprobs",
        "teacher_logprob": "teacher_logprobs",
        "gap": "gap",
        "gate": "gate",
        "advantage": "advantage",
        "dloss_dlogp": "dloss_dlogp",
        "entropy": "entropy",
        "decision": "decision",
        "support": "support",
        "support_score": "support_score",
    }
    out = []
    for row in rows.to_dicts():
        for i in range(len(row["token_ids"])):
            values = {name: row[column][i] if row.get(column) is not None else None for name, column in names.items()}
            out.append({"turn": row["turn"], "position": i, **values})
    return out


def hover(token: dict) -> str:
    n = style.number
    text = style.wrap(token["piece"].replace("\n", "⏎"), 60, 3)
    return (
        f"<b>{text}</b>  id {token['token_id']}, turn {token['turn'] + 1}, token {token['position'] + 1}<br>"
        f"log p: student {n(token['old_logprob'])}, teacher {n(token['teacher_logprob'])} nats<br>"
        f"gap {n(token['gap'])} nats → gate {n(token['gate'], '.3f')}<br>"
        f"advantage {n(token['advantage'])}, dL/dlog p {n(token['dloss_dlogp'], '+.3g')} (whole loss, weighted)<br>"
        f"entropy {n(token['entropy'], '.3f')} nats"
    )


def lay_out(tokens: list[dict], seen: dict[int, str], wide: float = WIDE) -> tuple[list[tuple], list[tuple], int]:
    """Wrap cells into lines of `wide` px: [(token, x, width, line)], [(turn, line, observation)], number of lines."""
    placed, heads, line, x, turn = [], [], -1, 0.0, None
    for token in tokens:
        width = len(show_piece(token["piece"])) * CHAR + 9
        if token["turn"] != turn:
            turn, line, x = token["turn"], line + (2 if turn is not None or seen else 1), 0.0
            heads.append((turn, line, seen.get(turn, "")))
        elif x + width > wide:
            line, x = line + 1, 0.0
        placed.append((token, x, min(width, wide), line))
        x += width + CELL_GAP
    return placed, heads, line + 1


def draw_cells(
    placed: list[tuple], heads: list[tuple], colours: list[str], hovers: list[str], values: list, name: str
) -> go.Figure:
    """Cells laid out by `lay_out`, each with a colour, a hover text and a value, under what the agent saw."""
    fig = go.Figure()
    fig.add_bar(
        orientation="h",
        base=[x for _, x, _, _ in placed],
        x=[w for _, _, w, _ in placed],
        y=[y for *_, y in placed],
        width=0.8,
        marker=dict(color=colours, line=dict(color="#d5dae0", width=0.6)),
        text=[style.escape(show_piece(t["piece"])) for t, *_ in placed],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        constraintext="none",
        insidetextfont=dict(family=style.MONO, size=12, color=[style.ink_on(c) for c in colours]),
        hovertext=hovers,
        hoverinfo="text",
        customdata=values,
        name=name,
        showlegend=False,
    )
    for _, line, text in heads:
        if text:
            fig.add_annotation(
                x=0,
                y=line - 1,
                xanchor="left",
                yanchor="middle",
                showarrow=False,
                text=f"<i>{style.shorten(text, 112)}</i>",
                font=dict(size=12, color=style.MUTED),
                yshift=-3,
                hovertext=style.wrap(text, 80, 8),
            )
    return fig


def dress_cells(
    fig: go.Figure, title: str, subtitle: str, heads: list[tuple], lines: int, legend: bool = False
) -> None:
    """Title and axes of a figure of cells: no scale but the turns' numbers at the left."""
    style.dress(fig, title, subtitle, height=max(lines * LINE, 90), legend=legend, left=LEFT, right=RIGHT, bottom=14)
    fig.update_layout(bargap=0)
    fig.update_xaxes(range=[0, WIDE], visible=False, fixedrange=True)
    fig.update_yaxes(
        range=[max(lines, math.ceil(90 / LINE)) - 0.5, -0.5],
        showgrid=False,
        showline=False,
        ticks="",
        fixedrange=True,
        automargin=False,
        tickvals=[line for _, line, _ in heads],
        ticktext=[f"turn {k + 1}  " for k, *_ in heads],
    )


def cells(
    turns: pl.DataFrame,
    step: int,
    episode: int,
    turn: int = -1,
    color: str = "gate",
    beta: float = -1.0,
    limit: int = 600,
) -> go.Figure:
    """The text of a turn (or of an episode, turn = -1) as coloured cells, a token each, under what the agent saw.

    color: one of QUANTITIES. Signed quantities are centred at zero, the gate at one half (a gap of zero). At most
    `limit` tokens are drawn; the subtitle says when some are left out.
    """
    if color not in QUANTITIES:
        raise unknown("colour", color, QUANTITIES)
    tokens = token_rows(turns, step, episode, turn, beta)
    left_out, tokens = len(tokens) - limit, tokens[:limit]
    if all(t[color] is None for t in tokens):
        raise WorkbenchError(f"turns: {color} was not recorded for step {step}, episode {episode}")
    seen = style.pick(turns, "turns", step=step, episode=episode).select("turn", "observation").rows()
    placed, heads, lines = lay_out(tokens, dict(seen))

    values = [t[color] for t, *_ in placed]
    known = [v for v in values if v is not None]
    low, high, scale = 0.0, 1.0, style.DIVERGING
    if color == "entropy":
        high, scale = max(known), style.DEPTH
    elif color != "gate":
        high = style.spread(known)
        low = -high
    if color == "dloss_dlogp":  # a negative slope is a push upwards, so the colours change sides
        scale = tuple((1 - x, c) for x, c in reversed(scale))
    colours = [style.shade((v - low) / (high - low or 1), scale) if v is not None else NO_VALUE for v in values]
    fig = draw_cells(placed, heads, colours, [hover(t) for t, *_ in placed], values, QUANTITIES[color])
    fig.add_scatter(  # carries the colour bar: a bar trace with plain colours has none
        x=[None],
        y=[None],
        mode="markers",
        showlegend=False,
        hoverinfo="skip",
        marker=dict(
            color=[low],
            cmin=low,
            cmax=high,
            colorscale=[list(c) for c in scale],
            showscale=True,
            colorbar=dict(
                title=dict(text=QUANTITIES[color], side="right", font=dict(size=12)),
                thickness=10,
                lenmode="pixels",
                outlinewidth=0,
                len=max(90, min(220, lines * LINE)),
                x=1.02,
                y=1,
                yanchor="top",
                tickfont=dict(size=11, color=style.MUTED),
                nticks=5,
            ),
        ),
    )
    what = f"turn {turn + 1} of episode {episode}" if turn >= 0 else f"episode {episode}"
    extra = f" The last {left_out} tokens are not drawn." if left_out > 0 else ""
    subtitle = f"Step {step}, {what}. Grey: what the agent saw. {MEANINGS[color]} Hover a token for its numbers.{extra}"
    dress_cells(fig, TITLES[color], subtitle, heads, lines)
    return fig


def coefficients(
    turns: pl.DataFrame,
    step: int,
    episode: int,
    turn: int = -1,
    beta: float = -1.0,
    coef: float = 0.01,
    limit: int = 120,
) -> go.Figure:
    """Gradient coefficient dL/dlog p of each token: -A from the policy loss and -coef g from SDAR's, before a loss is
    averaged over tokens; where the run recorded it, the whole loss after averaging stands below.

    The policy part is that of the first update on a batch, where no ratio has moved and nothing is clipped.
    """
    tokens = token_rows(turns, step, episode, turn, beta)
    left_out, tokens = len(tokens) - limit, tokens[:limit]
    parts = [
        ("policy loss<br>−A", [-t["advantage"] if t["advantage"] is not None else None for t in tokens]),
        (f"SDAR loss<br>−λ g, λ = {coef:g}", [-coef * t["gate"] for t in tokens]),
    ]
    if any(t["dloss_dlogp"] is not None for t in tokens):
        parts.append(("recorded,<br>whole loss", [t["dloss_dlogp"] for t in tokens]))
    fig = make_subplots(len(parts), 1, shared_xaxes=True, vertical_spacing=0.06)
    for row, (name, values) in enumerate(parts, 1):
        colours = [style.mix(style.BLUE if (v or 0) <= 0 else style.VERMILION, "#ffffff", 0.1) for v in values]
        fig.add_bar(
            x=list(range(len(tokens))),
            y=values,
            marker=dict(color=colours),
            name=name.replace("<br>", ", "),
            hovertext=[hover(t) for t in tokens],
            hoverinfo="text",
            showlegend=False,
            row=row,
            col=1,
        )
        fig.update_yaxes(title_text=name, zeroline=True, nticks=5, exponentformat="power", row=row)
    for i in range(1, len(tokens)):
        if tokens[i]["turn"] != tokens[i - 1]["turn"]:
            fig.add_vline(x=i - 0.5, line=dict(color="#9aa5b1", width=1, dash="dot"))
    many = len(tokens) > 48
    what = f"turn {turn + 1} of episode {episode}" if turn >= 0 else f"episode {episode}, turns apart by dotted lines"
    extra = f" The last {left_out} tokens are not drawn." if left_out > 0 else ""
    style.dress(
        fig,
        "How hard is each token pushed, by the outcome and by the teacher?",
        f"Step {step}, {what}. dL/dlog p per token; negative (blue): descent raises its probability. The gated loss "
        f"can only raise, whatever the gap's sign.{extra}",
        height=140 * len(parts),
        legend=False,
        bottom=58 if many else 96,
    )
    fig.update_layout(bargap=0.25)
    fig.update_xaxes(showgrid=False)
    if many:
        fig.update_xaxes(title_text="sampled token", row=len(parts))
    else:
        fig.update_xaxes(
            tickvals=list(range(len(tokens))),
            ticktext=[style.escape(show_piece(t["piece"])[:14]) for t in tokens],
            tickangle=-55,
            tickfont=dict(family=style.MONO, size=11, color=style.INK),
            row=len(parts),
        )
    return fig
