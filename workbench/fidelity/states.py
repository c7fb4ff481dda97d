"""The states of recorded episodes, brought back to life: commands replayed, snapshots taken, prompts as recorded."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from ..envs.base import Env, SolvedEnv, SolverAlong, State, Task
from ..envs.memo import MemoEnv
from ..errors import WorkbenchError
from ..records import Episode
from ..rollout import Start

WON, LOST = "won", "lost"  # keys of states whose value is decided
LIMITS = ("max_turns", "invalid_actions", "context_full")


@dataclass(frozen=True, eq=False)
class Place:
    """An undecided state: what a job needs to go on from it. depth: turns played before it."""

    key: str
    task: Task
    group: int
    seed: int
    start: Start

    @property
    def depth(self) -> int:
        return len(self.start.turns)


@dataclass(eq=False)
class Restored:
    """paths: of each episode the keys of its K + 1 states, the last one decided; places: the undecided ones by key;
    excluded: episodes that could not be brought back, and why; solver: of each episode the solver's advantage of its K
    turns, where the environment has a solver; unsolved: episodes a state of which it could not solve, and why."""

    paths: dict[int, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    excluded: dict[int, str] = field(default_factory=dict)
    solver: dict[int, tuple[float, ...]] = field(default_factory=dict)
    unsolved: dict[int, str] = field(default_factory=dict)


def restore(env: Env, episodes: Mapping[int, Episode], whole: bool = True) -> Restored:
    """Replay each episode's recorded commands from a reset and keep every state on the way.

    Two states are one where task, seed, commands so far and the tokens that the policy reads next are the same; what
    was rolled for one holds for the other. whole: the policy reads its whole conversation; where it reads a fresh
    prompt every turn, states are one that have the same snapshot after as many turns. A state without a win left, as an
    exact solver says, is lost. An episode whose observations, validity of commands or end are not those recorded is
    excluded.
    """
    out = Restored()
    for number, episode in episodes.items():
        try:
            path, places = _replay(env, episode, out, number, whole)
        except WorkbenchError as error:
            out.excluded[number] = f"{episode.task}: {error}"
            out.solver.pop(number, None)
            out.unsolved.pop(number, None)
            continue
        out.paths[number] = path
        out.places |= {key: place for key, place in places.items() if key not in out.places}
    return out


def _replay(
    env: Env, episode: Episode, out: Restored, number: int, whole: bool
) -> tuple[tuple[str, ...], dict[str, Place]]:
    task, path, places = Task(episode.task, episode.kind, episode.split), [], {}
    state = env.reset(episode.task, episode.seed)
    solver, advantages = SolverAlong(env) if has_solver(env) else None, []
    for k, turn in enumerate(episode.turns):
        if state.done:
            raise WorkbenchError(f"the game is over before turn {k + 1} of {len(episode.turns)}")
        if state.observation != turn.observation:
            raise WorkbenchError(
                f"turn {k + 1} was recorded with {_quoted(turn.observation)}, the game now says "
                f"{_quoted(state.observation)}"
            )
        if solver and solver.solution and solver.solution.lost:
            if episode.outcome:
                raise WorkbenchError(f"the solver sees no win left before turn {k + 1}, and the game was won")
            path.append(LOST)
        else:
            snapshot = env.snapshot()
            key = state_key(episode, k, None if whole else snapshot)
            path.append(key)
            places[key] = Place(
                key, task, episode.group, episode.seed, Start(snapshot, episode.turns[:k], turn.prompt_ids)
            )
        state = env.step(turn.action)
        if state.valid != turn.valid:
            said = ("was not accepted", "was accepted")
            raise WorkbenchError(
                f"the command of turn {k + 1} {said[turn.valid]} when it was recorded, and now {said[state.valid]}"
            )
        if solver and (judged := solver.turn(state)):
            advantages.append(judged[2])
    _check_end(episode, state)
    path.append(WON if episode.outcome else LOST)
    if solver and solver.why:
        out.unsolved[number] = f"{episode.task}: {solver.why}"
    elif solver:
        out.solver[number] = tuple(advantages)
    return tuple(path), places


def has_solver(env: Env) -> bool:
    """Whether an environment, or the one behind its memo, offers an exact solver."""
    return isinstance(env.inner if isinstance(env, MemoEnv) else env, SolvedEnv)


def state_key(episode: Episode, turn: int, snapshot: Any = None) -> str:
    """A digest of the state before a turn: task, seed, the tokens the policy reads, and the commands so far; or instead
    of them a snapshot that JSON can hold, how many commands there were, and how many were not accepted."""
    commands = [t.action for t in episode.turns[:turn]]
    if snapshot is not None:
        with suppress(TypeError, ValueError):
            commands = [json.dumps([turn, sum(not t.valid for t in episode.turns[:turn]), snapshot], sort_keys=True)]
    digest = blake2b(digest_size=16)
    for part in (episode.task, str(episode.seed), *commands):
        digest.update(part.encode() + b"\0")
    digest.update(episode.turns[turn].prompt_ids.tobytes())
    return digest.hexdigest()


def _check_end(episode: Episode, state: State) -> None:
    won = int(state.done and state.outcome)
    if won != episode.outcome:
        raise WorkbenchError(f"it was recorded as {_ended(episode.outcome)} and now ends {_ended(won)}")
    if not state.done and episode.stop_reason and episode.stop_reason not in LIMITS:
        raise WorkbenchError(f"it was recorded as {episode.stop_reason}, and the game is not over now")


def _ended(outcome: int) -> str:
    return "won" if outcome else "not won"


def _quoted(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= width else line[: width - 1] + "…")


def choose(groups: Sequence[int], wanted: int, seed: int) -> list[int]:
    """Places of at most `wanted` episodes, spread over groups: one of each, in an order that derives from the seed,
    then a second of each, and so on. Few episodes of many groups tell more than many of few, which share states."""
    rng = np.random.default_rng([seed, 23])
    order = {group: n for n, group in enumerate(rng.permutation(sorted(set(groups))).tolist())}
    rounds: dict[int, int] = {}
    ranked = []
    for i in rng.permutation(len(groups)).tolist():
        rounds[groups[i]] = rounds.get(groups[i], -1) + 1
        ranked.append((rounds[groups[i]], order[groups[i]], i))
    return sorted(i for *_, i in sorted(ranked)[:wanted])
