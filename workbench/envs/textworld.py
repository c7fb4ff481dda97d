"""TextWorld's cooking games (Côté et al. 2018, arXiv 1806.11532), made here by seed and played in TextWorld's engine.

The generator, the text and the planner are those of the `textworld` package (its tw-cooking challenge, the game of the
First TextWorld Problems competition); nothing is downloaded, for the wheel holds the compiler too. Needs the
`textworld` extra (or `alfworld`, which brings it); importing this module does not.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError, unknown
from .base import Solution, State, Task, Unsolved, replay, step_advantage
from .memo import MemoEnv, Transitions

# heldout: other games of the train foods. valid and test: TextWorld's, with foods and preparations train never has.
SPLITS = {"train": "train", "heldout": "train", "valid": "valid", "test": "test"}
COUNTS = {"train": 200, "heldout": 50, "valid": 50, "test": 50}
FIRST_HELDOUT = 1_000_000  # a seed of the engine; training games have those below it
DEFAULT_PARAMS = "recipe=1,take=1,go=1,open=1,cook=1,cut=0,drop=0"
_ALLOWED = {"recipe": range(1, 6), "take": range(6), "go": (1, 6, 9, 12)} | dict.fromkeys(
    ("open", "cook", "cut", "drop"), (0, 1)
)

Snapshot = tuple[str, int, tuple[str, ...]]


@functools.cache
def version() -> str:
    """The engine's version; does not import it. Raises WorkbenchError where it is missing."""
    try:
        return metadata.version("textworld")
    except metadata.PackageNotFoundError:
        raise WorkbenchError('TextWorld is not installed: pip install "credit-workbench[textworld]"') from None


