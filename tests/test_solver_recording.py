"""An exact solver's values around every turn: asked while a game is played, recorded, and read by CAST."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench import envs, replay
from workbench.envs.base import EnvBatch, Solution, State, Task, Unsolved, step_advantage
from workbench.errors import WorkbenchError
from workbench.methods import method
from workbench.prompts import Chat, PromptStyle
from workbench.records import Turn
from workbench.rollout import Job, Limits, play
from workbench.runs import RunFolder
from workbench.train import TrainConfig, Trainer

LIMIT = "pit/hard: unsolved within 3 states"
LIMITS = Limits(max_turns=5, max_response_tokens=1, max_invalid=0)


class Pit:
    """A line of places, a goal at 0 and a pit. A word's letters say where it leads: on, back, nowhere or down."""

    splits = ("train", "heldout", "unseen")

    def __init__(self):
        self.asked = []

    def tasks(self, split):
        return [Task(f"pit/{name}", "pit", split) for name in ("easy", "hard")]

    def reset(self, task_id, seed=0):
        self.task, self.place, self.turn = task_id, 2, 0
        return self._state(0)

    def step(self, action):
        move = sum(map(ord, action)) % 4
        self.turn += 1
        if math.isfinite(self.place):
            self.place = {0: self.place - 1, 1: self.place + 1, 2: self.place, 3: math.inf}[move]
        return self._state(self.turn)

    def _state(self, turn):
        won = self.place == 0
        return State(f"you see {'cup ' * turn}.", ("go",), float(won), won, int(won), True, {"kind": "pit"})

    def solution(self):
        self.asked.append((self.task, self.turn))
        if self.task == "pit/hard" and self.turn == 2:
            raise Unsolved(LIMIT)
        return Solution(float(self.place), ("go",))

    def solver_advantage(self, before, after, state):
        return step_advantage(before, after)

    def snapshot(self):
        return self.task, self.place, self.turn

    def restore(self, snapshot):
        self.task, self.place, self.turn = snapshot
        return self._state(self.turn)

    def expert(self):
        return "go"

    def close(self):
        pass


class Blind(Pit):
    """The same game without a solver."""

    solution = None
    solver_advantage = None


def jobs(names, n=6):
    return [Job(Task(f"pit/{name}", "pit", "train"), g, (7, g, i)) for g, name in enumerate(names) for i in range(n)]


def values(turn):
    return turn.solver_before, turn.solver_after, turn.solver_advantage


def test_every_turn_holds_the_solver_s_values_around_it(policy):
    chat, pits = Chat(policy.tokenizer, PromptStyle()), [Pit(), Pit(), Pit()]
    episodes = play(policy, chat, EnvBatch(pits), jobs(["easy"], 9), LIMITS, solver=True)
    seen = set()
    for episode in episodes:
        env = Pit()
        env.reset(episode.task)
        for turn in episode.turns:
            before = env.place
            env.step(turn.action)
            worth = 0 if math.isinf(before) else -before if math.isinf(env.place) else before - env.place
            assert values(turn) == (before, env.place, worth)
            seen.add(worth)
    assert seen >= {1, 0, -1, -2}
    # Each state is solved once: what follows a turn is what precedes the next.
    assert sum(len(pit.asked) for pit in pits) == sum(len(e.turns) + 1 for e in episodes)
    pits = [Pit()]
    plain = play(policy, chat, EnvBatch(pits), jobs(["easy"], 3), LIMITS)
    assert not pits[0].asked and all(values(turn) == (None,) * 3 for e in plain for turn in e.turns)
    assert [e.turns[0].action for e in plain] == [e.turns[0].action for e in episodes[:3]]


