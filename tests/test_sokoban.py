"""Sokoban: rules and A* against a slow search on plain coordinates, dead states too, and the game as an environment."""

import itertools
import math
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import envs
from workbench.envs.base import SolvedEnv, Unsolved
from workbench.envs.sokoban import Sokoban
from workbench.errors import WorkbenchError
from workbench.games import levels
from workbench.games.sokoban import WAYS, draw, parse, render, solved, steps
from workbench.solvers.sokoban import bound, frozen, solve, squares

STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
PINNED = ("######", "## $.#", "# @  #", "#    #", "##   #", "######")
FACING = ("#######", "#  .  #", "# $ $ #", "#@ .  #", "#     #", "#######")
CORNER = ("#####", "#$ .#", "# @ #", "#####")
PAIR = ("######", "# $$ #", "# @  #", "# .. #", "######")  # side by side on the wall: neither can ever leave it


def plain(board):
    """(walls, goals, player, boxes) as sets of (row, column)."""
    cells = {(r, c): mark for r, row in enumerate(board) for c, mark in enumerate(row)}

    def where(marks):
        return frozenset(cell for cell, mark in cells.items() if mark in marks)

    return where("#"), where(".*+"), next(iter(where("@+"))), where("$*")


def plain_step(walls, player, boxes, way):
    to = player[0] + STEPS[way][0], player[1] + STEPS[way][1]
    beyond = to[0] + STEPS[way][0], to[1] + STEPS[way][1]
    if to in walls or to in boxes and (beyond in walls or beyond in boxes):
        return None
    return to, (boxes - {to} | {beyond} if to in boxes else boxes)


def plain_distances(board):
    """Fewest steps to a win of every state that can be reached from this board, as (player, boxes)."""
    walls, goals, player, boxes = plain(board)
    todo, before = [(player, boxes)], {(player, boxes): []}
    for here in todo:
        for way in STEPS if here[1] != goals else ():
            if after := plain_step(walls, *here, way):
                if after not in before:
                    before[after] = []
                    todo.append(after)
                before[after].append(here)
    found = {here: 0 for here in todo if here[1] == goals}
    queue = list(found)
    for here in queue:
        for other in before[here]:
            if other not in found:
                found[other] = found[here] + 1
                queue.append(other)
    return {here: found.get(here, math.inf) for here in todo}


def drawn(board, player, boxes):
    """The board with player and boxes elsewhere."""
    walls, goals, _, _ = plain(board)

    def mark(cell):
        if cell in walls:
            return "#"
        here = "@" if cell == player else "$" if cell in boxes else " "
        return {"@": "+", "$": "*", " ": "."}[here] if cell in goals else here

    return tuple("".join(mark((r, c)) for c in range(len(board[0]))) for r in range(len(board)))


def random_boards(count, seed=1):
    rng, boards = random.Random(seed), []
    while len(boards) < count:
        if board := draw(rng.choice((5, 6)), rng.choice((5, 6)), rng.choice((1, 2, 2, 3)), (0, 4), rng):
            boards.append(board)
    return boards


def agree(board, player, boxes, distances):
    walls, _, _, _ = plain(board)
    distance = distances[player, boxes]
    room, position = parse(drawn(board, player, boxes))
    assert render(room, position) == drawn(board, player, boxes)
    after = {way: plain_step(walls, player, boxes, way) for way in STEPS}
    best = tuple(way for way in WAYS if 0 < distance < math.inf and distances.get(after[way], math.inf) < distance)
    found = solve.__wrapped__(room, position)
    assert (found.distance, found.actions) == (distance, best), "\n".join(drawn(board, player, boxes))
    known = {way: parse(drawn(board, *to))[1] for way, to in after.items() if to}
    assert dict(steps(room, position)) == known


def test_a_star_is_the_plain_search_on_hundreds_of_states_dead_ones_too():
    rng, dead, alive = random.Random(2), 0, 0
    for board in random_boards(500):
        distances = plain_distances(board)
        _, _, player, boxes = plain(board)
        living = [here for here, distance in distances.items() if 0 < distance < math.inf]
        lost = [here for here, distance in distances.items() if distance == math.inf]
        chosen = [(player, boxes), *rng.sample(living, min(8, len(living))), *rng.sample(lost, min(2, len(lost)))]
        for here in chosen:
            agree(board, *here, distances)
            dead, alive = dead + (distances[here] == math.inf), alive + (distances[here] < math.inf)
    assert dead > 300 and alive > 300


