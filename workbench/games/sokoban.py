"""Sokoban: rules, and boards drawn by seed, as CAST plays it (arXiv 2607.25308).

The paper's text was not read; rules and sizes are those of the released code and data (github Wloner0809/CAST,
rllm/environments/sokoban), where a size counts the wall around the room. That code draws its rooms from a row's seed by
a routine of gym-sokoban, and the rows hold no boards: boards here are drawn otherwise, so the same seed is another
board.

Cells are numbered in reading order; sets of cells are integers, cell n bit n.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import WorkbenchError

MARKS = {"#": "wall", " ": "floor", ".": "goal", "$": "box", "*": "box on goal", "@": "player", "+": "player on goal"}
WAYS = ("up", "down", "left", "right")


class Position(NamedTuple):
    """Where the player and the boxes are: a cell and a set of cells."""

    player: int
    boxes: int


@dataclass(frozen=True)
class Room:
    """What never changes on a board: its size, walls and goals. The outermost cells are walls."""

    width: int
    height: int
    walls: int
    goals: int

    @cached_property
    def floor(self) -> tuple[int, ...]:
        """Cells without a wall."""
        return tuple(i for i in range(self.width * self.height) if not self.walls >> i & 1)

    @cached_property
    def steps(self) -> tuple[int, int, int, int]:
        """What each of WAYS adds to a cell's number."""
        return (-self.width, self.width, -1, 1)


def parse(rows: tuple[str, ...]) -> tuple[Room, Position]:
    """A board as equal-length strings in the marks of MARKS -> room and position.

    Raises WorkbenchError for other marks, a room that is not closed by walls, no or several players, no box, or a
    number of boxes that is not that of the goals.
    """
    height, width = len(rows), len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows) or height < 3 or width < 3:
        raise WorkbenchError(f"Sokoban board: expected at least 3 rows of one length, got {list(rows)}")
    text = "".join(rows)
    for i, mark in enumerate(text):
        row, column = divmod(i, width)
        if mark not in MARKS:
            raise WorkbenchError(f"Sokoban board: {mark!r} in row {row + 1}; expected one of {' '.join(MARKS)!r}")
        if mark != "#" and (row in (0, height - 1) or column in (0, width - 1)):
            raise WorkbenchError(f"Sokoban board: row {row + 1} is open to the outside; expected walls all around")
    walls, goals, boxes, players = (
        sum(1 << i for i, mark in enumerate(text) if mark in kind) for kind in ("#", ".*+", "$*", "@+")
    )
    if players.bit_count() != 1:
        raise WorkbenchError(f"Sokoban board: {players.bit_count()} players; expected one @ or +")
    if not boxes or boxes.bit_count() != goals.bit_count():
        raise WorkbenchError(
            f"Sokoban board: {boxes.bit_count()} boxes and {goals.bit_count()} goals; expected as many, at least one"
        )
    return Room(width, height, walls, goals), Position(players.bit_length() - 1, boxes)


def step(room: Room, position: Position, way: int) -> Position | None:
    """The position after a step in WAYS[way], with a push of the box there; None if a wall or second box stops it."""
    move = room.steps[way]
    to = position.player + move
    if room.walls >> to & 1:
        return None
    if position.boxes >> to & 1:
        if (room.walls | position.boxes) >> to + move & 1:
            return None
        return Position(to, position.boxes ^ (1 << to | 1 << to + move))
    return Position(to, position.boxes)


def steps(room: Room, position: Position) -> Iterator[tuple[str, Position]]:
    """Every step that changes the board as (command, the position after it)."""
    for way, word in enumerate(WAYS):
        if after := step(room, position, way):
            yield word, after


def solved(room: Room, position: Position) -> bool:
    """Whether every box stands on a goal."""
    return position.boxes == room.goals


def render(room: Room, position: Position) -> tuple[str, ...]:
    """The board as `parse` reads it."""

    def mark(i: int) -> str:
        goal = room.goals >> i & 1
        if room.walls >> i & 1:
            return "#"
        if i == position.player:
            return "+" if goal else "@"
        if position.boxes >> i & 1:
            return "*" if goal else "$"
        return "." if goal else " "

    width = room.width
    return tuple("".join(mark(r * width + c) for c in range(width)) for r in range(room.height))


def draw(width: int, height: int, boxes: int, walls: tuple[int, int], rng: random.Random) -> tuple[str, ...] | None:
    """A random board: between walls[0] and walls[1] walls inside the room, the rest at random, no box on a goal.

    None where the walls cut the floor in pieces or leave no room.
    """
    inside = [r * width + c for r in range(1, height - 1) for c in range(1, width - 1)]
    count = rng.randint(*walls)
    rng.shuffle(inside)
    inner, floor = inside[:count], inside[count:]
    if len(floor) < 2 * boxes + 1 or not _connected(floor, width):
        return None
    edge = [i for i in range(width * height) if i % width in (0, width - 1) or i // width in (0, height - 1)]
    room = Room(width, height, sum(1 << i for i in edge + inner), sum(1 << i for i in floor[:boxes]))
    return render(room, Position(floor[2 * boxes], sum(1 << i for i in floor[boxes : 2 * boxes])))


def _connected(floor: list[int], width: int) -> bool:
    todo, left = [floor[0]], set(floor[1:])
    while todo:
        here = todo.pop()
        for move in (-width, width, -1, 1):
            if here + move in left:
                left.remove(here + move)
                todo.append(here + move)
    return not left
