"""ALFWorld (arXiv 2010.03768) through its own text engine: the released games, or games made from what it ships.

All text, admissible commands, rewards and wins are the engine's. Text is given as the engine gives it, the welcome line
included. Needs the `alfworld` extra; importing this module does not.
"""

import difflib
import json
import os
import re
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError, unknown
from ..solvers.alfworld import solve
from . import alfworld_games as games
from .alfworld_engine import Engine, Reply, borrow, give_back, versions
from .alfworld_expert import goal_of, next_command
from .base import Solution, State, Task, Unsolved, step_advantage
from .memo import MemoEnv, Transitions

RELEASE = "json_2.1.1"
RELEASED_SPLITS = ("train", "valid_seen", "valid_unseen")
GAME_FILE = "game.tw-pddl"

Snapshot = tuple[str, int, tuple[str, ...]]


class AlfworldEnv:
    """One live ALFWorld game.

    data: folder that holds `json_2.1.1/<split>/<task>/<trial>/game.tw-pddl`; "generated" for games made here; by
    default the folder ALFWORLD_DATA names if that is set, else generated games. cache: where proved games are kept, by
    default `credit-workbench/alfworld` under XDG_CACHE_HOME or ~/.cache. per_kind: how many generated games of each
    task type `tasks` lists; `reset` takes any seed.

    Splits: those of train, valid_seen and valid_unseen that `data` has; for generated games train and heldout (other
    games in the official train rooms, as valid_seen is) and unseen (the official unseen rooms). `reset` takes any
    generated id, whatever `data` is. `info` holds the task sentence (`task`) and the task type (`kind`).
    An episode has no step limit of its own, and the engine plays on after a win. Reward is the engine's score: 1.0
    where the game is won, else 0.0. The engine starts with the first game; each AlfworldEnv has its own (about 15 MB).
    """

    def __init__(self, data: str | None = None, cache: str | None = None, per_kind: int = 200):
        root = data or _named_folder() or "generated"
        self.cache = Path(cache) if cache else default_cache()
        self.per_kind = per_kind
        self._root = None if root == "generated" else Path(root)
        self._listed: dict[str, tuple[Task, ...]] = {}
        self._engine: Engine | None = None
        self._task = ""
        self._seed = 0
        self._actions: list[str] = []
        self._state: State | None = None
        self._info: dict[str, str] = {}
        if not 0 < per_kind <= games.FIRST_HELDOUT:
            raise WorkbenchError(f"per_kind must be 1 to {games.FIRST_HELDOUT}, got {per_kind}")
        if self._root is None:
            self.splits: tuple[str, ...] = games.SPLITS
        else:
            self.splits = tuple(s for s in RELEASED_SPLITS if (self._root / RELEASE / s).is_dir())
            if not self.splits:
                raise WorkbenchError(f"ALFWorld data {root}: expected {RELEASE}/<{'|'.join(RELEASED_SPLITS)}>/ in it")

    def tasks(self, split: str) -> Sequence[Task]:
        """The games of a split; generated ones in an order whose every prefix has the task types evenly."""
        if split not in self.splits:
            raise unknown("ALFWorld split", split, self.splits)
        if self._root is None:
            return tuple(Task(game.id, game.kind, split) for game in games.listing(split, self.per_kind))
        if split not in self._listed:
            self._listed[split] = _released(self._root, split)
        return self._listed[split]

    def reset(self, task_id: str, seed: int = 0) -> State:
        """Start a game. `seed` is kept in snapshots and otherwise unused: the engine has no randomness."""
        reply = self._start(task_id)
        self._task, self._seed, self._actions = task_id, seed, []
        sentence = re.search(r"Your task is to: .*", reply.feedback)
        self._info = {"task": sentence[0] if sentence else "", "kind": _kind(task_id)}
        self._state = self._read(reply)
        return self._state

    def step(self, action: str) -> State:
        """Play one command; `valid` is whether the engine found an action for it."""
        self._running()
        self._state = self._read(self._engine.step(action))
        self._actions.append(action)
        return self._state

    def snapshot(self) -> Snapshot:
        """(task id, seed, commands so far)."""
        self._running()
        return self._task, self._seed, tuple(self._actions)

    def restore(self, snapshot: Snapshot) -> State:
        """Return to a snapshot by playing its commands again, from here where it continues the running game."""
        task_id, seed, actions = snapshot[0], snapshot[1], tuple(snapshot[2])
        done = len(self._actions)
        if self._state is None or (self._task, self._seed) != (task_id, seed) or actions[:done] != tuple(self._actions):
            self.reset(task_id, seed)
            done = 0
        for action in actions[done:]:
            self.step(action)
        return self._running()

    def expert(self) -> str | None:
        """The next command of a player who sees everything; None once won, or where there is no way on."""
        state = self._running()
        goal = goal_of(self._game["pddl_problem"])
        command = goal and next_command(goal, self._engine.facts(), self._engine.names())
        return command if command in state.admissible and not state.done else None

    def solution(self) -> Solution:
        """The fewest commands to the goal from here, by `solvers.alfworld`: exact, and no planner's length.

        Raises Unsolved over the search's limit, and for a goal that is not of the six kinds.
        """
        if self._running().done:
            return Solution(0.0)
        goal = goal_of(self._game["pddl_problem"])
        if goal is None:
            raise Unsolved(f"task {self._task}: its goal is none of ALFWorld's six kinds")
        try:
            return solve(goal, self._engine.facts(), self._engine.names())
        except Unsolved as error:
            raise Unsolved(f"task {self._task}: {error}") from None

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        """`step_advantage`: no command of ALFWorld is random, and none leads where the goal is out of reach."""
        return step_advantage(before, after)

    def close(self) -> None:
        """Give the engine back for other games of this process; `reset` takes one again."""
        if self._engine:
            self._give_back()
        self._engine, self._state = None, None

    def walkthrough(self, task_id: str) -> list[str]:
        """A winning sequence of commands: the game file's walkthrough, which for generated games is their proof."""
        return list(self._load(task_id).get("walkthrough") or ())

    def fingerprint(self, task_id: str) -> str:
        """A digest of the game's contents and the engine's versions. Proves a generated game not seen before."""
        path = self._file(task_id)
        if not path.is_file():
            self._load(task_id)
        digest = blake2b(path.read_bytes(), digest_size=16)
        digest.update(versions().encode())
        return digest.hexdigest()

    def identity(self) -> str | None:
        """A digest equal for two states of a game only if every later answer is equal (`Engine.identity`)."""
        self._running()
        return self._engine.identity()

    def _running(self) -> State:
        if self._state is None:
            raise WorkbenchError("no ALFWorld game is running: reset or restore first")
        return self._state

    def _read(self, reply: Reply) -> State:
        return State(
            observation=reply.feedback,
            admissible=reply.admissible,
            reward=reply.score,
            done=reply.won,
            outcome=int(reply.won),
            valid=reply.accepted,
            info=dict(self._info),
        )

    def _start(self, task_id: str) -> Reply:
        self._state = None
        game = self._load(task_id)
        try:
            reply = self._live().reset(game)
        except WorkbenchError:
            raise
        except (Exception, SystemExit) as error:  # the PDDL translator exits the process on bad input
            self.close()
            reason = (str(error).splitlines() or [""])[0]
            raise WorkbenchError(
                f"game file {self._file(task_id)} does not load in ALFWorld's engine: {type(error).__name__} {reason}"
            ) from None
        self._game = game
        return reply

    def _live(self) -> Engine:
        if self._engine is None:
            self._engine = borrow()
            self._give_back = weakref.finalize(self, give_back, self._engine)
        return self._engine

    def _file(self, task_id: str) -> Path:
        if task_id.startswith("generated/"):
            return games.proved_path(games.parse(task_id), self.cache)
        if self._root is None:
            raise WorkbenchError(f"task {task_id!r} is a released game: give data=FOLDER or set ALFWORLD_DATA")
        return self._root / task_id

    def _load(self, task_id: str) -> dict[str, Any]:
        if task_id.startswith("generated/"):
            task = games.parse(task_id)
            kept = games.kept_game(task, self.cache)
            if kept:
                return kept
            other = borrow()  # the running game stays as it is
            try:
                return games.proved_game(task, self.cache, other)
            finally:
                give_back(other)
        path = self._file(task_id)
        if not path.is_file() or path.name != GAME_FILE:
            known = [task.id for split in self.splits for task in self.tasks(split)]
            near = difflib.get_close_matches(task_id, known, n=1, cutoff=0)
            raise WorkbenchError(f"game file {path} does not exist" + (f"; did you mean {near[0]!r}?" if near else ""))
        return _read_game(path)


