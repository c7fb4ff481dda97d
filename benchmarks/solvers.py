"""How long an exact value of a game's state takes at the paper's sizes: `python benchmarks/solvers.py [BOARDS]`.

Boards of level "paper" (30 a game and split unless told otherwise) are played half by the solver, half at random, and
`solution()` is asked at every state met with empty caches. Rush Hour is shown twice, for its first state makes the
board's table and the later ones look it up; Sokoban too, by whether the state can still be won. Milliseconds a state:
median, 90th and 99th percentile, maximum.

Peers, on a dozen of the same states: a plain breadth-first search in Python over the same rules until the first win;
for Minesweeper, trying all arrangements of the mines where there are at most 50,000, which gives the chances of that
one board alone. The last column, and for all games together the last line, is the peer's median over the solver's.
"""

import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from workbench import envs
from workbench.envs.base import Env
from workbench.games import minesweeper, rush_hour, sokoban
from workbench.solvers import minesweeper as minesweeper_solver
from workbench.solvers import rush_hour as rush_hour_solver
from workbench.solvers import sokoban as sokoban_solver

STEPS, PEERS, ARRANGEMENTS = 8, 12, 50_000
CACHES = [
    value
    for module in (rush_hour_solver, sokoban_solver, minesweeper_solver)
    for value in vars(module).values()
    if "cache_clear" in dir(value)
]


def milliseconds(ask: Callable[[], Any]) -> float:
    start = time.perf_counter()
    ask()
    return 1e3 * (time.perf_counter() - start)


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


def states(env: Env, split: str, boards: int) -> list[list[Any]]:
    """Snapshots met, board by board."""
    rng, met = random.Random(0), []
    for task in itertools.islice(env.tasks(split), boards):
        state = env.reset(task.id)
        met.append([])
        while not state.done and len(met[-1]) < STEPS:
            met[-1].append(env.snapshot())
            state = env.step(env.expert() if rng.random() < 0.5 else rng.choice(state.admissible))
    return met


def breadth_first(start: Any, moves: Callable[[Any], Iterable[tuple[str, Any]]], won: Callable[[Any], bool]) -> float:
    """Fewest moves to a win, inf where there is none."""
    seen, layer = {start}, [start]
    for depth in itertools.count():
        if any(map(won, layer)):
            return depth
        layer = list({after for here in layer for _, after in moves(here)} - seen)
        if not layer:
            return math.inf
        seen.update(layer)


def all_arrangements(seen: tuple[str, ...], mines: int) -> dict[int, int]:
    """For each hidden cell, in how many arrangements of the mines that fit the numbers it holds one."""
    text, near = "".join(seen), minesweeper.neighbours(len(seen), len(seen[0]))
    numbers = [(int(mark), near[i]) for i, mark in enumerate(text) if mark.isdecimal()]
    counts = {i: 0 for i, mark in enumerate(text) if not mark.isdecimal()}
    for held in map(frozenset, itertools.combinations(counts, mines)):
        if all(len(held.intersection(around)) == number for number, around in numbers):
            for cell in held:
                counts[cell] += 1
    return counts


def peer(game: str, env: Env, snapshot: Any) -> Callable[[], Any] | None:
    """The peer's question for a state, None where it is too large for it."""
    info = env.restore(snapshot).info
    if game == "minesweeper":
        hidden = sum(not mark.isdecimal() for mark in "".join(info["board"]))
        few = math.comb(hidden, info["mines"]) <= ARRANGEMENTS
        return (lambda: all_arrangements(info["board"], info["mines"])) if few else None
    if game == "rush_hour":
        puzzle, position = rush_hour.parse(info["board"])
        return lambda: breadth_first(
            position, lambda p: rush_hour.slides(puzzle, p), lambda p: rush_hour.solved(puzzle, p)
        )
    room, position = sokoban.parse(info["board"])
    return lambda: breadth_first(position, lambda p: sokoban.steps(room, p), lambda p: sokoban.solved(room, p))


def measure(game: str, split: str, boards: int) -> list[float]:
    """Prints the game's lines and returns the ratios, one a state that the peer was given."""
    env = envs.make(game, level="paper").envs[0]
    met = states(env, split, boards)
    times: dict[str, list[tuple[float, Any]]] = {}
    for board in met:
        forget()
        for i, snapshot in enumerate(board):
            if game != "rush_hour":
                forget()
            env.restore(snapshot)
            spent = milliseconds(env.solution)
            kind = {"rush_hour": " later" if i else " table", "sokoban": " dead" if env.solution().dead else " alive"}
            times.setdefault(kind.get(game, ""), []).append((spent, snapshot))
    ratios = []
    for name, found in times.items():
        spread = np.percentile([ms for ms, _ in found], [50, 90, 99, 100])
        asked = [
            (ms, ask) for ms, snapshot in found[:: max(1, len(found) // PEERS)] if (ask := peer(game, env, snapshot))
        ]
        theirs = [milliseconds(ask) for _, ask in asked]
        own = [ms for ms, _ in asked]
        ratios += [a / b for a, b in zip(theirs, own, strict=True)]
        ratio = f"{np.median(theirs) / np.median(own):8.1f}" if asked else "       -"
        print(f"{game + name:18} {split:8} {len(found):6} " + " ".join(f"{v:9.2f}" for v in spread) + ratio, flush=True)
    return ratios


def main(boards: int = 30) -> None:
    print(
        f"{'game':18} {'split':8} {'states':>6} "
        + " ".join(f"{n:>9}" for n in ("median", "p90", "p99", "max"))
        + "   ratio"
    )
    ratios = []
    for game in ("rush_hour", "sokoban", "minesweeper"):
        for split in ("heldout", "unseen"):
            ratios += measure(game, split, boards)
    print(f"plain search over solver, median of {len(ratios)} states: {np.median(ratios):.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
