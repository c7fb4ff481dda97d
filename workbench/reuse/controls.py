"""Controls for a gate: a fixed number of uses, and random stops at a gate's own rate.

A gate with a low threshold trips on ordinary noise, and stopping at random as often may do as well; only a comparison
at a matched rate tells whether the gate's timing matters.
"""

import random
from dataclasses import dataclass
from typing import Any

from ..errors import WorkbenchError
from .dgg import Decision, check


@dataclass(frozen=True)
class FixedReuseConfig:
    max_reuse: int = 4  # gradients computed and applied on every batch; 1 is the plain method

    def __post_init__(self):
        if self.max_reuse < 1:
            raise WorkbenchError(f"fixed reuse: max_reuse must be at least 1, got {self.max_reuse}")


@dataclass(frozen=True)
class RandomStopConfig:
    max_reuse: int = 4  # most gradients computed on one batch
    # .31 is what i.i.d. normal increments give a gate at threshold .5; better is the measured share of its own trips.
    rate: float = 0.31  # chance, at every use but the first, to discard the update and stop

    def __post_init__(self):
        if self.max_reuse < 1:
            raise WorkbenchError(f"random stop: max_reuse must be at least 1, got {self.max_reuse}")
        if not 0 <= self.rate <= 1:
            raise WorkbenchError(f"random stop: rate must lie in [0, 1], got {self.rate}")


class FixedReuse:
    """Applies every update; the increments are recorded so that runs compare with a gated one."""

    def __init__(self, config: FixedReuseConfig = FixedReuseConfig()):
        self.config = config
        self.max_reuse, self.statistic = config.max_reuse, "energy"
        self.threshold: float | None = None
        self.previous: float | None = None

    def observe(self, value: float, reuse: int) -> Decision:
        """value: squared Frobenius norm of the head's gradient; reuse: 1 for a batch's first use, then 2, 3, ..."""
        check(value, reuse, self.max_reuse)
        increment = None if self.previous is None else value - self.previous
        self.previous = value
        return Decision(True, False, increment)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self.previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous = state["previous"]


class RandomStop:
    """Discards and stops with probability `rate` at every use but the first, whatever the gradient.

    The n-th draw depends on the seed and n alone, so a resumed run draws what an unbroken one would.
    """

    def __init__(self, config: RandomStopConfig = RandomStopConfig(), seed: int = 0):
        self.config, self.seed = config, seed
        self.max_reuse, self.statistic = config.max_reuse, "energy"
        self.threshold: float | None = None
        self.previous: float | None = None
        self.draws = 0

    def observe(self, value: float, reuse: int) -> Decision:
        """value: squared Frobenius norm of the head's gradient; reuse: 1 for a batch's first use, then 2, 3, ..."""
        check(value, reuse, self.max_reuse)
        increment = None if self.previous is None else value - self.previous
        self.previous = value
        if reuse == 1:
            return Decision(True, False, increment)
        trip = random.Random(f"random stop {self.seed} {self.draws}").random() < self.config.rate
        self.draws += 1
        return Decision(not trip, trip, increment)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self.previous, "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous, self.draws = state["previous"], state["draws"]
