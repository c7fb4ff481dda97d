"""Rush Hour: rules, and boards drawn by seed, as CAST plays it (arXiv 2607.25308).

The paper's text was not read; rules, sizes and the counting of moves are those of the released code and data (github
Wloner0809/CAST, rllm/environments/rush_hour): a vehicle slides along its own line over free cells, one slide of any
length is one move, and the game is won when the red car A stands at the right end of its row. Boards are drawn
otherwise here, so the same seed is another board.

A position is a tuple with one number a vehicle: the column of its left cell, or the row of its upper cell.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import WorkbenchError

EMPTY, WALL, RED = "o", "x", "A"
MAX_CELLS = 64  # cells are bits of one machine word
FORWARD = {True: "right", False: "down"}  # by whether the vehicle lies in a row
BACKWARD = {True: "left", False: "up"}
Position = tuple[int, ...]


@dataclass(frozen=True)
class Vehicle:
    """A vehicle and where on its line it can ever stand.

    line: its row if horizontal, else its column. low, high: the first and last place of its first cell that walls and
    the vehicles of its own line leave, for those never pass each other. behind: which vehicle comes just before it
    between the same walls, -1 for none.
    """

    label: str
    length: int
    horizontal: bool
    line: int
    low: int
    high: int
    behind: int


@dataclass(frozen=True)
class Puzzle:
    """What never changes on a board: its size, walls (a set of cells as an integer, bit row * width + column) and
    vehicles in the order of their labels."""

    width: int
    height: int
    walls: int
    vehicles: tuple[Vehicle, ...]

    def cells(self, vehicle: Vehicle, place: int) -> int:
        """The cells of a vehicle whose first cell is at `place` on its line, as a set."""
        first, step = vehicle.line * self.width + place, 1
        if not vehicle.horizontal:
            first, step = place * self.width + vehicle.line, self.width
        return sum(1 << first + step * i for i in range(vehicle.length))

    @property
    def red(self) -> int:
        """Which vehicle is the red car."""
        return next(i for i, vehicle in enumerate(self.vehicles) if vehicle.label == RED)

    @property
    def openable(self) -> bool:
        """Whether nothing in the red car's own row shuts the exit for ever."""
        car = self.vehicles[self.red]
        return car.high + car.length == self.width


def parse(rows: tuple[str, ...]) -> tuple[Puzzle, Position]:
    """A board as equal-length strings -> puzzle and position.

    `o` or `.` is empty, `x` a wall, an upper-case letter a cell of the vehicle of that name, A the red car, which lies
    in a row. Raises WorkbenchError for anything else.
    """
    height, width = len(rows), len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows) or not 0 < width * height <= MAX_CELLS:
        raise WorkbenchError(
            f"Rush Hour board {'/'.join(rows)!r}: expected rows of one length, {MAX_CELLS} cells at most"
        )
    places: dict[str, list[tuple[int, int]]] = {}
    walls = 0
    for r, row in enumerate(rows):
        for c, mark in enumerate(row):
            if mark == WALL:
                walls |= 1 << r * width + c
            elif "A" <= mark <= "Z":
                places.setdefault(mark, []).append((r, c))
            elif mark not in (EMPTY, "."):
                raise WorkbenchError(f"Rush Hour board: {mark!r} in row {r + 1}; expected o, x or a vehicle A to Z")
    lines: dict[str, tuple[bool, int, int, int]] = {}
    for label, cells in sorted(places.items()):
        horizontal = len({r for r, _ in cells}) == 1
        line = cells[0][not horizontal]
        along = [c if horizontal else r for r, c in cells]
        straight = horizontal or len({c for _, c in cells}) == 1
        if len(cells) < 2 or not straight or along != list(range(along[0], along[0] + len(cells))):
            raise WorkbenchError(f"Rush Hour board: vehicle {label} must be one straight piece of at least 2 cells")
        lines[label] = horizontal, line, along[0], len(cells)
    if RED not in lines or not lines[RED][0]:
        raise WorkbenchError(f"Rush Hour board: the red car {RED} must lie in a row")
    vehicles = _vehicles(width, height, walls, lines)
    return Puzzle(width, height, walls, vehicles), tuple(first for _, _, first, _ in lines.values())


