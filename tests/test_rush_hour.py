"""Rush Hour: rules and distances against a slow search on plain text, real boards, and the game as an environment."""

import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import envs
from workbench.envs.base import SolvedEnv, Unsolved
from workbench.envs.rush_hour import RushHour
from workbench.errors import WorkbenchError
from workbench.games import levels
from workbench.games.rush_hour import draw, parse, render, slides, solved
from workbench.solvers.rush_hour import FAR, table

# the hardest boards of M. Fogleman's complete database of 6x6 boards (michaelfogleman.com/rush) and their moves
KNOWN = {
    "IBBxooIooLDDJAALooJoKEEMFFKooMGGHHHM": 60,
    "BBoKMxDDDKMoIAALooIoJLEEooJFFNoGGoxN": 58,
    "GBBoLoGHIoLMGHIAAMCCCKoMooJKDDEEJFFo": 51,
}
HARD = tuple("GBBoLoGHIoLMGHIAAMCCCKoMooJKDDEEJFFo"[i : i + 6] for i in range(0, 36, 6))
PINNED = ("oCCCo", "DDooo", "oAAoE", "ooooE", "BBBoo")
SHUT = ("oooo", "AAxo", "BBoo")
MIXED = [
    ("ooBoo", "AABoC", "ooDDC", "xoooo"),  # a wall, not square
    ("oooBBo", "AAoCoo", "DDoCEE", "oooooo"),  # two vehicles in one row, two rows apart
    ("BBoCC", "oAAoD", "EoFFD", "Eoooo", "GGGxo"),
    SHUT,
    ("AABB", "oooo"),  # another vehicle in the red car's row shuts the exit
]


def plain_moves(board):
    """Every slide as (command, board), by looking at letters alone."""
    cells = {(r, c): mark for r, row in enumerate(board) for c, mark in enumerate(row)}
    for label in sorted(set(cells.values()) - {"o", "x"}):
        own = [cell for cell, mark in cells.items() if mark == label]
        across = own[0][0] == own[1][0]
        for word, step in (("left", (0, -1)), ("right", (0, 1))) if across else (("up", (-1, 0)), ("down", (1, 0))):
            for n in range(1, 9):
                to = [(r + step[0] * n, c + step[1] * n) for r, c in own]
                if any(cells.get(cell) not in ("o", label) for cell in to):
                    break
                after = {**cells, **dict.fromkeys(own, "o")} | dict.fromkeys(to, label)
                rows = tuple("".join(after[r, c] for c in range(len(board[0]))) for r in range(len(board)))
                yield f"move {label} {word} {n}", rows


def plain_distances(board):
    """Fewest moves to a win of every board reachable from this one."""
    seen, todo, before = {board}, [board], {}
    for here in todo:
        for _, after in plain_moves(here):
            before.setdefault(after, []).append(here)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    found = {here: 0 for here in todo if any(row.endswith("A") for row in here)}
    queue = list(found)
    for here in queue:
        for other in before.get(here, []):
            if other not in found:
                found[other] = found[here] + 1
                queue.append(other)
    return {here: found.get(here, math.inf) for here in todo}


def random_boards(count):
    rng, boards = random.Random(5), []
    while len(boards) < count:
        if board := draw(rng.choice((4, 5)), rng.choice((3, 4, 5)), rng.randint(2, 5), rng):
            boards.append(board)
    return boards


@pytest.mark.parametrize("board", MIXED + random_boards(12), ids="/".join)
def test_every_reachable_state_has_the_plain_search_s_distance_and_best_moves(board):
    puzzle, _ = parse(board)
    known = table(puzzle)
    distances = plain_distances(board)
    for here, distance in list(distances.items())[:: 1 + len(distances) // 150]:
        again, position = parse(here)
        assert again == puzzle and render(puzzle, position) == here
        assert dict(slides(puzzle, position)) == {move: parse(after)[1] for move, after in plain_moves(here)}
        best = [move for move, after in plain_moves(here) if 0 < distance < math.inf and distances[after] < distance]
        found = known.solution(position)
        assert found.distance == distance and sorted(found.actions) == sorted(best)
    assert set(distances.values()) <= set(known.distances.tolist()) | {math.inf}


@pytest.mark.parametrize("text, moves", KNOWN.items())
def test_the_hardest_boards_need_as_many_moves_as_is_known(text, moves):
    puzzle, position = parse(tuple(text[i : i + 6] for i in range(0, 36, 6)))
    known = table(puzzle)
    assert known.distance(position) == moves
    if moves == 51:  # the database has its reachable states too
        assert (known.distances < FAR).sum() == 4780


def test_vehicles_of_one_row_never_pass_each_other():
    puzzle, _ = parse(("BBCCoooo", "AAoooooo"))
    assert len(table(puzzle).keys) == math.comb(6, 2) * 7


def test_positions_are_those_of_a_distance():
    puzzle, position = parse(MIXED[1])
    known = table(puzzle)
    for distance in range(4):
        rows = known.positions(distance)
        assert len(rows) == (known.distances == distance).sum()
        assert {known.distance(tuple(map(int, row))) for row in rows} <= {distance}
    assert solved(puzzle, tuple(map(int, known.positions(0)[0]))) and not solved(puzzle, position)


@pytest.mark.parametrize("place", [(9, 0), (0, 9), (-1, 0), (1, 1, 1)])
def test_a_position_outside_the_table_is_an_error(place):
    puzzle, position = parse(("oBoo", "oBAA", "oooo"))
    wrong = place if len(place) == 3 else tuple(np.add(position, place).tolist())
    with pytest.raises(WorkbenchError, match="not in the table"):
        table(puzzle).distance(wrong)


def test_an_overlap_is_not_in_the_table():
    puzzle, _ = parse(("oBoo", "oBoo", "AAoo", "oooo"))
    with pytest.raises(WorkbenchError, match="not in the table"):
        table(puzzle).distance((1, 1))


@pytest.mark.parametrize(
    "board, words",
    [
        (("oBoo", "AA"), "rows of one length"),
        ((), "rows of one length"),
        (("oBoo", "oooo"), "vehicle B must be one straight piece"),
        (("BBoo", "oBAA"), "vehicle B must be one straight piece"),
        (("BoBo", "AAoo"), "vehicle B must be one straight piece"),
        (("oooo", "BBoo"), "red car A must lie in a row"),
        (("Aooo", "Aooo"), "red car A must lie in a row"),
        (("AAo?", "oooo"), "'\\?' in row 1"),
        (("o" * 13,) * 5, "64 cells at most"),
    ],
)
def test_a_malformed_board_is_named(board, words):
    with pytest.raises(WorkbenchError, match=words):
        parse(board)


def game(board, **options):
    return RushHour(boards={"rush_hour/rows/0": board}, **options)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.data())