def test_an_episode_with_an_unsolved_state_is_named_and_has_no_values(policy):
    said = []
    chat = Chat(policy.tokenizer, PromptStyle())
    episodes = play(policy, chat, EnvBatch([Pit()]), jobs(["easy", "hard"]), LIMITS, solver=True, say=said.append)
    for episode in episodes:
        hard = episode.task == "pit/hard" and len(episode.turns) >= 2
        assert all((values(turn) == (None,) * 3) == hard for turn in episode.turns)
    assert said == [f"pit/hard: no solver values for this episode: {LIMIT}"], "once, though true of several episodes"


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokenizer):
    from tiny_models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def trainer(tmp_path, small, monkeypatch):
    monkeypatch.setitem(envs.ENVIRONMENTS, "pit", Pit)
    monkeypatch.setitem(envs.ENVIRONMENTS, "blind", Blind)
    said = []

    def make(name, options=None, **changes):
        settings = {
            "env": "pit", "model": small, "prompt": "plain", "teacher": False, "steps": 2, "tasks_per_step": 2,
            "group_size": 4, "live_episodes": 8, "max_turns": 5, "max_response_tokens": 1, "max_invalid": 0,
            "eval_games": 1, "eval_every": 2, "checkpoint_every": 2, "lr": 1e-2,
        }  # fmt: skip
        config = TrainConfig(method=name, method_options=options or {}, **(settings | changes))
        made = Trainer(config, RunFolder.create(tmp_path, "run", {}), said.append)
        made.said = said
        return made

    return make


def test_a_run_of_cast_records_what_its_credit_was_made_of(trainer):
    run = trainer("cast")
    run.run()
    turns, heads, steps = (run.folder.read(name) for name in ("turns", "episodes", "steps"))
    names = ["solver_before", "solver_after", "solver_advantage"]
    hard = turns.join(heads.select("step", "episode", "task", "n_turns"), on=["step", "episode"])
    unsolved = (hard["task"] == "pit/hard") & (hard["n_turns"] >= 2)
    assert unsolved.any() and not unsolved.all()
    for name in names:
        assert (turns[name].is_null() == unsolved).all()
    assert (turns["solver_share"].filter(unsolved) == 0).all() and (turns["solver_share"] != 0).any()
    counted = hard.filter(unsolved).select("step", "episode").unique().group_by("step").len().sort("step")["len"]
    assert steps["n_unsolved"].to_list() == counted.to_list()
    assert [line for line in run.said if LIMIT in line]
    for step in (0, 1):
        batch, _ = replay.batch_of(turns, heads, step)
        again = replay.credit_of(batch, method("cast")).credit.turns["turn_advantage"][batch.turn_mask]
        own = turns.filter(turns["step"] == step)["turn_advantage"]
        np.testing.assert_allclose(again, own, atol=1e-6)


def test_alpha_zero_trains_as_grpo_bit_for_bit_without_a_solver(trainer):
    weights = []
    for name, options in (("grpo", {}), ("cast", method("cast").off), ("cast", {})):
        run = trainer(name, options, eval_every=9, checkpoint_every=9)
        run.run()
        asked = [env.asked for env in run.envs.envs if env.asked]
        assert bool(asked) == (options == {} and name == "cast")
        weights.append(torch.cat([p.detach().flatten() for p in run.policy.model.parameters()]))
        if name == "grpo":
            assert run.folder.read("turns")["solver_before"].null_count() == run.folder.read("turns").height
            assert run.folder.read("steps")["n_unsolved"].null_count() == 2
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("setting", ["on", True])
def test_any_method_can_record_what_the_solver_says(trainer, setting):
    run = trainer("grpo", record_solver=setting)
    batch = run.batch(run.rollout(0))
    assert batch.solver_advantages.shape == batch.turn_mask.shape
    known = ~batch.solver_advantages.isnan()
    assert bool((batch.solver_advantages[known & batch.turn_mask] != 0).any()) and not bool(known.all())


def test_a_solver_that_is_not_there_is_one_line(trainer):
    for name, setting in (("cast", "auto"), ("grpo", "on")):
        with pytest.raises(WorkbenchError, match="^environment 'blind' has no exact solver; .* one: .*sokoban.*$"):
            trainer(name, env="blind", record_solver=setting)
    trainer("grpo", env="blind")
    for setting in ("off", False):
        with pytest.raises(WorkbenchError, match="'cast' reads an exact solver's values, and record_solver is off"):
            trainer("cast", record_solver=setting)
    with pytest.raises(WorkbenchError, match="record_solver must be auto, on or off, got 'maybe'"):
        trainer("grpo", record_solver="maybe")


def test_impossible_values_are_refused():
    turn = Turn([1], [2], [-0.5], solver_before=3.0, solver_after=math.inf, solver_advantage=-3.0)
    for bad in ({"solver_before": -1.0}, {"solver_after": math.nan}, {"solver_advantage": math.inf}):
        with pytest.raises(WorkbenchError, match="turn: solver_"):
            replace(turn, **bad)
