"""ALFWorld's own text engine: loaded on demand, its parsers memoised, and read (never steered) by what is written here.

The engine is TextWorld's PddlEnv under ALFWorld's two wrappers (`AlfredDemangler`, `AlfredInfos`), as
`alfworld.agents.environment.alfred_tw_env` builds it. Its planner library, fast-downward, is GPL-3, hence the extra.
"""

import copy
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import WorkbenchError

Fact = tuple[str, ...]


@functools.cache
def versions() -> str:
    """The engine's packages and versions, for keys of caches; does not import them."""
    try:
        return " ".join(f"{p}-{metadata.version(p)}" for p in ("alfworld", "textworld", "fast_downward_textworld"))
    except metadata.PackageNotFoundError as error:
        raise WorkbenchError(
            f"ALFWorld's engine is not installed ({error.name} is missing): "
            'pip install "credit-workbench[alfworld]" (building it needs cmake and a C++ compiler)'
        ) from None


@functools.cache
def packages() -> SimpleNamespace:
    """Import the engine once, with its pure functions memoised.

    `alfworld.info` makes the folder ALFWORLD_DATA (by default in the home folder) and sets that variable for the
    whole process when imported; it is pointed at its own package meanwhile, and the variable is put back.
    Raises WorkbenchError where the packages are missing.
    """
    versions()
    before = os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = str(metadata.distribution("alfworld").locate_file("alfworld/data"))
    try:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
        from alfworld.gen import constants, goal_library
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
        from textworld.envs import PddlEnv
        from textworld.envs.pddl import logic, textgen
        from textworld.logic import Rule
    except ImportError as error:
        raise WorkbenchError(
            f'ALFWorld\'s engine does not import ({error}): pip install "credit-workbench[alfworld]"'
        ) from None
    finally:
        os.environ.pop("ALFWORLD_DATA")
        if before is not None:
            os.environ["ALFWORLD_DATA"] = before
    unplanned = _memoise(logic, textgen, Rule)

    def start() -> Any:
        infos = textworld.EnvInfos(admissible_commands=True, won=True, extras=["gamefile"])
        return AlfredInfos(AlfredDemangler(PddlEnv(infos)))

    return SimpleNamespace(
        start=start,
        unplanned=unplanned,
        constants=constants,
        goals=goal_library.gdict,
        domain=Path(ALFRED_PDDL_PATH).read_text(),
        grammar=Path(ALFRED_TWL2_PATH).read_text(),
        layouts=Path(constants.__file__).parent / "layouts",
    )


def _memoise(logic: Any, textgen: Any, Rule: Any) -> Callable[[], AbstractContextManager]:
    """Keep what the engine otherwise computes again on every step; its text stays the same byte for byte.

    Grammar symbols carry their context, so a parsed phrase is handed out as a copy; parsed queries are never
    written to. Contexts hold entities and placeholders that nothing changes after loading, so their tables are
    copied and not their contents. Phrases are evaluated in a scope of their own, where TextWorld 1.7 writes to
    `locals()`, which Python 3.13 ignores. Returns a context in which a game loads without the second translation that
    only the planner reads.
    """
    parse = functools.lru_cache(65536)(textgen._parse_and_convert)
    textgen._parse_and_convert = lambda *args, **kwargs: copy.deepcopy(parse(*args, **kwargs))
    Rule.parse_conjunctive_query = staticmethod(functools.lru_cache(65536)(Rule.parse_conjunctive_query))

    def copy_context(context: dict[str, Any]) -> dict[str, Any]:
        return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}

    textgen.copy_context = copy_context

    def derive(self: Any, context: dict[str, Any] | None = None) -> list[Any]:
        context = context or self.context
        scope = {"self": self, "context": context, **context["variables"]}
        return [textgen.TerminalSymbol(eval(self.expression, vars(textgen), scope))]

    textgen.EvalSymbol.derive = derive
    translate = functools.lru_cache(32)(logic.fast_downward.pddl2sas)
    planner_wanted = True

    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        if optimize and not planner_wanted:
            return None, ""
        argv = sys.argv
        try:
            return translate(domain, problem, verbose=verbose, optimize=optimize)
        finally:
            sys.argv = argv  # the translator replaces it

    @contextmanager
    def unplanned() -> Iterator[None]:
        nonlocal planner_wanted
        planner_wanted = False
        try:
            yield
        finally:
            planner_wanted = True

    logic.fast_downward.pddl2sas = pddl2sas
    return unplanned


