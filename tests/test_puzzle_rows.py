"""Rows of puzzle files: real ones all solve as they say, and what is wrong with a file or a row is named."""

import shutil
from pathlib import Path

import check_games
import polars as pl
import pytest

from workbench import envs
from workbench.errors import WorkbenchError
from workbench.games import sokoban
from workbench.games.rows import check, load, playable, read

CAST = Path("../shared/data/cast")
RUSH = {
    "width": 6,
    "height": 6,
    "board_config": "oEEEoooDDDBooAAoBoooooBoGGoCFFoooCoo",
    "min_moves_optimal": 6,
    "uid": "one",
}
ROOM = {"seed": 7, "dim_x": 6, "dim_y": 6, "num_boxes": 2, "uid": "two"}
MINES = {
    "rows": 3,
    "cols": 4,
    "num_mines": 2,
    "mine_positions": [[0, 0], [0, 3]],
    "first_click": [2, 1],
    "uid": "three",
}
ROWS = {"rush_hour": RUSH, "sokoban": ROOM, "minesweeper": MINES}
OPEN = "######\n#    #\n#@$ .#\n######"


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.parquet"):
        path = tmp_path / name
        pl.DataFrame(list(rows), infer_schema_length=None, strict=False).write_parquet(path)
        return path

    return write


@pytest.fixture(scope="module")
def real():
    if not CAST.is_dir():
        pytest.skip("CAST's test rows are not at ../shared/data/cast")
    return lambda game, split: CAST / game / split / "test.parquet"


@pytest.mark.parametrize("split", ["id", "unseen"])
def test_every_real_rush_hour_row_needs_the_moves_it_says(real, split):
    rows = read(real("rush_hour", split))
    assert (rows.game, len(rows.boards), len(rows.optimal), rows.excluded) == ("rush_hour", 200, 200, {})


@pytest.mark.parametrize("split", ["id", "unseen"])
@pytest.mark.parametrize("game", ["sokoban", "minesweeper"])
def test_some_real_rows_of_the_other_games_pass_the_check(real, game, split):
    found, rows = load(real(game, split))
    assert found == game and len(rows) == 200
    assert [check_games.check_row(("file", game, n, rows[n])) for n in (0, 67, 199)] == [""] * 3


def test_the_check_counts_rows_and_names_those_that_fail(write, capsys):
    wrong = RUSH | {"min_moves_optimal": 5, "uid": "off by one"}
    assert check_games.main([str(write(RUSH, wrong, RUSH))]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "2 passed, 1 failed" and "3/3 rush_hour rows" in err
    assert "row 1 (off by one): min_moves_optimal is 5, but 6 moves win" in out
    for game, row in ROWS.items():
        assert check_games.main([str(write(row, name=f"{game}.parquet"))]) == 0
        assert capsys.readouterr().out == "1 passed, 0 failed\n"


def test_the_check_of_a_torn_file_fails(write, capsys):
    path = write(RUSH)
    path.write_bytes(path.read_bytes()[:-20])
    assert check_games.main([str(path)]) == 1
    assert "not a whole parquet file" in (out := capsys.readouterr().out) and out.endswith("0 passed, 1 failed\n")


def test_the_check_sees_a_wrong_solver(monkeypatch):
    rows = {game: ("file", game, 0, row) for game, row in ROWS.items()}
    right = check_games.solve
    monkeypatch.setattr(check_games, "plain_sokoban", lambda room, start: right(room, start).distance + 1)
    assert "a plain search" in check_games.check_row(rows["sokoban"])
    monkeypatch.setattr(check_games, "plain_counts", lambda board, seen: {})
    assert "all arrangements" in check_games.check_row(rows["minesweeper"])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"min_moves_optimal": 7}, "min_moves_optimal is 7, but 6 moves win; expected the fewest"),
        ({"min_moves_optimal": None}, "min_moves_optimal is None; expected a whole number"),
        ({"board_config": RUSH["board_config"][:-1]}, "expected 36 cells for 6x6"),
        ({"board_config": None}, "board_config is None"),
        ({"width": 9}, "expected 54 cells for 9x6"),
        ({"width": 0}, "width is 0; expected a whole number from 1"),
        ({"board_config": "o" * 36}, "red car A must lie in a row"),
        ({"board_config": "AAx" + "o" * 33}, "no moves win from this board"),
        ({"board_config": "ooooAA" + "o" * 30}, "won already"),
        ({"board_config": "?" + RUSH["board_config"][1:]}, "'\\?' in row 1"),
    ],
)
def test_a_wrong_rush_hour_row_is_left_out_by_name(write, change, words):
    path = write(RUSH, RUSH | change)
    rows = read(path)
    assert list(rows.boards) == ["rush_hour/rows/0"] and list(rows.excluded) == ["rush_hour/rows/1"]
    with pytest.raises(WorkbenchError, match=words):
        raise WorkbenchError(rows.excluded["rush_hour/rows/1"])
    assert rows.excluded["rush_hour/rows/1"].startswith(f"{path}, row 1 (one): ")