def _vehicles(width: int, height: int, walls: int, lines: dict) -> tuple[Vehicle, ...]:
    labels, made = list(lines), []
    for label, (horizontal, line, first, length) in lines.items():
        mates = sorted((f, size, name) for name, (h, at, f, size) in lines.items() if (h, at) == (horizontal, line))
        size, step = (width, 1) if horizontal else (height, width)
        origin = line * width if horizontal else line
        blocked = [i for i in range(size) if walls >> origin + step * i & 1]
        start = max((i + 1 for i in blocked if i < first), default=0)
        end = min((i for i in blocked if i > first), default=size)
        before = [(n, name) for f, n, name in mates if start <= f < first]
        after = [n for f, n, _ in mates if first < f < end]
        low, high = start + sum(n for n, _ in before), end - sum(after) - length
        behind = labels.index(before[-1][1]) if before else -1
        made.append(Vehicle(label, length, horizontal, line, low, high, behind))
    return tuple(made)


def occupied(puzzle: Puzzle, position: Position) -> int:
    """Walls and vehicles as a set of cells."""
    taken = puzzle.walls
    for vehicle, place in zip(puzzle.vehicles, position, strict=True):
        taken |= puzzle.cells(vehicle, place)
    return taken


def slides(puzzle: Puzzle, position: Position) -> Iterator[tuple[str, Position]]:
    """Every legal move as (command, the position after it)."""
    taken = occupied(puzzle, position)
    for i, (vehicle, place) in enumerate(zip(puzzle.vehicles, position, strict=True)):
        others = taken & ~puzzle.cells(vehicle, place)
        for step, word in ((-1, BACKWARD[vehicle.horizontal]), (1, FORWARD[vehicle.horizontal])):
            to = place + step
            while vehicle.low <= to <= vehicle.high and not others & puzzle.cells(vehicle, to):
                yield f"move {vehicle.label} {word} {abs(to - place)}", (*position[:i], to, *position[i + 1 :])
                to += step


def solved(puzzle: Puzzle, position: Position) -> bool:
    """Whether the red car stands at the right end of its row."""
    red = puzzle.red
    return position[red] + puzzle.vehicles[red].length == puzzle.width


def render(puzzle: Puzzle, position: Position) -> tuple[str, ...]:
    """The board as `parse` reads it."""
    marks = [WALL if puzzle.walls >> i & 1 else EMPTY for i in range(puzzle.width * puzzle.height)]
    for vehicle, place in zip(puzzle.vehicles, position, strict=True):
        cells = puzzle.cells(vehicle, place)
        for i in range(len(marks)):
            if cells >> i & 1:
                marks[i] = vehicle.label
    return tuple("".join(marks[i : i + puzzle.width]) for i in range(0, len(marks), puzzle.width))


def draw(width: int, height: int, vehicles: int, rng: random.Random) -> tuple[str, ...] | None:
    """A random board with that many vehicles, the red car in the middle row, or None where they did not fit.

    Two vehicles in three are cars of 2 cells, the others trucks of 3; none but the red car lies in its row.
    """
    marks = [[EMPTY] * width for _ in range(height)]
    exit_row, left = (height - 1) // 2, rng.randrange(width - 2)
    marks[exit_row][left : left + 2] = RED * 2
    for number in range(1, vehicles):
        free = []
        length, horizontal = 3 if rng.randrange(3) == 0 else 2, rng.randrange(2) == 0
        for r in range(height - (0 if horizontal else length - 1)):
            for c in range(width - (length - 1 if horizontal else 0)):
                cells = [(r, c + i) if horizontal else (r + i, c) for i in range(length)]
                if (r != exit_row or not horizontal) and all(marks[y][x] == EMPTY for y, x in cells):
                    free.append(cells)
        if not free:
            return None
        for y, x in rng.choice(free):
            marks[y][x] = chr(ord(RED) + number)
    return tuple("".join(row) for row in marks)
