"""Read puzzle rows of CAST's data (github Wloner0809/CAST, data/datasets): one parquet file, one game, a board a row.

Rush Hour rows hold their board and its fewest moves, Minesweeper rows their mines and first click. Sokoban rows hold a
seed and sizes only; the paper's boards come out of its own generator, which is not part of this project. So a Sokoban
row's board is drawn here from its seed, boxes and size: another board than the paper's. A column `board`, rows joined
by line breaks in the marks of games.sokoban.MARKS, is taken instead where a file has one.

A row that cannot be played as it stands is left out by name, with the reason; a file that cannot be read is an error.
"""

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from ..errors import WorkbenchError, printable, unknown
from ..solvers import rush_hour as rush_hour_solver
from ..solvers import sokoban as sokoban_solver
from . import levels, minesweeper, rush_hour, sokoban

Board = levels.Rows | minesweeper.Board
COLUMNS = {
    "rush_hour": ("width", "height", "board_config", "min_moves_optimal"),
    "sokoban": ("seed", "dim_x", "dim_y", "num_boxes"),
    "minesweeper": ("rows", "cols", "num_mines", "mine_positions", "first_click"),
}
MOST, MOST_BOXES = 9, 4  # rows and columns, and boxes, of a drawn Sokoban board: more takes the solver minutes
ROW_TRIES = 3000  # a drawn board needed 256 candidates at most
MARKER = {"rush_hour": "board_config", "sokoban": "dim_x", "minesweeper": "mine_positions"}


@dataclass(frozen=True)
class PuzzleRows:
    """Boards by task id `<game>/rows/<number>`, rows counted from 0, and why the others were left out.

    optimal: fewest moves as the file has them, Rush Hour only.
    """

    game: str
    boards: Mapping[str, Board]
    excluded: Mapping[str, str] = field(default_factory=dict)
    optimal: Mapping[str, int] = field(default_factory=dict)


def read(path: str | Path, game: str | None = None, solve: bool = True) -> PuzzleRows:
    """Read a file of any of the three games, or of the game named.

    solve: also leave out boards that the exact solver finds unsolvable or of another distance than the row says; some
    15 ms a 6x6 Rush Hour row. Raises WorkbenchError for a file that is missing, torn or empty, or lacks a column.
    """
    game, rows = load(path, game)
    boards, excluded, optimal = {}, {}, {}
    for number, row in enumerate(rows):
        name = f"{game}/rows/{number}"
        try:
            board = READERS[game](row)
            if solve:
                check(game, board, row.get("min_moves_optimal"))
        except WorkbenchError as error:
            uid = f" ({row['uid']})" if row.get("uid") else ""
            excluded[name] = printable(f"{path}, row {number}{uid}: {error}")
            continue
        boards[name] = board
        if game == "rush_hour":
            optimal[name] = row["min_moves_optimal"]
    return PuzzleRows(game, boards, excluded, optimal)


def load(path: str | Path, game: str | None = None) -> tuple[str, list[dict[str, Any]]]:
    """The game of a file and its rows as they stand. Raises WorkbenchError as `read`."""
    table = _table(Path(path))
    return _game(path, table.columns, game), table.to_dicts()


def check(game: str, board: Board, optimal: int | None = None) -> None:
    """Raise WorkbenchError where the exact solver finds a board won already, unsolvable, or of another distance."""
    if game == "minesweeper":
        if minesweeper.won(board, minesweeper.start(board)):
            raise WorkbenchError("the first click opens every safe cell; expected a board still to be played")
        return
    if game == "rush_hour":
        puzzle, position = rush_hour.parse(board)
        distance = rush_hour_solver.table(puzzle).distance(position)
    else:
        distance = sokoban_solver.solve(*sokoban.parse(board)).distance
    if distance == float("inf"):
        raise WorkbenchError("no moves win from this board; expected a solvable one")
    if distance == 0:
        raise WorkbenchError("the board is won already; expected one to be played")
    if optimal is not None and distance != optimal:
        raise WorkbenchError(f"min_moves_optimal is {optimal}, but {distance:.0f} moves win; expected the fewest")


def playable(path: str | Path, game: str) -> Mapping[str, Board]:
    """The boards of a file by task id; warns of rows left out, each with its reason.

    Raises WorkbenchError as `read`, and where no row is left.
    """
    rows = read(path, game)
    reasons = list(rows.excluded.values())
    if not rows.boards:
        raise WorkbenchError(f"{path}: none of {len(reasons)} rows can be played; {reasons[0]}")
    if reasons:
        warnings.warn(f"{len(reasons)} of {len(reasons) + len(rows.boards)} rows left out:\n" + "\n".join(reasons),
                      stacklevel=2)  # fmt: skip
    return rows.boards


