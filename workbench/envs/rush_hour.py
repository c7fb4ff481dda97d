"""Rush Hour as a text game with the exact distance of every position: the second game of CAST (arXiv 2607.25308)."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..games import levels
from ..games import rush_hour as rules
from ..solvers import rush_hour as solver
from .base import Solution
from .puzzle import Puzzle


class RushHour(Puzzle):
    """One live game.

    level: "small" (5x5, 5 or 6 vehicles, 2 to 4 moves; unseen 7 vehicles) or "paper" (6x6, 7 vehicles, 6 to 8
    moves; unseen 9, 7 to 9). counts, boards: as in Puzzle (boards as games.rush_hour.parse reads them). limit: of the
    solver, in placements of one board's vehicles.

    In the text `.` is empty and `#` a wall; on `info`'s board these are `o` and `x`, and a letter is a vehicle on both.
    Commands are `move A right 2`; a slide of any length is one move.
    """

    game, title = "rush_hour", "Rush Hour"
    task = (
        "Rush Hour: slide vehicles along their own lines over free cells until A stands at the right end of its row. "
        "Command: move VEHICLE left|right|up|down CELLS."
    )
    rules = rules
    seen = str.maketrans(rules.EMPTY + rules.WALL, ".#")  # letters in the text are vehicles only

    def __init__(
        self,
        level: str = "small",
        counts: Mapping[str, int] | None = None,
        boards: Mapping[str, levels.Rows] | None = None,
        limit: int = solver.LIMIT,
    ):
        super().__init__(level, counts, boards, limit)

    def _commands(self) -> Iterator[tuple[str, Any]]:
        return rules.slides(self._fixed, self._position)

    def _solve(self) -> Solution:
        return solver.table(self._fixed, self._limit).solution(self._position)
