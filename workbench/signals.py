"""The numbers that sampled tokens carry: their names in the turns table, their units, and how they are coloured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Signal:
    """A number of each sampled token. It is coloured blue above `centre` and orange below, the other way round where
    `flip`, and from nothing to the largest where `centre` is None."""

    name: str
    label: str
    unit: str
    meaning: str
    centre: float | None = 0.0
    flip: bool = False


SIGNALS = (
    Signal("advantage", "advantage A", "no unit", "blue: reinforced, orange: discouraged"),
    Signal("gap", "gap", "nats", "blue: the teacher finds the token likelier than the student"),
    Signal("gate", "gate g", "from 0 to 1", "blue: above one half, the gap is positive", centre=0.5),
    Signal("dloss_dlogp", "gradient dL/dlog p", "per nat", "blue: descent raises the token's probability", flip=True),
    Signal("entropy", "entropy", "nats", "darker: the agent was more undecided", centre=None),
    Signal("log_ratio", "log ratio teacher − old", "nats", "blue: the teacher finds the token likelier than it was"),
    Signal("old_logprobs", "log p when sampled", "nats", "darker: the token was a surprise"),
    Signal("teacher_logprobs", "log p of the teacher", "nats", "darker: the teacher is surprised"),
    Signal("decision", "decision (DEAR)", "0 or 1", "dark: where the agent decided, the most undecided", centre=None),
    Signal("support", "evidence (DEAR)", "0 or 1", "dark: what a decision rests on, distilled with it", centre=None),
    Signal(
        "support_score",
        "evidence score (DEAR)",
        "from 0 to 2",
        "darker: closer to a decision, and disputed by the teacher",
        centre=None,
    ),
)
DERIVED = {"log_ratio": ("teacher_logprobs", "old_logprobs")}


def numbers(row: Mapping[str, Any], name: str, start: int, stop: int) -> np.ndarray:
    """A signal of the tokens start to stop - 1 of a row of the turns table, float32, NaN where it was not recorded."""
    lists = [row.get(source) for source in DERIVED.get(name, (name,))]
    if any(values is None for values in lists):
        return np.full(stop - start, np.nan, "<f4")
    arrays = [np.array(values[start:stop], "<f4") for values in lists]
    return arrays[0] - arrays[1] if len(arrays) > 1 else arrays[0]
