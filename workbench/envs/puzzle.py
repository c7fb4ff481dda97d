"""Puzzles whose state is the board: what Rush Hour and Sokoban share as text games with an exact solver."""

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..errors import WorkbenchError, unknown
from ..games import levels
from .base import Solution, State, Task, Unsolved, step_advantage

Snapshot = tuple[str, levels.Rows, bool]


class Puzzle:
    """One live game on a board of `levels`, or on one of `boards` by task id, where the only split is "rows".

    A subclass names its game and rules, the characters of the board that the text shows as others, and the task in a
    sentence; it says what can be played and asks the solver. The text is the board, cells separated by spaces and rows
    by ` / `. Reward is 1.0 for the win, which ends the game; there is no limit of turns. `info` holds `board` (a string
    a row), `task` and `kind`. counts: tasks a split lists; `reset` takes any seed. Task ids are
    `<game>/<level>/<split>/<seed>`. A snapshot is the task, the board and whether the last command was accepted.
    """

    game: str
    title: str
    task: str
    rules: ModuleType  # with parse, render and solved
    seen: Mapping[int, str]

    def __init__(
        self, level: str, counts: Mapping[str, int] | None, boards: Mapping[str, levels.Rows] | None, limit: int
    ):
        levels.check_level(self.game, level)
        self.level, self._limit, self._boards = level, limit, boards
        self._counts = {**levels.COUNTS, **(counts or {})}
        self.splits = levels.SPLITS if boards is None else ("rows",)
        self._state: State | None = None

    def _commands(self) -> Iterable[tuple[str, Any]]:
        """Each command that can be played here, and the position it leads to."""
        raise NotImplementedError

    def _solve(self) -> Solution:
        """The solver's answer about the position; raises Unsolved over its limit."""
        raise NotImplementedError

    def _lost(self) -> bool:
        """Whether the game ends here without a win."""
        return False

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in self.splits:
            raise unknown(f"{self.game} split", split, self.splits)
        if self._boards is not None:
            return tuple(Task(name, self.game, split) for name in self._boards)
        name = f"{self.game}/{self.level}/{split}"
        return tuple(Task(f"{name}/{seed}", self.game, split) for seed in range(self._counts[split]))

    def reset(self, task_id: str, seed: int = 0) -> State:
        """Start a game. `seed` is unused: the task id names the board."""
        if self._boards is None:
            rows = levels.generate(self.game, *levels.parse_task(self.game, task_id))
        elif task_id in self._boards:
            rows = self._boards[task_id]
        else:
            raise unknown(f"{self.game} row", task_id, self._boards)
        return self._start(task_id, rows)

    def step(self, action: str) -> State:
        """Play a command. One that cannot be played leaves the board as it is: valid is False."""
        self._running()
        if action not in self._playable:
            return self._read(0.0, False)
        self._position = self._playable[action]
        return self._read(float(self.rules.solved(self._fixed, self._position)), True)

    def snapshot(self) -> Snapshot:
        """(task id, board, whether the last command was accepted)."""
        state = self._running()
        return self._task, state.info["board"], state.valid

    def restore(self, snapshot: Snapshot) -> State:
        return self._start(*snapshot)

    def expert(self) -> str | None:
        """The first command of a shortest way, or None."""
        return next(iter(self.solution().actions), None)

    def solution(self) -> Solution:
        """Fewest commands to a win and those that lessen them. Raises Unsolved over the limit, naming the task."""
        self._running()
        return self._solved()

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        return step_advantage(before, after)

    def close(self) -> None:
        """Nothing is held."""

    def _solved(self) -> Solution:
        try:
            return self._solve()
        except Unsolved as error:
            raise Unsolved(f"task {self._task}: {error}") from None

    def _running(self) -> State:
        if self._state is None:
            raise WorkbenchError(f"no {self.title} game is running: reset or restore first")
        return self._state

    def _start(self, task_id: str, rows: levels.Rows, valid: bool = True) -> State:
        self._fixed, self._position = self.rules.parse(tuple(rows))
        self._task = task_id
        return self._read(0.0, valid)

    def _read(self, reward: float, valid: bool) -> State:
        won = self.rules.solved(self._fixed, self._position)
        board = self.rules.render(self._fixed, self._position)
        text = " / ".join(" ".join(row.translate(self.seen)) for row in board)
        lost = not won and self._lost()
        self._playable = {} if won or lost else dict(self._commands())
        self._state = State(
            observation=text if valid else f"invalid . {text}",
            admissible=tuple(self._playable),
            reward=reward,
            done=won or lost,
            outcome=int(won),
            valid=valid,
            info={"task": self.task, "kind": self.game, "board": board},
        )
        return self._state
