"""Keep the transitions of a deterministic environment, so that what was played once is answered at once.

The engine stays the only source: a transition not yet known is played by a live engine, written down, and from then on
repeated byte for byte. Transitions live in memory and, given a folder, in one append-only file a game.
"""

import fcntl
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from ..errors import WorkbenchError
from .base import Env, Solution, SolvedEnv, State, Task, replay

FORMAT = 2  # part of every table's name: to be raised when records change
ROOT = ""
Snapshot = tuple[str, int, tuple[str, ...]]


class Node(NamedTuple):
    """What belongs to a state however it was reached."""

    admissible: tuple[str, ...]
    done: bool
    outcome: int


class Edge(NamedTuple):
    """What one action gave: the state it led to and the answer."""

    target: str
    observation: str
    reward: float
    valid: bool
    info: dict[str, Any]


class GameTable:
    """The known transitions of one game, in memory and, with a path, in a file other processes may extend too.

    The file holds one record a line, each behind the CRC-32 of its text; a line that does not match (a torn tail, two
    halves run together) is skipped and its transition played again. Records are appended with one write under a lock,
    so writers never mix; what others wrote is read when something is looked for in vain.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.nodes: dict[str, Node] = {}
        self.edges: dict[tuple[str, str], Edge] = {}
        self.experts: dict[str, str | None] = {}
        self.solutions: dict[str, Solution] = {}
        self._shared: dict[Any, Any] = {}
        self._read = 0

    def edge(self, source: str, action: str) -> Edge | None:
        """The transition, if it and the state it leads to are known."""
        edge = self.edges.get((source, action))
        if edge is None and self._refresh():
            edge = self.edges.get((source, action))
        return edge if edge is not None and edge.target in self.nodes else None

    def expert(self, node: str) -> tuple[str | None] | None:
        """(command or None,) if the expert was asked at this state before, else None."""
        if node not in self.experts:
            self._refresh()
        return (self.experts[node],) if node in self.experts else None

    def add(self, source: str, action: str, node: Node, edge: Edge) -> None:
        """Write a transition down. Raises WorkbenchError where the disk refuses; memory keeps it all the same."""
        records = []
        if self.nodes.get(edge.target) != node:
            records.append({"n": edge.target, "a": node.admissible, "d": node.done, "o": node.outcome})
        records.append(
            {"f": source, "c": action, "t": edge.target, "s": edge.observation, "r": edge.reward, "v": edge.valid}
            | ({"i": edge.info} if edge.info else {})
        )
        self._append(records)

    def add_expert(self, node: str, command: str | None) -> None:
        self._append([{"n": node, "x": command}])

    def solution(self, node: str) -> Solution | None:
        """What the solver said of this state, if it was asked before."""
        if node not in self.solutions:
            self._refresh()
        return self.solutions.get(node)

    def add_solution(self, node: str, solution: Solution) -> None:
        distance = None if solution.dead else solution.distance
        self._append([{"n": node, "g": distance, "a": solution.actions}])

    def _append(self, records: list[dict[str, Any]]) -> None:
        lines = [json.dumps(record, separators=(",", ":")) for record in records]
        for line in lines:
            self._take(json.loads(line))
        if self.path is None:
            return
        data = b"".join(b"%08x %s\n" % (crc32(line), line) for line in (text.encode() for text in lines))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
                end = os.fstat(handle).st_size
                torn = end > 0 and os.pread(handle, 1, end - 1) != b"\n"
                written = os.write(handle, b"\n" * torn + data)
                if written < torn + len(data):
                    raise OSError(None, "the disk took only a part of a record")
            finally:
                os.close(handle)
        except OSError as error:
            raise WorkbenchError(f"cannot write {self.path}: {error.strerror}") from None

    def _refresh(self) -> bool:
        """Read what was appended since the last look; whether there was anything."""
        if self.path is None:
            return False
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._read:
                    self._read = 0
                if size == self._read:
                    return False
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise WorkbenchError(f"cannot read {self.path}: {error.strerror}") from None
        whole = data.rfind(b"\n") + 1
        for line in data[:whole].splitlines():
            text = line[9:]
            if line[:9] == b"%08x " % crc32(text):
                self._take(json.loads(text))
        self._read += whole
        return whole > 0

    def _take(self, record: dict[str, Any]) -> None:
        share = self._shared.setdefault
        if "f" in record:
            source, action, target = (share(record[k], record[k]) for k in "fct")
            text = share(record["s"], record["s"])
            info = record.get("i", {})
            info = share(("info", json.dumps(info)), info)
            self.edges[source, action] = Edge(target, text, record["r"], record["v"], info)
        elif "x" in record:
            self.experts[record["n"]] = record["x"]
        elif "g" in record:
            distance = math.inf if record["g"] is None else record["g"]
            self.solutions[record["n"]] = Solution(distance, tuple(record["a"]))
        else:
            admissible = tuple(share(command, command) for command in record["a"])
            self.nodes[record["n"]] = Node(share(admissible, admissible), record["d"], record["o"])


class Transitions:
    """The tables of many games, for one process; live games of a batch share one.

    folder: where they are kept; None for memory only. limit: transitions held in memory (about 0.5 kB each, and 1 kB a
    distinct list of commands); beyond it the games used longest ago are dropped from memory and read again from the
    folder when needed. Without a folder nothing is dropped.
    """

    def __init__(self, folder: str | Path | None = None, limit: int = 1_000_000):
        self.folder = None if folder is None else Path(folder)
        self.limit = limit
        self._tables: OrderedDict[str, GameTable] = OrderedDict()

    def table(self, name: str) -> GameTable:
        """The table of a game, by a name that is a digest of all its transitions depend on."""
        if name not in self._tables:
            self._tables[name] = GameTable(self.folder and self.folder / name[:2] / f"{name}.jsonl")
        self._tables.move_to_end(name)
        if self.folder:
            while len(self._tables) > 1 and sum(len(t.edges) for t in self._tables.values()) > self.limit:
                self._tables.popitem(last=False)
        return self._tables[name]


@cache
def _shared(folder: Path) -> Transitions:
    """The one Transitions of a folder in this process."""
    return Transitions(folder)


class MemoEnv:
    """A deterministic environment behind a memo of its transitions; itself an environment of the same protocol.

    inner: makes the environment, when it is first needed: for its tasks, a fingerprint, or something unknown. So a
    process that meets only what is known never starts an engine, if the environment starts its engine with a game.
    path: a folder, whose transitions all games of this process share; a `Transitions`; or None for memory of its own.
    fingerprint(env, task id): a digest of the game's contents, so that a changed file is another game; by default the
    task id alone.
    identity(env): a digest that two states of a game share only if every later answer is the same, or None where that
    cannot be told. By default a state is the sequence of actions that led to it, which is always right; an identity
    lets different sequences meet.
    `expert` and `solution` must be functions of the state, as `step` is, and `info` plain JSON. `played`: how many
    actions the engine has had to play. Raises what the environment raises; what it raised is not kept.
    """

    def __init__(
        self,
        inner: Callable[[], Env],
        path: str | Path | Transitions | None = None,
        fingerprint: Callable[[Any, str], str] | None = None,
        identity: Callable[[Any], str | None] | None = None,
    ):
        self._make, self._fingerprint, self._identity = inner, fingerprint, identity
        if path is None or isinstance(path, Transitions):
            self._transitions = path or Transitions()
        else:
            self._transitions = _shared(Path(path).absolute())
        self._inner: Env | None = None
        self._engine_at: tuple[GameTable, str] | None = None
        self._table: GameTable | None = None
        self._task, self._seed = "", 0
        self._actions: list[str] = []
        self._path: list[str] = []
        self.played = 0

    @property
    def inner(self) -> Env:
        """The environment behind the memo; made on first use."""
        if self._inner is None:
            self._inner = self._make()
        return self._inner

    @property
    def splits(self) -> tuple[str, ...]:
        return self.inner.splits

    def tasks(self, split: str) -> Sequence[Task]:
        return self.inner.tasks(split)

    def reset(self, task_id: str, seed: int = 0) -> State:
        contents = self._fingerprint(self.inner, task_id) if self._fingerprint else ""
        name = blake2b(json.dumps([FORMAT, task_id, seed, contents]).encode(), digest_size=20).hexdigest()
        self._table = self._transitions.table(name)
        self._task, self._seed, self._actions, self._path = task_id, seed, [], []
        try:
            return self._advance(ROOT, ROOT)
        except BaseException:
            self._table = None
            raise

    def step(self, action: str) -> State:
        self._running()
        state = self._advance(self._path[-1], action)
        self._actions.append(action)
        return state

    def snapshot(self) -> Snapshot:
        """(task id, seed, actions so far)."""
        self._running()
        return self._task, self._seed, tuple(self._actions)

    def restore(self, snapshot: Snapshot) -> State:
        """Walk a snapshot's actions through the memo: at once where they were played before."""
        return replay(self, *snapshot)

    def expert(self) -> str | None:
        table, node = self._running(), self._path[-1]
        known = table.expert(node)
        if known is None:
            self._bring_engine_here()
            known = (self.inner.expert(),)
            table.add_expert(node, known[0])
        return known[0]

    def solution(self) -> Solution:
        """The environment's solution. Raises WorkbenchError where it has no solver."""
        table, node = self._running(), self._path[-1]
        known = table.solution(node)
        if known is None:
            solver = self._solver()
            self._bring_engine_here()
            known = solver.solution()
            table.add_solution(node, known)
        return known

    def solver_advantage(self, before: Solution, after: Solution, state: State) -> float:
        return self._solver().solver_advantage(before, after, state)

    def _solver(self) -> SolvedEnv:
        if not isinstance(self.inner, SolvedEnv):
            raise WorkbenchError(f"{type(self.inner).__name__} has no solver")
        return self.inner

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._inner, self._engine_at, self._table = None, None, None

    def _running(self) -> GameTable:
        if self._table is None:
            raise WorkbenchError("no game is running: reset or restore first")
        return self._table

    def _advance(self, source: str, action: str) -> State:
        table = self._table
        edge = table.edge(source, action)
        if edge is None:
            edge = self._play(source, action)
        self._path.append(edge.target)
        node = table.nodes[edge.target]
        return State(edge.observation, node.admissible, edge.reward, node.done, node.outcome, edge.valid, {**edge.info})

    def _play(self, source: str, action: str) -> Edge:
        """Have the engine play an unknown transition, and write it down."""
        table = self._table
        if source == ROOT:
            self._engine_at = None
            state = self.inner.reset(self._task, self._seed)
        else:
            self._bring_engine_here()
            self._engine_at = None
            state = self.inner.step(action)
        self.played += 1
        target = self._identity(self.inner) if self._identity else None
        if target is None:
            target = blake2b(json.dumps([source, action]).encode(), digest_size=16).hexdigest()
        self._engine_at = (table, target)
        node = Node(state.admissible, state.done, state.outcome)
        table.add(source, action, node, Edge(target, state.observation, state.reward, state.valid, state.info))
        return table.edges[source, action]

    def _bring_engine_here(self) -> None:
        """Put the live engine in the present state, from the last state of this episode that it is already in."""
        path = self._path
        table, at = self._engine_at or (None, ROOT)
        if table is self._table and at in path:
            done = len(path) - 1 - path[::-1].index(at)
        else:
            self._engine_at = None
            self.inner.reset(self._task, self._seed)
            done = 0
        self._engine_at = None
        for action in self._actions[done:]:
            self.inner.step(action)
            self.played += 1
        self._engine_at = (self._table, path[-1])
