"""The protocol every text environment keeps, and a batch of live games behind it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from ..errors import WorkbenchError


@dataclass(frozen=True)
class Task:
    """One game to play. `id` names it for ever (a file path or `game/fold/seed`); `kind` picks its skill text."""

    id: str
    kind: str
    split: str


@dataclass(frozen=True)
class State:
    """What the player knows after a reset or a step.

    observation: the engine's text. admissible: the engine's list of commands it accepts here.
    reward: of this step, on the engine's own scale. outcome: 1 once the task is won, else 0.
    valid: whether the engine accepted the last action (True after a reset).
    """

    observation: str
    admissible: tuple[str, ...]
    reward: float = 0.0
    done: bool = False
    outcome: int = 0
    valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Env(Protocol):
    """One live game at a time.

    `tasks(split)` lists what can be played; splits are named by the environment in `splits`, the training one first.
    `reset(task_id, seed)` starts a game; games here are deterministic given (task_id, seed), and `seed` only
    matters where an engine has randomness beyond the task itself.
    `snapshot()` returns a small picklable value from which `restore()` rebuilds the exact state, in this
    process or another. `expert()` returns a command that leads towards winning from here, or None.
    """

    splits: tuple[str, ...]

    def tasks(self, split: str) -> Sequence[Task]: ...
    def reset(self, task_id: str, seed: int = 0) -> State: ...
    def step(self, action: str) -> State: ...
    def snapshot(self) -> Any: ...
    def restore(self, snapshot: Any) -> State: ...
    def expert(self) -> str | None: ...
    def close(self) -> None: ...


def replay(env: Env, task_id: str, seed: int, actions: Sequence[str]) -> State:
    """The state that a game's commands lead to, played from its start."""
    state = env.reset(task_id, seed)
    for action in actions:
        state = env.step(action)
    return state


@dataclass(frozen=True)
class Solution:
    """What an exact solver says of a state.

    distance: fewest actions to a win, inf where the solver has no way left. actions: the commands that begin a shortest
    way; none where the game is won or lost.
    """

    distance: float
    actions: tuple[str, ...] = ()

    @property
    def dead(self) -> bool:
        """Whether the distance is inf."""
        return math.isinf(self.distance)

    @property
    def lost(self) -> bool:
        """Whether no play can win: the distance is inf and nothing is left to try. A state of Minesweeper whose best
        guess dies is dead and not lost, for another guess may live."""
        return self.dead and not self.actions


class Unsolved(WorkbenchError):
    """A solver ran over its limit: the state has no known value and is left out by name, never guessed."""


@runtime_checkable
class SolvedEnv(Env, Protocol):
    """An environment whose states an exact solver can value.

    `solution()` is of the live state and raises Unsolved over the solver's limit. `solver_advantage()` is a turn's
    value for CAST: `before` and `after` are the solutions around it, `state` is what the step returned.
    """

    def solution(self) -> Solution: ...
    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float: ...


def step_advantage(before: Solution, after: Solution) -> float:
    """The solver advantage of a turn in a deterministic game: 1 for progress, 0 for a wasted action.

    Entering a deadlock costs the whole distance before it; within one every turn is worth 0 (CAST, arXiv 2607.25308).
    """
    if before.dead:
        return 0.0
    return -before.distance if after.dead else before.distance - after.distance


class SolverAlong:
    """An exact solver along one episode: asked about the state where it begins and after every turn, until one is over
    the solver's limit. solution: of the state it was asked about last, None from then on; why: that it is None."""

    def __init__(self, env: SolvedEnv):
        self.env, self.why = env, ""
        self.solution = self._ask()

    def turn(self, state: State) -> tuple[Solution, Solution, float] | None:
        """The solutions before and after the turn that led to `state`, and its solver advantage."""
        before, self.solution = self.solution, self._ask()
        if before is None or self.solution is None:
            return None
        return before, self.solution, self.env.solver_advantage(before, self.solution, state)

    def _ask(self) -> Solution | None:
        if not self.why:
            try:
                return self.env.solution()
            except Unsolved as error:
                self.why = str(error)
        return None


class EnvBatch:
    """`n` live games of one kind, stepped together; slot i is `envs[i]`."""

    def __init__(self, envs: Sequence[Env]):
        self.envs = list(envs)

    def __len__(self) -> int:
        return len(self.envs)

    def tasks(self, split: str) -> Sequence[Task]:
        return self.envs[0].tasks(split)

    def reset(self, task_ids: Sequence[str], seeds: Sequence[int] | None = None) -> list[State]:
        """Start task_ids[i] in slot i (fewer tasks than slots is fine)."""
        seeds = seeds or [0] * len(task_ids)
        return [env.reset(t, s) for env, t, s in zip(self.envs, task_ids, seeds, strict=False)]

    def step(self, actions: dict[int, str]) -> dict[int, State]:
        """Play one action in each named slot."""
        return {slot: self.envs[slot].step(action) for slot, action in actions.items()}

    def close(self) -> None:
        for env in self.envs:
            env.close()
