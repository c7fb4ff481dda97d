"""What would each method have credited? One episode's turns by methods, and one turn's tokens by methods.

Methods are on scales of their own, so a row is coloured by its share of the row's largest value, and that value is
written beside it; where a row is another one times a factor, that is written too. Credit is as in `credit_compare`.
"""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..records import Batch
from ..replay import Replayed
from . import beliefs, gates, style
from .credit_compare import KINDS, SAME, kinds, relations, turn_tables
from .replay import beliefs_of
from .tokens import show_piece

ROW, LEFT, RIGHT = 23, 178, 216  # px: a row's height, and the margins for names and for scales
PLOT = style.WIDTH - LEFT - RIGHT
TOKENS_A_LINE, ROOM = 30, 12  # tokens side by side; up to how many cells leave room for a number in each

GAP = "teacher gap"

Order = Sequence[tuple[int, int]]


def has_teacher(turns: pl.DataFrame) -> bool:
    """Whether the run recorded log-probs of a teacher."""
    return "teacher_logprobs" in turns.columns and turns["teacher_logprobs"].null_count() < turns.height


def choose(turns: pl.DataFrame, episodes: pl.DataFrame, step: int = -1, episode: int = -1) -> tuple[int, int]:
    """(step, episode) to look at, -1 meaning free: with a teacher, the one that figures.beliefs.choose picks; without,
    of the last step the longest success whose group has a failure, else the longest episode."""
    if has_teacher(turns):
        step, _, episode = beliefs.choose(beliefs_of(turns, episodes), episodes, step, -1, episode)
        return step, episode
    step = turns["step"].max() if step < 0 else step
    rows = style.pick(turns, "turns", step=step)
    if episode >= 0:
        return step, style.pick(rows, "turns", episode=episode)["episode"][0]
    mixed = pl.col("outcome").n_unique().over("group") > 1
    heads = style.pick(episodes, "episodes", step=step).with_columns(_first=mixed & (pl.col("outcome") == 1))
    heads = heads.join(rows.group_by("episode").agg(_turns=pl.len()), on="episode")
    return step, heads.sort(["_first", "_turns", "episode"], descending=[True, True, False])["episode"][0]


def choose_turn(turns: pl.DataFrame, step: int, episode: int) -> int:
    """The turn whose gaps differ most among its tokens; without a teacher, the one of most tokens."""
    if has_teacher(turns):
        return gates.pick_turn(turns, step, episode)
    rows = style.pick(turns, "turns", step=step, episode=episode)
    return rows.sort([pl.col("token_ids").list.len(), "turn"], descending=[True, False])["turn"][0]


def place(order: Order, episode: int) -> int:
    """The number that the batch gives to an episode."""
    return sorted({e for e, _ in order}).index(episode)


def _about_mean(values: Sequence[float]) -> list[float]:
    """Values less their mean, in percent of their mean size."""
    mean, size = sum(values) / len(values), sum(map(abs, values)) / len(values)
    return [100 * (v - mean) / size if size else 0.0 for v in values]


def by_turn(
    batch: Batch,
    order: Order,
    done: Mapping[str, Replayed],
    turns: pl.DataFrame,
    episodes: pl.DataFrame,
    step: int,
    episode: int,
    centred: bool = False,
) -> go.Figure:
    """Heat map of one episode's credit, a row a method and a column a turn, methods grouped by what they tell apart.

    batch, order: from workbench.replay.batch_of; done: from credit_by_method. centred: credit less the episode's mean,
    in percent of its mean size, of the methods that tell its turns apart (of all, where none does).
    """
    told = beliefs_of(turns, episodes) if has_teacher(turns) else turns
    rows = style.pick(beliefs.outcomes(told, episodes), "turns", step=step, episode=episode).sort("turn").to_dicts()
    at, kind = place(order, episode), kinds(batch, done)
    credit = {name: table[at, : len(rows)].tolist() for name, table in turn_tables(batch, done).items()}
    values = {name: _about_mean(v) for name, v in credit.items()} if centred else credit
    apart = {name: v for name, v in values.items() if not centred or max(map(abs, v)) > 100 * SAME}
    values, grouped = apart or values, []
    for each in KINDS:
        mine = [name for name in values if kind[name] == each]
        grouped += [("", KINDS[each]), *((name, name) for name in mine)] if mine else []
    wide = len(rows) <= ROOM
    hover = {name: [_turn_hover(name, c, row) for c, row in zip(credit[name], rows, strict=True)] for name in values}
    fig, height = make_subplots(1, 1), ROW * len(grouped) + 6
    _heat(fig, 1, grouped, values, range(len(rows)), hover, wide, "difference" if centred else "credit", height)
    _scales(fig, grouped, values, " %" if centred else "")
    won = "a success" if rows[0]["outcome"] else "a failure"
    if centred:
        flat = len(done) - len(apart)
        heading = "Which turns does a method favour?"
        sentence = (
            "Credit of a turn less the episode's mean, in percent of the mean size; blue: above it. The largest is at "
            f"the row's right. Not drawn: {flat} methods that give all its turns the same."
            if apart
            else "No method tells its turns apart."
        )
    else:
        heading = "What would each method have credited?"
        sentence = (
            "Credit: push on the log-prob of a turn's tokens, their mean; the advantage, and what an auxiliary loss "
            "adds. Rows are coloured on scales of their own: at the right is the largest value, and which row it is a "
            "multiple of."
        )
    style.dress(
        fig, heading, f"Step {step}, episode {episode}, {won}. {sentence}",
        height=height, legend=False, left=LEFT, right=RIGHT, bottom=124 if wide else 62,
    )  # fmt: skip
    _axes(fig, grouped)
    if wide:
        labels = [f"{style.shorten(r['action'], 20) or '(no action)'} <b>{r['turn'] + 1}</b>" for r in rows]
        fig.update_xaxes(tickvals=list(range(len(rows))), ticktext=labels, tickangle=-40, tickfont_color=style.INK)
    else:
        shown = [r["turn"] for r in rows if r["turn"] == 0 or r["turn"] % 5 == 4]
        fig.update_xaxes(tickvals=shown, ticktext=[str(k + 1) for k in shown], title_text="turn")
    return fig


