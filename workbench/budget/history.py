"""What a policy's recent rollouts say of its success rate on a task before the task is played again.

V0.5 holds a task's rollouts against such a rate, CoBA-RL allocates by it. Both papers take a task's own past; where a
run passes over its tasks only a few times that says little, so here a task's rate leans on the rate of its kind, that
on the rate of all, and that on one half, and old steps fade as the policy moves on.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import WorkbenchError, unknown

PRIORS = ("history", "half", "v0")


@dataclass(frozen=True)
class HistoryConfig:
    memory: float = 0.8  # what a step's rollouts weigh one step later, relative to new ones; 1 never forgets
    strength: float = 4.0  # rollouts that the next wider rate counts as: the kind's for a task, that of all for a kind
    prior: str = "history"  # a task's rate: that of the "history"; "half": .5 whatever was seen; "v0": predicted by it

    def __post_init__(self):
        if not 0 <= self.memory <= 1:
            raise WorkbenchError(f"history: memory must lie in [0, 1], got {self.memory}")
        if not 0 < self.strength < math.inf:
            raise WorkbenchError(f"history: strength must be finite and above 0, got {self.strength}")
        if self.prior not in PRIORS:
            raise unknown("prior", str(self.prior), PRIORS)


@dataclass(frozen=True)
class History:
    """success: of each step so far the mean over its tasks of their success rates; counts: successes and rollouts of
    every task, every kind and all, faded by age. For V0 alone, recent: the text that a task begins with and the outcome
    of the latest rollouts, oldest first; values: what was predicted of the tasks of the step to come, by their ids."""

    config: HistoryConfig = HistoryConfig()
    success: tuple[float, ...] = ()
    counts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    recent: tuple[tuple[str, int], ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    def rate(self, task: str, kind: str) -> float:
        """The success rate to expect of a task, in (0, 1); one half where nothing was seen of it, its kind or any.

        What V0 predicted of the task, where it did.
        """
        if task in self.values:
            return self.values[task]
        rate = 0.5
        if self.config.prior == "half":
            return rate
        for name in _names(task, kind)[::-1]:
            won, played = self.counts.get(name, (0.0, 0.0))
            rate = (won + self.config.strength * rate) / (played + self.config.strength)
        return rate

    def after(self, played: Iterable[tuple[str, str, int]]) -> "History":
        """The history with one more step: (task, kind, outcome 0 or 1) of each of its rollouts.

        Raises WorkbenchError on a step without rollouts or an outcome that is neither.
        """
        counts = {name: (won * self.config.memory, n * self.config.memory) for name, (won, n) in self.counts.items()}
        tasks: dict[str, list[int]] = {}
        for task, kind, outcome in played:
            if outcome not in (0, 1):
                raise WorkbenchError(f"history: an outcome must be 0 or 1, got {outcome!r} of task {task}")
            for name in _names(task, kind):
                won, n = counts.get(name, (0.0, 0.0))
                counts[name] = (won + outcome, n + 1)
            tasks.setdefault(task, []).append(outcome)
        if not tasks:
            raise WorkbenchError("history: a step needs at least one rollout")
        mean = math.fsum(sum(own) / len(own) for own in tasks.values()) / len(tasks)
        return replace(self, success=(*self.success, mean), counts=counts, values={})

    def state_dict(self) -> dict[str, Any]:
        return {"success": list(self.success), "counts": dict(self.counts), "recent": list(self.recent)}

    def with_state(self, state: Mapping[str, Any]) -> "History":
        """The history that `state_dict` was taken of."""
        recent = tuple((text, outcome) for text, outcome in state.get("recent", ()))
        return History(self.config, tuple(state["success"]), dict(state["counts"]), recent)


def _names(task: str, kind: str) -> tuple[str, str, str]:
    """Whose counts a rollout enters, the narrowest first."""
    return f"task {task}", f"kind {kind}", "all"
