"""Policy x environments -> episodes: many games live at once, each sampled token recorded with its log-prob."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .envs.base import EnvBatch, State, Task
from .policy import Policy
from .prompts import Chat
from .records import Episode, Turn
from .session import Sampled
from .skills import SkillBank, privileged_prompt


@dataclass(frozen=True)
class Job:
    """One episode to play. key: integers its random draws derive from, whatever else runs beside it."""

    task: Task
    group: int
    key: tuple[int, ...]
    seed: int = 0


@dataclass(frozen=True)
class Limits:
    """When an episode or a response ends.

    max_turns: turns of an episode; max_response_tokens: of a turn; max_context: tokens of an episode's sequence;
    max_invalid: invalid actions after which an episode ends (0: never).
    """

    max_turns: int = 10
    max_response_tokens: int = 16
    max_context: int = 1024
    max_invalid: int = 3


@dataclass(frozen=True)
class Teacher:
    """The skill bank and where in the prompt its text goes, for playing with the privileged text in context."""

    bank: SkillBank
    insert_at: int


class _Game:
    """One live episode: its prompt so far and the turns played."""

    def __init__(self, job: Job, state: State, chat: Chat, limits: Limits, skill: np.ndarray | None, insert_at: int):
        self.job, self.state, self.chat, self.limits = job, state, chat, limits
        self.kind = state.info.get("kind", job.task.kind)
        self.skill, self.insert_at = skill, insert_at
        self.turns: list[Turn] = []
        self.past: list[tuple[str, str]] = []
        self.invalid = 0
        self.prompt = self._fresh()
        shape = (limits.max_turns, limits.max_response_tokens)
        self.uniforms = np.random.default_rng(list(job.key)).random(shape)

    def _fresh(self) -> np.ndarray:
        ids = self.chat.first(self.chat.style.message(self.state, self.past, True))
        return ids if self.skill is None else privileged_prompt(ids, self.skill, self.insert_at)

    @property
    def full(self) -> bool:
        return len(self.prompt) + self.limits.max_response_tokens > self.limits.max_context

    def take(self, sampled: Sampled, response: str, action: str, state: State) -> str:
        """Record a turn; returns why the episode ends here, or an empty string."""
        before = self.state
        self.turns.append(
            Turn(
                prompt_ids=self.prompt,
                response_ids=sampled.ids,
                logprobs=np.minimum(sampled.logprobs, 0),
                observation=before.observation,
                action=action,
                valid=state.valid,
                reward=state.reward,
                truncated=sampled.truncated,
                info={"response": response},
            )
        )
        self.past.append((before.observation, action))
        self.state = state
        self.invalid += not state.valid
        if state.done:
            return "won" if state.outcome else "lost"
        if len(self.turns) == self.limits.max_turns:
            return "max_turns"
        if self.limits.max_invalid and self.invalid >= self.limits.max_invalid:
            return "invalid_actions"
        if self.chat.style.history >= 0:
            self.prompt = self._fresh()
        else:
            message = self.chat.style.message(state, self.past, False)
            following = self.chat.following(message, sampled.truncated)
            self.prompt = np.concatenate([self.prompt, sampled.ids, following])
        return "context_full" if self.full else ""

    def episode(self, stop_reason: str) -> Episode:
        return Episode(
            turns=tuple(self.turns),
            task=self.job.task.id,
            group=self.job.group,
            seed=self.job.seed,
            outcome=self.state.outcome,
            total_reward=float(sum(t.reward for t in self.turns)),
            stop_reason=stop_reason,
            kind=self.kind,
            split=self.job.task.split,
        )


def play(
    policy: Policy,
    chat: Chat,
    envs: EnvBatch,
    jobs: Sequence[Job],
    limits: Limits,
    temperature: float = 1.0,
    teacher: Teacher | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Episode]:
    """Play every job and return its episode, in the order of `jobs`. A slot that ends a game starts the next job.

    teacher: play with the skill text in context. Raises WorkbenchError where a first prompt does not fit the context.
    """
    slots = min(len(envs), len(jobs))
    session = policy.session(slots, limits.max_context)
    waiting = list(range(len(jobs)))[::-1]
    live: dict[int, tuple[int, _Game]] = {}
    episodes: dict[int, Episode] = {}

    def start(slot: int) -> None:
        index = waiting.pop()
        job = jobs[index]
        state = envs.envs[slot].reset(job.task.id, job.seed)
        skill = None
        if teacher:
            text = teacher.bank.text(state.info.get("kind", job.task.kind), state.observation, job.task.id)
            skill = np.asarray(policy.tokenizer.encode(text, add_special_tokens=False), np.int32)
        live[slot] = (index, _Game(job, state, chat, limits, skill, teacher.insert_at if teacher else 0))

    for slot in range(slots):
        start(slot)
    while live:
        sampled = session.sample(
            {slot: game.prompt for slot, (_, game) in live.items()},
            {slot: game.uniforms[len(game.turns)] for slot, (_, game) in live.items()},
            chat.end_id,
            temperature,
        )
        responses = {slot: chat.decode(s.ids) for slot, s in sampled.items()}
        actions = {slot: chat.style.command(responses[slot], live[slot][1].state.admissible) for slot in sampled}
        states = envs.step(actions)
        for slot, state in states.items():
            index, game = live[slot]
            if stop := game.take(sampled[slot], responses[slot], actions[slot], state):
                episodes[index] = game.episode(stop)
                del live[slot]
                if progress:
                    progress(len(episodes), len(jobs))
                if waiting:
                    start(slot)
    return [episodes[i] for i in range(len(jobs))]
