"""Which methods' credit differs at all? What each tells apart on a recorded step, and how far their orders agree.

A token's credit is the push of a method's whole loss on it before tokens are averaged: its advantage, less the slope of
an auxiliary loss where it has one (`workbench.replay.Replayed`). A turn's is the mean of its tokens'.
"""

import html
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

import plotly.graph_objects as go
import polars as pl
import torch
from IPython.display import display
from torch import Tensor

from ..methods import method
from ..records import Batch
from ..replay import Replayed
from ..toy_world import rank_correlation
from . import style
from .display import MARK

KINDS = {
    "episode": "one value for the whole episode",
    "turn": "one value for each turn",
    "token": "a value for each token",
}
SAME = 1e-6  # share of the largest value: what lies closer is rounding


def turn_tables(batch: Batch, done: Mapping[str, Replayed]) -> dict[str, Tensor]:
    """(E,K) credit of every turn by method; 0 where there is no turn."""
    return {name: batch.turn_mean(each.push) for name, each in done.items()}


def kinds(batch: Batch, done: Mapping[str, Replayed]) -> dict[str, str]:
    """What each method tells apart on this batch: "token" where tokens of one turn differ, "turn" where turns of one
    episode do, else "episode"."""
    out = {}
    for name, turns in turn_tables(batch, done).items():
        push = done[name].push
        in_turn = torch.where(batch.response_mask, push - batch.to_tokens(turns), 0).abs().max()
        in_episode = torch.where(batch.turn_mask, turns - turns[:, :1], 0).abs().max()
        least = SAME * push.abs().max()
        out[name] = "token" if in_turn > least else "turn" if in_episode > least else "episode"
    return out


def favoured(batch: Batch, done: Mapping[str, Replayed], place: int) -> dict[str, int]:
    """The turn, from 1, that each method credits most in an episode of the batch, the first of equals; only of methods
    that tell its turns apart."""
    out = {}
    for name, table in turn_tables(batch, done).items():
        mine = table[place][batch.turn_mask[place]]
        if mine.max() - mine.min() > SAME * done[name].push.abs().max():
            out[name] = int(mine.argmax()) + 1
    return out


def in_order(kind: Mapping[str, str]) -> list[str]:
    """The names of `kinds`, those that tell nothing apart first."""
    return sorted(kind, key=lambda name: list(KINDS).index(kind[name]))


def relations(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, float] | None]:
    """For each of the named rows, in order: (earlier name, factor) where its values are an earlier row's times a
    positive factor, None where it is the first of its kind. Rows of nothing but 0 are of one kind."""
    out: dict[str, tuple[str, float] | None] = {}
    for name, mine in values.items():
        found, largest = None, max(map(abs, mine))
        for first in (n for n, relation in out.items() if relation is None):
            theirs = values[first]
            square = sum(x * x for x in theirs)
            factor = sum(x * y for x, y in zip(mine, theirs, strict=True)) / square if square else 1.0
            close = all(abs(x - factor * y) <= SAME * largest for x, y in zip(mine, theirs, strict=True))
            if close and factor > 0:
                found = (first, factor)
                break
        out[name] = found
    return out


def agreement_frame(batch: Batch, done: Mapping[str, Replayed]) -> pl.DataFrame:
    """One row a pair of methods, each with itself too: one, other, correlation, episodes.

    correlation: Spearman's, of the credit of an episode's turns, as a mean over the episodes in which neither method
    gives all turns the same; None where there are none. episodes: how many there are.
    """
    tables = turn_tables(batch, done)
    tables = {n: tables[n] / max(tables[n].abs().max().item(), 1e-12) for n in in_order(kinds(batch, done))}
    rows = []
    for one, other in combinations_with_replacement(tables, 2):
        found = rank_correlation(tables[one], tables[other], batch.turn_mask, digits=6)
        found = found[torch.isfinite(found)]
        mean = found.mean().item() if len(found) else None
        rows.append({"one": one, "other": other, "correlation": mean, "episodes": len(found)})
    return pl.DataFrame(rows, schema_overrides={"correlation": pl.Float64})


def _varying(frame: pl.DataFrame) -> tuple[list[str], list[str]]:
    """Methods that tell turns of some episode apart, and those that do so in none."""
    own = frame.filter(pl.col("one") == pl.col("other"))
    return tuple(own.filter((pl.col("episodes") > 0) == some)["one"].to_list() for some in (True, False))


