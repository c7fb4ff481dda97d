"""The exact distance of every Rush Hour position, by a breadth-first search backwards from all won positions at once.

A slide of any length is one move, and every move can be taken back, so the search runs forwards and backwards alike.
All placements of a board's vehicles are written down first, then the search walks over them; those that it does not
reach cannot be won. Positions are numbers in a mixed base, one digit a vehicle, in a sorted array.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..envs.base import Solution, Unsolved
from ..errors import WorkbenchError
from ..games.rush_hour import Position, Puzzle, slides, solved

LIMIT = 2_000_000  # placements of one board; those of 6x6 boards mostly number thousands, the most known over 500,000
FAR = np.iinfo(np.int16).max


@dataclass(frozen=True, eq=False)
class Table:
    """Every placement of a puzzle's vehicles (keys (N,), sorted) and its fewest moves to a win (distances (N,), FAR
    where none is left)."""

    puzzle: Puzzle
    keys: np.ndarray
    distances: np.ndarray

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """What one cell along its line adds to the key, for each vehicle."""
        return _strides(self.puzzle)

    def distance(self, position: Position) -> float:
        """Fewest moves to a win, inf where none is left. Raises WorkbenchError for a position not in the table."""
        vehicles, key, at = self.puzzle.vehicles, 0, len(self.keys)
        if len(position) == len(vehicles) and all(
            v.low <= p <= v.high for p, v in zip(position, vehicles, strict=True)
        ):
            key = sum((p - v.low) * s for p, v, s in zip(position, vehicles, self.strides, strict=True))
            at = int(np.searchsorted(self.keys, key))
        if at == len(self.keys) or self.keys[at] != key:
            raise WorkbenchError(f"Rush Hour: position {position} is not in the table of {len(self.keys)} placements")
        found = int(self.distances[at])
        return float("inf") if found == FAR else float(found)

    def solution(self, position: Position) -> Solution:
        """Distance and the moves that lessen it."""
        distance = self.distance(position)
        if solved(self.puzzle, position) or distance == float("inf"):
            return Solution(distance)
        shorter = [move for move, after in slides(self.puzzle, position) if self.distance(after) == distance - 1]
        return Solution(distance, tuple(shorter))

    def positions(self, distance: int) -> np.ndarray:
        """(N, vehicles) all positions that far from a win."""
        keys = self.keys[self.distances == distance]
        spans = [vehicle.high - vehicle.low + 1 for vehicle in self.puzzle.vehicles]
        lows = [vehicle.low for vehicle in self.puzzle.vehicles]
        return keys[:, None] // np.array(self.strides) % np.array(spans) + np.array(lows)


def _strides(puzzle: Puzzle) -> tuple[int, ...]:
    strides, stride = [], 1
    for vehicle in reversed(puzzle.vehicles):
        strides.append(stride)
        stride *= vehicle.high - vehicle.low + 1
    if stride >= 2**63:
        raise Unsolved(f"Rush Hour: a board of {len(puzzle.vehicles)} vehicles has too many placements to number")
    return tuple(reversed(strides))


@lru_cache(128)
def table(puzzle: Puzzle, limit: int = LIMIT) -> Table:
    """The table of a puzzle. Raises Unsolved where its vehicles have more placements than `limit`."""
    keys, taken = _placements(puzzle, limit)
    distances = np.full(len(keys), FAR, np.int16)
    if puzzle.openable:
        _search(puzzle, keys, taken, distances)
    return Table(puzzle, keys, distances)


def _placements(puzzle: Puzzle, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(N,) keys in order and (N,) the cells taken, of every way to place the vehicles without overlap."""
    strides = _strides(puzzle)
    keys, taken = np.zeros(1, np.int64), np.array([puzzle.walls], np.uint64)
    for i, vehicle in enumerate(puzzle.vehicles):
        places = range(vehicle.low, vehicle.high + 1)
        masks = np.array([puzzle.cells(vehicle, place) for place in places], np.uint64)
        row, column = np.nonzero((taken[:, None] & masks) == 0)
        keys, taken = keys[row] + column * strides[i], taken[row] | masks[column]
        if len(keys) > limit:
            vehicles = f"the {len(puzzle.vehicles)} vehicles of a {puzzle.width}x{puzzle.height} board"
            raise Unsolved(f"Rush Hour: {vehicles} have more than {limit} placements, the solver's limit")
    for i, vehicle in enumerate(puzzle.vehicles):
        if vehicle.behind >= 0:
            first = puzzle.vehicles[vehicle.behind]
            span = [v.high - v.low + 1 for v in (first, vehicle)]
            ahead = keys // strides[i] % span[1] + vehicle.low
            kept = ahead > keys // strides[vehicle.behind] % span[0] + first.low
            keys, taken = keys[kept], taken[kept]
    return keys, taken


def _steps(puzzle: Puzzle, keys: np.ndarray, taken: np.ndarray) -> list[np.ndarray]:
    """For each vehicle and way (N,): the index of the placement with it one cell on, -1 where it cannot go."""
    steps = []
    for vehicle, stride in zip(puzzle.vehicles, _strides(puzzle), strict=True):
        span = vehicle.high - vehicle.low + 1
        entered = [puzzle.cells(vehicle, place + 1) & ~puzzle.cells(vehicle, place) for place in
                   range(vehicle.low, vehicle.high)] + [2**64 - 1]  # fmt: skip
        free = np.flatnonzero((taken & np.array(entered, np.uint64)[keys // stride % span]) == 0)
        onward, back = np.full(len(keys), -1, np.int32), np.full(len(keys), -1, np.int32)
        onward[free] = np.searchsorted(keys, keys[free] + stride)
        back[onward[free]] = free
        steps += [onward, back]
    return steps


def _search(puzzle: Puzzle, keys: np.ndarray, taken: np.ndarray, distances: np.ndarray) -> None:
    red = puzzle.red
    car = puzzle.vehicles[red]
    frontier = np.flatnonzero(keys // _strides(puzzle)[red] % (car.high - car.low + 1) == car.high - car.low)
    steps, distance = _steps(puzzle, keys, taken), 0
    distances[frontier] = 0
    while len(frontier):
        distance += 1
        found = []
        for step in steps:
            at = frontier
            while len(at):
                at = step[at]
                at = at[at >= 0]
                known = distances[at]
                found.append(at[known == FAR])
                at = at[known >= distance]  # nearer ones slide on by themselves
                distances[at] = distance
        frontier = np.concatenate(found)
