"""Sokoban as a text game with the exact distance of every position: the first game of CAST (arXiv 2607.25308)."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..games import levels
from ..games import sokoban as rules
from ..solvers import sokoban as solver
from .base import Solution
from .puzzle import Puzzle


class Sokoban(Puzzle):
    """One live game.

    level: "small" (6x6, one box, 2 to 6 walls inside, 2 to 8 steps; unseen at most one wall, 4 to 8) or "paper" (6x6,
    2 boxes; unseen 7x7, 3). counts, boards: as in Puzzle (boards as games.sokoban.parse reads them). limit: of the
    solver, in positions expanded.
    end_when_dead: end the game, lost, once no win is left, as CAST's runs do; the solver is then asked at every push.

    Marks are those of games.sokoban.MARKS, but that the text shows floor as `_`; commands are up, down, left and right.
    """

    game, title = "sokoban", "Sokoban"
    task = (
        "Sokoban: push every box $ onto a goal . by walking against it; * is a box on a goal, @ you, + you on a goal, "
        "# a wall. Commands: up, down, left, right."
    )
    rules = rules
    seen = str.maketrans(" ", "_")

    def __init__(
        self,
        level: str = "small",
        counts: Mapping[str, int] | None = None,
        boards: Mapping[str, levels.Rows] | None = None,
        limit: int = solver.LIMIT,
        end_when_dead: bool = False,
    ):
        super().__init__(level, counts, boards, limit)
        self._end_when_dead = end_when_dead

    def _commands(self) -> Iterator[tuple[str, Any]]:
        return rules.steps(self._fixed, self._position)

    def _solve(self) -> Solution:
        return solver.solve(self._fixed, self._position, self._limit)

    def _lost(self) -> bool:
        return self._end_when_dead and self._solved().dead