def by_token(
    batch: Batch,
    order: Order,
    done: Mapping[str, Replayed],
    turns: pl.DataFrame,
    step: int,
    episode: int,
    turn: int,
    limit: int = 120,
) -> go.Figure:
    """Heat map of one turn's tokens, a row a method that tells tokens of a turn apart or has an auxiliary loss, under
    the teacher's gap where there is one; where no method does, the first of those that differ by a factor only.

    Of a method with an auxiliary loss, what that loss alone adds; of the others, the advantage. turn counts from 0.
    """
    row = style.pick(turns, "turns", step=step, episode=episode, turn=turn).row(0, named=True)
    here = (batch.episode_index == place(order, episode))[:, None] & (batch.turn_index == turn)
    kind = kinds(batch, done)
    values = {}
    if batch.teacher_logprobs is not None:
        values[GAP] = (batch.teacher_logprobs - batch.old_logprobs)[here].tolist()
    names = [n for n in done if kind[n] == "token" or done[n].aux_slope is not None]
    for name in names or done:
        each = done[name]
        policy = 0 if each.aux_slope is None else each.method.loss.pg_coef * each.credit.advantages
        values[name] = (each.push - policy)[here].tolist()
    if not names:
        values = {name: values[name] for name, same in relations(values).items() if same is None}
    pieces = [show_piece(p) for p in row.get("pieces") or map(str, row["token_ids"])]
    shown = min(len(pieces), limit)
    lines, across = math.ceil(shown / TOKENS_A_LINE), min(shown, TOKENS_A_LINE)
    rows, gap = [(name, _label(name, done)) for name in values], 96
    height = lines * ROW * len(rows) + (lines - 1) * gap
    fig = make_subplots(lines, 1, vertical_spacing=gap / height if lines > 1 else 0)
    hover = {n: [_token_hover(label, x, i, pieces[i]) for i, x in enumerate(values[n])] for n, label in rows}
    for line in range(lines):
        part = range(line * TOKENS_A_LINE, min((line + 1) * TOKENS_A_LINE, shown))
        _heat(fig, line + 1, rows, values, part, hover, across <= ROOM, "value", height)
        ticks = dict(tickvals=list(part), ticktext=[style.escape(pieces[i][:16]) for i in part], tickangle=-50)
        font = dict(family=style.MONO, size=11, color=style.INK)
        fig.update_xaxes(range=[part[0] - 0.5, part[0] + across - 0.5], tickfont=font, **ticks, row=line + 1)
    _scales(fig, rows, values)
    cut = f" The last {len(pieces) - shown} tokens are not drawn." if len(pieces) > shown else ""
    style.dress(
        fig,
        "Which tokens of a turn does a method favour?",
        f"Step {step}, turn {turn + 1} of episode {episode}: "
        f"{'methods that tell its tokens apart' if names else 'no method tells its tokens apart'}. Blue raises a "
        "token's probability, orange lowers it. Of a loss beside the policy loss, what it adds before averaging; "
        f"of other methods, the advantage. At the right: the row's largest value.{cut}",
        height=height, legend=False, left=LEFT, right=RIGHT, bottom=106,
    )  # fmt: skip
    _axes(fig, rows)
    return fig


