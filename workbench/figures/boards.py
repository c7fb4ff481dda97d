"""What did each turn do to the board? One episode of a board game as small pictures, a turn each.

Boards are read from the recorded observations, where cells are separated by spaces and rows by a slash. A picture shows
what the player saw and, over it, what it then did; above it stand the action and what an exact solver says of it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from ..errors import WorkbenchError
from . import style

WALL, OPEN, HIDDEN, GOAL = "#55616d", "#f4f5f7", "#b9c5d0", "#cfe8dd"
BOX, HOME, PLAYER, RED = "#e9b44c", "#4fae86", "#7fb8dc", "#e8855a"
VEHICLES = (
    "#9ecae1", "#f2cf8d", "#b5d8b7", "#d3b7dc", "#c9d1d9", "#f0b8a8", "#a8d5d2", "#ddd29a", "#bfc7ea", "#e3bcd0",
)  # fmt: skip

# A mark in the observation -> (colour of its cell, what is written on it, what it is).
SOKOBAN = {
    "#": (WALL, "", "wall"), "_": (OPEN, "", "floor"), ".": (GOAL, "◎", "goal"), "$": (BOX, "■", "box"),
    "*": (HOME, "■", "box on a goal"), "@": (PLAYER, "●", "player"), "+": (PLAYER, "◉", "player on a goal"),
}  # fmt: skip
MINESWEEPER = {
    "?": (HIDDEN, "", "hidden"), "F": ("#f2cf8d", "⚑", "flagged"), "*": (RED, "✱", "the mine that was hit"),
    "0": (OPEN, "", "no mine around"),
    **{str(n): (OPEN, str(n), f"{n} mine{'s' * (n > 1)} around") for n in range(1, 9)},
}  # fmt: skip
RUSH_HOUR = {
    "#": (WALL, "", "wall"), ".": (OPEN, "", "empty"), "A": (RED, "A", "car A, which must reach the right end"),
    **{
        letter: (VEHICLES[n % len(VEHICLES)], letter, f"vehicle {letter}")
        for n, letter in enumerate("BCDEFGHIJKLMNOPQRSTUVWXYZ")
    },
}  # fmt: skip
GAMES: dict[str, Mapping[str, tuple[str, str, str]]] = {
    "rush_hour": RUSH_HOUR, "sokoban": SOKOBAN, "minesweeper": MINESWEEPER,
}  # fmt: skip
EDGE, HEADING = 16, 50  # px beside the pictures, and between the lines of them
WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def read(observation: str, kind: str) -> tuple[str, ...]:
    """The board in an observation, a string a row, one mark a cell.

    Raises WorkbenchError for a game that has no board here, or a text that is not a whole board in its marks.
    """
    if kind not in GAMES:
        raise WorkbenchError(f"no board is drawn of {kind!r}; those that have one: {', '.join(GAMES)}")
    text = observation.removeprefix("invalid . ")
    rows = tuple("".join(row.split()) for row in text.split("/"))
    if any(len(row) != len(rows[0]) for row in rows) or not rows[0] or not set("".join(rows)) <= GAMES[kind].keys():
        raise WorkbenchError(f"{kind}: expected a board of equal rows in its marks, got {observation[:80]!r}")
    return rows


def chosen_cells(board: Sequence[str], kind: str, action: str) -> list[tuple[int, int]]:
    """Where an action's marker goes, (row, column): one cell for a reveal, from and to for a move, none where the
    action names nothing that is on the board."""
    places = {(r, c): mark for r, row in enumerate(board) for c, mark in enumerate(row)}
    if kind == "minesweeper" and (found := re.fullmatch(r"(?:reveal|flag) (\d+) (\d+)", action)):
        cell = (int(found[1]) - 1, int(found[2]) - 1)
        return [cell] if cell in places else []
    if kind == "sokoban" and action in WAYS:
        (row, column), (down, right) = next(p for p, mark in places.items() if mark in "@+"), WAYS[action]
        return [(row, column), (row + down, column + right)]
    if kind == "rush_hour" and (found := re.fullmatch(r"move (\w) (up|down|left|right) (\d+)", action)):
        down, right = (int(found[3]) * step for step in WAYS[found[2]])
        if cells := [p for p, mark in places.items() if mark == found[1]]:
            first = max(cells) if down + right > 0 else min(cells)
            return [first, (first[0] + down, first[1] + right)]
    return []


def said(row: Mapping[str, Any]) -> str:
    """What the solver says of a turn, short: actions left before and after it, and its advantage."""
    if row.get("solver_advantage") is None:
        return "no solver value"
    before, after = ("∞" if math.isinf(row[n]) else f"{row[n]:g}" for n in ("solver_before", "solver_after"))
    return f"{before} → {after} left, {worth(row['solver_advantage'])}"


def worth(value: float) -> str:
    """A solver advantage as text."""
    return style.number(value, "+g") if value else "0"


def colour_of(value: float | None) -> str:
    """Blue for a turn that the solver rates above zero, vermilion below, grey at zero or where there is no value."""
    return style.MUTED if not value else style.SUCCESS if value > 0 else style.FAILURE


def episode(turns: pl.DataFrame, episodes: pl.DataFrame, step: int, number: int, columns: int = 5) -> go.Figure:
    """One episode, a picture a turn: the board that was seen, and over it what was done.

    Raises WorkbenchError where the episode is not of a board game, as `read`, or was not recorded.
    """
    head = style.pick(episodes, "episodes", step=step, episode=number).to_dicts()[0]
    rows = style.pick(turns, "turns", step=step, episode=number).sort("turn").to_dicts()
    kind = head["kind"]
    pictures = [read(row["observation"], kind) for row in rows]
    lines = math.ceil(len(rows) / columns)
    side = (style.WIDTH - 2 * EDGE) * (1 - 0.02 * (columns - 1)) / columns  # of a picture, px
    height = lines * side + (lines - 1) * HEADING
    fig = make_subplots(
        lines,
        columns,
        horizontal_spacing=0.02,
        vertical_spacing=HEADING / height,
        subplot_titles=[_heading(row) for row in rows],
    )
    notes = fig.layout.annotations
    for i, (row, board, note) in enumerate(zip(rows, pictures, notes, strict=True)):
        place = dict(row=i // columns + 1, col=i % columns + 1)
        fig.add_trace(_picture(board, kind), **place)
        if (marker := _marker(board, kind, row)) is not None:
            fig.add_trace(marker, **place)
        axis = fig.get_subplot(**place)
        axis.xaxis.update(range=[-0.55, len(board[0]) - 0.45], constrain="domain")
        axis.yaxis.update(range=[len(board) - 0.45, -0.55], constrain="domain")
        axis.yaxis.update(scaleanchor=axis.yaxis.anchor, scaleratio=1)
        note.update(font=dict(size=12, color=style.INK), align="center", yshift=2)
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    won = "won" if head["outcome"] else "lost" if head["stop_reason"] == "lost" else "not won"
    told = " Above each: fewest actions left before and after, and the turn's advantage, by the exact solver."
    solved = any(row.get("solver_advantage") is not None for row in rows)
    style.dress(
        fig,
        "What did each turn do to the board?",
        f"Step {step}, episode {number} ({head['task']}), {won} in {len(rows)} turns. Each picture is what was seen "
        f"before the turn, with what was then done marked on it.{told if solved else ''}",
        height=round(height),
        legend=False,
        panel_titles=True,
        left=EDGE,
        right=EDGE,
        bottom=12,
    )
    return fig


def _heading(row: Mapping[str, Any]) -> str:
    action = style.shorten(row["action"], 20) or "(nothing)"
    invalid = "" if row["valid"] else " (invalid)"
    colour = colour_of(row.get("solver_advantage"))
    below = f'<span style="color:{colour}">{said(row)}</span>' if "solver_advantage" in row else ""
    return f"<b>{row['turn'] + 1}</b> {action}{invalid}<br>{below}"


def _picture(board: Sequence[str], kind: str) -> go.Heatmap:
    looks = GAMES[kind]
    marks = sorted(set("".join(board)))
    edges = [n / len(marks) for n in range(len(marks) + 1)]
    scale = [
        (edges[n + side], looks[mark][0]) for n, mark in enumerate(marks) for side in (0, 1)
    ]  # a band of one colour for each mark
    return go.Heatmap(
        z=[[marks.index(mark) + 0.5 for mark in row] for row in board],
        zmin=0,
        zmax=len(marks),
        colorscale=scale,
        showscale=False,
        xgap=1,
        ygap=1,
        text=[[looks[mark][1] for mark in row] for row in board],
        texttemplate="%{text}",
        textfont=dict(size=13, color=style.INK),
        hovertext=[
            [f"row {r + 1}, column {c + 1}: {looks[mark][2]}" for c, mark in enumerate(row)]
            for r, row in enumerate(board)
        ],
        hoverinfo="text",
        meta=dict(board=list(board)),
    )


def _marker(board: Sequence[str], kind: str, row: Mapping[str, Any]) -> go.Scatter | None:
    cells = chosen_cells(board, kind, row["action"])
    if not cells:
        return None
    ys, xs = zip(*cells, strict=True)
    if len(cells) == 1:
        marker = dict(symbol="square-open", size=18, color=style.INK, line=dict(width=2.4))
    else:
        marker = dict(symbol="arrow", size=[0, 11], angleref="previous", color=style.INK)
    return go.Scatter(
        x=xs,
        y=ys,
        mode="markers" if len(cells) == 1 else "lines+markers",
        line=dict(color=style.INK, width=2.4),
        marker=marker,
        hovertext=f"turn {row['turn'] + 1}: {style.escape(row['action'])}",
        hoverinfo="text",
        cliponaxis=False,
    )
