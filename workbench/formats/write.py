"""Rollouts of another system as a run folder, so that everything that reads a run reads them.

Tables `episodes` and `turns` have the columns of workbench/tables.py, null where the source does not say, and more:
fidelity, where, info, source_episode, source_group and source_turn as the source wrote them, source_mask, and the
log-probs that the trainer keeps apart. source.json says what was read and what is missing. Nothing is made up: no
tokens from text, no success from a reward, no group where the source has none.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from os import getpid
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..config import digest
from ..errors import WorkbenchError
from ..runs import RunFolder
from ..runs.files import atomic_write, told, write_json
from ..runs.folder import FORMAT_VERSION
from ..runs.manifest import versions
from ..tables import TOKEN_LISTS, TURN_SCALARS, cut
from . import open_source
from .base import MAX_INTEGER, SourceEpisode, SourceTurn
from .source import Source, expanded

_PART_BYTES = 1 << 26  # of ids, log-probs and text in one table file, about
_MAX_GROUPS = 1 << 20  # numbered from 0; beyond it a group is numbered by a hash of its name
_TURN_BYTES, _TOKEN_BYTES = 512, 64  # what a turn and a token take while they are Python's, about
# turn field -> column and type of its values
_LISTS = {
    "token_ids": ("token_ids", pl.Int32),
    "logprobs": ("old_logprobs", pl.Float32),
    "teacher_logprobs": ("teacher_logprobs", pl.Float32),
    "trainer_logprobs": ("trainer_logprobs", pl.Float32),
    "reference_logprobs": ("reference_logprobs", pl.Float32),
    "advantages": ("advantage", pl.Float32),
    "mask": ("source_mask", pl.Int8),
}
# what source.json counts as missing, and the column that is null or empty then
_TURN_SIGNALS = {name: column for name, (column, _) in _LISTS.items()}
_TURN_SIGNALS |= {name: name for name in ("context_ids", "reward", "valid", "truncated", "action")}
_EPISODE_SIGNALS = {name: name for name in ("group", "task", "advantage", "stop_reason")}
_EPISODE_SIGNALS |= {"reward": "return", "success": "outcome"}


def import_run(path: str | Path, out: str | Path, progress: Callable[[str], None] | None = None) -> RunFolder:
    """Read the rollouts at `path` and write them as a run folder at `out`, which must not be there yet.

    The folder appears as a whole once everything is read, under a temporary name beside it until then. Rows that repeat
    a turn's number within an episode are written once and counted in source.json. old_logprobs are the behaviour
    policy's. progress: called with a line now and then. Raises WorkbenchError naming the record that cannot be read, or
    where `out` exists or the disk does not take it; nothing is left behind.
    """
    source = open_source(path)
    out = expanded(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WorkbenchError(f"{out} is there already; name a folder that is not")
    draft = out.with_name(f".{out.name}.{getpid()}")
    with told(out):
        (draft / "tables").mkdir(parents=True)
    try:
        _write(source, draft, progress or (lambda line: None))
        with told(out):
            draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return RunFolder.open(out)


def _write(source: Source, folder: Path, progress: Callable[[str], None]) -> None:
    began = datetime.now(UTC)
    config = {"source": _utf8(str(source.path.resolve())), "format": source.format}
    header = {"format_version": FORMAT_VERSION, "experiment": "import", "digest": digest(config)}
    with ThreadPoolExecutor(1) as pool:
        tables = _Tables(folder, pool)
        for episode in source.episodes():
            tables.add(episode)
            if tables.episodes % 10_000 == 0:
                progress(f"{tables.episodes} episodes, {tables.turns} turns read")
        tables.flush()
        tables.finish()
    if not tables.episodes:
        raise WorkbenchError(f"{source.path}: no episodes in it ({source.format})")
    ended = datetime.now(UTC)
    facts = {
        "format": source.format,
        "description": source.description,
        "path": config["source"],
        "files": [{"path": _utf8(str(f.resolve())), "bytes": f.stat().st_size} for f in source.files],
        "notes": [_utf8(note) for note in source.notes],
        "lacks": list(source.lacks),
    } | tables.facts()
    write_json(folder / "source.json", facts)
    write_json(folder / "config.json", header | {"created": began.isoformat(), "config": config})
    manifest = {
        "status": "complete",
        "started": began.isoformat(),
        "ended": ended.isoformat(),
        "seconds": (ended - began).total_seconds(),
        "parameters": config,
        "versions": versions(),
        "result": {name: facts[name] for name in ("format", "fidelity", "episodes", "turns", "steps", "missing")},
    }
    write_json(folder / "manifest.json", header | manifest)
    atomic_write(folder / "COMPLETE", f"{ended.isoformat()}\n".encode())


class _Tables:
    """Rows on their way to the disk: those of one step are held until they are many or the step changes."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor):
        self._folder = folder
        self._rows: list[tuple[int, SourceEpisode]] = []
        self._size = 0
        self._groups: dict[tuple[int, str], int] = {}
        self._numbers: Counter[int] = Counter()
        self._parts: Counter[int] = Counter()
        self._lacking: Counter[str] = Counter()
        self._fidelity: Counter[str] = Counter()
        self._repeats = {"identical": 0, "different": 0}
        self._pool = pool
        self._writing: list[Future] = []
        self.episodes = self.turns = 0

    def add(self, episode: SourceEpisode) -> None:
        if episode.step < 0:
            raise WorkbenchError(f"{episode.where}: step is {episode.step}, expected 0 or more")
        if episode.step > MAX_INTEGER:  # taken from the name of a file or folder
            raise WorkbenchError(f"{episode.where}: step is over 2^63-1, expected a whole number of 64 bits")
        if self._rows and self._rows[0][1].step != episode.step:
            self.flush()
        episode, size = self._once(episode)
        self._rows.append((self._numbers[episode.step], episode))
        self._numbers[episode.step] += 1
        self._fidelity[episode.fidelity] += 1
        self.episodes += 1
        self.turns += len(episode.turns)
        self._size += size
        if self._size > _PART_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._rows:
            return
        step = self._rows[0][1].step
        name = f"step={step:06d}.parquet" if not self._parts[step] else f"step={step:06d}.{self._parts[step]}.parquet"
        frames = {"episodes": self._episodes_frame(), "turns": self._turns_frame()}
        self._lacking.update({what: _empty(frames["episodes"][column]) for what, column in _EPISODE_SIGNALS.items()})
        self._lacking.update(
            {f"turn {what}": _empty(frames["turns"][column]) for what, column in _TURN_SIGNALS.items()}
        )
        self.finish()
        tables = self._folder / "tables"
        self._writing = [self._pool.submit(_write_table, tables / t / name, frame) for t, frame in frames.items()]
        self._parts[step] += 1
        self._rows, self._size = [], 0

    def finish(self) -> None:
        """Wait until what was handed to the disk is there. Raises WorkbenchError where it is not."""
        for future in self._writing:
            future.result()
        self._writing = []

    def facts(self) -> dict[str, Any]:
        """Counts for source.json. missing: signals that no turn (or episode) has; partly: how many lack it of those."""
        rows = {True: self.turns, False: self.episodes}
        counts = {name: (n, rows[name.startswith("turn ")]) for name, n in self._lacking.items() if n}
        return {
            "fidelity": self._fidelity.most_common(1)[0][0] if len(self._fidelity) == 1 else "mixed",
            "episodes": self.episodes,
            "turns": self.turns,
            "steps": len(self._numbers),
            "missing": sorted(name for name, (n, all_of) in counts.items() if n == all_of),
            "partly": {name: n for name, (n, all_of) in sorted(counts.items()) if n < all_of},
            "repeated_turns_left_out": dict(self._repeats),
        }

    def _once(self, episode: SourceEpisode) -> tuple[SourceEpisode, int]:
        """The episode with each turn number once, the first as it comes, and about how many bytes it takes."""
        kept: list[SourceTurn] = []
        seen: dict[int, SourceTurn] = {}
        size = 0
        for turn in episode.turns:
            first = turn if turn.turn is None else seen.setdefault(turn.turn, turn)
            if first is turn:
                kept.append(turn)
                size += len(turn.response) + len(turn.observation) + _TURN_BYTES
                for ids in (turn.token_ids, turn.context_ids):
                    size += 0 if ids is None else _TOKEN_BYTES * len(ids)
            else:
                same = first.response == turn.response and _equal(first.token_ids, turn.token_ids)
                self._repeats["identical" if same else "different"] += 1
        return replace(episode, turns=tuple(kept)) if len(kept) < len(episode.turns) else episode, size

    def _group(self, episode: SourceEpisode) -> int | None:
        if not episode.group:
            return None
        key = episode.step, episode.group
        if key not in self._groups and len(self._groups) >= _MAX_GROUPS:
            return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
        return self._groups.setdefault(key, len(self._groups))

    def _episodes_frame(self) -> pl.DataFrame:
        rows = [e for _, e in self._rows]
        columns = {
            "step": pl.Series([e.step for e in rows], dtype=pl.Int64),
            "episode": pl.Series([number for number, _ in self._rows], dtype=pl.Int64),
            "group": pl.Series([self._group(e) for e in rows], dtype=pl.Int64),
            "task": _text(e.task for e in rows),
            "kind": _text("" for _ in rows),
            "split": _text("" for _ in rows),
            "seed": pl.Series([None] * len(rows), dtype=pl.Int64),
            "outcome": pl.Series([None if e.success is None else int(e.success) for e in rows], dtype=pl.Int64),
            "return": pl.Series([e.reward for e in rows], dtype=pl.Float64),
            "advantage": pl.Series([e.advantage for e in rows], dtype=pl.Float64),
            "prior": pl.Series([None] * len(rows), dtype=pl.Float64),
            "n_turns": pl.Series([len(e.turns) for e in rows], dtype=pl.Int64),
            "n_tokens": pl.Series([_tokens(e) for e in rows], dtype=pl.Int64),
            "stop_reason": _text(e.stop_reason for e in rows),
            "fidelity": _text(e.fidelity for e in rows),
            "source_episode": _text(e.episode for e in rows),
            "source_group": _text(e.group for e in rows),
            "where": _text(e.where for e in rows),
            "info": _text(_json(e.info) for e in rows),
        }
        return pl.DataFrame(columns)

    def _turns_frame(self) -> pl.DataFrame:
        rows = [(number, e, k, t) for number, e in self._rows for k, t in enumerate(e.turns)]
        turns = [t for *_, t in rows]
        contexts = [context for _, e in self._rows for context in _contexts(e)]
        groups = {number: self._group(e) for number, e in self._rows}
        pieces = [t.info.get("pieces") for t in turns]
        columns = {
            "step": pl.Series([e.step for _, e, *_ in rows], dtype=pl.Int64),
            "episode": pl.Series([number for number, *_ in rows], dtype=pl.Int64),
            "group": pl.Series([groups[number] for number, *_ in rows], dtype=pl.Int64),
            "turn": pl.Series([k for *_, k, _ in rows], dtype=pl.Int64),
            "observation": _text(t.observation for t in turns),
            "action": _text(t.action for t in turns),
            "response": _text(t.response for t in turns),
            "valid": pl.Series([t.valid for t in turns], dtype=pl.Boolean),
            "truncated": pl.Series([t.truncated for t in turns], dtype=pl.Boolean),
            "reward": pl.Series([t.reward for t in turns], dtype=pl.Float64),
            "context_ids": _lists([ids for ids, _ in contexts], pl.Int32),
            "continues": pl.Series([continues for _, continues in contexts], dtype=pl.Boolean),
            "pieces": _pieces(pieces),
        }
        columns |= {column: _lists([getattr(t, name) for t in turns], kind) for name, (column, kind) in _LISTS.items()}
        columns["gap"] = _lists([_gap(t) for t in turns], pl.Float32)
        empty = {name: pl.List(pl.Float32) for name in TOKEN_LISTS}
        empty |= {name: pl.Boolean if name == "pivotal" else pl.Float64 for name in TURN_SCALARS}
        for name, kind in empty.items():
            columns.setdefault(name, pl.Series([None] * len(rows), dtype=kind))
        columns["source_turn"] = pl.Series([t.turn for t in turns], dtype=pl.Int64)
        columns["where"] = _text(t.info.get("where") or e.where for _, e, _, t in rows)
        columns["info"] = _text(_json(t.info) for t in turns)
        return pl.DataFrame(columns)