def agreement(frame: pl.DataFrame, step: int) -> go.Figure:
    """Matrix of mean within-episode rank correlations between methods, from `agreement_frame`; methods that give all
    turns of every episode the same have no order to compare and are named below the title."""
    names, flat = _varying(frame)
    fig, size = go.Figure(), 54
    pairs = {(r["one"], r["other"]): r for r in frame.to_dicts()}
    cells = [[pairs.get((a, b)) or pairs[b, a] for b in names] for a in names]
    fig.add_heatmap(
        x=list(range(len(names))),
        y=list(range(len(names))),
        z=[[c["correlation"] for c in row] for row in cells],
        text=[[style.number(c["correlation"], "+.2f") for c in row] for row in cells],
        texttemplate="%{text}",
        textfont=dict(size=12),
        hovertext=[
            [
                f"<b>{a}</b> and <b>{b}</b>: {style.number(c['correlation'], '+.3f')}<br>"
                f"mean over {c['episodes']} episodes in which both tell turns apart"
                for b, c in zip(names, row, strict=True)
            ]
            for a, row in zip(names, cells, strict=True)
        ],
        hoverinfo="text",
        zmin=-1,
        zmax=1,
        xgap=2,
        ygap=2,
        colorscale=[list(c) for c in style.DIVERGING],
        colorbar=dict(
            title=dict(text="mean rank correlation", side="right", font=dict(size=12)),
            thickness=10,
            lenmode="pixels",
            len=180,
            outlinewidth=0,
            y=1,
            yanchor="top",
            tickvals=[-1, -0.5, 0, 0.5, 1],
            tickfont=dict(size=11, color=style.MUTED),
        ),
    )
    same = f"No order to compare, as all turns of an episode get the same: {', '.join(flat)}." if flat else ""
    style.dress(
        fig,
        "Do methods put the turns of an episode in the same order?",
        f"Step {step}. Spearman's correlation of the turns' credit within an episode, as a mean over its episodes; "
        f"1: the same order, −1: the opposite one. {same}",
        height=max(size * len(names), 120),
        legend=False,
        left=178,
        right=max(96, style.WIDTH - 178 - 74 * max(len(names), 1)),
        bottom=110,
    )
    ticks = dict(tickvals=list(range(len(names))), ticktext=[f"{n}  " for n in names])
    for update in (fig.update_xaxes, fig.update_yaxes):
        update(showgrid=False, showline=False, ticks="", tickfont=dict(size=12, color=style.INK), **ticks)
    fig.update_xaxes(tickangle=-40, range=[-0.5, max(len(names), 1) - 0.5])
    fig.update_yaxes(range=[max(len(names), 1) - 0.5, -0.5], automargin=False)
    if not names:
        fig.data[0].showscale = False
        fig.add_annotation(text="no method here tells turns of an episode apart", showarrow=False, x=0, y=0)
        fig.update_xaxes(visible=False)
        fig.update_yaxes(visible=False)
    return fig


def counts(kind: Mapping[str, str]) -> dict[str, int]:
    """How many methods there are of each of KINDS."""
    return {each: sum(k == each for k in kind.values()) for each in KINDS}


def least_agreement(frame: pl.DataFrame) -> dict | None:
    """The row of `agreement_frame` with the smallest correlation, the first of equals; None where there is none."""
    pairs = frame.filter(pl.col("one") != pl.col("other"), pl.col("correlation").is_not_null())
    return None if pairs.is_empty() else pairs.sort("correlation", maintain_order=True).row(0, named=True)


def sentences(kind: Mapping[str, str], frame: pl.DataFrame) -> list[str]:
    """How many methods tell anything apart on the step, and which two that do agree least."""
    count, (names, _), low = counts(kind), _varying(frame), least_agreement(frame)
    out = [
        f"Of {len(kind)} methods {count['episode']} give an episode one value, {count['turn']} one for each turn and "
        f"{count['token']} one for each token."
    ]
    if low is None:
        return [*out, "No two methods put the turns of an episode in orders that could be compared."]
    pairs = frame.filter(pl.col("one") != pl.col("other"))["correlation"].drop_nulls()
    return [
        *out,
        f"{len(names)} of them put the turns of an episode in some order. The two that agree least are {low['one']} "
        f"and {low['other']}, with a mean rank correlation of {style.number(low['correlation'], '+.2f')} over "
        f"{low['episodes']} episodes; {(pairs > 1 - SAME).sum()} of {len(pairs)} pairs agree wholly.",
    ]


def table(kind: Mapping[str, str], left_out: Mapping[str, str]) -> str:
    """HTML table of methods: name and paper, what it gave a value to on this step, what it does, and what it can and
    cannot see; of those that could not be computed, why not. Nothing in it is markup but the table."""
    head = ("method", "gives", "what it does, and what it can and cannot see")
    look = "text-align:left;vertical-align:top;white-space:normal;padding:5px 12px 5px 0"
    cells = [f'style="{look};min-width:{width}px"' for width in (190, 130, 0)]
    rows = []
    for name in [*in_order(kind), *left_out]:
        built = method(name)
        says = f"{built.description} {built.sees}"
        gives = KINDS[kind[name]] if name in kind else "not computed"
        says += f" Not computed here: it {left_out[name]}." if name in left_out else ""
        paper = f'<br><span style="color:{style.MUTED};font-size:12px">{html.escape(built.paper)}</span>'
        texts = (f"<b>{html.escape(name)}</b>{paper}", html.escape(gives), html.escape(says))
        rows.append("<tr>" + "".join(f"<td {c}>{text}</td>" for c, text in zip(cells, texts, strict=True)) + "</tr>")
    top = "".join(f"<th {c}>{html.escape(text)}</th>" for c, text in zip(cells, head, strict=True))
    whole = f"max-width:{style.WIDTH}px;border-collapse:collapse;font-size:13px"
    return (
        f'<div {MARK}="text"><table style="{whole}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def show_table(kind: Mapping[str, str], left_out: Mapping[str, str]) -> None:
    """Display `table`."""
    names = ", ".join([*kind, *left_out])
    display({"text/html": table(kind, left_out), "text/plain": f"what each method sees: {names}"}, raw=True)
