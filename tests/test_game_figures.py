"""Pictures of boards, and solver against belief: what they draw is what the environments and tables say."""

import math
import random

import polars as pl
import pytest

from workbench import envs
from workbench.collected import EVALS, RUNS, STEPS, Collected
from workbench.errors import WorkbenchError
from workbench.figures import boards, by_game, solver_values

GAMES = ("rush_hour", "sokoban", "minesweeper")
TEXT = {"rush_hour": str.maketrans("ox", ".#"), "sokoban": str.maketrans(" ", "_"), "minesweeper": {}}


def played(name, groups=2, size=3, turns=6):
    """Tables of episodes that an expert played who errs every third turn, and every state's board. Beliefs follow the
    solver but for every fifth turn."""
    env, rng, rows, heads, seen = envs.make(name).envs[0], random.Random(0), [], [], []
    for e in range(groups * size):
        state, belief, before = env.reset(env.tasks("train")[e // size].id), 0.5, None
        before = env.solution()
        for k in range(turns):
            best = env.expert()
            action = best if best and rng.random() < 0.6 else rng.choice([*state.admissible, "<b>jump</b>"])
            row = dict(step=0, episode=e, group=e // size, turn=k, observation=state.observation, action=action)
            seen.append(state.info["board"])
            state = env.step(action)
            after = env.solution()
            value = env.solver_advantage(before, after, state)
            revision = math.tanh(value) / 20 * (-1 if len(rows) % 5 == 4 else 1)
            row |= dict(valid=state.valid, solver_before=before.distance, solver_after=after.distance)
            row |= dict(solver_advantage=value, evidence=revision, belief_before=belief, belief=belief + revision)
            rows.append(row | dict(revision=revision, z=0.0, turn_advantage=0.0, after=state.info["board"]))
            belief, before = belief + revision, after
            if state.done:
                break
        heads.append(
            dict(step=0, episode=e, group=e // size, task=env.tasks("train")[e // size].id, kind=name, advantage=0.0,
                 outcome=e % 2, prior=0.5, stop_reason="lost" if state.done else "max_turns")
        )  # fmt: skip
    return pl.DataFrame(rows, infer_schema_length=None), pl.DataFrame(heads), seen


@pytest.fixture(scope="module", params=GAMES)
def run(request):
    return request.param, *played(request.param)


def test_boards_are_read_as_the_game_has_them_and_markers_stand_where_the_action_acts(run):
    name, turns, _, seen = run
    moved = 0
    for row, board in zip(turns.to_dicts(), seen, strict=True):
        picture = boards.read(row["observation"], name)
        assert picture == tuple(line.translate(TEXT[name]) for line in board)
        cells = boards.chosen_cells(picture, name, row["action"])
        if not row["valid"]:
            continue
        after = [line.translate(TEXT[name]) for line in row["after"]]
        (r, c), (to_r, to_c) = cells[0], cells[-1]
        moved += 1
        if name == "rush_hour":
            letter = row["action"].split()[1]
            assert picture[r][c] == after[to_r][to_c] == letter and picture[to_r][to_c] == "."
        elif name == "sokoban":
            assert picture[r][c] in "@+" and after[to_r][to_c] in "@+"
        else:
            assert len(cells) == 1 and picture[r][c] != after[r][c]
    assert moved > 10


def test_what_is_no_board_is_refused():
    with pytest.raises(WorkbenchError, match="no board is drawn of 'twc'; those that have one: rush_hour, sokoban"):
        boards.read("You are in the kitchen.", "twc")
    for text in ("# # # / # @", "# # / # €", ""):
        with pytest.raises(WorkbenchError, match="sokoban: expected a board of equal rows"):
            boards.read(text, "sokoban")
    assert boards.read("invalid . # # / @ _", "sokoban") == ("##", "@_")
    for kind, action in (("rush_hour", "move Z up 1"), ("minesweeper", "reveal 9 9"), ("sokoban", "jump")):
        assert boards.chosen_cells(("@A", "??"), kind, action) == []


def test_an_episode_is_a_picture_a_turn_and_says_what_the_solver_says(run):
    name, turns, episodes, _ = run
    for number in (0, 1):
        rows = turns.filter(pl.col("episode") == number).to_dicts()
        fig = boards.episode(turns, episodes, 0, number)
        pictures = [trace for trace in fig.data if trace.type == "heatmap"]
        assert [tuple(p.meta["board"]) for p in pictures] == [boards.read(r["observation"], name) for r in rows]
        titles = [note.text for note in fig.layout.annotations]
        assert len(titles) == len(rows)
        for title, row in zip(titles, rows, strict=True):
            assert boards.said(row) in title and boards.colour_of(row["solver_advantage"]) in title
            assert "<b>jump" not in title and ("(invalid)" in title) == (not row["valid"])
        for picture in pictures:
            for line, hover in zip(picture.meta["board"], picture.hovertext, strict=True):
                assert all(text.endswith(boards.GAMES[name][mark][2]) for mark, text in zip(line, hover, strict=True))
    plain = boards.episode(turns.drop(solver_values.COLUMNS), episodes, 0, 0)
    assert "solver" not in plain.layout.meta["subtitle"]


def test_solver_and_belief_differ_where_their_signs_do(run):
    _, turns, episodes, _ = run
    rows = solver_values.compared(turns, episodes)
    wrong = rows.filter((pl.col("revision") * pl.col("solver_advantage")) < 0)
    assert rows["differ"].sum() == wrong.height and 0 < wrong.height < rows.height
    found = solver_values.agreement(rows)
    signed = (rows["solver_advantage"] != 0).sum()
    assert found["turns"] == turns.height and found["signed"] == signed
    assert found["agree"] == pytest.approx(1 - wrong.height / signed)
    assert found["revision.wasted"] in (0, None) and found["revision.progress"] > 0
    assert f"{signed} of {turns.height} turns" in solver_values.sentences(rows)[0]
    step, episode = solver_values.choose(turns, episodes)
    most = rows.group_by("episode").agg(pl.col("differ").sum())["differ"].max()
    assert len(solver_values.differing(turns, step, episode)) == most
    assert solver_values.choose(turns, episodes, 0, 2) == (0, 2)
    fig = solver_values.along(turns, episodes, step, episode)
    bands = {(s.x0, s.x1) for s in fig.layout.shapes}
    assert bands == {(t + 0.5, t + 1.5) for t in solver_values.differing(turns, step, episode)}
    own = turns.filter(pl.col("episode") == episode)
    assert list(fig.data[1].y) == own["solver_advantage"].to_list()
    assert list(fig.data[2].y) == [own["belief_before"][0], *own["belief"].to_list()]
    boxes = solver_values.by_side(rows).data
    assert sum(len(box.x) for box in boxes) == rows.height


def test_dead_states_and_unsolved_turns_are_drawn_as_such():
    turns, episodes, _ = played("sokoban")
    end = turns.filter(pl.col("episode") == 1)["turn"].max()
    there = (pl.col("episode") == 1) & (pl.col("turn") == end)
    dead = turns.with_columns(
        solver_after=pl.when(there).then(math.inf).otherwise("solver_after"),
        solver_advantage=pl.when(there).then(-3.0).otherwise("solver_advantage"),
    )
    assert solver_values.compared(dead, episodes).filter(there)["side"][0] == "lost the game"
    fig = solver_values.along(dead, episodes, 0, 1)
    assert fig.layout.yaxis.ticktext[-1] == "none" and fig.data[0].marker.symbol[-1] == "x"
    assert "∞ left, −3" in boards.episode(dead, episodes, 0, 1).layout.annotations[end].text
    unsolved = turns.with_columns(
        pl.when(pl.col("episode") == 1).then(None).otherwise(pl.col(name)).alias(name) for name in solver_values.COLUMNS
    )
    assert solver_values.compared(unsolved, episodes)["episode"].unique().to_list() == [0, 2, 3, 4, 5]
    assert "no solver value" in boards.episode(unsolved, episodes, 0, 1).layout.annotations[0].text
    assert list(solver_values.along(unsolved, episodes, 0, 1).data[1].y) == [None] * (end + 1)
    with pytest.raises(WorkbenchError, match="recorded without an exact solver: set record_solver"):
        solver_values.compared(turns.drop("solver_advantage"), episodes)
    with pytest.raises(WorkbenchError, match="no group has both"):
        solver_values.compared(turns, episodes.with_columns(outcome=1))


def study(rates, seeds=4, games=20):
    """A collected study: rates {(game, label): (before, after)} of every run."""
    rows = []
    for (game, label), ends in rates.items():
        for seed in range(seeds):
            for step, rate in zip((0, 5), ends, strict=True):
                for panel in ("heldout", "unseen"):
                    for n in range(games):
                        run = f"{game}-{label}-{seed}"
                        task = f"{game}/small/{panel}/{n}"
                        won = int((n + seed) % games < rate * games)
                        rows.append(
                            (f"{label} env={game}", "", seed, run, step, panel, "student", task, game, n, won, 3)
                        )
    empty = (pl.DataFrame(schema=schema) for schema in (STEPS, RUNS))
    return Collected(pl.DataFrame(rows, schema=EVALS, orient="row"), *empty)


def test_games_and_panels_of_a_study_are_compared_apart():
    rates = {("sokoban", "grpo"): (0.2, 0.3), ("sokoban", "cast"): (0.2, 0.9),
             ("minesweeper", "grpo"): (0.4, 0.5), ("minesweeper", "cast"): (0.4, 0.5)}  # fmt: skip
    data = study(rates)
    found = by_game.table(data)
    assert found.select("game", "panel", "label").rows() == [
        (game, panel, label)
        for game in ("sokoban", "minesweeper")
        for panel in ("heldout", "unseen")
        for label in ("grpo", "cast")
    ]
    for row in found.to_dicts():
        before, after = rates[row["game"], row["label"]]
        assert (row["before"], row["success"], row["runs"], row["games"]) == (before, pytest.approx(after), 4, 20)
        assert row["low"] <= after <= row["high"]
        assert bool(row["named"]) == (row["game"] == "sokoban" and row["label"] == "cast")
    said = by_game.sentences(found)
    assert len(said) == 4 and "cast +60.0 points" in said[0] and "no method differs from grpo" in said[2]
    fig = by_game.success(found)
    dots = [t for t in fig.data if t.marker.size == 12]
    assert sorted(t.x[0] for t in dots) == sorted(found["success"].to_list())
    twice = data.evals.with_columns(run=pl.lit("one"))
    with pytest.raises(WorkbenchError, match="run one was evaluated on more than one game"):
        list(by_game.apart(twice))
