"""The fewest player steps that win a Sokoban position, or the proof that it cannot be won, by A* over pushes.

A node is a position right after a push; an edge is the shortest walk to a box and one push, at the cost of its steps.
The bound is the cheapest assignment of boxes to goals in pushes, each box as if alone. Positions that can never be won
are cut: a box on a square from which no goal can be reached, or one that no push can ever free off its goal. A win is
only taken once every node that could lie on a shortest way is expanded, so all first steps of shortest ways are known;
where the search runs dry, no way exists.
"""

import heapq
import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import linear_sum_assignment

from ..envs.base import Solution, Unsolved
from ..games.sokoban import WAYS, Position, Room

LIMIT = 200_000  # positions expanded for one answer
FEW = 4  # boxes up to which trying every assignment is the quickest


def _shift(cells: int, by: int) -> int:
    return cells << by if by > 0 else cells >> -by


def _cells(cells: int) -> list[int]:
    found = []
    while cells:
        found.append((cells & -cells).bit_length() - 1)
        cells &= cells - 1
    return found


@dataclass(frozen=True)
class Squares:
    """What a room's walls and goals say of single squares.

    pushes[goal][cell]: fewest pushes of a lone box from the cell to that goal, inf where there is no way. dead: the set
    of squares from which a box reaches no goal, walls included.
    """

    pushes: tuple[tuple[float, ...], ...]
    dead: int


@lru_cache(4096)
def squares(room: Room) -> Squares:
    """A lone box is pulled backwards from every goal."""
    size = room.width * room.height
    pushes, live = [], 0
    for goal in _cells(room.goals):
        far = [math.inf] * size
        far[goal], frontier = 0, [goal]
        for cell in frontier:
            for move in room.steps:
                start, player = cell - move, cell - 2 * move
                if not (room.walls >> start & 1 or room.walls >> player & 1) and far[start] == math.inf:
                    far[start] = far[cell] + 1
                    frontier.append(start)
        live |= sum(1 << cell for cell in frontier)
        pushes.append(tuple(far))
    return Squares(tuple(pushes), (1 << size) - 1 & ~live)


def bound(room: Room, boxes: int) -> float:
    """Pushes that the boxes need at least, each as if alone; inf where they cannot all reach goals."""
    pushes = squares(room).pushes
    places = _cells(boxes)
    if len(places) <= FEW:
        return min(sum(pushes[g][c] for g, c in zip(order, places, strict=True)) for order in _orders(len(places)))
    far = 10_000.0
    costs = np.array([[min(row[c], far) for row in pushes] for c in places])
    total = costs[linear_sum_assignment(costs)].sum()
    return math.inf if total >= far else float(total)


@lru_cache
def _orders(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.permutations(range(count)))


def frozen(room: Room, boxes: int) -> bool:
    """Whether some box off its goal can never be pushed again in a game that is still won."""
    return any(_stuck(room, squares(room).dead, room.walls, boxes, cell) for cell in _cells(boxes & ~room.goals))


def _stuck(room: Room, dead: int, fixed: int, boxes: int, cell: int) -> bool:
    """Whether a box can move on neither axis; `fixed` holds walls and the boxes that the question came from."""
    fixed |= 1 << cell
    for move in (1, room.width):
        sides = cell - move, cell + move
        if any(fixed >> side & 1 for side in sides) or all(dead >> side & 1 for side in sides):
            continue
        if not any(boxes >> side & 1 and _stuck(room, dead, fixed, boxes, side) for side in sides):
            return False
    return True


def _spread(room: Room, cells: int) -> int:
    return cells << 1 | cells >> 1 | cells << room.width | cells >> room.width


def _walks(room: Room, position: Position) -> list[int]:
    """Cells that the player reaches without a push, a set for each number of steps."""
    free = ~(room.walls | position.boxes)
    layer = 1 << position.player
    layers, seen = [], 0
    while layer:
        layers.append(layer)
        seen |= layer
        layer = _spread(room, layer) & free & ~seen
    return layers


def _pushes(room: Room, position: Position, dead: int):
    """Every push that leaves the box on a live square, as (steps with the push, from where, way, the boxes after)."""
    free = ~(dead | position.boxes)
    stands = [_shift(position.boxes, -move) & _shift(free, -2 * move) for move in room.steps]
    wanted = stands[0] | stands[1] | stands[2] | stands[3]
    for walked, layer in enumerate(_walks(room, position)):
        if layer & wanted:
            for way, move in enumerate(room.steps):
                for stand in _cells(layer & stands[way]):
                    boxes = position.boxes ^ (1 << stand + move | 1 << stand + 2 * move)
                    yield walked + 1, stand, way, Position(stand + move, boxes)


def _least(room: Room):
    """A function of the boxes: the bound, inf also where a square is dead or a box frozen; each is found once."""
    dead, known = squares(room).dead, {}

    def least(boxes: int) -> float:
        if boxes not in known:
            lost = boxes & dead or frozen(room, boxes)
            known[boxes] = math.inf if lost else bound(room, boxes)
        return known[boxes]

    return least


@lru_cache(65536)
def solve(room: Room, position: Position, limit: int = LIMIT) -> Solution:
    """Fewest steps to a win, inf where there is none, and the steps that begin such a way.

    Raises Unsolved once `limit` positions were expanded without an answer.
    """
    if position.boxes == room.goals:
        return Solution(0.0)
    dead, least = squares(room).dead, _least(room)
    if math.isinf(least(position.boxes)):
        return Solution(math.inf)
    costs, came = {position: 0}, {position: []}
    queue, best, expanded = [(least(position.boxes), 0, position)], math.inf, 0
    while queue:
        _, cost, here = heapq.heappop(queue)  # of equal sums the shorter way first: wins come after all that may tie
        if cost > costs[here]:
            continue
        if here.boxes == room.goals:
            best = float(cost)
            break
        expanded += 1
        if expanded > limit:
            raise Unsolved(f"Sokoban: no answer within {limit} positions, the solver's limit")
        for walked, _, _, there in _pushes(room, here, dead):
            total, known = cost + walked, costs.get(there, math.inf)
            if total == known:
                came[there].append(here)
            elif total < known and (left := least(there.boxes)) < math.inf:
                costs[there], came[there] = total, [here]
                heapq.heappush(queue, (total + left, total, there))
    return Solution(best, () if math.isinf(best) else _first_steps(room, position, costs, came, best))


def _first_steps(room: Room, start: Position, costs: dict, came: dict, best: float) -> tuple[str, ...]:
    """The steps from the start that lie on some shortest way, back along every shortest way from every win."""
    todo = [there for there, cost in costs.items() if there.boxes == room.goals and cost == best]
    useful = set(todo)
    for there in todo:
        fresh = [here for here in came[there] if here not in useful]
        useful.update(fresh)
        todo += fresh
    layers, first = _walks(room, start), 0
    ways = set()
    for walked, stand, way, there in _pushes(room, start, squares(room).dead):
        if there not in useful or costs[there] != walked or start not in came[there]:
            continue
        if walked == 1:
            ways.add(way)
            continue
        back = 1 << stand
        for layer in reversed(layers[1 : walked - 1]):
            back = _spread(room, back) & layer
        first |= back
    ways.update(way for way, move in enumerate(room.steps) if first >> start.player + move & 1)
    return tuple(WAYS[way] for way in sorted(ways))
