"""Text environments behind one protocol."""

from collections.abc import Callable
from typing import Any

from ..errors import WorkbenchError, unknown
from .base import Env, EnvBatch, State, Task

__all__ = ["ENVIRONMENTS", "Env", "EnvBatch", "State", "Task", "make"]


def _textworld_express(game: str) -> Callable[..., Env]:
    def build(**options: Any) -> Env:
        from .textworld_express import TextWorldExpress

        return TextWorldExpress(game=game, **options)

    return build


def _alfworld(memo: bool = True, memo_path: str | None = None, **options: Any) -> Env:
    from .alfworld import AlfworldEnv, memoised

    return memoised(path=memo_path, **options) if memo else AlfworldEnv(**options)


TWX_GAMES = ("twc", "cookingworld", "coin", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder")
ENVIRONMENTS: dict[str, Callable[..., Env]] = {game: _textworld_express(game) for game in TWX_GAMES}
ENVIRONMENTS["alfworld"] = _alfworld


def make(name: str, n: int = 1, **options: Any) -> EnvBatch:
    """`n` live games of a named environment. Raises WorkbenchError for an unknown name or option."""
    if name not in ENVIRONMENTS:
        raise unknown("environment", name, ENVIRONMENTS)
    try:
        return EnvBatch([ENVIRONMENTS[name](**options) for _ in range(n)])
    except TypeError as error:
        raise WorkbenchError(f"environment {name!r}: {error}") from None
