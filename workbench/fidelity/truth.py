"""What a turn was worth, from rolls or exact values: V of every state and the differences, with intervals.

V(s) is the chance that the policy wins from s; the true advantage of the turn between s and s' is V(s') - V(s), which
holds what the policy chose and, where the game itself is random, what the game answered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from .states import LOST, WON

Z95 = 1.959963984540054
THRESHOLD = 0.2  # of |advantage|, from which a turn is pivotal where its interval leaves out 0 as well


@dataclass(frozen=True, eq=False)
class Value:
    """An estimate of V: wins of n rolls, its 95 % interval, and the rates of either half of the rolls. n 0: exact."""

    value: float
    low: float
    high: float
    n: int = 0
    halves: tuple[float, float] = (0.0, 0.0)

    @property
    def variance(self) -> float:
        """An unbiased estimate of the estimate's own variance."""
        return self.value * (1 - self.value) / (self.n - 1) if self.n > 1 else 0.0


def exact(value: float) -> Value:
    """A value that is known."""
    return Value(value, value, value, 0, (value, value))


def estimate(outcomes: np.ndarray) -> Value:
    """V from (n,) outcomes of independent rolls; the interval is Wilson's."""
    n, half = len(outcomes), len(outcomes) // 2
    rate = float(np.mean(outcomes))
    low, high = wilson(rate, n)
    return Value(rate, low, high, n, (float(np.mean(outcomes[:half])), float(np.mean(outcomes[half:]))))


def wilson(rate: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a rate of n independent draws."""
    middle = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def difference(before: Value, after: Value) -> tuple[float, float, float]:
    """after - before and its 95 % interval: Newcombe's hybrid of two score intervals (Stat. Med. 17:873)."""
    gap = after.value - before.value
    low = gap - np.hypot(after.value - after.low, before.high - before.value)
    high = gap + np.hypot(after.high - after.value, before.value - before.low)
    return gap, float(low), float(high)


def values(rolled: Mapping[str, np.ndarray]) -> dict[str, Value]:
    """{state: Value}, the decided ones included."""
    return {WON: exact(1.0), LOST: exact(0.0)} | {key: estimate(outcomes) for key, outcomes in rolled.items()}


@dataclass(frozen=True, eq=False)
class Truth:
    """E episodes of up to K turns, right-padded. mask (E,K); value, value_low, value_high (E,K+1): V of the states, the
    last of an episode its outcome; rolls (E,K+1): of each, 0 where it is exact; state (E,K+1): number of the state, one
    for a state that episodes share; variance (E,K+1): of each estimate;
    advantage, low, high (E,K); halves (2,E,K): advantages by either half of the rolls; group (E,): episodes that share
    states, which are resampled together."""

    mask: np.ndarray
    value: np.ndarray
    value_low: np.ndarray
    value_high: np.ndarray
    rolls: np.ndarray
    state: np.ndarray
    variance: np.ndarray
    advantage: np.ndarray
    low: np.ndarray
    high: np.ndarray
    halves: np.ndarray
    group: np.ndarray

    @property
    def turns(self) -> np.ndarray:
        """(E,) turns of each episode."""
        return self.mask.sum(1)

    @property
    def state_mask(self) -> np.ndarray:
        """(E,K+1) which states exist."""
        return np.pad(self.mask, ((0, 0), (1, 0)), constant_values=True)

    def pivotal(self, threshold: float = THRESHOLD) -> np.ndarray:
        """(E,K) turns whose advantage is at least the threshold in size and whose interval leaves out 0."""
        clear = (self.low > 0) | (self.high < 0)
        return self.mask & clear & (np.abs(self.advantage) >= threshold - 1e-9)

    def half(self, which: int) -> "Truth":
        """The truth with the advantages of one half of the rolls; its intervals stay those of the whole."""
        return replace(self, advantage=self.halves[which])

    def of(self, episodes: Sequence[int]) -> "Truth":
        """The truth of some episodes."""
        picked = {f.name: getattr(self, f.name)[list(episodes)] for f in fields(self) if f.name != "halves"}
        return Truth(**picked, halves=self.halves[:, list(episodes)])


def truth(paths: Sequence[Sequence[Value]], groups: Sequence[int]) -> Truth:
    """The truth of episodes, each given as the values of its K + 1 states; a state they share is one Value."""
    E, K = len(paths), max(len(path) for path in paths) - 1
    mask = np.arange(K) < np.array([len(path) - 1 for path in paths])[:, None]
    states = np.zeros((6, E, K + 1))
    number: dict[int, int] = {}
    table = np.zeros((3, E, K))
    halves = np.zeros((2, E, K))
    for e, path in enumerate(paths):
        states[:, e, : len(path)] = np.transpose(
            [(v.value, v.low, v.high, v.n, number.setdefault(id(v), len(number)), v.variance) for v in path]
        )
        for k, (before, after) in enumerate(zip(path, path[1:], strict=False)):
            table[:, e, k] = difference(before, after)
            halves[:, e, k] = np.subtract(after.halves, before.halves)
    return Truth(mask, *states, *table, halves, np.asarray(groups))
