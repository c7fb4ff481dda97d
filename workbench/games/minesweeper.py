"""Minesweeper: rules, and boards drawn by seed, as CAST plays it (arXiv 2607.25308).

The paper's text was not read; rules and sizes are those of the released code (github Wloner0809/CAST,
rllm/environments/minesweeper): the mines keep off the first click and its neighbours, the first click is opened before
the player's first turn, a flag is put and taken away by the same command, and a flagged cell is neither revealed nor
opened by a neighbour. Its boards are drawn otherwise, so the same seed is another board here.

Sets of cells are integers, cell (r, c) bit r * cols + c; rows and columns count from 0.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b

from ..errors import WorkbenchError

Cell = tuple[int, int]
HELDOUT_SHARE = 5  # one layout of mines in five


@dataclass(frozen=True)
class Size:
    rows: int
    cols: int
    mines: int


LEVELS = {"small": Size(4, 4, 2), "paper": Size(6, 6, 7)}
UNSEEN = {"small": Size(4, 4, 3), "paper": Size(7, 7, 10)}


@dataclass(frozen=True)
class Board:
    """Where the mines lie and which cell is opened first. Raises WorkbenchError for a board that cannot be played."""

    rows: int
    cols: int
    mines: frozenset[Cell]
    first: Cell

    def __post_init__(self):
        if self.rows < 1 or self.cols < 1:
            raise WorkbenchError(f"Minesweeper board: {self.rows} rows of {self.cols} cells; expected at least 1 each")
        for name, cell in [("mine", cell) for cell in sorted(self.mines)] + [("first click", self.first)]:
            if not (0 <= cell[0] < self.rows and 0 <= cell[1] < self.cols):
                raise WorkbenchError(f"Minesweeper board: {name} {cell} lies outside {self.rows} rows of {self.cols}")
        if self.first in self.mines:
            raise WorkbenchError(f"Minesweeper board: the first click {self.first} is a mine")
        if not self.mines:
            raise WorkbenchError("Minesweeper board: it has no mine")

    @property
    def safe(self) -> int:
        """How many cells hold no mine."""
        return self.rows * self.cols - len(self.mines)


@dataclass(frozen=True)
class Position:
    """What has been done on a board: cells opened and flagged, and whether a mine was hit."""

    opened: int
    flagged: int = 0
    hit: int = 0


@cache
def neighbours(rows: int, cols: int) -> tuple[tuple[int, ...], ...]:
    """For each cell in reading order, the numbers of the cells around it."""

    def around(r: int, c: int) -> Iterator[int]:
        for i in range(max(r - 1, 0), min(r + 2, rows)):
            for j in range(max(c - 1, 0), min(c + 2, cols)):
                if (i, j) != (r, c):
                    yield i * cols + j

    return tuple(tuple(around(r, c)) for r in range(rows) for c in range(cols))


@lru_cache(4096)
def _truth(board: Board) -> tuple[int, tuple[int, ...]]:
    """The set of mines, and for each cell how many lie around it."""
    mines = sum(1 << r * board.cols + c for r, c in board.mines)
    return mines, tuple(sum(mines >> n & 1 for n in near) for near in neighbours(board.rows, board.cols))


def opened_by(board: Board, opened: int, cell: int, flagged: int = 0) -> int:
    """Cells open once a safe `cell` is revealed: a cell with no mine around it opens its unflagged neighbours too."""
    counts, near = _truth(board)[1], neighbours(board.rows, board.cols)
    opened |= 1 << cell
    frontier = [cell]
    while frontier:
        here = frontier.pop()
        if counts[here]:
            continue
        for other in near[here]:
            if not (opened | flagged) >> other & 1:
                opened |= 1 << other
                frontier.append(other)
    return opened


def start(board: Board) -> Position:
    """The position after the first click."""
    return Position(opened_by(board, 0, board.first[0] * board.cols + board.first[1]))


def reveal(board: Board, position: Position, cell: int) -> Position:
    """Reveal a hidden cell without a flag."""
    if mined(board, cell):
        return Position(position.opened, position.flagged, 1 << cell)
    return Position(opened_by(board, position.opened, cell, position.flagged), position.flagged)


def flag(position: Position, cell: int) -> Position:
    """Put a flag on a hidden cell, or take it away."""
    return Position(position.opened, position.flagged ^ 1 << cell)


def mined(board: Board, cell: int) -> bool:
    return bool(_truth(board)[0] >> cell & 1)


def won(board: Board, position: Position) -> bool:
    """Whether every safe cell is open."""
    return not position.hit and position.opened.bit_count() == board.safe


def wrong_flags(board: Board, position: Position) -> int:
    """How many flags stand on safe cells."""
    return (position.flagged & ~_truth(board)[0]).bit_count()


def view(board: Board, position: Position) -> tuple[str, ...]:
    """What the player sees, a string a row: a digit for an open cell, `?` hidden, `F` flagged, `*` the mine hit."""
    counts = _truth(board)[1]

    def seen(cell: int) -> str:
        if position.hit >> cell & 1:
            return "*"
        if position.opened >> cell & 1:
            return str(counts[cell])
        return "F" if position.flagged >> cell & 1 else "?"

    cols = board.cols
    return tuple("".join(seen(r * cols + c) for c in range(cols)) for r in range(board.rows))


def draw(size: Size, rng: random.Random) -> Board:
    """A random board whose mines keep off the first click and, where there is room, its neighbours."""
    rows, cols = size.rows, size.cols
    first = rng.randrange(rows * cols)
    kept = {first, *neighbours(rows, cols)[first]}
    if rows * cols - len(kept) < size.mines:
        kept = {first}
    mines = rng.sample([cell for cell in range(rows * cols) if cell not in kept], size.mines)
    return Board(rows, cols, cells(mines, cols), divmod(first, cols))


def cells(numbers: Iterable[int], cols: int) -> frozenset[Cell]:
    return frozenset(divmod(n, cols) for n in numbers)


@lru_cache(8192)
def generate(level: str, split: str, seed: int) -> Board:
    """The board of a task, the same on every machine.

    One layout of mines in five belongs to heldout, the others to train, so that no layout is in both; unseen boards
    hold more mines, those of "paper" on a larger field. A board that the first click would win is drawn again.
    """
    size = (UNSEEN if split == "unseen" else LEVELS)[level]
    rng = random.Random(f"minesweeper/{level}/{split}/{seed}")
    while True:
        board = draw(size, rng)
        layout = repr((board.rows, board.cols, sorted(board.mines))).encode()
        heldout = blake2b(layout, digest_size=4).digest()[0] % HELDOUT_SHARE == 0
        if (split == "unseen" or heldout == (split == "heldout")) and not won(board, start(board)):
            return board