@pytest.mark.parametrize("board", [FACING, CORNER, PAIR], ids=["facing", "corner", "pair"])
def test_all_states_of_a_few_boards(board):
    distances = plain_distances(board)
    for here in list(distances)[:: 1 + len(distances) // 300]:
        agree(board, *here, distances)


def test_dead_squares_and_frozen_boxes_are_seen_without_search():
    room, position = parse(CORNER)
    assert squares(room).dead & position.boxes and solve(room, position, 0).dead
    room, position = parse(PAIR)
    assert frozen(room, position.boxes) and solve(room, position, 0).dead
    room, position = parse(FACING)
    assert not frozen(room, position.boxes)


def test_the_bound_of_many_boxes_is_the_cheapest_assignment():
    board = ("########", "#@ $   #", "# $. . #", "# .$.$ #", "#  $ . #", "#      #", "########")
    room, position = parse(board)
    pushes = squares(room).pushes
    places = [cell for cell in room.floor if position.boxes >> cell & 1]
    assert len(places) == 5
    every = (
        sum(pushes[g][c] for g, c in zip(order, places, strict=True)) for order in itertools.permutations(range(5))
    )
    assert bound(room, position.boxes) == min(every) > 0


def test_a_solver_over_its_limit_names_the_task():
    env = Sokoban(boards={"sokoban/rows/0": FACING}, limit=2)
    env.reset("sokoban/rows/0")
    with pytest.raises(Unsolved, match="task sokoban/rows/0: .* within 2 positions"):
        env.solution()


@pytest.mark.parametrize(
    "board, words",
    [
        (("#####", "#@$.#"), "at least 3 rows"),
        (("#####", "#@$.#", "####"), "rows of one length"),
        (("#####", "#@$. ", "#####"), "row 2 is open"),
        (("#####", "#@$X#", "#####"), "'X' in row 2"),
        (("#####", "# $.#", "#####"), "0 players"),
        (("######", "#@@$.#", "######"), "2 players"),
        (("######", "#@$$.#", "######"), "2 boxes and 1 goals"),
        (("#####", "#@  #", "#####"), "0 boxes and 0 goals"),
    ],
)
def test_a_malformed_board_is_named(board, words):
    with pytest.raises(WorkbenchError, match=words):
        parse(board)


@settings(max_examples=25)
@given(st.integers(0, 30), st.data())
def test_play_keeps_the_solver_s_laws(seed, data):
    """Best steps and only they lessen the distance, by 1; turns add up, a deadlock costing all that was left."""
    env, other = Sokoban(), Sokoban()
    state = env.reset(f"sokoban/small/unseen/{seed}")
    first = before = env.solution()
    total, left = 0.0, None
    for _ in range(10):
        if state.done:
            break
        invalid = env.step("sing")
        assert not invalid.valid and other.restore(env.snapshot()) == invalid, "a refused command is remembered"
        action = data.draw(st.sampled_from(state.admissible))
        best, kept = env.solution().actions, pickle.loads(pickle.dumps(env.snapshot()))
        state = env.step(action)
        after = env.solution()
        gain = env.solver_advantage(before, after, state)
        assert gain <= 1 and (gain == 1) == (action in best)
        if before.dead:
            assert after.dead and gain == 0
        elif after.dead:
            left = before.distance
        other.restore(kept)
        assert other.solution() == before and other.step(action) == state
        total, before = total + gain, after
    assert total == (first.distance - before.distance if left is None else first.distance - 2 * left)


def test_the_expert_wins_in_the_distance_and_an_invalid_command_changes_nothing():
    env = envs.make("sokoban", level="small").envs[0]
    assert isinstance(env, SolvedEnv)
    state = env.reset("sokoban/small/train/0")
    assert state.observation == "# # # # # # / # # _ $ . # / # _ @ _ _ # / # _ _ _ _ # / # # _ _ _ # / # # # # # #"
    for command in ("jump", "Up", ""):
        refused = env.step(command)
        assert not refused.valid and refused.observation == f"invalid . {state.observation}"
        assert refused.info == state.info and refused.admissible == state.admissible
    moves, rewards = int(env.solution().distance), []
    while not state.done:
        state = env.step(env.expert())
        rewards.append(state.reward)
    assert rewards == [0.0] * (moves - 1) + [1.0] and state.outcome == 1 and state.admissible == ()
    assert env.solution().distance == 0 and env.expert() is None


def test_a_dead_game_goes_on_unless_it_is_told_to_end():
    board = ("######", "#    #", "#.$@ #", "#    #", "######")
    for ends in (False, True):
        env = Sokoban(boards={"sokoban/rows/0": board}, end_when_dead=ends)
        env.reset("sokoban/rows/0")
        before = env.solution()
        for action in ("up", "left"):
            state = env.step(action)
            assert not state.done
        state = env.step("down")
        after = env.solution()
        assert before.distance == 1 and after.dead and after.actions == () and env.expert() is None
        assert (state.done, state.outcome, state.valid) == (ends, 0, True)
        assert (state.admissible == ()) == ends
        if not ends:
            assert env.solver_advantage(after, env.solution(), env.step("up")) == 0


@pytest.mark.parametrize("level", levels.LEVELS["sokoban"])
@pytest.mark.parametrize("split", levels.SPLITS)
def test_boards_of_a_level_are_in_its_range_and_differ(level, split):
    wanted = (levels.UNSEEN if split == "unseen" else levels.LEVELS)["sokoban"][level]
    boards = [levels.generate("sokoban", level, split, seed) for seed in range(20 if level == "small" else 4)]
    assert len(set(boards)) == len(boards)
    for board in boards:
        room, position = parse(board)
        assert (room.height, room.width) == (wanted.rows, wanted.columns)
        assert position.boxes.bit_count() == wanted.boxes and not solved(room, position)
        assert wanted.moves[0] <= solve(room, position).distance <= wanted.moves[1]


def test_a_seed_s_board_is_the_same_everywhere_and_a_repeated_one_is_replaced():
    assert levels.generate("sokoban", "small", "train", 0) == PINNED
    boards = {seed: levels.generate("sokoban", "small", "train", seed) for seed in (735, 834, 257, 1873)}
    assert len(set(boards.values())) == 4