@pytest.mark.parametrize(
    "game, change, words",
    [
        ("sokoban", {"num_boxes": 9}, "num_boxes is 9; expected a whole number from 1 to 4"),
        ("sokoban", {"dim_x": 3}, "dim_x is 3; expected a whole number from 4 to 9"),
        ("sokoban", {"seed": None}, "seed is None"),
        ("sokoban", {"board": "####\n#@ #\n####"}, "0 boxes and 0 goals"),
        ("sokoban", {"board": "#####\n#$@.#\n#####"}, "no moves win"),
        ("sokoban", {"board": "#####\n#*@ #\n#####"}, "won already"),
        ("minesweeper", {"num_mines": 3}, "2 mine_positions; expected num_mines, 3, all different"),
        ("minesweeper", {"mine_positions": [[0, 0], [0, 0]]}, "2 mine_positions; expected num_mines, 2, all different"),
        ("minesweeper", {"mine_positions": [[0, 0], [3, 0]]}, "mine \\(3, 0\\) lies outside"),
        ("minesweeper", {"mine_positions": None}, "must be pairs of row and column"),
        ("minesweeper", {"first_click": [0, 0]}, "the first click \\(0, 0\\) is a mine"),
        ("minesweeper", {"first_click": [1]}, "must be pairs of row and column"),
    ],
)
def test_a_wrong_row_of_the_other_games_is_left_out_by_name(write, game, change, words):
    rows = read(write(ROWS[game], ROWS[game] | change))
    assert list(rows.boards) == [f"{game}/rows/0"] and list(rows.excluded) == [f"{game}/rows/1"]
    with pytest.raises(WorkbenchError, match=words):
        raise WorkbenchError(rows.excluded[f"{game}/rows/1"])


@pytest.mark.parametrize("game", ROWS)
def test_a_missing_column_is_named(write, game):
    for column in ROWS[game]:
        if column != "uid":
            path = write({k: v for k, v in ROWS[game].items() if k != column})
            with pytest.raises(WorkbenchError, match=f"rows.parquet: no column {column}; {game} rows have"):
                read(path, game)


def test_a_file_that_is_none_is_named(write, tmp_path):
    with pytest.raises(WorkbenchError, match="absent.parquet: no such file"):
        read(tmp_path / "absent.parquet")
    (tmp_path / "text.parquet").write_text("seed,dim_x\n1,2\n")
    with pytest.raises(WorkbenchError, match="text.parquet: not a whole parquet file"):
        read(tmp_path / "text.parquet")
    with pytest.raises(WorkbenchError, match="not a file of puzzle rows; expected one of the columns board_config"):
        read(write({"a": 1}))
    pl.DataFrame([RUSH]).clear().write_parquet(tmp_path / "empty.parquet")
    with pytest.raises(WorkbenchError, match="empty.parquet: no rows"):
        read(tmp_path / "empty.parquet")
    with pytest.raises(WorkbenchError, match="unknown game of puzzle rows 'rush'; did you mean 'rush_hour'"):
        read(write(RUSH), "rush")


@pytest.mark.parametrize("game", ROWS)
def test_an_environment_plays_a_file_s_rows(write, game):
    path = write(ROWS[game], ROWS[game] | {"uid": "again"})
    env = envs.make(game, rows=str(path)).envs[0]
    assert env.splits == ("rows",)
    first, second = env.tasks("rows")
    assert (first.id, second.split) == (f"{game}/rows/0", "rows")
    state = env.reset(second.id)
    while not state.done:
        state = env.step(env.expert())
    assert state.outcome == 1
    with pytest.raises(WorkbenchError, match="rows/0"):
        env.reset(f"{game}/rows/7")


def test_rows_left_out_are_told_when_an_environment_is_made(write):
    path = write(RUSH, RUSH | {"min_moves_optimal": 4})
    with pytest.warns(UserWarning, match="1 of 2 rows left out:\n.*row 1 \\(one\\): min_moves_optimal is 4"):
        env = envs.make("rush_hour", rows=str(path)).envs[0]
    assert [task.id for task in env.tasks("rows")] == ["rush_hour/rows/0"]
    with pytest.raises(WorkbenchError, match="none of 1 rows can be played; .*min_moves_optimal is 4"):
        playable(write(RUSH | {"min_moves_optimal": 4}), "rush_hour")


def test_a_sokoban_row_is_drawn_from_its_seed_unless_it_holds_a_board(write, tmp_path):
    path = write(ROOM, ROOM | {"board": OPEN}, ROOM | {"seed": 8})
    boards = read(path).boards
    shutil.move(path, tmp_path / "other.parquet")
    assert read(tmp_path / "other.parquet").boards == boards  # the file's name and place do not matter
    drawn, given, other = boards.values()
    assert given == tuple(OPEN.split("\n")) and drawn != other
    room, position = sokoban.parse(drawn)
    assert (room.width, room.height, position.boxes.bit_count()) == (6, 6, 2)
    check("sokoban", drawn)
