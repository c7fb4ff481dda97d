"""Heavy thinking (LongCat-Flash-Thinking-2601, arXiv 2601.16725): parallel attempts, then one that reads them.

Stage one draws K answers independently. In stage two a summariser sees the answers alone, in a shuffled order, and
gives the final one; it may go on for further rounds, with what it said before as its memory. The report trains that
stage too; here it is an evaluation, with the weights as they are, against a majority vote over as many rollouts.

In a text world an answer is the list of commands that an attempt played: no observations, no outcome. The summariser is
the policy itself, which plays the game once more with those lists in its first message. The vote takes the list that
most attempts share, the earliest of equals: a game has no short answer to count, so it rarely finds two alike.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import polars as pl
import torch

from .envs.base import EnvBatch, Task
from .errors import WorkbenchError
from .figures.curves import Z95, wilson
from .policy import Policy
from .prompts import Chat
from .records import Episode
from .rollout import Job, Limits, Teacher, play
from .runs.folder import RunFolder
from .sampling import panel_tasks
from .settings import from_parameters
from .train import Trainer

Answer = TypeVar("Answer", bound=Hashable)
Summarise = Callable[[Sequence[Answer], Sequence[Answer]], Answer]

_ATTEMPT, _ORDER, _SUMMARY = 11, 12, 13  # purposes of a random draw
ARMS = ("single", "vote", "heavy", "any")


def majority(answers: Sequence[Answer]) -> Answer:
    """The most frequent answer, the earliest of equals. Raises WorkbenchError where there is none."""
    if not answers:
        raise WorkbenchError("heavy thinking: no answers to vote on")
    count = Counter(answers)
    return max(count, key=count.__getitem__)


def think(
    answers: Sequence[Answer], summarise: Summarise, rng: np.random.Generator, rounds: int = 1, orders: int = 1
) -> Answer:
    """The final answer over parallel ones.

    summarise: (answers in the order shown, earlier summaries) -> an answer. rounds: how often it goes over them;
    orders: shuffled orders that it is shown in each round, whose summaries are put to a vote. The order of `answers`
    decides nothing but what a vote between equals takes. Raises WorkbenchError without answers, rounds or orders.
    """
    _at_least_one(rounds=rounds, orders=orders)
    if not answers:
        raise WorkbenchError("heavy thinking: no answers to summarise")
    memory: list[Answer] = []
    for _ in range(rounds):
        shown = [[answers[i] for i in rng.permutation(len(answers))] for _ in range(orders)]
        memory.append(majority([summarise(each, tuple(memory)) for each in shown]))
    return memory[-1]


def plan_of(episode: Episode) -> tuple[str, ...]:
    """What an attempt answers: the commands that it played."""
    return tuple(turn.action for turn in episode.turns)


class Attempts:
    """The note a summariser reads before it plays, by task: the plans in the order given, then earlier summaries."""

    def __init__(self, plans: Mapping[str, Sequence[Sequence[str]]], memory: Mapping[str, Sequence[Sequence[str]]]):
        self.plans, self.memory = plans, memory

    def text(self, kind: str, observation: str = "", task: str = "") -> str:
        lines = ["Earlier attempts at this task, some of which failed:"]
        lines += [f"{n}. {'; '.join(plan)}" for n, plan in enumerate(self.plans[task], 1)]
        lines += [f"Summary {n}. {'; '.join(plan)}" for n, plan in enumerate(self.memory.get(task, ()), 1)]
        return "\n".join(lines) + "\n\n"


def compare(
    policy: Policy,
    chat: Chat,
    envs: EnvBatch,
    tasks: Sequence[Task],
    limits: Limits,
    key: tuple[int, ...],
    attempts: int = 4,
    rounds: int = 1,
    temperature: float = 1.0,
) -> pl.DataFrame:
    """One row a game: single (mean outcome), vote, heavy and any (the best that a perfect judge could pick) at the same
    number of rollouts, attempts + rounds: the vote plays `rounds` attempts more than the summariser reads.

    plans: how many lists of commands differ. <arm>_tokens: sampled; <arm>_read: others in context, each counted once
    an episode, of which the summariser's include the note. key: integers the draws derive from. Raises WorkbenchError
    on tasks that repeat, none at all, or a note that does not fit the context.
    """
    _at_least_one(attempts=attempts, rounds=rounds)
    ids = [task.id for task in tasks]
    if not ids or len(set(ids)) < len(ids):
        raise WorkbenchError(f"heavy thinking: tasks must be given, each once; got {len(ids)}, {len(set(ids))} of them")
    per = attempts + rounds
    jobs = [Job(task, n, (*key, _ATTEMPT, n, k)) for n, task in enumerate(tasks) for k in range(per)]
    played = play(policy, chat, envs, jobs, limits, temperature)
    each = [played[n * per : (n + 1) * per] for n in range(len(ids))]
    shown = {
        task: [plan_of(own[k]) for k in np.random.default_rng([*key, _ORDER, n]).permutation(attempts)]
        for n, (task, own) in enumerate(zip(ids, each, strict=True))
    }
    memory: dict[str, list[tuple[str, ...]]] = {task: [] for task in ids}
    summaries: list[list[Episode]] = []
    for turn in range(rounds):
        jobs = [Job(task, n, (*key, _SUMMARY, n, turn)) for n, task in enumerate(tasks)]
        so_far = {task: tuple(own) for task, own in memory.items()}
        note = Teacher(Attempts(shown, so_far), chat.insertion_point("user"))
        summaries.append(play(policy, chat, envs, jobs, limits, temperature, note))
        for task, episode in zip(ids, summaries[-1], strict=True):
            memory[task].append(plan_of(episode))
    rows = []
    for n, own in enumerate(each):
        plans = [plan_of(e) for e in own]
        heavy = [*own[:attempts], *(done[n] for done in summaries)]
        rows.append({
            "task": ids[n], "kind": own[0].kind, "single": float(np.mean([e.outcome for e in own])),
            "vote": own[plans.index(majority(plans))].outcome, "heavy": heavy[-1].outcome,
            "any": max(e.outcome for e in own), "plans": len(set(plans)),
            "vote_tokens": _sampled(own), "heavy_tokens": _sampled(heavy),
            "vote_read": _read(own), "heavy_read": _read(heavy),
        })  # fmt: skip
    return pl.DataFrame(rows)


def of_run(
    run: RunFolder, panel: str = "", games: int = 96, attempts: int = 4, rounds: int = 1, message: Callable = print
) -> pl.DataFrame:
    """`compare` with a run's last checkpoint, on the first of the games its panel is evaluated on (default: held out).

    Raises WorkbenchError where the run has no checkpoint or its environment no such panel.
    """
    found = run.latest_checkpoint()
    if found is None:
        raise WorkbenchError(f"{run.path}: no checkpoint is in it, so there is no policy to play")
    trainer = Trainer(from_parameters(run.config), run, message)
    state = torch.load(found / "trainer.pt", map_location=trainer.policy.device, weights_only=True)
    trainer.policy.model.load_state_dict(state["model"])
    splits, seed = trainer.envs.envs[0].splits, trainer.config.eval_seed
    panel = panel or splits[min(1, len(splits) - 1)]
    if panel not in splits:
        raise WorkbenchError(f"{run.path}: its environment has no panel {panel!r}; known: {', '.join(splits)}")
    chosen = panel_tasks(trainer.envs.tasks(panel), trainer.config.eval_seed, games)
    message(f"step {state['step']}: {len(chosen)} games of {panel}, {attempts} attempts and {rounds} that read them")
    return compare(
        trainer.policy, trainer.chat, trainer.envs, chosen, trainer.limits, (seed,), attempts, rounds,
        trainer.config.eval_temperature,
    )  # fmt: skip


def summary(games: pl.DataFrame) -> dict[str, float]:
    """Success of each arm; heavy less vote with a 95 % interval over games (paired, normal); tokens of both a game."""
    if games.is_empty():
        raise WorkbenchError("heavy thinking: no games were played")
    apart = (games["heavy"] - games["vote"]).cast(pl.Float64)
    half = Z95 * float(apart.std() or 0.0) / games.height**0.5
    means = {name: float(games[name].mean()) for name in (*ARMS, "plans")}
    cost = ("vote_tokens", "heavy_tokens", "vote_read", "heavy_read")
    gain = float(apart.mean())
    return {
        "games": games.height, **means, "gain": gain, "gain_low": gain - half, "gain_high": gain + half,
        **{name: float(games[name].mean()) for name in cost},
    }  # fmt: skip


def text(games: pl.DataFrame) -> str:
    """The summary as lines to print."""
    s, n = summary(games), games.height
    names = {"single": "one attempt", "vote": "majority vote", "heavy": "heavy thinking", "any": "best attempt"}
    lines = []
    for arm, name in names.items():
        low, high = wilson(s[arm] * n, n)
        cost = f"{s[f'{arm}_tokens']:6.0f} sampled  {s[f'{arm}_read']:6.0f} read" if f"{arm}_tokens" in s else ""
        interval = "" if arm == "single" else f"[{low:.2f}, {high:.2f}]"  # a mean over attempts of one game
        lines.append(f"{name:15} {s[arm]:.2f}  {interval:12}  {cost}".rstrip())
    verdict = "no difference is shown" if s["gain_low"] <= 0 <= s["gain_high"] else "beyond chance"
    lines.append(
        f"heavy less vote {s['gain']:+.2f} [{s['gain_low']:+.2f}, {s['gain_high']:+.2f}] over {n} games, {verdict}; "
        f"{s['plans']:.1f} different plans a game"
    )
    return "\n".join(lines)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise WorkbenchError(f"heavy thinking: {name} must be at least 1, got {count}")


def _sampled(episodes: Sequence[Episode]) -> int:
    return sum(len(turn.response_ids) for e in episodes for turn in e.turns)


def _read(episodes: Sequence[Episode]) -> int:
    """Tokens in context that were not sampled, each once: where prompts extend each other, those of the last."""
    read = 0
    for e in episodes:
        if e.contiguous:
            read += len(e.turns[-1].prompt_ids) - sum(len(turn.response_ids) for turn in e.turns[:-1])
        else:
            read += sum(len(turn.prompt_ids) for turn in e.turns)
    return read