def _table(path: Path) -> pl.DataFrame:
    if not path.is_file():
        raise WorkbenchError(f"{path}: no such file; expected a parquet file of puzzle rows")
    try:
        table = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError, pl.exceptions.PanicException) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise WorkbenchError(f"{path}: not a whole parquet file ({reason})") from None
    if table.is_empty():
        raise WorkbenchError(f"{path}: no rows; expected at least one")
    return table


def _game(path: str | Path, columns: list[str], game: str | None) -> str:
    if game is None:
        game = next((name for name, column in MARKER.items() if column in columns), None)
        if game is None:
            markers = ", ".join(f"{column} ({name})" for name, column in MARKER.items())
            raise WorkbenchError(f"{path}: not a file of puzzle rows; expected one of the columns {markers}")
    if game not in COLUMNS:
        raise unknown("game of puzzle rows", game, COLUMNS)
    missing = [column for column in COLUMNS[game] if column not in columns]
    if missing:
        raise WorkbenchError(f"{path}: no column {', '.join(missing)}; {game} rows have {', '.join(COLUMNS[game])}")
    return game


def _whole(row: Mapping[str, Any], column: str, least: int, most: int) -> int:
    value = row[column]
    if type(value) is not int or not least <= value <= most:
        raise WorkbenchError(f"{column} is {value!r}; expected a whole number from {least} to {most}")
    return value


def _rush_hour(row: Mapping[str, Any]) -> levels.Rows:
    width, height = (_whole(row, column, 1, rush_hour.MAX_CELLS) for column in ("width", "height"))
    text = row["board_config"]
    if not isinstance(text, str) or len(text) != width * height:
        raise WorkbenchError(f"board_config is {text!r}; expected {width * height} cells for {width}x{height}")
    _whole(row, "min_moves_optimal", 1, 10_000)
    board = tuple(text[i : i + width] for i in range(0, len(text), width))
    rush_hour.parse(board)
    return board


def _sokoban(row: Mapping[str, Any]) -> levels.Rows:
    if (text := row.get("board")) is not None:
        if not isinstance(text, str):
            raise WorkbenchError(f"board is {text!r}; expected lines of text")
        board = tuple(text.strip("\n").split("\n"))
        sokoban.parse(board)
        return board
    rows, columns = (_whole(row, name, 4, MOST) for name in ("dim_x", "dim_y"))
    inside = (rows - 2) * (columns - 2)
    boxes = _whole(row, "num_boxes", 1, min(MOST_BOXES, max(1, (inside - 1) // 3)))
    seed = _whole(row, "seed", 0, 2**63 - 1)
    walls = (inside // 16, inside * 3 // 8)
    level = levels.SokobanLevel(rows, columns, boxes, walls, (2 * boxes, 20 * boxes))
    name = f"{rows}x{columns}, {boxes} boxes, seed {seed}"
    return levels.first(level, random.Random(f"sokoban/rows/{rows}/{columns}/{boxes}/{seed}"), name, tries=ROW_TRIES)


def _minesweeper(row: Mapping[str, Any]) -> minesweeper.Board:
    rows, columns = (_whole(row, name, 1, 100) for name in ("rows", "cols"))
    mines = _whole(row, "num_mines", 1, rows * columns - 1)
    cells, first = row["mine_positions"], row["first_click"]
    if not isinstance(cells, list) or not all(_pair(cell) for cell in cells) or not _pair(first):
        raise WorkbenchError("mine_positions and first_click must be pairs of row and column")
    if len(cells) != mines or len({tuple(cell) for cell in cells}) != mines:
        raise WorkbenchError(f"{len(cells)} mine_positions; expected num_mines, {mines}, all different")
    return minesweeper.Board(rows, columns, frozenset(tuple(cell) for cell in cells), tuple(first))


def _pair(cell: Any) -> bool:
    return isinstance(cell, list) and len(cell) == 2 and all(type(part) is int for part in cell)


READERS: Mapping[str, Callable[[Mapping[str, Any]], Board]] = {
    "rush_hour": _rush_hour,
    "sokoban": _sokoban,
    "minesweeper": _minesweeper,
}
