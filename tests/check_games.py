"""Solve every row of puzzle files (CAST's Rush Hour, Sokoban and Minesweeper) and check the answers.

    python tests/check_games.py FILE.parquet [FILE.parquet ...] [--jobs N]

Rush Hour: the table's distance must be the row's `min_moves_optimal`, and following best moves must win in as many.
Sokoban: the row's board (drawn from its seed and size) must be solvable, in as many steps as a plain breadth-first
search finds, and each best step must leave one fewer.
Minesweeper: the solver plays the row by what is visible; wherever few enough arrangements of the mines exist, its
counts must be those of trying them all, and everywhere the chances must add up to the mines and no cell that it calls
safe may hold one.
Progress goes to stderr. The last line is `N passed, N failed`, one count a row; the exit status is 0 if none failed
and some passed.
"""

import argparse
import itertools
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from workbench.errors import WorkbenchError
from workbench.games import minesweeper, rush_hour, sokoban
from workbench.games.rows import READERS, check, load
from workbench.solvers import minesweeper as minesweeper_solver
from workbench.solvers.rush_hour import table
from workbench.solvers.sokoban import solve

FEW = 2_000  # arrangements of mines that are all tried


class Wrong(Exception):
    pass


def check_rush_hour(board: tuple[str, ...]) -> None:
    puzzle, position = rush_hour.parse(board)
    known = table(puzzle)
    for left in range(int(known.distance(position)), 0, -1):
        found = known.solution(position)
        moves = dict(rush_hour.slides(puzzle, position))
        if found.distance != left or not found.actions or not set(found.actions) <= set(moves):
            raise Wrong(f"{found} where {left} moves are left")
        position = moves[found.actions[-1]]
    if not rush_hour.solved(puzzle, position):
        raise Wrong("following best moves does not win")


def check_sokoban(board: tuple[str, ...]) -> None:
    room, start = sokoban.parse(board)
    found = solve(room, start)
    if math.isinf(found.distance):
        raise Wrong("the solver calls the board dead")
    steps = dict(sokoban.steps(room, start))
    for action in found.actions:
        if action not in steps or solve(room, steps[action]).distance != found.distance - 1:
            raise Wrong(f"{action} is called a best step of {found.distance:.0f}, and is not")
    plain = plain_sokoban(room, start)
    if plain != found.distance or not found.actions:
        raise Wrong(f"the solver says {found.distance:.0f} steps, a plain search {plain}")


def plain_sokoban(room: sokoban.Room, start: sokoban.Position) -> float:
    """Steps to a win by breadth-first search over whole layers, inf where there is none.

    A state is one number: the player's floor cell above a bit for each floor cell with a box.
    """
    floor = {cell: i for i, cell in enumerate(room.floor)}
    size, nowhere = len(floor), len(floor)
    steps = [np.array([*(floor.get(cell + move, nowhere) for cell in room.floor), nowhere]) for move in room.steps]
    boxes, goals = (
        sum(1 << i for cell, i in floor.items() if cells >> cell & 1) for cells in (start.boxes, room.goals)
    )
    layer = seen = np.array([floor[start.player] << size | boxes])
    for depth in itertools.count():
        player, boxes = layer >> size, layer & (1 << size) - 1
        if (boxes == goals).any():
            return depth
        found = []
        for onward in steps:
            to = onward[player]
            beyond = onward[to]
            pushes = boxes >> to & 1 == 1
            fine = (to < nowhere) & ~(pushes & ((beyond == nowhere) | (boxes >> beyond & 1 == 1)))
            moved = np.where(pushes, boxes ^ (1 << to) ^ (1 << beyond), boxes)
            found.append((to << size | moved)[fine])
        layer = np.setdiff1d(np.concatenate(found), seen)
        if not len(layer):
            return math.inf
        seen = np.union1d(seen, layer)


def check_minesweeper(board: minesweeper.Board) -> None:
    position = minesweeper.start(board)
    while not position.hit and not minesweeper.won(board, position):
        seen = minesweeper.view(board, position)
        belief = minesweeper_solver.belief(seen, len(board.mines))
        if not math.isclose(sum(belief.chance(cell) for cell in belief.mined), len(board.mines)):
            raise Wrong(f"chances do not add up to {len(board.mines)} mines on {'/'.join(seen)}")
        if any(minesweeper.mined(board, cell) for cell in belief.safe):
            raise Wrong(f"a cell called safe holds a mine on {'/'.join(seen)}")
        if math.comb(len(belief.mined), len(board.mines)) <= FEW and belief.mined != plain_counts(board, seen):
            raise Wrong(f"counts are not those of all arrangements on {'/'.join(seen)}")
        position = minesweeper.reveal(board, position, minesweeper_solver.choice(seen, len(board.mines)))


def plain_counts(board: minesweeper.Board, seen: tuple[str, ...]) -> dict[int, int]:
    """For each hidden cell, in how many of the arrangements that fit the numbers it holds a mine."""
    text, near = "".join(seen), minesweeper.neighbours(board.rows, board.cols)
    hidden = [i for i, mark in enumerate(text) if mark in "?F"]
    counts = dict.fromkeys(hidden, 0)
    for mines in map(set, itertools.combinations(hidden, len(board.mines))):
        if all(int(mark) == len(mines.intersection(near[i])) for i, mark in enumerate(text) if mark.isdecimal()):
            for cell in mines:
                counts[cell] += 1
    return counts


CHECKS = {"rush_hour": check_rush_hour, "sokoban": check_sokoban, "minesweeper": check_minesweeper}


def check_row(task: tuple[str, str, int, dict]) -> str:
    """What is wrong with a row, or ""."""
    path, game, number, row = task
    try:
        board = READERS[game](row)
        check(game, board, row.get("min_moves_optimal"))
        CHECKS[game](board)
    except (WorkbenchError, Wrong) as error:
        uid = f" ({row['uid']})" if row.get("uid") else ""
        return f"{path}, row {number}{uid}: {error}"
    return ""


def check_file(path: str, jobs: int) -> tuple[int, int]:
    """Rows that passed and failed."""
    game, rows = load(path)
    tasks = [(path, game, number, row) for number, row in enumerate(rows)]
    began = told = time.perf_counter()
    failed = 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        answers = pool.map(check_row, tasks, chunksize=8) if jobs > 1 else map(check_row, tasks)
        for done, wrong in enumerate(answers, 1):
            if wrong:
                failed += 1
                print(f"FAILED {wrong}", flush=True)
            now = time.perf_counter()
            if now - told > 5 or done == len(tasks):
                told = now
                print(f"{path}: {done}/{len(tasks)} {game} rows, {now - began:.0f} s", file=sys.stderr, flush=True)
    return len(tasks) - failed, failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Solve every row of puzzle files and check the answers.")
    parser.add_argument("files", nargs="+", type=Path, help="parquet files of Rush Hour, Sokoban or Minesweeper rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args(arguments)
    passed = failed = 0
    for path in options.files:
        try:
            counts = check_file(str(path), max(1, options.jobs))
        except WorkbenchError as error:
            print(f"FAILED {error}", flush=True)
            counts = 0, 1
        passed, failed = passed + counts[0], failed + counts[1]
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or not passed)


if __name__ == "__main__":
    sys.exit(main())
