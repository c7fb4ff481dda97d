"""Policy x environments -> episodes: many games live at once, each sampled token recorded with its log-prob."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .envs.base import Env, EnvBatch, SolverAlong, State, Task
from .policy import Policy
from .prompts import Chat
from .records import Episode, Turn
from .session import Sampled
from .skills import SkillBank, privileged_prompt


@dataclass(frozen=True, eq=False)
class Start:
    """Where in an episode that was played before a job goes on.

    snapshot: of the environment there; turns: those played so far; prompt_ids: what the policy reads next, as it was
    recorded.
    """

    snapshot: Any
    turns: tuple[Turn, ...]
    prompt_ids: np.ndarray


@dataclass(frozen=True)
class Job:
    """One episode to play. key: integers its random draws derive from, whatever else runs beside it. start: where it
    begins, None for the task's own beginning; the turns before it are the first of the episode that comes back."""

    task: Task
    group: int
    key: tuple[int, ...]
    seed: int = 0
    start: Start | None = None

    def begin(self, env: Env) -> State:
        """Put the environment where the episode begins."""
        return env.restore(self.start.snapshot) if self.start else env.reset(self.task.id, self.seed)


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
        self.turns: list[Turn] = list(job.start.turns) if job.start else []
        self.solver: SolverAlong | None = None
        self.past: list[tuple[str, str]] = [(t.observation, t.action) for t in self.turns]
        self.invalid = sum(not t.valid for t in self.turns)
        self.prompt = job.start.prompt_ids if job.start else self._fresh()
        shape = (limits.max_turns, limits.max_response_tokens)
        self.uniforms = np.random.default_rng(list(job.key)).random(shape)

    def _fresh(self) -> np.ndarray:
        ids = self.chat.first(self.chat.style.message(self.state, self.past, True))
        return ids if self.skill is None else privileged_prompt(ids, self.skill, self.insert_at)

    @property
    def full(self) -> bool:
        return len(self.prompt) + self.limits.max_response_tokens > self.limits.max_context

    @property
    def unsolved(self) -> str:
        """Why the solver has no values for this episode."""
        return self.solver.why if self.solver else ""

    def judge(self, state: State) -> dict[str, float]:
        """The solver's values of the turn that led to `state`, by the names a Turn has for them."""
        judged = self.solver.turn(state) if self.solver else None
        if judged is None:
            return {}
        before, after, advantage = judged
        return {"solver_before": before.distance, "solver_after": after.distance, "solver_advantage": advantage}

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
                **self.judge(state),
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
        unknown = dict.fromkeys(("solver_before", "solver_after", "solver_advantage"))
        return Episode(
            turns=tuple(replace(turn, **unknown) if self.unsolved else turn for turn in self.turns),
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
    solver: bool = False,
    say: Callable[[str], Any] | None = None,
) -> list[Episode]:
    """Play every job and return its episode, in the order of `jobs`. A slot that ends a game starts the next job.

    teacher: play with the skill text in context. solver: ask the environment's exact solver around every turn; an
    episode of which it cannot solve a state within its limit has no solver values in any turn, and `say` is told which
    and why, once a reason. Raises WorkbenchError where a first prompt does not fit the context.
    """
    slots = min(len(envs), len(jobs))
    session = policy.session(slots, limits.max_context)
    waiting = list(range(len(jobs)))[::-1]
    live: dict[int, tuple[int, _Game]] = {}
    episodes: dict[int, Episode] = {}
    told: set[str] = set()

    def start(slot: int) -> None:
        index = waiting.pop()
        job = jobs[index]
        state = job.begin(envs.envs[slot])
        skill = None
        if teacher:
            text = teacher.bank.text(state.info.get("kind", job.task.kind), state.observation, job.task.id)
            skill = np.asarray(policy.tokenizer.encode(text, add_special_tokens=False), np.int32)
        game = _Game(job, state, chat, limits, skill, teacher.insert_at if teacher else 0)
        if solver:
            game.solver = SolverAlong(envs.envs[slot])
        live[slot] = (index, game)

    def ask(slot: int) -> None:
        game = live[slot][1]
        session.begin(slot, game.prompt, game.uniforms[len(game.turns)])

    for slot in range(slots):
        start(slot)
        ask(slot)
    while live:
        sampled = session.step(chat.end_id, temperature)
        responses = {slot: chat.decode(s.ids) for slot, s in sampled.items()}
        actions = {slot: chat.style.command(responses[slot], live[slot][1].state.admissible) for slot in sampled}
        states = envs.step(actions)
        for slot, state in states.items():
            index, game = live[slot]
            if stop := game.take(sampled[slot], responses[slot], actions[slot], state):
                episodes[index] = game.episode(stop)
                if say and game.unsolved and game.unsolved not in told:
                    told.add(game.unsolved)
                    say(f"{game.job.task.id}: no solver values for this episode: {game.unsolved}")
                del live[slot]
                if progress:
                    progress(len(episodes), len(jobs))
                if waiting:
                    start(slot)
            if slot in live:
                ask(slot)
    return [episodes[i] for i in range(len(jobs))]
