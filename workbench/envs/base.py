"""The protocol every text environment keeps, and a batch of live games behind it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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