class TextWorldCooking:
    """One live game: find the kitchen, read the cookbook, gather and prepare what it asks for, eat the meal.

    params: the generator's settings, `name=number,...` over DEFAULT_PARAMS: recipe (ingredients, 1 to 5), take (of
    them to be fetched), go (rooms: 1, 6, 9, 12), open, cook, cut, drop (0 or 1). cache: where games are kept, by
    default `credit-workbench/textworld` under XDG_CACHE_HOME or ~/.cache; making one takes some seconds, once. counts:
    tasks a split lists; `reset` takes any seed.

    Splits: train and heldout (other games of the train foods), valid and test (TextWorld's own: foods, and
    preparations of train foods, that train never has). Task ids are `textworld/<split>/<seed>`; `params` makes them
    other games. Reward is the engine's score as a share of the most there is: 1.0 in all for a win. A spoilt
    ingredient loses the game. Text is the engine's without banner, status line and empty lines. A command outside
    `admissible` gets the engine's own answer and valid=False (a few that it understands all the same are played).

    `expert()` and `solution()` are the engine's planner, which plans again after every step and sees everything: it
    needs no cookbook and no look around. Its plans are not proved shortest (they grow by an undo where a command led
    astray, and are then shortened greedily), and they depend on the way a state was reached, so
    `solution().distance` is a plan's length, at least the fewest commands, not the fewest; inf only where the engine
    says the game is lost. Where it is not lost and the planner has no plan, `solution()` raises Unsolved.
    """

    splits = tuple(SPLITS)

    def __init__(self, params: str = "", cache: str | None = None, counts: Mapping[str, int] | None = None):
        version()
        self.params = _settings(params)
        self.cache = Path(cache) if cache else default_cache()
        self._counts = {**COUNTS, **(counts or {})}
        self._env: Any = None
        self._loaded = ""
        self._state: State | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise unknown("TextWorld split", split, SPLITS)
        return tuple(Task(f"textworld/{split}/{seed}", "textworld", split) for seed in range(self._counts[split]))

    def reset(self, task_id: str, seed: int = 0) -> State:
        """Start a game, made now if it is not in the cache. `seed` is unused: the task id names the game."""
        self._state = None
        if self._loaded != task_id:
            self.close()
            self._env = _start(self._file(task_id))
            self._loaded = task_id
        self._task, self._seed, self._actions = task_id, seed, []
        self._raw, self._score = self._env.reset(), 0
        self._info = {"task": self._raw["objective"], "kind": "textworld"}
        return self._read(self._raw["feedback"].split(self._raw["objective"], 1)[-1], True)

    def step(self, action: str) -> State:
        before = self._running()
        self._actions.append(action)
        if before.done:
            return self._read("", False)
        self._raw, _, _ = self._env.step(action)
        return self._read(self._raw["feedback"], action.strip() in before.admissible)

    def snapshot(self) -> Snapshot:
        """(task id, seed, commands so far)."""
        self._running()
        return self._task, self._seed, tuple(self._actions)

    def restore(self, snapshot: Snapshot) -> State:
        """Play a snapshot's commands again."""
        return replay(self, *snapshot)

    def expert(self) -> str | None:
        """The first command of the engine's plan; None once the game is over or where it has none."""
        plan = self._plan()
        return plan[0] if plan else None

    def solution(self) -> Solution:
        """The length of the engine's plan and its first command, as the class says."""
        if self._running().done:
            return Solution(0.0 if self._state.outcome else float("inf"))
        plan = self._plan()
        if not plan:
            raise Unsolved(f"task {self._task}: TextWorld's planner has no plan after {len(self._actions)} commands")
        return Solution(float(len(plan)), (plan[0],))

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        """`step_advantage` of the two plans."""
        return step_advantage(before, after)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env, self._loaded, self._state = None, "", None

    def fingerprint(self, task_id: str) -> str:
        """A digest of the game's parameters, its task and the engine's version."""
        return _digest(self.params, *_parse(task_id))

    def _running(self) -> State:
        if self._state is None:
            raise WorkbenchError("no TextWorld game is running: reset or restore first")
        return self._state

    def _plan(self) -> list[str]:
        return [] if self._running().done else list(self._raw["policy_commands"])

    def _read(self, text: str, valid: bool) -> State:
        raw = self._raw
        over, scored = raw["won"] or raw["lost"], raw["score"] - self._score
        self._score = raw["score"]
        self._state = State(
            observation=_clean(text),
            admissible=() if over else tuple(raw["admissible_commands"]),
            reward=scored / raw["max_score"],
            done=over,
            outcome=int(raw["won"]),
            valid=valid,
            info=dict(self._info),
        )
        return self._state

    def _file(self, task_id: str) -> Path:
        """The game's file, made unless it is whole in the cache."""
        split, seed = _parse(task_id)
        folder = self.cache / _digest(self.params, split, seed)
        if not _whole(folder):
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)
            _generate(self.params, split, seed, folder)
        return folder / "game.z8"


def _settings(params: str) -> dict[str, int]:
    """Raises WorkbenchError for a name or number that the generator would not take."""
    settings: dict[str, int] = {}
    for part in filter(None, f"{DEFAULT_PARAMS},{params}".split(",")):
        name, _, number = part.partition("=")
        if name not in _ALLOWED:
            raise unknown("TextWorld parameter", name, _ALLOWED)
        if not number.isdecimal() or int(number) not in _ALLOWED[name]:
            allowed = ", ".join(map(str, _ALLOWED[name]))
            raise WorkbenchError(f"TextWorld parameter {part!r}: {name} must be one of {allowed}")
        settings[name] = int(number)
    if settings["take"] > settings["recipe"]:
        raise WorkbenchError(
            f"TextWorld: take={settings['take']} of a recipe of {settings['recipe']}; at most that many"
        )
    return settings


