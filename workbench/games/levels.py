"""Rush Hour and Sokoban boards by seed: solvable, of a chosen distance, the same on every machine.

Sizes of "paper" are those of CAST's data (github Wloner0809/CAST): Rush Hour 6x6 with 7 vehicles and 6 to 8 moves,
unseen 9 and 7 to 9; Sokoban 6x6 with 2 boxes, unseen 7x7 with 3. "small" is what a model of a million parameters
learns; its unseen boards are as large, as such a model reads no other size: Rush Hour with more vehicles, Sokoban with
next to no walls inside and no short ways.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from ..envs.base import Unsolved
from ..errors import WorkbenchError, unknown
from ..solvers import rush_hour as rush_hour_solver
from ..solvers import sokoban as sokoban_solver
from . import rush_hour, sokoban

SPLITS = ("train", "heldout", "unseen")
COUNTS = {"train": 2000, "heldout": 200, "unseen": 200}
HELDOUT_SHARE = 5  # one board in five
TRIES = 100_000  # candidates drawn for one board
SOKOBAN_LIMIT = 20_000  # positions expanded for a candidate; one that needs more is passed over
Rows = tuple[str, ...]


@dataclass(frozen=True)
class RushHourLevel:
    """Vehicles with the red car, and fewest moves to a win: both from least to most."""

    size: int
    vehicles: tuple[int, int]
    moves: tuple[int, int]

    def draw(self, rng: random.Random) -> Rows | None:
        """A board of the level, or None where this try gave none: of the distances in range that a random set of
        vehicles has, one is taken, and one of its positions."""
        rows = rush_hour.draw(self.size, self.size, rng.randint(*self.vehicles), rng)
        if rows is None:
            return None
        puzzle, _ = rush_hour.parse(rows)
        table = rush_hour_solver.table.__wrapped__(puzzle)
        low, high = self.moves
        there = [n for n in range(low, high + 1) if (table.distances == n).any()]
        if not there:
            return None
        positions = table.positions(rng.choice(there))
        return rush_hour.render(puzzle, tuple(map(int, positions[rng.randrange(len(positions))])))


@dataclass(frozen=True)
class SokobanLevel:
    """Walls inside the room and fewest steps to a win, both from least to most; rows and columns count the wall around
    the room."""

    rows: int
    columns: int
    boxes: int
    walls: tuple[int, int]
    moves: tuple[int, int]

    def draw(self, rng: random.Random) -> Rows | None:
        """A board of the level, or None where this try gave none."""
        rows = sokoban.draw(self.columns, self.rows, self.boxes, self.walls, rng)
        if rows is None:
            return None
        low, high = self.moves
        try:
            found = sokoban_solver.solve.__wrapped__(*sokoban.parse(rows), SOKOBAN_LIMIT)
        except Unsolved:
            return None
        return rows if low <= found.distance <= high else None


Level = RushHourLevel | SokobanLevel
LEVELS: dict[str, dict[str, Level]] = {
    "rush_hour": {"small": RushHourLevel(5, (5, 6), (2, 4)), "paper": RushHourLevel(6, (7, 7), (6, 8))},
    "sokoban": {"small": SokobanLevel(6, 6, 1, (2, 6), (2, 8)), "paper": SokobanLevel(6, 6, 2, (1, 6), (4, 20))},
}
UNSEEN: dict[str, dict[str, Level]] = {
    "rush_hour": {"small": RushHourLevel(5, (7, 7), (2, 4)), "paper": RushHourLevel(6, (9, 9), (7, 9))},
    "sokoban": {"small": SokobanLevel(6, 6, 1, (0, 1), (4, 8)), "paper": SokobanLevel(7, 7, 3, (4, 12), (8, 30))},
}


def parse_task(game: str, task_id: str) -> tuple[str, str, int]:
    """`game/level/split/seed` -> (level, split, seed). Raises WorkbenchError for anything else."""
    parts = task_id.split("/")
    if len(parts) != 4 or parts[0] != game or not (parts[3].isascii() and parts[3].isdecimal()):
        raise WorkbenchError(f"task {task_id!r}: expected {game}/<level>/<{'|'.join(SPLITS)}>/<seed>")
    check_level(game, parts[1])
    if parts[2] not in SPLITS:
        raise unknown(f"{game} split", parts[2], SPLITS)
    return parts[1], parts[2], int(parts[3])


def check_level(game: str, level: str) -> None:
    """Raise WorkbenchError for a level that the game does not have."""
    if level not in LEVELS[game]:
        raise unknown(f"{game} level", level, LEVELS[game])


@lru_cache(8192)
def generate(game: str, level: str, split: str, seed: int) -> Rows:
    """The board of a task. One board in five belongs to heldout, the others to train, so none is in both."""
    name = f"{game}/{level}/{split}/{seed}"

    def wanted(rows: Rows) -> bool:
        heldout = blake2b("\n".join(rows).encode(), digest_size=4).digest()[0] % HELDOUT_SHARE == 0
        return split == "unseen" or heldout == (split == "heldout")

    again = REPEATED.get(f"{game}/{level}/{split}", {}).get(seed, 0)
    rng = random.Random(f"{name}/{again}" if again else name)
    return first(UNSEEN[game][level] if split == "unseen" else LEVELS[game][level], rng, name, wanted)


def first(level: Level, rng: random.Random, name: str, wanted=lambda rows: True, tries: int = TRIES) -> Rows:
    """The first board of a level that is wanted. Raises WorkbenchError, naming `name`, where `tries` give none."""
    for _ in range(tries):
        rows = level.draw(rng)
        if rows is not None and wanted(rows):
            return rows
    raise WorkbenchError(f"{name}: no solvable board within {tries} tries of {level}")


# Listed seeds whose first board another listed seed of their split has too, and which board of theirs is taken instead.
REPEATED: Mapping[str, Mapping[int, int]] = {
    "sokoban/small/train": dict.fromkeys((834, 1062, 1109, 1464, 1584, 1672, 1873), 1),
    "sokoban/small/unseen": dict.fromkeys((43, 124, 168, 183, 189, 190), 1),
    "sokoban/paper/train": dict.fromkeys((446, 1755, 1892), 1),
}