def _write_table(path: Path, frame: pl.DataFrame) -> None:
    with told(path):
        path.parent.mkdir(exist_ok=True)
        frame.write_parquet(path, compression="zstd", statistics=True)


def _empty(column: pl.Series) -> int:
    return column.null_count() + (int((column == "").sum()) if column.dtype == pl.String else 0)


def _contexts(episode: SourceEpisode) -> list[tuple[np.ndarray | None, bool | None]]:
    """Of each turn the context tokens that the turn before does not hold, and whether it holds the others."""
    out: list[tuple[np.ndarray | None, bool | None]] = []
    seen = None
    for turn in episode.turns:
        context = turn.context_ids
        if context is None:
            out.append((None, None))
        else:
            continues = seen is not None and np.array_equal(context[: len(seen)], seen)
            out.append((context[len(seen) :] if continues else context, continues))
        known = context is not None and turn.token_ids is not None
        seen = np.concatenate([context, turn.token_ids]) if known else None
    return out


def _gap(turn: SourceTurn) -> np.ndarray | None:
    """(L,) teacher minus student, nats; None where one is missing or they differ in length."""
    if turn.teacher_logprobs is None or turn.logprobs is None or len(turn.teacher_logprobs) != len(turn.logprobs):
        return None
    return turn.teacher_logprobs - turn.logprobs