def _parse(task_id: str) -> tuple[str, int]:
    parts = task_id.split("/")
    if len(parts) != 3 or parts[0] != "textworld" or not parts[2].isdecimal():
        raise WorkbenchError(f"task {task_id!r}: expected textworld/<{'|'.join(SPLITS)}>/<seed>")
    if parts[1] not in SPLITS:
        raise unknown("TextWorld split", parts[1], SPLITS)
    if int(parts[2]) >= FIRST_HELDOUT:
        raise WorkbenchError(f"task {task_id!r}: seeds are below {FIRST_HELDOUT}")
    return parts[1], int(parts[2])


def _digest(params: Mapping[str, int], split: str, seed: int) -> str:
    named = json.dumps([version(), dict(params), SPLITS[split], split == "heldout", seed], sort_keys=True)
    return blake2b(named.encode(), digest_size=16).hexdigest()


def _generate(params: Mapping[str, int], split: str, seed: int, folder: Path) -> None:
    """Make a game in `folder`, which appears whole or not at all. Raises WorkbenchError where that fails."""
    try:
        import textworld
        from textworld.challenges import CHALLENGES
        from textworld.generator import compile_game
    except ImportError as error:
        raise WorkbenchError(f"TextWorld does not import ({error}): reinstall textworld") from None
    flags = {name: bool(params[name]) for name in ("open", "cook", "cut", "drop")}
    settings = {**params, **flags, "recipe_seed": 0, "split": SPLITS[split]}
    options = textworld.GameOptions()
    options.seeds = seed + FIRST_HELDOUT * (split == "heldout")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
            options.path = str(Path(made) / "game.z8")
            with _quiet():
                compile_game(CHALLENGES["tw-cooking"][1](settings, options), options)
            whole = Path(made) / "whole"
            whole.mkdir()
            digests = {}
            for name in ("game.z8", "game.json"):
                digests[name] = _sum(Path(made) / name)
                os.replace(Path(made) / name, whole / name)
            (whole / "sums.json").write_text(json.dumps(digests))
            with contextlib.suppress(FileExistsError):
                os.rename(whole, folder)  # on a folder that another process has made meanwhile it fails: the same game
    except OSError as error:
        if not _whole(folder):
            raise WorkbenchError(f"cannot make TextWorld game {folder}: {error}") from None
    except Exception as error:  # the generator's own checks, and its compiler's
        reason = (str(error).splitlines() or [""])[0]
        raise WorkbenchError(
            f"TextWorld cannot make textworld/{split}/{seed} of {dict(params)}: {type(error).__name__} {reason}"
        ) from None


def _sum(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _whole(folder: Path) -> bool:
    """Whether a game lies there undamaged."""
    try:
        sums = json.loads((folder / "sums.json").read_text())
        return all(_sum(folder / name) == sums[name] for name in ("game.z8", "game.json"))
    except (OSError, ValueError, KeyError):
        return False


def _start(path: Path) -> Any:
    import textworld

    wanted = ("admissible_commands", "policy_commands", "won", "lost", "score", "max_score", "objective")
    with _quiet():
        return textworld.start(str(path), textworld.EnvInfos(**dict.fromkeys(wanted, True)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the interpreter's warning that it knows no walkthrough of a game made here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Game '.*' is not fully supported")
        yield


def _clean(text: str) -> str:
    """The engine's text without its prompt and status line, and without empty lines."""
    text = re.split(r"\n\s*>[^\n]*$|\n\s*\*\*\* ", text.rstrip(), maxsplit=1)[0]
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def default_cache() -> Path:
    """`credit-workbench/textworld` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit-workbench" / "textworld"


def memoised(
    params: str = "",
    cache: str | None = None,
    counts: Mapping[str, int] | None = None,
    path: str | Transitions | None = None,
) -> MemoEnv:
    """A TextWorldCooking behind a memo, by default in the cache folder; `path` is as `MemoEnv` takes it.

    A state is the sequence of commands that led to it, for the planner's word may depend on that.
    """
    return MemoEnv(
        lambda: TextWorldCooking(params, cache, counts),
        path or (Path(cache) if cache else default_cache()) / "transitions",
        fingerprint=TextWorldCooking.fingerprint,
    )
