"""Dynamic gradient gating (arXiv 2605.19425): stop reusing a batch when the output head's gradient jumps.

Read (abstract and digests; there is no public code or full text): the energy of the head's gradient is monitored; the
z-score of its step-wise increment over a sliding window gates; the gate is armed once the window is full and never on
the first use of a batch; a trip discards the gradient before Adam and stops the reuse; 4 uses, threshold .1 to 1.
Inferred here: energy is the squared Frobenius norm, an increment joins consecutive computed gradients (across batches
too), only increments of applied updates enter the window, and the deviation is the population's.
"""

from collections import deque
from dataclasses import dataclass
from math import fsum, isfinite, sqrt
from typing import Any

from ..errors import WorkbenchError, unknown

STATISTICS = ("energy", "norm", "grad_norm", "kl", "chi2")


@dataclass(frozen=True)
class DGGConfig:
    max_reuse: int = 4  # most gradients computed on one batch; 1 is the plain method
    window: int = 32  # increments that the running mean and deviation cover
    threshold: float = 0.5  # z above which the gate trips
    # What a trip does: "discard" the update, "stop" the reuse, or "both" (paper). An update is a gradient of the whole
    # batch, so after "discard" alone the next use computes the same gradient once more, with an increment of 0.
    mode: str = "both"
    # What is watched: of the head's gradient its "energy" ||g||_F^2 or "norm" ||g||_F; as controls the norm of all the
    # gradient "grad_norm", or how far the policy is from the one that sampled, "kl" or "chi2".
    statistic: str = "energy"

    def __post_init__(self):
        if self.mode not in ("both", "discard", "stop"):
            raise unknown("gate mode", str(self.mode), ("both", "discard", "stop"))
        if self.statistic not in STATISTICS:
            raise unknown("gate statistic", str(self.statistic), STATISTICS)
        for name in ("max_reuse", "window"):
            if getattr(self, name) < 1:
                raise WorkbenchError(f"gate: {name} must be at least 1, got {getattr(self, name)}")
        if not isfinite(self.threshold):
            raise WorkbenchError(f"gate: threshold must be finite, got {self.threshold}")


@dataclass(frozen=True)
class Decision:
    """apply: take the optimizer's step with this gradient, else drop the gradient and leave weights and moments alone.
    stop: leave the reuse loop early. increment and z: what the decision rests on, None where there is none yet."""

    apply: bool
    stop: bool
    increment: float | None = None
    z: float | None = None


def check(value: float, reuse: int, max_reuse: int, statistic: str = "energy") -> None:
    """Raise WorkbenchError on a statistic that is not finite, a norm or energy below 0, or a reuse outside range."""
    if not isfinite(value) or (value < 0 and statistic not in ("kl", "chi2")):
        raise WorkbenchError(f"gate: gradient {statistic} must be finite and at least 0, got {value}")
    if not 1 <= reuse <= max_reuse:
        raise WorkbenchError(f"gate: reuse must lie in 1..{max_reuse}, got {reuse}")


class Gate:
    """The gate's state over a run. Call `observe` once for each computed gradient, before the optimizer's step."""

    def __init__(self, config: DGGConfig = DGGConfig()):
        self.config = config
        self.max_reuse, self.statistic = config.max_reuse, config.statistic
        self.threshold: float | None = config.threshold
        self.previous: float | None = None
        self.window: deque[float] = deque(maxlen=config.window)

    def observe(self, value: float, reuse: int) -> Decision:
        """value: the gate's statistic of this gradient; reuse: 1 for a batch's first use, then 2, 3, ..."""
        check(value, reuse, self.max_reuse, self.statistic)
        increment = None if self.previous is None else value - self.previous
        self.previous = value
        z = None
        if increment is not None and len(self.window) == self.config.window:
            mean = fsum(self.window) / len(self.window)
            std = sqrt(fsum((x - mean) ** 2 for x in self.window) / len(self.window))
            z = (increment - mean) / (std + 1e-8)
        trip = z is not None and reuse > 1 and z > self.config.threshold
        applied = not (trip and self.config.mode != "stop")
        if applied and increment is not None:
            self.window.append(increment)
        return Decision(applied, trip and self.config.mode != "discard", increment, z)

    def state_dict(self) -> dict[str, Any]:
        return {"previous": self.previous, "window": list(self.window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.previous = state["previous"]
        self.window = deque(state["window"], maxlen=self.config.window)