def _tokens(episode: SourceEpisode) -> int | None:
    sizes = [None if turn.token_ids is None else len(turn.token_ids) for turn in episode.turns]
    return None if None in sizes else sum(sizes)


def _equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and np.array_equal(a, b))


def _lists(values: list[np.ndarray | None], kind: pl.DataType) -> pl.Series:
    full = [v for v in values if v is not None and len(v)]
    flat = pl.Series(np.concatenate(full) if full else [], dtype=kind)
    return cut(flat, [None if v is None else len(v) for v in values])


def _text(values: Iterable[str | None]) -> pl.Series:
    values = list(values)
    try:
        return pl.Series(values, dtype=pl.String)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        return pl.Series([None if v is None else _utf8(v) for v in values], dtype=pl.String)


def _pieces(values: list[Any]) -> pl.Series:
    """Lists of strings; those that are Series are put end to end and cut again, in a tenth of the time."""
    if values and all(isinstance(v, pl.Series) for v in values):
        return cut(pl.concat(values), [len(v) for v in values])
    try:
        return pl.Series(values, dtype=pl.List(pl.String))
    except UnicodeEncodeError:
        clean = [None if v is None else [_utf8(piece) for piece in v] for v in values]
        return pl.Series(clean, dtype=pl.List(pl.String))


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _json(info: dict[str, Any]) -> str | None:
    """What has no column of its own; arrays a token, which audits read from the source, are left out."""
    info = {k: v for k, v in info.items() if k not in ("pieces", "where") and not isinstance(v, np.ndarray)}
    return json.dumps(info, ensure_ascii=False, default=str) if info else None
