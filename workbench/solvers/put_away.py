"""The fewest commands that put things away in one room: take, put, and open what is shut."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from ..envs.base import Solution


@dataclass(frozen=True)
class Thing:
    """Something to put away. right: the containers it may end in; inside: the one it is in, "" where it lies loose."""

    name: str
    right: frozenset[str]
    held: bool = False
    inside: str = ""

    @property
    def away(self) -> bool:
        return self.inside in self.right


def fewest(things: Iterable[Thing], shut: frozenset[str]) -> Solution:
    """Fewest commands until every thing is away, and every command that begins a shortest way.

    Each thing costs a take unless it is held, and a put; of the shut containers, those that hold a thing are opened,
    and the fewest others that leave each thing a place. Commands can be given in any order that is accepted. Hands
    hold any number of things. Where a thing has no right place the distance is inf.
    """
    left = [thing for thing in things if not thing.away]
    if any(not thing.right for thing in left):
        return Solution(float("inf"))
    locked_in = {thing.inside for thing in left if thing.inside in shut}
    homeless = [thing.right for thing in left if not thing.right - (shut - locked_in)]
    choices = sorted(set().union(*homeless)) if homeless else []
    for count in range(len(choices) + 1):
        covers = [set(c) for c in combinations(choices, count) if all(right & set(c) for right in homeless)]
        if covers:
            break
    opened = locked_in.union(*covers)
    commands = {f"open {container}" for container in opened}
    for thing in left:
        if thing.held:
            commands |= {f"put {thing.name} in {container}" for container in thing.right - shut}
        elif thing.inside not in shut:
            commands.add(f"take {thing.name}")
    distance = sum(1 if thing.held else 2 for thing in left) + len(locked_in) + count
    return Solution(float(distance), tuple(sorted(commands)))
