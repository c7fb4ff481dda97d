import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import envs
from workbench.credit.cast import reveal_advantage
from workbench.envs.base import Solution, SolvedEnv, Unsolved
from workbench.envs.minesweeper import Minesweeper
from workbench.errors import WorkbenchError
from workbench.games import levels
from workbench.games import minesweeper as rules
from workbench.games.minesweeper import Board, Position, Size
from workbench.solvers import minesweeper as solver

ROWS = Path("../shared/data/cast/minesweeper")
ROW = Board(1, 6, frozenset({(0, 5)}), (0, 4))


@st.composite
def boards(draw, cells=16):
    rows = draw(st.integers(1, 4))
    cols = draw(st.integers(2, min(5, cells // rows)))
    mines = draw(st.integers(1, min(6, rows * cols - 1)))
    return rules.draw(Size(rows, cols, mines), draw(st.randoms(use_true_random=False)))


@st.composite
def played(draw):
    """A board and a position that safe reveals and flags lead to."""
    board = draw(boards())
    position = rules.start(board)
    for cell in draw(st.lists(st.integers(0, board.rows * board.cols - 1), max_size=6)):
        if position.opened >> cell & 1:
            continue
        if position.flagged >> cell & 1 or rules.mined(board, cell):
            position = rules.flag(position, cell)
        else:
            position = rules.reveal(board, position, cell)
    return board, position


def arrangements(seen, mines):
    """Every placement of the mines that a visible board allows, by trying all."""
    rows, cols = len(seen), len(seen[0])
    text, near = "".join(seen), rules.neighbours(rows, cols)
    hidden = [cell for cell, c in enumerate(text) if c in "?F"]
    for placed in combinations(hidden, mines):
        if all(sum(n in placed for n in near[i]) == int(c) for i, c in enumerate(text) if c.isdigit()):
            yield set(placed)


def chances(seen, mines):
    ways = list(arrangements(seen, mines))
    hidden = [cell for cell, c in enumerate("".join(seen)) if c in "?F"]
    return len(ways), {cell: sum(cell in placed for placed in ways) for cell in hidden}


@given(played())
def test_beliefs_are_those_of_every_placement_tried(case):
    board, position = case
    seen = rules.view(board, position)
    known = solver.belief(seen, len(board.mines))
    assert (known.arrangements, known.mined) == chances(seen, len(board.mines))
    assert not any(rules.mined(board, cell) for cell in known.safe)


def test_components_and_untouched_cells_share_the_mines_out():
    """Two numbers far apart and cells between them: each side's chance depends on how many mines the other takes."""
    seen = ("?1???1?", "???????")
    for mines in range(2, 5):
        known = solver.belief(seen, mines)
        assert (known.arrangements, known.mined) == chances(seen, mines)
    with pytest.raises(WorkbenchError, match="no arrangement of 5 mines fits"):
        solver.belief(seen, 5)
    with pytest.raises(WorkbenchError, match="no arrangement of 2 mines fits"):
        solver.belief(("10", "??"), 2)
    with pytest.raises(WorkbenchError, match="no arrangement"):
        solver.belief(("100?",), 1)


def slow_reveals(board, opened):
    """K by trying every placement before every reveal."""
    near, count = rules.neighbours(board.rows, board.cols), 0
    while not rules.won(board, Position(opened)):
        _, mined = chances(rules.view(board, Position(opened)), len(board.mines))
        least = min(mined.values())
        cell = min((sum(mined.get(n, 0) for n in near[c]), c) for c, ways in mined.items() if ways == least)[1]
        if rules.mined(board, cell):
            return math.inf
        opened, count = rules.opened_by(board, opened, cell), count + 1
    return count


@settings(max_examples=40)
@given(played())
def test_reveals_needed_is_the_play_of_a_slow_solver(case):
    board, position = case
    assert solver.reveals_needed(board, position) == slow_reveals(board, position.opened)


@settings(max_examples=50)
@given(played(), st.randoms(use_true_random=False))
def test_advice_is_the_same_wherever_the_mines_lie(case, rng):
    """The solver never looks under a cell: any board that shows the same gets the same word."""
    board, position = case
    if rules.won(board, position):
        return
    seen, cols = rules.view(board, position), board.cols
    placed = rng.choice(list(arrangements(seen, len(board.mines))))
    other = Board(board.rows, cols, rules.cells(placed, cols), board.first)
    said = []
    for truth in (board, other):
        env = at(truth, position)
        assert env.restore(env.snapshot()).info["board"] == seen
        said.append((env.expert(), env.solution().actions))
    assert said[0] == said[1] and said[0][0] in said[0][1]


def at(board, position):
    """A game in a position, reached cell by cell."""
    env = Minesweeper(boards={"b": board})
    state = env.reset("b")
    for verb, cells in (("reveal", position.opened), ("flag", position.flagged)):
        for cell in range(board.rows * board.cols):
            command = f"{verb} {cell // board.cols + 1} {cell % board.cols + 1}"
            if cells >> cell & 1 and command in state.admissible:
                state = env.step(command)
    return env


def test_it_is_a_solved_environment():
    env = envs.make("minesweeper").envs[0]
    assert isinstance(env, SolvedEnv) and env.splits == ("train", "heldout", "unseen")
    assert [len(env.tasks(split)) for split in env.splits] == [2000, 200, 200]
    state = env.reset(env.tasks("train")[0].id)
    assert len(state.info["board"]) == 4 and state.observation.split(" / ")[0] == " ".join(state.info["board"][0])
    assert env.reset(env.tasks("unseen")[0].id).info["mines"] == 3


def test_no_layout_is_in_two_splits_and_none_is_won_at_the_start():
    for level in rules.LEVELS:
        drawn = {s: [rules.generate(level, s, seed) for seed in range(300)] for s in levels.SPLITS}
        layouts = {s: {(b.rows, b.mines) for b in boards} for s, boards in drawn.items()}
        assert not layouts["train"] & layouts["heldout"] and not layouts["train"] & layouts["unseen"]
        assert not any(rules.won(b, rules.start(b)) for boards in drawn.values() for b in boards)
        assert len(set(drawn["train"])) > 200
    assert rules.generate("paper", "train", 7).mines == frozenset(
        {(0, 4), (1, 0), (1, 1), (2, 0), (2, 1), (4, 1), (4, 2)}
    )


@pytest.mark.parametrize("level", ["small", "paper"])
def test_the_expert_takes_the_distance_off_by_one_each_turn(level):
    env, ends = Minesweeper(level), []
    for task in env.tasks("train")[:40]:
        state = env.reset(task.id)
        distance = env.solution().distance
        for _ in range(40):
            if state.done:
                break
            best = env.solution()
            assert best.actions and set(best.actions) <= set(state.admissible)
            state = env.step(env.expert())
            if not best.dead and not state.done:
                assert env.solution().distance == best.distance - 1
        ends.append((state.outcome, math.isfinite(distance)))
    assert all(outcome == winnable for outcome, winnable in ends) and sum(outcome for outcome, _ in ends) > 25


@pytest.mark.parametrize("level", ["small", "paper"])
def test_turns_are_worth_what_cast_says(level):
    """Random play, wrong flags and nonsense included, against the tensor form of the case table."""
    env, rng = Minesweeper(level), random.Random(0)
    befores, afters, won, lost, valid, got = [], [], [], [], [], []
    for task in env.tasks("heldout")[:60]:
        state = env.reset(task.id)
        before = env.solution()
        for _ in range(12):
            draw = rng.random()
            action = rng.choice(before.actions if draw < 0.5 and before.actions else state.admissible)
            state = env.step("dance" if draw > 0.95 else action)
            after = env.solution()
            befores.append(before.distance)
            afters.append(after.distance)
            won.append(state.outcome == 1)
            lost.append(state.done and not state.outcome)
            valid.append(state.valid)
            got.append(env.solver_advantage(before, after, state))
            before = after
            if state.done:
                break
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (befores, afters)]
    flags = [torch.tensor(values) for values in (won, lost, valid)]
    safe = {"small": 14, "paper": 29}[level]
    assert torch.equal(reveal_advantage(*tensors, *flags, torch.tensor(safe)), torch.tensor(got, dtype=torch.float64))
    kinds = {
        "won": any(won),
        "lost": any(lost),
        "invalid": not all(valid),
        "stuck": math.inf in befores or level == "small",
    }
    assert all(kinds.values()) and {-1.0, 0.0, 1.0} < set(got), kinds


def test_every_case_of_the_table():
    alike = Board(2, 2, frozenset({(0, 0)}), (1, 1))  # nothing tells the three hidden cells apart; the first guess dies
    told = Board(2, 4, frozenset({(0, 2), (1, 3)}), (0, 0))  # so does it here, but after another the next one lives
    env = Minesweeper(boards={"alike": alike, "told": told, "row": ROW})
    env.reset("told")
    stuck = env.solution()
    assert stuck.dead and "reveal 2 3" in stuck.actions and env.expert() == "reveal 1 3"
    state = env.step("reveal 2 3")
    assert (
        env.solution() == Solution(1, ("reveal 1 4", "reveal 2 4"))
        and env.solver_advantage(stuck, env.solution(), state) == 1
    )

    state = env.reset("alike")
    stuck = env.solution()
    assert stuck == Solution(math.inf, ("reveal 1 1", "reveal 1 2", "reveal 2 1")) and env.expert() == "reveal 1 1"
    state = env.step("reveal 1 2")
    assert env.solution().dead and env.solver_advantage(stuck, env.solution(), state) == 0
    state = env.step("reveal 2 1")
    assert state.done and env.solver_advantage(stuck, env.solution(), state) == 3, "all three safe cells of the board"
    assert env.solution() == Solution(0.0) and env.expert() is None
    env.reset("alike")
    state = env.step("reveal 1 1")
    assert state.done and not state.outcome and state.info["board"] == ("*?", "?1")
    assert env.solution() == Solution(math.inf) and env.solver_advantage(stuck, env.solution(), state) == 0

    state = env.reset("row")
    before = env.solution()
    assert env.solver_advantage(Solution(5.0), Solution(math.inf), state) == -5
    state = env.step("reveal 1 6")
    assert before.distance == 1 and env.solver_advantage(before, env.solution(), state) == -1
    env.reset("row")
    state = env.step("reveal 1 1")
    assert state.outcome == 1 and env.solver_advantage(before, env.solution(), state) == 1


def test_flags_cost_a_turn_where_they_are_wrong_and_stop_what_opens_beside_them():
    env = Minesweeper(boards={"b": ROW})
    state = env.reset("b")
    assert state.observation == "? ? ? ? 1 ?"
    start = env.solution()
    state = env.step("flag 1 2")
    flagged = env.solution()
    assert state.observation == "? F ? ? 1 ?" and flagged.distance == start.distance + 1
    assert env.solver_advantage(start, flagged, state) == -1
    assert "reveal 1 2" not in state.admissible and not env.step("reveal 1 2").valid
    assert env.solution() == flagged, "what cannot be played changes nothing"
    state = env.step("flag 1 2")
    assert state.valid and env.solution() == start
    env.step("flag 1 6")
    assert env.solution().distance == start.distance, "a flag on a mine costs nothing"


def test_snapshots_rebuild_the_state(tmp_path):
    env, other, rng = Minesweeper("paper"), Minesweeper(), random.Random(1)
    for task in env.tasks("train")[:10]:
        state = env.reset(task.id)
        for _ in range(5):
            state = env.step(rng.choice((*state.admissible, "?")) if state.admissible else "?")
        assert other.restore(tuple(json.loads(json.dumps(env.snapshot())))) == state
        assert other.solution() == env.solution()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Minesweeper("smal"), "did you mean 'small'"),
        (lambda: Minesweeper().tasks("trian"), "did you mean 'train'"),
        (lambda: Minesweeper().reset("minesweeper/smal/train/1"), "did you mean 'small'"),
        (lambda: Minesweeper().reset("minesweeper/small/trian/1"), "did you mean 'train'"),
        (lambda: Minesweeper().reset("minesweeper/small/train/-1"), "expected minesweeper/<level>/"),
        (lambda: Minesweeper(boards={"b1": ROW}).reset("b2"), "did you mean 'b1'"),
        (lambda: Minesweeper().step("reveal 1 1"), "no Minesweeper game is running"),
        (lambda: Board(0, 4, frozenset(), (0, 0)), "0 rows of 4"),
        (lambda: Board(2, 2, frozenset({(2, 0)}), (0, 0)), r"mine \(2, 0\) lies outside 2 rows of 2"),
        (lambda: Board(2, 2, frozenset({(0, 0)}), (0, 0)), "first click .* is a mine"),
        (lambda: Board(2, 2, frozenset({(0, 1)}), (0, 9)), "first click .* lies outside"),
        (lambda: Board(2, 2, frozenset(), (0, 0)), "no mine"),
        (lambda: solver.belief(("1x",), 1), "'x' in 1x"),
        (lambda: solver.belief(("²?",), 1), "'²' in ²"),
        (lambda: solver.belief(("1??", "??"), 1), r"'1\?\?/\?\?'; expected at least one row, and all of one length"),
        (lambda: solver.belief((), 1), "expected at least one row"),
    ],
)
def test_bad_input_is_one_line(call, said):
    with pytest.raises(WorkbenchError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_over_the_node_limit_the_state_is_left_out_by_name():
    env = Minesweeper("paper", node_limit=3)
    task = env.tasks("train")[0].id
    env.reset(task)
    for ask in (env.solution, env.expert):
        with pytest.raises(Unsolved, match=f"task {task}: .* 7 mines: over 3 partial assignments"):
            ask()


@pytest.mark.parametrize(("split", "limit"), [("id", 60), ("unseen", 20)])
def test_the_papers_rows_are_played(split, limit):
    path = ROWS / split / "test.parquet"
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    env = envs.make("minesweeper", rows=str(path)).envs[0]
    tasks = env.tasks("rows")
    assert len(tasks) == 200
    finite = 0
    for task in tasks[:limit]:
        state = env.reset(task.id)
        finite += (winnable := not env.solution().dead)
        while not state.done:
            state = env.step(env.expert())
        assert state.outcome == winnable
    assert finite > limit / 2