def _heat(
    fig: go.Figure,
    line: int,
    rows: Sequence[tuple[str, str]],
    values: Mapping[str, Sequence[float]],
    part: range,
    hover: Mapping[str, Sequence[str]],
    numbers: bool,
    what: str,
    height: int,
) -> None:
    """Add one heat map of the columns in `part` to a line of the figure. rows: (name in values, label), top first; one
    without a name is a heading. A row's colours are its share of the largest value of the whole row; height: of the
    figure's data area, px, below which the colour bar stands."""
    z, text, hovers = [], [], []
    for name, _ in rows:
        mine = [values[name][i] for i in part] if name else []
        largest = max(map(abs, values[name])) if name else 0.0
        z.append([v / (largest or 1) for v in mine] or [None] * len(part))
        text.append([_short(v, largest) if numbers else "" for v in mine] or [""] * len(part))
        hovers.append([hover[name][i] for i in part] if name else [""] * len(part))
    fig.add_heatmap(
        x=list(part),
        y=list(range(len(rows))),
        z=z,
        text=text,
        texttemplate="%{text}",
        textfont=dict(size=11),
        hovertext=hovers,
        hoverinfo="text",
        hoverongaps=False,
        zmin=-1,
        zmax=1,
        xgap=2,
        ygap=2,
        colorscale=[list(c) for c in style.DIVERGING],
        showscale=line == 1,
        colorbar=dict(
            orientation="h",
            title=dict(text=f"share of the row's largest |{what}|", side="top", font=dict(size=12)),
            thickness=10,
            lenmode="pixels",
            len=194,
            outlinewidth=0,
            xpad=0,
            ypad=0,
            x=1 + 8 / PLOT,
            xanchor="left",
            y=-6 / height,
            yanchor="top",
            tickvals=[-1, 0, 1],
            ticktext=["−1", "0", "+1"],
            tickfont=dict(size=11, color=style.MUTED),
        ),
        row=line,
        col=1,
    )


def _short(value: float, largest: float) -> str:
    """A number with as many places as the row's size asks for."""
    places = 0 if largest >= 10 else 2 if largest >= 0.1 or not largest else min(1 - math.floor(math.log10(largest)), 4)
    return style.number(round(value, places) + 0.0, f"+.{places}f")


def _size(value: float) -> str:
    return style.number(value, ",.0f" if value >= 1000 else ".3g" if value >= 0.001 else ".2g")


def _scales(
    fig: go.Figure, rows: Sequence[tuple[str, str]], values: Mapping[str, Sequence[float]], unit: str = ""
) -> None:
    """Write beside each row its largest value, and which earlier row it is a multiple of; headings go above theirs."""
    alike = relations({name: values[name] for name, _ in rows if name})
    base = dict(xref="paper", xanchor="left", showarrow=False)
    for y, (name, label) in enumerate(rows):
        if not name:
            small = dict(size=12, color=style.MUTED)
            fig.add_annotation(x=0, y=y, text=f"<i>{label}</i>", yshift=-3, font=small, **base)
            continue
        largest, same = max(map(abs, values[name])), alike[name]
        size = _size(largest) + unit
        fig.add_annotation(x=1, y=y, text=size, xshift=8, font=dict(size=12, color=style.INK), **base)
        if same is not None and largest:
            factor = "" if abs(same[1] - 1) <= SAME else f"{_size(same[1])} × "
            small = dict(size=11, color=style.MUTED)
            fig.add_annotation(x=1, y=y, text=f"= {factor}{same[0]}", xshift=64, font=small, **base)


def _axes(fig: go.Figure, rows: Sequence[tuple[str, str]]) -> None:
    named = [(y, label) for y, (name, label) in enumerate(rows) if name]
    fig.update_yaxes(
        range=[len(rows) - 0.4, -0.6],
        tickvals=[y for y, _ in named],
        ticktext=[f"{label}  " for _, label in named],
        tickfont=dict(size=12, color=style.INK),
        automargin=False,
    )
    for update in (fig.update_xaxes, fig.update_yaxes):
        update(showgrid=False, showline=False, ticks="", fixedrange=True)


def _label(name: str, done: Mapping[str, Replayed]) -> str:
    return f"{name} (nats)" if name == GAP else name if done[name].aux_slope is None else f"{name}, its loss"


def _turn_hover(name: str, credit: float, row: dict) -> str:
    known = dict.fromkeys(beliefs.NEEDS) | row
    return f"<b>{name}</b>: credit {style.number(credit, '+.4g')}<br>{beliefs.hover(known)}"


def _token_hover(name: str, value: float, position: int, piece: str) -> str:
    return f"<b>{name}</b>: {style.number(value, '+.4g')}<br>token {position + 1}: <b>{style.escape(piece)}</b>"
