"""Text environments behind one protocol."""

from collections.abc import Callable
from typing import Any

from ..errors import WorkbenchError, unknown
from .base import Env, EnvBatch, SolvedEnv, State, Task

__all__ = ["ENVIRONMENTS", "SOLVED", "Env", "EnvBatch", "State", "Task", "make", "require_solver"]


def _textworld_express(game: str) -> Callable[..., Env]:
    def build(**options: Any) -> Env:
        from .textworld_express import TextWorldExpress

        return TextWorldExpress(game=game, **options)

    return build


def _alfworld(memo: bool = True, memo_path: str | None = None, **options: Any) -> Env:
    from .alfworld import AlfworldEnv, memoised

    return memoised(path=memo_path, **options) if memo else AlfworldEnv(**options)


def _textworld(memo: bool = True, memo_path: str | None = None, **options: Any) -> Env:
    from .textworld import TextWorldCooking, memoised

    return memoised(path=memo_path, **options) if memo else TextWorldCooking(**options)


def _boards(rows: str | None, game: str) -> dict[str, Any]:
    """The option that has a game play a file's own rows."""
    from ..games.rows import playable

    return {} if rows is None else {"boards": playable(rows, game)}


def _rush_hour(rows: str | None = None, **options: Any) -> Env:
    from .rush_hour import RushHour

    return RushHour(**options, **_boards(rows, "rush_hour"))


def _sokoban(rows: str | None = None, **options: Any) -> Env:
    from .sokoban import Sokoban

    return Sokoban(**options, **_boards(rows, "sokoban"))


def _minesweeper(rows: str | None = None, **options: Any) -> Env:
    from .minesweeper import Minesweeper

    return Minesweeper(**options, **_boards(rows, "minesweeper"))


TWX_GAMES = ("twc", "cookingworld", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")
ENVIRONMENTS: dict[str, Callable[..., Env]] = {game: _textworld_express(game) for game in TWX_GAMES}
ENVIRONMENTS["alfworld"] = _alfworld
ENVIRONMENTS["textworld"] = _textworld
ENVIRONMENTS["rush_hour"] = _rush_hour
ENVIRONMENTS["sokoban"] = _sokoban
ENVIRONMENTS["minesweeper"] = _minesweeper
# Whose states a solver values: textworld and TextWorldExpress games but twc by a plan's length, the others exactly
SOLVED = ("rush_hour", "sokoban", "minesweeper", "alfworld", "textworld", *TWX_GAMES)


def make(name: str, n: int = 1, **options: Any) -> EnvBatch:
    """`n` live games of a named environment. Raises WorkbenchError for an unknown name or option."""
    if name not in ENVIRONMENTS:
        raise unknown("environment", name, ENVIRONMENTS)
    try:
        return EnvBatch([ENVIRONMENTS[name](**options) for _ in range(n)])
    except TypeError as error:
        raise WorkbenchError(f"environment {name!r}: {error}") from None


def require_solver(name: str, env: Env) -> None:
    """Raise WorkbenchError where the environment of that name has no exact solver."""
    if not isinstance(env, SolvedEnv):
        raise WorkbenchError(f"environment {name!r} has no exact solver; those that have one: {', '.join(SOLVED)}")
