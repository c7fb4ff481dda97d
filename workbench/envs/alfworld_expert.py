"""The next command towards ALFWorld's six goals, worked out from the facts of the engine's present state.

It sees everything (where the object is, what is closed), as the walkthroughs of the released games do, and being a
function of the state alone it answers from any state. Whether a command is accepted, and whether the game is then won,
stays the engine's word.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .alfworld_engine import Fact, expressions

TOOLS = {"isclean": "sinkbasintype", "ishot": "microwavetype", "iscool": "fridgetype"}
ABLE = {"isclean": "cleanable", "ishot": "heatable", "iscool": "coolable"}
VERBS = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}
_UNDERSTOOD = {"inreceptacle", "objecttype", "receptacletype", "holds", "istoggled", "toggleable", "atlocation"}
_UNDERSTOOD |= {"receptacleatlocation", *TOOLS, *ABLE.values()}


@dataclass(frozen=True)
class Goal:
    """count objects of type `object`, each in state `state`, in one receptacle; or one in hand beside a lit `lamp`.

    Types are the engine's, in lower case ("mugtype"); "" where the goal does not name one.
    """

    object: str
    receptacle: str = ""
    state: str = ""
    lamp: str = ""
    count: int = 1


@lru_cache(64)
def goal_of(problem: str) -> Goal | None:
    """Read the goal of a PDDL problem; None where it is not of the six kinds."""
    found: list[list[str]] = []

    def walk(node: Any) -> None:
        if all(isinstance(child, str) for child in node):
            found.append(node)
        else:
            for child in node:
                if isinstance(child, list):
                    walk(child)

    for part in expressions(problem)[0]:
        if part[0] == ":goal":
            walk(part)
    atoms = [atom for atom in found if atom and not atom[0].startswith("?")]
    names = {atom[0] for atom in atoms}
    types = {atom[1]: atom[2] for atom in atoms if atom[0] in ("objecttype", "receptacletype")}
    states = [name for name in TOOLS if name in names]
    lamp = next((types.get(atom[1], "") for atom in atoms if atom[0] == "istoggled"), "")
    held = next((types.get(atom[2], "") for atom in atoms if atom[0] == "holds"), "")
    if names - _UNDERSTOOD - {"="} or len(states) > 1:
        return None
    if lamp:
        return Goal(held, lamp=lamp) if held else None
    objects = [atom[2] for atom in atoms if atom[0] == "objecttype"]
    places = [atom[2] for atom in atoms if atom[0] == "receptacletype"]
    if len(set(objects)) != 1 or len(set(places)) != 1:
        return None
    return Goal(objects[0], places[0], states[0] if states else "", count=len(objects))


def next_command(goal: Goal, facts: Iterable[Fact], names: Mapping[str, str]) -> str | None:
    """A command that leads towards the goal from here; None once it is reached or where no way is seen.

    facts: as `Engine.facts`; names: as `Engine.names`.
    """
    room = _Room(facts, names)
    things = {o for o in room.of("objecttype", goal.object) if room.holds_true("pickupable", o)}
    if goal.state:
        things &= {o for o in things if room.holds_true(ABLE[goal.state], o)}
    ready = {o for o in things if not goal.state or room.holds_true(goal.state, o)}
    if goal.lamp:
        lamps = [o for o in room.of("objecttype", goal.lamp) if o in room.inside]
        lamps.sort(key=lambda o: (not room.holds_true("istoggled", o), *room.effort(room.inside[o])))
        if room.held in things and lamps:
            way = room.go(room.inside[lamps[0]])
            return way or (None if room.holds_true("istoggled", lamps[0]) else f"use {names[lamps[0]]}")
        spare = things if lamps else set()
    else:
        places = sorted(
            room.of("receptacletype", goal.receptacle),
            key=lambda r: (-sum(room.inside.get(o) == r for o in ready), *room.effort(r)),
        )
        done = {o for o in ready if places and room.inside.get(o) == places[0]}
        if not places or len(done) >= goal.count:
            return None
        if room.held in ready:
            return room.enter(places[0]) or f"move {names[room.held]} to {names[places[0]]}"
        if room.held in things:
            tools = sorted(room.of("receptacletype", TOOLS[goal.state]), key=room.effort)
            if not tools:
                return None
            return room.go(tools[0]) or f"{VERBS[goal.state]} {names[room.held]} with {names[tools[0]]}"
        spare = things - done
    if room.held:
        return room.put_down()
    reachable = [o for o in spare if o in room.inside]
    if not reachable:
        return None
    thing = min(reachable, key=lambda o: (o not in ready, *room.effort(room.inside[o]), o))
    place = room.inside[thing]
    return room.enter(place) or f"take {names[thing]} from {names[place]}"


class _Room:
    """The facts, arranged for questions about places."""

    def __init__(self, facts: Iterable[Fact], names: Mapping[str, str]):
        table: dict[str, set[Fact]] = defaultdict(set)
        for name, *arguments in facts:
            table[name].add(tuple(arguments))
        self.table, self.names = table, names
        self.at = min((loc for _, loc in table["atlocation"]), default="")
        self.held = min((o for _, o in table["holds"]), default="")
        self.where = dict(sorted(table["receptacleatlocation"]))
        self.inside = {o: r for o, r in sorted(table["inreceptacle"]) if r in self.where}

    def holds_true(self, predicate: str, *arguments: str) -> bool:
        return arguments in self.table[predicate]

    def of(self, predicate: str, kind: str) -> list[str]:
        return sorted(thing for thing, k in self.table[predicate] if k == kind)

    def shut(self, place: str) -> bool:
        return self.holds_true("openable", place) and not self.holds_true("opened", place)

    def effort(self, place: str) -> tuple[bool, bool, str]:
        return (self.where.get(place) != self.at, self.shut(place), place)

    def go(self, place: str) -> str | None:
        return None if self.where.get(place) == self.at else f"go to {self.names[place]}"

    def enter(self, place: str) -> str | None:
        return self.go(place) or (f"open {self.names[place]}" if self.shut(place) else None)

    def put_down(self) -> str | None:
        kinds = {k for o, k in self.table["objecttype"] if o == self.held}
        fits = {rt for rt, ot in self.table["cancontain"] if ot in kinds}
        places = sorted((r for r, k in self.table["receptacletype"] if k in fits and r in self.where), key=self.effort)
        return places and (self.enter(places[0]) or f"move {self.names[self.held]} to {self.names[places[0]]}") or None