def _kind(task_id: str) -> str:
    """The task type, which a released game's folder is named after."""
    return task_id.split("/")[2].split("-")[0]


def _read_game(path: Path) -> dict[str, Any]:
    """A game file's contents. Raises WorkbenchError naming the file where it is torn or lacks a part."""
    try:
        text = path.read_text()
        game = json.loads(text)
    except OSError as error:
        raise WorkbenchError(f"game file {path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise WorkbenchError(
            f"game file {path} is torn: not valid JSON at character {error.pos} of {len(text)}"
        ) from None
    except UnicodeDecodeError as error:
        raise WorkbenchError(f"game file {path} is torn: not text at byte {error.start}") from None
    wanted = ("pddl_domain", "grammar", "pddl_problem")
    for key in wanted:
        if not isinstance(game, dict) or not isinstance(game.get(key), str):
            raise WorkbenchError(f"game file {path} has no {key!r}: expected {', '.join(wanted)}")
    return game


def _released(root: Path, split: str) -> tuple[Task, ...]:
    """Games the official loader plays: the six task types, nothing sliced, none marked unsolvable."""
    tasks = []
    for path in sorted((root / RELEASE / split).glob(f"*/*/{GAME_FILE}")):
        name = path.relative_to(root).as_posix()
        if _kind(name) not in games.KINDS or "Sliced" in name:
            continue
        if not re.search(rb'"solvable":\s*false', path.read_bytes()):
            tasks.append(Task(name, _kind(name), split))
    return tuple(tasks)


def _named_folder() -> str | None:
    """What ALFWORLD_DATA names; but importing alfworld sets it to a folder of its own, which is often empty."""
    named = os.environ.get("ALFWORLD_DATA")
    if named and Path(named) == Path.home() / ".cache" / "alfworld" and not (Path(named) / RELEASE).is_dir():
        return None
    return named


def default_cache() -> Path:
    """`credit-workbench/alfworld` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit-workbench" / "alfworld"


def memoised(
    data: str | None = None, cache: str | None = None, per_kind: int = 200, path: str | Transitions | None = None
) -> MemoEnv:
    """An AlfworldEnv behind a memo, by default in the cache folder; `path` is as `MemoEnv` takes it."""
    return MemoEnv(
        lambda: AlfworldEnv(data, cache, per_kind),
        path or (Path(cache) if cache else default_cache()) / "transitions",
        fingerprint=AlfworldEnv.fingerprint,
        identity=AlfworldEnv.identity,
    )