@dataclass(frozen=True)
class Reply:
    """The engine's answer, as it gave it. accepted: whether it found an action for the command (True on reset)."""

    feedback: str
    admissible: tuple[str, ...]
    score: float
    won: bool
    accepted: bool


class Engine:
    """One live game in ALFWorld's engine."""

    def __init__(self):
        self._env = packages().start()
        self._game: dict[str, Any] = {}

    def reset(self, game: dict[str, Any]) -> Reply:
        """Start a game, given as the contents of a game.tw-pddl file (`pddl_domain`, `grammar`, `pddl_problem`)."""
        with packages().unplanned():
            if game != self._game:
                self._game = {}
                self._env.load(dict(game))
                self._game = game
                self._observed = observed_predicates(game["pddl_domain"], game["grammar"], game["pddl_problem"])
            return self._reply(self._env.reset(), 0.0, True)

    def step(self, command: str) -> Reply:
        state, score, _ = self._env.step(command)
        return self._reply(state, score, state["_last_action"] is not None)

    def _reply(self, state: Any, score: float, accepted: bool) -> Reply:
        return Reply(state.feedback, tuple(state["admissible_commands"]), float(score), bool(state["won"]), accepted)

    def facts(self) -> set[Fact]:
        """What holds now, as the engine keeps it: ("inreceptacle", "mug_bar_...", "desk_bar_..."), ...; lower case."""
        return {(fact.name, *fact.names) for fact in self._env._pddl_state.facts}

    def names(self) -> dict[str, str]:
        """Display name of each entity: "mug_bar_..." -> "mug 1"."""
        return {key: info.name for key, info in self._env._entity_infos.items()}

    def identity(self) -> str | None:
        """A digest of all that can influence any later answer, or None where that cannot be shown.

        The engine's moving parts are its planner state, its table of facts, and the list of commands it made from
        them. Facts whose predicate no rule, goal or phrase reads cannot matter (`observed_predicates`); the others
        are written by unconditional effects only, which the table of facts mirrors one for one. So equal digests
        mean equal answers to every command from here on, whichever way the two states were reached.
        """
        if self._observed is None:
            return None
        kept = sorted(f for f in self.facts() if f[0].removeprefix("not_") in self._observed)
        return blake2b(repr(kept).encode(), digest_size=16).hexdigest()


_idle: list[Engine] = []


def borrow() -> Engine:
    """An engine to play in; `give_back` it when done.

    Engines are used again and never unloaded: each is a copy of one C++ library whose copies keep pointers into one
    another, so that unloading one makes the process crash later.
    """
    return _idle.pop() if _idle else Engine()


def give_back(engine: Engine) -> None:
    """Let another game have this engine."""
    _idle.append(engine)


def expressions(text: str) -> list[Any]:
    """PDDL text as nested lists of lower-case words."""
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^\s()]+", re.sub(r";[^\n]*", "", text).lower()):
        if word == "(":
            stack.append([])
        elif word != ")":
            stack[-1].append(word)
        elif len(stack) > 1:
            stack[-2].append(stack.pop())
    while len(stack) > 1:
        stack[-2].append(stack.pop())
    return stack[0]


def _words(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for child in node:
            yield from _words(child)


@functools.lru_cache(64)
def observed_predicates(domain: str, grammar: str, problem: str) -> frozenset[str] | None:
    """Predicates that a precondition, the goal or a phrase of the grammar reads; None if one is written conditionally.

    Names only, so a word that happens to equal a predicate's name counts as a reading: too many, never too few.
    """
    (define,) = expressions(domain)[:1]
    declared = {p[0] for part in define if part[0] == ":predicates" for p in part[1:]}
    read = {w.removeprefix("not_") for w in re.findall(r"[a-z_0-9-]+", grammar.lower())}
    conditional = []
    for part in define:
        if part[0] == ":action":
            fields = dict(zip(part[2::2], part[3::2], strict=False))
            read.update(_words(fields.get(":precondition", [])))
            conditional += _conditional(fields.get(":effect", []))
        elif part[0] in (":derived", ":axiom"):
            read.update(_words(part))
    read.update(w for part in expressions(problem)[0] if part[0] == ":goal" for w in _words(part))
    observed = frozenset(declared & read)
    written = {w for _, effect in conditional for w in _words(effect)}
    return None if observed & written else observed


def _conditional(node: Any) -> list[tuple[Any, Any]]:
    """The (condition, effect) pairs of an effect, those under `forall` included."""
    if isinstance(node, str) or not node:
        return []
    if node[0] == "when":
        return [(node[1], node[2])]
    return [pair for child in node for pair in _conditional(child)]
