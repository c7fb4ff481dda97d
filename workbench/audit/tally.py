"""Counts and examples while a source passes by."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ..formats.base import SourceEpisode, SourceTurn
from ..links import Link

EXAMPLES = 5


@dataclass(frozen=True)
class Example:
    """One place of a finding. where: `file.jsonl:17 turn 3`, or the text of `link`, which is None outside of a run."""

    where: str
    detail: str
    link: Link | None = None


@dataclass(frozen=True)
class Place:
    """Where an episode is."""

    where: str
    step: int
    episode: str
    link: Link | None = None

    @classmethod
    def of(cls, episode: SourceEpisode) -> "Place":
        link = episode.info.get("link")
        where = episode.where or episode.episode
        return cls(where, episode.step, episode.episode, link if isinstance(link, Link) else None)

    def example(self, detail: str, turn: int | None = None, span: tuple[int, int] | None = None) -> Example:
        if self.link is None:
            parts = [self.where] + ([f"turn {turn}"] if turn is not None else [])
            parts += [f"tokens {span[0]}-{span[1]}"] if span else []
            return Example(" ".join(parts), detail)
        start, end = span if span and turn is not None else (None, None)
        link = self.link if turn is None else replace(self.link, turn=turn, start=start, end=end)
        return Example(str(link), detail, link)

    def turn(self, turn: SourceTurn) -> "Place":
        """The place of a turn that has a line of its own."""
        where = turn.info.get("where")
        return self if not isinstance(where, str) or self.link else replace(self, where=where)


class Tally:
    """Per check: what it looked at, what it found, and the first few places."""

    def __init__(self):
        self.looked: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.examples: dict[str, list[Example]] = {}

    def look(self, name: str, n: int = 1) -> None:
        self.looked[name] += n

    def hit(self, name: str, place: Place, detail: str, n: int = 1, **where: Any) -> None:
        """Count n; `where` is turn and span of the example."""
        self.add(name, n, [] if len(self.examples.get(name, ())) >= EXAMPLES else [place.example(detail, **where)])

    def add(self, name: str, n: int, examples: list[Example]) -> None:
        """Count n with the examples that are still wanted."""
        if n:
            self.found[name] += n
            kept = self.examples.setdefault(name, [])
            kept += examples[: EXAMPLES - len(kept)]


def numeric(value: Any) -> float | None:
    """A number of a source's info, which may hold anything; None for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def number(turn: SourceTurn, index: int) -> int:
    """The turn's number in examples and links: as it is written, else its place in the episode from 0."""
    return index if turn.turn is None else turn.turn


def written(turn: SourceTurn) -> int | None:
    """The number that the first source of the turn wrote; an imported run keeps it beside its own."""
    given = turn.info.get("source_turn", turn.turn)
    return given if type(given) is int else None
