from dataclasses import replace

import numpy as np
import pytest

from workbench import envs, shipped
from workbench.engines.play import Lockstep
from workbench.envs.base import EnvBatch, State, Task
from workbench.policy import Policy
from workbench.prompts import Chat, PromptStyle
from workbench.records import Batch
from workbench.rollout import Job, Limits, Teacher, play
from workbench.skills import SkillBank


class Corridor:
    """Three rooms; `go` three times wins. Text says which room."""

    splits = ("train",)

    def tasks(self, split):
        return [Task("c", "corridor", split)]

    def reset(self, task_id, seed=0):
        self.room = 0
        return self._state(True)

    def step(self, action):
        valid = action == "go"
        self.room += valid
        return self._state(valid)

    def _state(self, valid):
        won = self.room == 3
        return State(f"you see {'cup ' * self.room}.", ("go",), float(won), won, int(won), valid)

    def snapshot(self):
        return self.room

    def restore(self, snapshot):
        self.room = snapshot
        return self._state(True)

    def expert(self):
        return "go"

    def close(self):
        pass


@pytest.fixture(scope="module")
def twc():
    policy = Policy.load(shipped.data("models", "twc-small"))
    batch = envs.make("twc", 6)
    return policy, Chat(policy.tokenizer, PromptStyle()), batch, batch.tasks("heldout")


def jobs_of(tasks, n, group=3):
    return [Job(tasks[i // group], i // group, (0, i)) for i in range(n)]


def test_episodes_are_one_row_and_replay_in_the_environment(twc):
    policy, chat, batch, tasks = twc
    episodes = play(policy, chat, batch, jobs_of(tasks, 9), Limits())
    assert [e.group for e in episodes] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    env = batch.envs[0]
    for episode in episodes:
        assert episode.contiguous
        state = env.reset(episode.task)
        for turn in episode.turns:
            assert turn.observation == state.observation
            assert chat.style.command(chat.decode(turn.response_ids), state.admissible) == turn.action
            state = env.step(turn.action)
            assert (state.valid, state.reward) == (turn.valid, turn.reward)
        assert state.outcome == episode.outcome and episode.kind == env._state.info["kind"]
    assert Batch.from_episodes(episodes).turn_counts.tolist() == [len(e.turns) for e in episodes]


def test_an_episode_does_not_depend_on_which_run_beside_it(twc):
    policy, chat, batch, tasks = twc
    jobs = jobs_of(tasks, 8)
    together = play(policy, chat, batch, jobs, Limits())
    alone = play(policy, chat, EnvBatch(batch.envs[:1]), [jobs[5], jobs[2]], Limits())
    for a, b in ((alone[0], together[5]), (alone[1], together[2])):
        assert [t.response_ids.tolist() for t in a.turns] == [t.response_ids.tolist() for t in b.turns]


def test_the_teacher_reads_the_skill_and_plays_better(twc):
    policy, chat, batch, tasks = twc
    teacher = Teacher(SkillBank.load(shipped.data("skills", "twc")), chat.insertion_point("user"))
    jobs = [Job(t, i, (1, i)) for i, t in enumerate(tasks[:60])]
    plain, skilled = (play(policy, chat, batch, jobs, Limits(), teacher=t) for t in (None, teacher))
    text = chat.decode(skilled[0].turns[0].prompt_ids)
    assert "privileged skill information" in text and "privileged" not in chat.decode(plain[0].turns[0].prompt_ids)
    assert sum(e.outcome for e in skilled) > sum(e.outcome for e in plain)


def test_limits_end_an_episode_and_say_why(policy):
    chat = Chat(policy.tokenizer, PromptStyle())
    task = Corridor().tasks("train")[0]

    def reasons(limits):
        return {
            e.stop_reason
            for e in play(policy, chat, EnvBatch([Corridor()]), [Job(task, 0, (i,)) for i in range(3)], limits)
        }

    assert reasons(Limits(max_turns=4, max_invalid=2)) == {"invalid_actions"}
    assert reasons(Limits(max_turns=4, max_invalid=0)) == {"max_turns"}
    assert reasons(Limits(max_turns=50, max_invalid=0, max_context=60)) == {"context_full"}
    lone = play(
        policy, chat, EnvBatch([Corridor()]), [Job(task, 0, (0,))], replace(Limits(), max_turns=2, max_invalid=0)
    )[0]
    assert len(lone.turns) == 2 and not any(t.valid for t in lone.turns)
    assert all(np.array_equal(t.prompt_ids[:1], lone.turns[0].prompt_ids[:1]) for t in lone.turns)


class Says:
    """An engine that answers every prompt with one command, beside a process that still plays two games."""

    def __init__(self, chat, command):
        self.response = [*chat.tokenizer.encode(command, add_special_tokens=False), chat.end_id]
        self.calls = []

    def most(self, count):
        return max(count, 2)

    def generate(self, prompts, temperature):
        self.calls.append([len(prompt) for prompt in prompts])
        return [self.response for _ in prompts], None


def test_an_engine_s_own_generation_plays_in_lockstep(tokenizer):
    chat = Chat(tokenizer, PromptStyle())
    engine = Says(chat, "look")
    player = Lockstep(engine, tokenizer)
    jobs = [Job(Corridor().tasks("train")[0], 0, (i,)) for i in range(4)]
    played = play(player, chat, EnvBatch([Corridor() for _ in range(3)]), jobs, Limits(max_turns=2, max_invalid=0))
    assert [len(e.turns) for e in played] == [2] * 4 and not player.sampled
    assert all(t.response_ids.tolist() == engine.response and not t.truncated for e in played for t in e.turns)
    assert [len(call) for call in engine.calls] == [3, 3, 2, 2], "a lone game is filled up to the other process's two"
    assert engine.calls[2][0] == engine.calls[2][1] == len(played[3].turns[0].prompt_ids)
