"""The games' notebook on the shipped runs, and the shipped model and skill texts of the games."""

import json

import nbformat
import polars as pl
import pytest
from transformers import AutoTokenizer

from workbench import envs, shipped
from workbench.envs.base import SolvedEnv
from workbench.figures import replay, solver_values
from workbench.figures.display import MARK, MIME
from workbench.runs import RunFolder
from workbench.runs.execute import run_notebook
from workbench.settings import SMALL_MODELS, TrainConfig, prompt_style, small_model
from workbench.skills import SkillBank
from workbench.sweep.study import Study

GAMES = ("rush_hour", "sokoban", "minesweeper")


def test_notebook_on_disk_is_clean_and_tagged():
    notebook = json.loads(shipped.notebook("games").read_text())
    nbformat.validate(notebook)
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code), "outputs are stripped"
    assert code[0]["metadata"]["tags"] == ["parameters"] and code[-1]["metadata"]["tags"] == ["result"]
    assert [c["metadata"].get("tags") for c in code].count(["figure"]) == 4
    parameters = "".join(code[0]["source"]).splitlines()
    assert all(": " in p.split("=")[0] and "  # " in p for p in parameters), "each has a plain type and a comment"


def test_the_notebook_says_what_the_tables_say(tmp_path):
    run = run_notebook("games", {"game": "sokoban"}, tmp_path, progress=False)
    result = run.manifest["result"]
    source = RunFolder.open(shipped.data("recorded_games", "sokoban"))
    recorded, episodes = source.read("turns"), source.read("episodes")
    turns = replay.beliefs_of(recorded, episodes)
    rows = solver_values.compared(turns, episodes)
    assert (result["step"], result["episode"]) == solver_values.choose(turns, episodes)
    apart = rows.filter(pl.col("step") == result["step"], pl.col("episode") == result["episode"]).filter("differ")
    assert result["disagree"] == [turn + 1 for turn in apart["turn"].sort()] and result["left_out"] == []
    assert result["agree"] == pytest.approx(solver_values.agreement(rows)["agree"])
    notebook = json.loads((run.path / "executed.ipynb").read_text())
    shown = [o["data"] for c in notebook["cells"] for o in c.get("outputs", []) if MIME in o.get("data", {})]
    assert len(shown) >= 4 and all(MARK in "".join(data["text/html"]) for data in shown)


@pytest.mark.parametrize("game", GAMES)
def test_the_shipped_runs_hold_solver_and_teacher(game):
    source = RunFolder.open(shipped.data("recorded_games", game))
    turns, episodes = source.read("turns"), source.read("episodes")
    assert set(episodes["kind"]) == {game} and turns["teacher_logprobs"].null_count() == 0
    # The environment and its solver still say of the recorded commands what they said then.
    env = envs.make(game).envs[0]
    assert isinstance(env, SolvedEnv) and game in envs.SOLVED
    for (number,), part in turns.filter(pl.col("step") == 0).group_by("episode", maintain_order=True):
        if number % 7:
            continue
        task = episodes.filter(pl.col("step") == 0, pl.col("episode") == number)["task"][0]
        state, before = env.reset(task), env.solution()
        for row in part.sort("turn").to_dicts():
            assert row["observation"] == state.observation
            state, after = env.step(row["action"]), env.solution()
            told = (before.distance, after.distance, env.solver_advantage(before, after, state))
            assert told == tuple(row[name] for name in solver_values.COLUMNS)
            before = after


def test_the_games_model_is_small_knows_every_word_and_is_shown_single_boards():
    folder = shipped.data("models", "games-small")
    assert sum(p.stat().st_size for p in folder.iterdir()) < 2.5e6
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for game in GAMES:
        config = TrainConfig(env=game)
        assert SMALL_MODELS[game] == "games-small" and small_model(config) == folder
        assert prompt_style(config).history == 0 and prompt_style(TrainConfig(env=game, history=3)).history == 3
        env, bank = envs.make(game).envs[0], SkillBank.load(shipped.data("skills", game))
        texts = [bank.text(game)]
        for split in env.splits:
            for task in env.tasks(split)[:5]:
                state = env.reset(task.id)
                texts += [state.info["task"], state.observation, *state.admissible]
        for text in texts:
            assert tokenizer.unk_token_id not in tokenizer.encode(text), text
    assert prompt_style(TrainConfig()).history == -1


def test_the_study_gives_every_method_the_same_rollouts_and_loss():
    study = Study.read("games")
    assert len(study.cells) == 60
    budgets = {tuple(c.parameters[n] for n in ("steps", "tasks_per_step", "group_size")) for c in study.cells}
    assert len(budgets) == 1
    assert {c.parameters["env"] for c in study.cells} == set(GAMES)
