"""ALFWorld games made from what the alfworld package ships, each proved solvable in the engine before it is used.

The domain, grammar, goal templates, tables of what fits where, 120 floor plans and the official split of rooms are the
package's; where the objects start and what is asked for are drawn here. A game is a function of its name
`generated/<train|unseen>/<task type>/<seed>` and comes out the same in every process.
"""

import json
import os
import random
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError, unknown
from .alfworld_engine import Engine, packages, versions
from .alfworld_expert import goal_of, next_command

KINDS = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
ROOMS = ("train", "unseen")
SPLITS = ("train", "heldout", "unseen")
FIRST_HELDOUT = 1_000_000  # heldout games are those of the train rooms with seeds from here on
MAX_ATTEMPTS = 50
MAX_PROOF_STEPS = 60
RECIPE = "1"  # part of each cached game's path: to be raised with any change to `build`

# Mean number of objects on each kind of receptacle in 47 released valid_seen games, rounded; others 1.
_CROWDING = {
    "DiningTable": 11, "CounterTop": 7, "Desk": 7, "Dresser": 5, "Fridge": 4, "Bed": 4, "Sofa": 4, "Cart": 3,
    "TVStand": 3, "SideTable": 2.3, "Toilet": 2.4, "CoffeeTable": 2, "SinkBasin": 2, "BathtubBasin": 1.5, "Shelf": 1.3,
    "Cabinet": 0.4, "Drawer": 0.4, "Safe": 0.4, "CoffeeMachine": 0.4, "ToiletPaperHanger": 0.2, "Toaster": 0.1,
}  # fmt: skip
_COPIES = (0.42, 0.31, 0.27)  # shares of object types with one, two and three copies in the same games
_LAMPS = ("DeskLamp", "FloorLamp")
_LAMP_PLACES = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable", "TVStand")
_WITHOUT_POSE = {"StoveBurner": 4, "CoffeeMachine": 1, "Toaster": 1}  # in a plan's objects, without a place to stand
_NEEDS = {  # task type: (property, receptacle that gives it)
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
_PROPERTIES = {p: p.lower() for p in ("Cleanable", "Heatable", "Coolable", "Sliceable", "Toggleable")}
_ESCAPES = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", ",": "_comma_"})


@dataclass(frozen=True)
class GeneratedTask:
    """A generated game's name, taken apart. rooms: "train" or "unseen"."""

    rooms: str
    kind: str
    seed: int

    @property
    def id(self) -> str:
        return f"generated/{self.rooms}/{self.kind}/{self.seed}"


def parse(task_id: str) -> GeneratedTask:
    """Read `generated/<train|unseen>/<task type>/<seed>`. Raises WorkbenchError naming the part that is wrong."""
    parts = task_id.split("/")
    if len(parts) != 4 or parts[0] != "generated" or not re.fullmatch(r"0|[1-9]\d*", parts[3]):
        raise WorkbenchError(f"task {task_id!r}: expected generated/<{'|'.join(ROOMS)}>/<task type>/<seed>")
    if parts[1] not in ROOMS:
        raise unknown("rooms of generated ALFWorld games", parts[1], ROOMS)
    if parts[2] not in KINDS:
        raise unknown("ALFWorld task type", parts[2], KINDS)
    return GeneratedTask(parts[1], parts[2], int(parts[3]))


def listing(split: str, per_kind: int) -> list[GeneratedTask]:
    """`per_kind` games of each task type, in an order whose every prefix has the types evenly."""
    rooms = "unseen" if split == "unseen" else "train"
    first = FIRST_HELDOUT if split == "heldout" else 0
    return [GeneratedTask(rooms, kind, first + n) for n in range(per_kind) for kind in KINDS]


def proved_game(task: GeneratedTask, folder: Path, engine: Engine) -> dict[str, Any]:
    """Make the game of this name, prove it in `engine` and keep it in `folder`.

    Attempts 0, 1, 2, ... of a seed are drawn until one is proved, so the result is the same everywhere.
    Raises WorkbenchError where none is, or the disk refuses.
    """
    for attempt in range(MAX_ATTEMPTS):
        game = build(task, attempt)
        proof = game and prove(engine, game)
        if proof:
            game |= {"solvable": True, "walkthrough": proof}
            write_atomically(proved_path(task, folder), json.dumps(game))
            return game
    raise WorkbenchError(f"task {task.id}: none of {MAX_ATTEMPTS} drawn games could be proved solvable")


def proved_path(task: GeneratedTask, folder: Path) -> Path:
    """Where a proved game is kept; another engine or recipe keeps its own."""
    return folder / f"games-{RECIPE}-{versions().split()[0]}" / task.rooms / task.kind / f"{task.seed}.tw-pddl"


def kept_game(task: GeneratedTask, folder: Path) -> dict[str, Any] | None:
    """The game as proved before, or None; a damaged file counts as none, and the game is made again."""
    try:
        game = json.loads(proved_path(task, folder).read_text())
    except (OSError, ValueError):
        return None
    return game if isinstance(game, dict) and game.get("walkthrough") else None


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file or nothing. Raises WorkbenchError where the disk refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise WorkbenchError(f"cannot write {path}: {error.strerror}") from None


def prove(engine: Engine, game: dict[str, Any]) -> list[str] | None:
    """Play the expert through the engine: the commands after which it says won, or None."""
    goal = goal_of(game["pddl_problem"])
    reply = engine.reset(game)
    plan: list[str] = []
    while goal and not reply.won and len(plan) < MAX_PROOF_STEPS:
        command = next_command(goal, engine.facts(), engine.names())
        if command not in reply.admissible:
            return None
        plan.append(command)
        reply = engine.step(command)
    return plan if reply.won else None


@cache
def _rooms(rooms: str, kind: str) -> tuple[int, ...]:
    """Numbers of the rooms of the official split in which a task type is played."""
    c = packages().constants
    numbers = c.TRAIN_SCENE_NUMBERS if rooms == "train" else c.TEST_SCENE_NUMBERS
    return tuple(n for n in numbers if any(n in r for s, r in c.SCENE_TYPE.items() if s in c.GOALS_VALID[kind]))


@cache
def _plan(room: int) -> tuple[tuple[str, ...], dict[str, tuple[str, str]]]:
    """Object types of a floor plan, and its receptacles: id -> (type, location), locations as the released games'."""
    layouts = packages().layouts
    kinds = tuple(sorted(json.loads((layouts / f"FloorPlan{room}-objects.json").read_text())))
    poses = json.loads((layouts / f"FloorPlan{room}-openable.json").read_text())
    known = packages().constants.RECEPTACLES
    places = {}
    for name, (x, z, rotation, horizon) in sorted(poses.items()):
        kind = name.split("|")[-1] if name.endswith("Basin") else name.split("|")[0]
        if kind in ("Sink", "Bathtub"):
            kind, name = f"{kind}Basin", f"{name}|{kind}Basin"
        if kind in known:
            places[name] = (kind, f"loc|{round(x * 4)}|{round(z * 4)}|{round(rotation / 90)}|{round(horizon)}")
    for index, (kind, copies) in enumerate(_WITHOUT_POSE.items()):
        for k in range(copies if kind in kinds else 0):
            places[f"{kind}|+0{index}.{k}0|+00.92|+00.00"] = (kind, f"loc|{index}|{100 + k}|0|30")
    return kinds, places


def build(task: GeneratedTask, attempt: int = 0) -> dict[str, Any] | None:
    """Draw a game, unproved; None where the drawn room cannot hold the task. The contents of a game.tw-pddl file."""
    rng = random.Random(f"{task.id}/{attempt}")
    c, goals = packages().constants, packages().goals
    room = rng.choice(_rooms(task.rooms, task.kind))
    kinds, places = _plan(room)
    present = {kind for kind, _ in places.values()}
    fits = {kind: set(c.VAL_RECEPTACLE_OBJECTS.get(kind, ())) for kind in sorted(present)}

    objects: dict[str, str] = {}
    inside: dict[str, str] = {}

    def put(kind: str, spots: list[str]) -> None:
        place = rng.choices(spots, [_CROWDING.get(places[s][0], 1) for s in spots])[0]
        name = f"{kind}|{rng.uniform(-4, 4):+06.2f}|{rng.uniform(0, 2):+06.2f}|{rng.uniform(-4, 4):+06.2f}"
        objects[name], inside[name] = kind, place

    for kind in kinds:
        spots = [s for s, (where, _) in places.items() if kind in fits[where]]
        if spots and kind not in c.RECEPTACLES - set(c.MOVABLE_RECEPTACLES):
            for _ in range(rng.choices((1, 2, 3), _COPIES)[0]):
                put(kind, spots)
    movable = set(objects.values())
    for kind in (k for k in _LAMPS if k in kinds and k not in movable):
        spots = [s for s, (where, _) in places.items() if where in _LAMP_PLACES]
        if spots:
            put(kind, spots)

    chosen = _choose(task.kind, rng, objects, inside, places, fits)
    if not chosen:
        return None
    template = goals[task.kind]
    words = {key: value.lower() for key, value in chosen.items()}
    sentence = rng.choice(template["templates"]).format(**words)
    goal = template["pddl"].format(**chosen)
    return {
        "pddl_domain": packages().domain,
        "grammar": packages().grammar.replace("UNKNOWN GOAL", sentence),
        "pddl_problem": _problem(task, places, objects, inside, movable, fits, goal),
        "solvable": None,
        "walkthrough": None,
        "meta": {"id": task.id, "attempt": attempt, "room": room, "task": sentence, **chosen},
    }


def _choose(kind, rng, objects, inside, places, fits) -> dict[str, str] | None:
    """What is asked for: `obj`, `recep`, `toggle` types. Nothing that is wanted lies where it should go yet."""
    counts: dict[str, int] = {}
    for o in objects.values():
        counts[o] = counts.get(o, 0) + 1
    lamps = [k for k in _LAMPS if k in counts]
    wanted = sorted(set(counts) - set(_LAMPS))
    prop, tool = _NEEDS.get(kind, ("", ""))
    if kind == "look_at_obj_in_light":
        return {"obj": rng.choice(wanted), "recep": "", "toggle": lamps[0]} if lamps and wanted else None
    if prop:
        wanted = [o for o in wanted if o in packages().constants.VAL_ACTION_OBJECTS[prop] and tool in fits]
    if kind == "pick_two_obj_and_place":
        wanted = [o for o in wanted if counts[o] >= 2]
    taken = {(objects[o], places[place][0]) for o, place in inside.items()}
    pairs = {o: [r for r in fits if o in fits[r] and r != tool and (o, r) not in taken] for o in wanted}
    pairs = {o: receptacles for o, receptacles in pairs.items() if receptacles}
    if not pairs:
        return None
    obj = rng.choice(sorted(pairs))
    return {"obj": obj, "recep": rng.choice(pairs[obj]), "toggle": ""}


def _problem(task, places, objects, inside, movable, fits, goal) -> str:
    """PDDL text in the shape of the released games."""
    c = packages().constants
    start = "loc|0|0|0|30"
    object_kinds = sorted(set(objects.values()))
    things = [("agent1", "agent")]
    things += [(f"{k}Type", "otype") for k in object_kinds] + [(f"{k}Type", "rtype") for k in fits]
    things += [(spot, "location") for spot in sorted({start} | {spot for _, spot in places.values()})]
    things += [(name, "receptacle") for name in places] + [(name, "object") for name in objects]
    facts = [("atLocation", "agent1", start)]
    for name, (kind, spot) in places.items():
        facts += [("receptacleType", name, f"{kind}Type"), ("receptacleAtLocation", name, spot)]
        facts += [("openable", name)] if kind in c.OPENABLE_CLASS_SET else []
    for name, kind in objects.items():
        place = inside[name]
        facts += [("objectType", name, f"{kind}Type"), ("inReceptacle", name, place)]
        facts += [("objectAtLocation", name, places[place][1])]
        facts += [("pickupable", name)] if kind in movable else []
        facts += [("isReceptacleObject", name)] if kind in c.MOVABLE_RECEPTACLES else []
        facts += [(fact, name) for prop, fact in _PROPERTIES.items() if kind in c.VAL_ACTION_OBJECTS[prop]]
    facts += [("canContain", f"{r}Type", f"{o}Type") for r in fits for o in object_kinds if o in fits[r]]
    declared = "\n".join(f"        {name.translate(_ESCAPES)} - {kind}" for name, kind in things)
    initial = "\n".join(f"        ({' '.join(word.translate(_ESCAPES) for word in fact)})" for fact in facts)
    name = task.id.replace("/", "_")
    goal = goal.replace("#", "-").rstrip()  # the templates close the problem themselves
    return f"(define (problem {name})\n(:domain alfred)\n(:objects\n{declared}\n)\n(:init\n{initial}\n)\n{goal}\n"