def test_play_keeps_the_solver_s_laws(seed, data):
    """A move changes the distance by at most 1, best moves and only they lessen it, and turns add up."""
    board = random_boards(8)[seed % 8]
    env = game(board)
    state = env.reset("rush_hour/rows/0")
    first = before = env.solution()
    total = 0.0
    for _ in range(6):
        if state.done:
            break
        invalid = env.step("sing")
        assert not invalid.valid and game(board).restore(env.snapshot()) == invalid, "a refused command is remembered"
        action = data.draw(st.sampled_from(state.admissible))
        best, kept = env.solution().actions, pickle.loads(pickle.dumps(env.snapshot()))
        state = env.step(action)
        after = env.solution()
        gain = env.solver_advantage(before, after, state)
        assert after.dead == before.dead and abs(gain) <= 1
        assert (gain == 1) == (action in best)
        other = game(board)
        assert other.restore(kept).info["board"] != state.info["board"]
        assert other.solution() == before and other.step(action) == state
        total, before = total + gain, after
    assert first.dead or total == first.distance - before.distance


def test_the_expert_wins_in_the_distance_and_an_invalid_command_changes_nothing():
    env = envs.make("rush_hour", level="small").envs[0]
    assert isinstance(env, SolvedEnv)
    state = env.reset("rush_hour/small/train/3")
    refused = env.step("move A right 9")
    assert not refused.valid and refused.observation == f"invalid . {state.observation}"
    assert refused.info == state.info and refused.admissible == state.admissible
    moves = int(env.solution().distance)
    rewards = []
    while not state.done:
        state = env.step(env.expert())
        rewards.append(state.reward)
    assert rewards == [0.0] * (moves - 1) + [1.0] and state.outcome == 1 and state.admissible == ()
    assert env.solution().distance == 0 and env.expert() is None


def test_text_is_one_token_a_cell_and_letters_are_vehicles():
    env = game(MIXED[0])
    state = env.reset("rush_hour/rows/0")
    assert state.observation == ". . B . . / A A B . C / . . D D C / # . . . ."
    assert state.info["board"] == MIXED[0] and state.info["kind"] == "rush_hour"
    assert "move D left 2" in state.admissible


@pytest.mark.parametrize("level", levels.LEVELS["rush_hour"])
@pytest.mark.parametrize("split", levels.SPLITS)
def test_boards_of_a_level_are_in_its_range_and_differ(level, split):
    wanted = (levels.UNSEEN if split == "unseen" else levels.LEVELS)["rush_hour"][level]
    boards = [levels.generate("rush_hour", level, split, seed) for seed in range(12 if level == "small" else 3)]
    assert len(set(boards)) == len(boards)
    for board in boards:
        puzzle, position = parse(board)
        assert puzzle.width == puzzle.height == wanted.size
        assert wanted.vehicles[0] <= len(puzzle.vehicles) <= wanted.vehicles[1]
        assert wanted.moves[0] <= table(puzzle).distance(position) <= wanted.moves[1]


def test_a_seed_s_board_is_the_same_everywhere():
    assert levels.generate("rush_hour", "small", "train", 0) == PINNED


def test_a_solver_over_its_limit_names_the_task():
    env = game(HARD, limit=1000)
    env.reset("rush_hour/rows/0")
    with pytest.raises(Unsolved, match="task rush_hour/rows/0: .* more than 1000 placements"):
        env.solution()


@pytest.mark.parametrize(
    "task, words",
    [
        ("rush_hour/small/train", "expected rush_hour/<level>"),
        ("sokoban/small/train/0", "expected rush_hour/<level>"),
        ("rush_hour/smal/train/0", "did you mean 'small'"),
        ("rush_hour/small/test/0", "unknown rush_hour split 'test'"),
        ("rush_hour/small/train/-1", "expected rush_hour/<level>"),
    ],
)
def test_a_wrong_task_is_named(task, words):
    with pytest.raises(WorkbenchError, match=words):
        RushHour().reset(task)


def test_a_wrong_level_or_split_or_no_game_is_named():
    with pytest.raises(WorkbenchError, match="unknown rush_hour level"):
        RushHour(level="huge")
    with pytest.raises(WorkbenchError, match="unknown rush_hour split"):
        RushHour().tasks("test")
    with pytest.raises(WorkbenchError, match="reset or restore first"):
        RushHour().step("move A right 1")
