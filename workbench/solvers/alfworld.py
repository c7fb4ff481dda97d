"""The fewest commands to ALFWorld's six goals, from the facts of the engine's present state.

The rules are those of the engine's own PDDL domain, which this search copies for the commands that can matter: going
anywhere is one command, a closed receptacle must be opened before it is reached into, one thing is carried at a time,
cleaning, heating and cooling need the right receptacle at hand and nothing more. Nothing is taken from ALFWorld's
planner or its walkthroughs, which are not proved shortest.

Places that only serve to put something down are alike but for being open, so one of them stands for all; everything
else that leads nowhere (closing, looking, carrying what the goal does not name) is left out, and no command left out
can make a way shorter.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..envs.alfworld_engine import Fact
from ..envs.alfworld_expert import ABLE, TOOLS, VERBS, Goal
from ..envs.base import Solution, Unsolved

NODE_LIMIT = 200_000  # states looked at for one question
NOTHING, OTHER = -1, -2  # held: no thing, or one that the goal does not name


class _Place(NamedTuple):
    """Where everything that matters is. Things, receptacles and lamps are numbers into their lists."""

    at: str
    held: int
    where: tuple[int, ...]  # for each thing a set of receptacles: the released games have some that lie in two at once
    open: int  # set of receptacles
    ready: int  # set of things in the wanted state
    lit: int  # set of lamps


def solve(goal: Goal, facts: Iterable[Fact], names: Mapping[str, str], limit: int = NODE_LIMIT) -> Solution:
    """Fewest commands to the goal, and the commands that begin a shortest way.

    facts: as `Engine.facts`; names: as `Engine.names`. Where several receptacles stand at one location, each one's
    `go to` is named; of commands that may as well wait (opening what is passed), not each may be. inf where there is
    no way. Raises Unsolved over `limit` states.
    """
    return _Search(goal, facts, names).solve(limit)


class _Search:
    def __init__(self, goal: Goal, facts: Iterable[Fact], names: Mapping[str, str]):
        table: dict[str, set[Fact]] = defaultdict(set)
        for name, *arguments in facts:
            table[name].add(tuple(arguments))
        self.goal, self.names = goal, names
        self.location = dict(sorted(table["receptacleatlocation"]))
        self.receptacles = sorted(self.location)
        number = {r: i for i, r in enumerate(self.receptacles)}
        kinds, able = dict(sorted(table["objecttype"])), {o for (o,) in table[ABLE.get(goal.state, "")]}
        inside: dict[str, int] = defaultdict(int)
        for o, r in table["inreceptacle"]:
            inside[o] |= 1 << number[r] if r in number else 0
        held = min((o for _, o in table["holds"]), default="")
        self.things = sorted(o for o, k in kinds.items() if k == goal.object and (not goal.state or o in able))
        self.fixed = {i for i, o in enumerate(self.things) if (o,) not in table["pickupable"]}
        lamps = sorted(o for o, k in kinds.items() if k == goal.lamp and (o,) in table["toggleable"])
        self.lamps = [(names[o], {self.spot(i) for i in _members(inside[o])}) for o in lamps]
        kind = dict(sorted(table["receptacletype"]))
        of = [kind.get(r, "") for r in self.receptacles]
        self.targets = [i for i, k in enumerate(of) if k == goal.receptacle]
        self.tools = {i for i, k in enumerate(of) if goal.state and k == TOOLS[goal.state]}
        holding = {rt for rt, ot in table["cancontain"] if ot == kinds.get(held)}
        self.fits = {
            OTHER: {i for i, k in enumerate(of) if k in holding},
            NOTHING: {i for i, k in enumerate(of) if (k, goal.object) in table["cancontain"]},
        }
        shut = {r for (r,) in table["openable"]} - {r for (r,) in table["opened"]}
        self.start = _Place(
            min((place for _, place in table["atlocation"]), default=""),
            self.things.index(held) if held in self.things else OTHER if held else NOTHING,
            tuple(inside[o] for o in self.things),
            sum(1 << i for i, r in enumerate(self.receptacles) if r not in shut),
            sum(1 << i for i, o in enumerate(self.things) if not goal.state or (o,) in table[goal.state]),
            sum(1 << i for i, o in enumerate(lamps) if (o,) in table["istoggled"]),
        )
        self.held_name = names.get(held, "")
        self.at_location: dict[str, list[int]] = defaultdict(list)
        for i, r in enumerate(self.receptacles):
            self.at_location[self.location[r]].append(i)
        useful = {*self.targets, *self.tools, *(i for places in self.start.where for i in _members(places))}
        self.useful = {self.spot(i) for i in useful} | {self.start.at}
        self.useful = self.useful.union(*(spots for _, spots in self.lamps))
        self.alike = {kind: self._alike(fits) for kind, fits in self.fits.items()}

    def spot(self, receptacle: int) -> str:
        return self.location[self.receptacles[receptacle]]

    def _alike(self, fits: set[int]) -> list[str]:
        """Locations that serve only to put down what `fits` takes: the open ones, or the shut ones if none is open."""
        other = [i for i in fits if self.spot(i) not in self.useful]
        ready = [i for i in other if self.start.open >> i & 1]
        return sorted({self.spot(i) for i in ready or other})

    def solve(self, limit: int) -> Solution:
        left = limit
        bound = self.least(self.start)
        if math.isinf(bound):
            return Solution(math.inf)
        while True:
            layer: dict[_Place, frozenset[str]] = {self.start: frozenset()}
            seen, cut = {self.start}, math.inf
            for depth in range(bound + 1):
                won = [begun for place, begun in layer.items() if self.won(place)]
                if won:
                    return Solution(float(depth), tuple(sorted(frozenset().union(*won))))
                following: dict[_Place, frozenset[str]] = {}
                for place, begun in layer.items():
                    for commands, after in self.moves(place):
                        if after in seen:
                            continue
                        least = depth + 1 + self.least(after)
                        if least > bound:
                            cut = min(cut, least)
                            continue
                        following[after] = following.get(after, frozenset()) | (begun or commands)
                seen.update(following)
                left -= len(following)
                if left < 0:
                    raise Unsolved(f"ALFWorld's shortest way: over {limit} states looked at")
                layer = following
            if math.isinf(cut):
                return Solution(math.inf)
            bound = int(cut)

    def won(self, place: _Place) -> bool:
        if self.goal.lamp:
            lit = any(place.lit >> i & 1 and place.at in spots for i, (_, spots) in enumerate(self.lamps))
            return lit and place.held >= 0
        return any(self._there(place, r) >= self.goal.count for r in self.targets)

    def _there(self, place: _Place, receptacle: int) -> int:
        return sum(inside >> receptacle & place.ready >> i & 1 for i, inside in enumerate(place.where))

    def least(self, place: _Place) -> float:
        """A number of commands that no way from here undercuts."""
        burden = int(place.held == OTHER)
        carried = place.held >= 0
        movable = [i for i in range(len(self.things)) if i not in self.fixed or i == place.held]
        if self.goal.lamp:
            if not self.lamps or not movable:
                return math.inf
            away = all(place.at not in spots for _, spots in self.lamps)
            return away + (not place.lit) + (0 if carried else burden + 1)
        if any(inside & inside - 1 or (inside and i == place.held) for i, inside in enumerate(place.where)):
            return int(not self.won(place))  # a thing in two places may be in the wanted one while it is carried
        best = math.inf
        for target in self.targets:
            missing = self.goal.count - self._there(place, target)
            if missing <= 0:
                return 0
            free = [i for i in movable if not place.where[i] >> target & place.ready >> i & 1]
            unready = max(0, missing - sum(place.ready >> i & 1 for i in free))
            if len(free) < missing or (unready and not self.tools):
                continue
            shut, away = not place.open >> target & 1, self.spot(target) != place.at
            best = min(best, away + shut + unready + 2 * missing - carried + burden)
        return best

    def moves(self, place: _Place) -> Iterator[tuple[frozenset[str], _Place]]:
        """The commands that may matter here, alike ones together, and where they lead."""
        held, name = place.held, self.names
        fits = self.fits[OTHER if held == OTHER else NOTHING] if held != NOTHING else set()
        for i in self.at_location[place.at]:
            receptacle, label = self.receptacles[i], name[self.receptacles[i]]
            if not place.open >> i & 1:
                if i in fits or i in self.targets or any(inside >> i & 1 for inside in place.where):
                    yield frozenset({f"open {label}"}), place._replace(open=place.open | 1 << i)
            else:
                for thing, inside in enumerate(place.where):
                    if inside >> i & 1 and held == NOTHING and thing not in self.fixed:
                        where = (*place.where[:thing], inside & ~(1 << i), *place.where[thing + 1 :])
                        command = f"take {name[self.things[thing]]} from {label}"
                        yield frozenset({command}), place._replace(held=thing, where=where)
                if i in fits:
                    carried = self.held_name if held == OTHER else name[self.things[held]]
                    where = list(place.where)
                    if held >= 0:
                        where[held] |= 1 << i
                    command = f"move {carried} to {name[receptacle]}"
                    yield frozenset({command}), place._replace(held=NOTHING, where=tuple(where))
            if i in self.tools and held >= 0 and not place.ready >> held & 1:
                command = f"{VERBS[self.goal.state]} {name[self.things[held]]} with {label}"
                yield frozenset({command}), place._replace(ready=place.ready | 1 << held)
        for i, (lamp, spots) in enumerate(self.lamps):
            if place.at in spots and not place.lit >> i & 1:
                yield frozenset({f"use {lamp}"}), place._replace(lit=place.lit | 1 << i)
        spare = self.alike[OTHER if held == OTHER else NOTHING] if held != NOTHING else []
        for spot in {*self.useful, *spare[:1]} - {place.at}:
            spots = spare if spot in spare else [spot]
            commands = frozenset(f"go to {name[self.receptacles[i]]}" for s in spots for i in self.at_location[s])
            if commands:
                yield commands, place._replace(at=spot)


def _members(numbers: int) -> list[int]:
    return [i for i in range(numbers.bit_length()) if numbers >> i & 1]
