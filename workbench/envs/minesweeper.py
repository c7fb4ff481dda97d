"""Minesweeper as a text game with a solver's value of every state: the third game of CAST (arXiv 2607.25308)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import WorkbenchError, unknown
from ..games import levels
from ..games import minesweeper as rules
from ..games.minesweeper import Board
from ..solvers import minesweeper as solver
from .base import Solution, State, Task, replay

Snapshot = tuple[str, int, tuple[str, ...]]


class Minesweeper:
    """One live game.

    level: "small" (4x4 with 2 mines, unseen with 3) or "paper" (6x6 with 7, unseen 7x7 with 10). counts: tasks a
    split lists; `reset` takes any seed. Task ids are `minesweeper/<level>/<split>/<seed>`. boards: boards to play
    instead, by task id; then the only split is "rows". node_limit: of the solver, for one visible board.

    The first click is made by the game. `reveal r c` and `flag r c` count rows and columns from 1; a flag is taken
    away by the same command, and a flagged cell cannot be revealed. An episode ends with a mine or with every safe
    cell open, and has no limit of turns of its own; reward is 1.0 for the win. `info` holds `board` (a string a row:
    digits, `?` hidden, `F` flagged, `*` the mine hit), `mines`, `task` and `kind`.

    `solution().distance` is the reveals that a player of exact beliefs still needs here, which never looks under a
    cell, plus one for every flag on a safe cell (CAST's K(s)); inf where that player has to guess and its guess dies,
    though another player might be luckier. `solution().actions` come from the visible board alone, so a state whose
    distance is inf has some until a mine is hit: every certainly safe cell's reveal, else every safest guess's
    (`flag` where the cell has a flag that must go first). `expert()` is what the solver plays next.
    """

    def __init__(
        self,
        level: str = "small",
        counts: Mapping[str, int] | None = None,
        boards: Mapping[str, Board] | None = None,
        node_limit: int = solver.NODE_LIMIT,
    ):
        if level not in rules.LEVELS:
            raise unknown("Minesweeper level", level, rules.LEVELS)
        self.level, self._node_limit = level, node_limit
        self._counts = {**levels.COUNTS, **(counts or {})}
        self._boards = boards
        self.splits = levels.SPLITS if boards is None else ("rows",)
        self._state: State | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self.splits:
            raise unknown("Minesweeper split", split, self.splits)
        if self._boards is not None:
            return tuple(Task(name, "minesweeper", split) for name in self._boards)
        name = f"minesweeper/{self.level}/{split}"
        return tuple(Task(f"{name}/{seed}", "minesweeper", split) for seed in range(self._counts[split]))

    def reset(self, task_id: str, seed: int = 0) -> State:
        """Start a game. `seed` is unused: the task id names the board."""
        self._board = self._boards[task_id] if self._boards and task_id in self._boards else self._generated(task_id)
        self._position = rules.start(self._board)
        self._task, self._seed, self._actions = task_id, seed, []
        board = self._board
        self._info = {
            "task": f"Minesweeper, {board.rows} rows of {board.cols} cells, {len(board.mines)} mines: reveal every "
            "cell without a mine. A number counts the mines around it. Commands: reveal ROW COLUMN, flag ROW COLUMN.",
            "kind": "minesweeper",
            "mines": len(board.mines),
        }
        return self._read(0.0, True)

    def step(self, action: str) -> State:
        """Play a command. One that cannot be played leaves the game as it is: valid is False."""
        before = self._running()
        self._actions.append(action)
        if action not in before.admissible:
            return self._read(0.0, False)
        verb, cell = self._parsed(action)
        if verb == "flag":
            self._position = rules.flag(self._position, cell)
        else:
            self._position = rules.reveal(self._board, self._position, cell)
        return self._read(float(rules.won(self._board, self._position)), True)

    def snapshot(self) -> Snapshot:
        """(task id, seed, commands so far)."""
        self._running()
        return self._task, self._seed, tuple(self._actions)

    def restore(self, snapshot: Snapshot) -> State:
        """Play a snapshot's commands again."""
        return replay(self, *snapshot)

    def expert(self) -> str | None:
        """The solver's next command from the visible board; None once the game is over. Raises Unsolved."""
        return None if self._running().done else self._command(self._asked(solver.choice))

    def solution(self) -> Solution:
        """Distance and best commands, as the class says. Raises Unsolved over the node limit."""
        if self._running().done:
            return Solution(0.0 if self._state.outcome else math.inf)
        needed = self._asked(lambda *_: solver.reveals_needed(self._board, self._position, self._node_limit))
        best = self._asked(solver.best_cells)
        wrong = rules.wrong_flags(self._board, self._position)
        return Solution(needed + wrong, tuple(self._command(cell) for cell in best))

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        """`credit.cast.reveal_advantage` of one turn: a win is worth the distance before it, a mine costs that.

        From a state whose distance was inf a win is worth all safe cells of the board, a mine 0, and a turn that finds
        a way again the distance it found. An invalid turn is worth 0; entering inf costs the distance before it.
        """
        if not state.valid:
            return 0.0
        if state.outcome:
            board = state.info["board"]
            return float(len(board) * len(board[0]) - state.info["mines"]) if before.dead else before.distance
        if before.dead:
            return 0.0 if after.dead else after.distance
        return -before.distance if after.dead else before.distance - after.distance

    def close(self) -> None:
        """Nothing is held."""

    def _running(self) -> State:
        if self._state is None:
            raise WorkbenchError("no Minesweeper game is running: reset or restore first")
        return self._state

    def _generated(self, task_id: str) -> Board:
        parts = task_id.split("/")
        if self._boards is not None:
            raise unknown("Minesweeper row", task_id, self._boards)
        if len(parts) != 4 or parts[0] != "minesweeper" or not parts[3].isdecimal():
            raise WorkbenchError(f"task {task_id!r}: expected minesweeper/<level>/<{'|'.join(levels.SPLITS)}>/<seed>")
        if parts[1] not in rules.LEVELS:
            raise unknown("Minesweeper level", parts[1], rules.LEVELS)
        if parts[2] not in levels.SPLITS:
            raise unknown("Minesweeper split", parts[2], levels.SPLITS)
        return rules.generate(parts[1], parts[2], int(parts[3]))

    def _asked(self, question: Any) -> Any:
        """The solver's answer on the visible board; Unsolved names the task too."""
        try:
            return question(self._state.info["board"], len(self._board.mines), self._node_limit)
        except solver.Unsolved as error:
            raise solver.Unsolved(f"task {self._task}: {error}") from None

    def _parsed(self, action: str) -> tuple[str, int]:
        verb, row, col = action.split()
        return verb, (int(row) - 1) * self._board.cols + int(col) - 1

    def _command(self, cell: int) -> str:
        verb = "flag" if self._position.flagged >> cell & 1 else "reveal"
        return _named(verb, cell, self._board.cols)

    def _read(self, reward: float, valid: bool) -> State:
        board, position = self._board, self._position
        seen = rules.view(board, position)
        is_won = rules.won(board, position)
        over = is_won or bool(position.hit)
        hidden = [] if over else [n for n in range(board.rows * board.cols) if not position.opened >> n & 1]
        reveals = [_named("reveal", n, board.cols) for n in hidden if not position.flagged >> n & 1]
        text = " / ".join(" ".join(row) for row in seen)
        self._state = State(
            observation=text if valid else f"invalid . {text}",
            admissible=(*reveals, *(_named("flag", n, board.cols) for n in hidden)),
            reward=reward,
            done=over,
            outcome=int(is_won),
            valid=valid,
            info={**self._info, "board": seen},
        )
        return self._state


def _named(verb: str, cell: int, cols: int) -> str:
    return f"{verb} {cell // cols + 1} {cell % cols + 1}"
