"""Exact Minesweeper beliefs from what the player sees, and the number of reveals a player that reasons so still needs.

`belief` and `choice` get the visible board and the number of mines, nothing else: no answer of theirs can depend on
where the mines lie. `reveals_needed` is K(s) of CAST (arXiv 2607.25308; the text was not read, this follows the
released oracle, github Wloner0809/CAST, rllm/environments/minesweeper/oracle.py): it plays `choice` to the end, and
only what each reveal uncovers, a number or a mine, is taken from the true board. So K is a property of the true board,
inf where the player has to guess and that guess, best as it is, dies.

Read in the released code: flags of the player are no evidence, the safest cell is guessed, each reveal counts 1 and a
flag that the solver proves counts 0. Departures: a cell counts as proved safe also where only the number of mines
proves it (there, numbers alone do); and which of several safe cells, or equally safe guesses, comes first differs: here
the one with the fewest mines expected around it, for it opens most, then the first in reading order. Both change K
by a reveal or two on some boards, and on a guess they may change whether it dies.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..envs.base import Unsolved
from ..errors import WorkbenchError
from ..games.minesweeper import Board, Position, mined, neighbours, opened_by, view, won

NODE_LIMIT = 200_000  # partial assignments tried for one visible board
HIDDEN, DIGITS = "?F", "012345678"


@dataclass(frozen=True)
class Belief:
    """What a visible board says of its hidden cells.

    arrangements: in how many ways the mines can lie. mined: for each hidden cell (its number in reading order), in how
    many of these it holds one. Each arrangement is equally likely, so chances are exact.
    """

    arrangements: int
    mined: dict[int, int]

    def chance(self, cell: int) -> float:
        """Probability of a mine in a hidden cell."""
        return self.mined[cell] / self.arrangements

    @property
    def safe(self) -> tuple[int, ...]:
        """The cells that hold a mine in no arrangement."""
        return tuple(cell for cell, ways in self.mined.items() if not ways)


@dataclass(frozen=True)
class _Group:
    """Hidden cells that the same numbers touch, and which numbers those are."""

    cells: tuple[int, ...]
    numbers: tuple[int, ...]


Counts = dict[int, tuple[int, list[int]]]  # mines -> (ways, for each group ways times its mines)


@lru_cache(1 << 16)
def belief(board: tuple[str, ...], mines: int, limit: int = NODE_LIMIT) -> Belief:
    """Count the arrangements of `mines` mines that fit a visible board, as `games.minesweeper.view` shows it.

    Hidden cells touched by the same numbers are one group; groups that share a number are one component, enumerated
    by itself; components and the cells no number touches then share the mines out, each share weighted by its
    binomial. Flags are read as hidden cells. Raises Unsolved over `limit` partial assignments, WorkbenchError where no
    arrangement fits or the board is malformed.
    """
    rows, cols = len(board), len(board[0]) if board else 0
    if not cols or any(len(row) != cols for row in board):
        raise WorkbenchError(f"Minesweeper: {_short(board)!r}; expected at least one row, and all of one length")
    text, near = "".join(board), neighbours(rows, cols)
    hidden = [cell for cell, seen in enumerate(text) if seen in HIDDEN]
    left, touching = {}, defaultdict(list)
    for cell, seen in enumerate(text):
        if seen not in HIDDEN:
            if seen not in DIGITS:
                raise WorkbenchError(f"Minesweeper: {seen!r} in {_short(board)}; expected digits, ? and F")
            left[cell] = int(seen)
            for other in near[cell]:
                if text[other] in HIDDEN:
                    touching[other].append(cell)
    groups = defaultdict(list)
    for cell in touching:
        groups[tuple(touching[cell])].append(cell)
    free = [cell for cell in hidden if cell not in touching]
    parts = _components([_Group(tuple(members), numbers) for numbers, members in groups.items()])
    budget, counted = [limit], []
    for part in parts:
        counted.append(_enumerate(part, left, budget))
        if budget[0] < 0:
            raise Unsolved(f"Minesweeper {_short(board)}, {mines} mines: over {limit} partial assignments")
    numbers_met = all(left[cell] == 0 for cell in left if not any(text[other] in HIDDEN for other in near[cell]))
    loose = {n: math.comb(len(free), n) for n in range(min(len(free), mines) + 1)}
    ways = [{n: count for n, (count, _) in counts.items()} for counts in counted]
    total = _joined([loose, *ways]).get(mines, 0) if numbers_met else 0
    if not total:
        raise WorkbenchError(f"Minesweeper {_short(board)}: no arrangement of {mines} mines fits it")
    mined_in = {}
    for at, (part, counts) in enumerate(zip(parts, counted, strict=True)):
        others = _joined([loose, *ways[:at], *ways[at + 1 :]])
        for index, group in enumerate(part):
            sum_of_mines = sum(weighted[index] * others.get(mines - n, 0) for n, (_, weighted) in counts.items())
            mined_in.update(dict.fromkeys(group.cells, sum_of_mines // len(group.cells)))
    if free:
        rest = _joined(ways)
        sum_of_mines = sum(n * count * rest.get(mines - n, 0) for n, count in loose.items())
        mined_in.update(dict.fromkeys(free, sum_of_mines // len(free)))
    return Belief(total, {cell: mined_in[cell] for cell in hidden})


def _short(board: Sequence[str], most: int = 120) -> str:
    text = "/".join(board)
    return text if len(text) <= most else f"{text[:most]}…"


def _components(groups: list[_Group]) -> list[list[_Group]]:
    """Groups that share numbers, together, in an order in which each touches one before it."""
    of_number = defaultdict(list)
    for group in groups:
        for number in group.numbers:
            of_number[number].append(group)
    seen, parts = set(), []
    for first in groups:
        if first in seen:
            continue
        part = [first]
        seen.add(first)
        for group in part:
            for number in group.numbers:
                part += [g for g in of_number[number] if g not in seen]
                seen.update(of_number[number])
        parts.append(part)
    return parts


def _enumerate(part: list[_Group], left: dict[int, int], budget: list[int]) -> Counts:
    """Every number of mines each group of a component can hold; stops where the budget goes under 0."""
    needed = {number: left[number] for group in part for number in group.numbers}
    room = dict.fromkeys(needed, 0)
    for group in part:
        for number in group.numbers:
            room[number] += len(group.cells)
    found: Counts = {}
    held = [0] * len(part)

    def place(at: int, ways: int) -> None:
        budget[0] -= 1
        if budget[0] < 0:
            return
        if at == len(part):
            mines = sum(held)
            count, weighted = found.get(mines) or (0, [0] * len(part))
            found[mines] = (count + ways, [w + ways * k for w, k in zip(weighted, held, strict=True)])
            return
        size, numbers = len(part[at].cells), part[at].numbers
        low = max(0, *(needed[n] - room[n] + size for n in numbers))
        for n in numbers:
            room[n] -= size
        for k in range(low, min(size, *(needed[n] for n in numbers)) + 1):
            for n in numbers:
                needed[n] -= k
            held[at] = k
            place(at + 1, ways * math.comb(size, k))
            for n in numbers:
                needed[n] += k
        for n in numbers:
            room[n] += size

    place(0, 1)
    return found


def _joined(parts: Sequence[dict[int, int]]) -> dict[int, int]:
    """Ways by number of mines of independent parts taken together."""
    joined = {0: 1}
    for part in parts:
        both = defaultdict(int)
        for n, count in joined.items():
            for m, ways in part.items():
                both[n + m] += count * ways
        joined = both
    return joined


def best_cells(board: tuple[str, ...], mines: int, limit: int = NODE_LIMIT) -> tuple[int, ...]:
    """Every cell certainly without a mine, or else those least likely to hold one; raises as `belief`."""
    known = belief(board, mines, limit)
    least = min(known.mined.values(), default=0)
    return tuple(cell for cell, ways in known.mined.items() if ways == least)


@lru_cache(1 << 16)
def choice(board: tuple[str, ...], mines: int, limit: int = NODE_LIMIT) -> int:
    """The cell that the solver reveals next, of `best_cells`; raises as `belief`."""
    known = belief(board, mines, limit).mined
    near = neighbours(len(board), len(board[0]))
    return min(best_cells(board, mines, limit), key=lambda cell: (sum(known.get(n, 0) for n in near[cell]), cell))


@lru_cache(1 << 16)
def _step(board: Board, opened: int, limit: int) -> int | None:
    """Cells open after the solver's next reveal, None where it hits a mine."""
    cell = choice(view(board, Position(opened)), len(board.mines), limit)
    return None if mined(board, cell) else opened_by(board, opened, cell)


def reveals_needed(board: Board, position: Position, limit: int = NODE_LIMIT) -> float:
    """K(s): reveals that `choice` needs to win from here, inf where it hits a mine on the way. Flags are not counted.

    Raises as `belief`, for any board on the way.
    """
    if position.hit:
        return math.inf
    opened, count = position.opened, 0
    while not won(board, Position(opened)):
        opened = _step(board, opened, limit)
        count += 1
        if opened is None:
            return math.inf
    return float(count)
