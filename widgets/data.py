"""What the explorer asks of a run folder: summaries of all episodes, sorted and filtered rows, windows of tokens.

Summaries are read without opening a token column; a window opens the token columns of one step's file and returns the
asked turns alone. Rows are plain values that JSON can hold; token numbers go as little-endian buffers beside it.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl

from workbench import summaries
from workbench.errors import WorkbenchError, unknown
from workbench.figures.pieces import join
from workbench.figures.style import pick
from workbench.runs import RunFolder
from workbench.runs.folder import scan_files
from workbench.signals import DERIVED, SIGNALS, numbers
from workbench.summaries import KEY, TURN_NUMBERS

from .filters import filtered

PREVIEW = 400  # characters of an observation that are sent before it is opened
WINDOW = 4096  # most tokens of one answer
LISTED = "step episode group task outcome return n_turns n_tokens recorded path revised pivotal hits first_hit".split()
TEXTS = ("observation", "action", "response")


class RunData:
    """One run folder as the explorer reads it. `refresh()` forgets what was read, for a run that goes on."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._found: dict[str, pl.DataFrame] = {}
        self._limits: dict[str, float | None] = {}
        for table in ("episodes", "turns"):
            run.scan(table)  # says which tables there are where one is missing

    def refresh(self) -> None:
        for name in ("summaries", "columns", "has_beliefs"):
            self.__dict__.pop(name, None)
        self._found.clear()
        self._limits.clear()

    # Summaries

    @functools.cached_property
    def columns(self) -> list[str]:
        """Columns of the turns table."""
        return self.run.scan("turns").collect_schema().names()

    @functools.cached_property
    def summaries(self) -> pl.DataFrame:
        """One row an episode: workbench.summaries.episodes."""
        return summaries.episodes(self.run)

    @functools.cached_property
    def has_beliefs(self) -> bool:
        return "revised" in self.summaries.columns and self.summaries["revised"].null_count() < self.summaries.height

    def numeric(self) -> list[str]:
        """Columns of the summaries that hold numbers, to sort and filter by."""
        frame = self.summaries
        return [n for n, t in frame.schema.items() if t.is_numeric() and frame[n].null_count() < frame.height]

    def overview(self) -> dict[str, Any]:
        """What the first view needs: names, counts, columns, signals that may have been recorded."""
        schema = self.summaries.schema
        recorded = [s for s in SIGNALS if set(DERIVED.get(s.name, (s.name,))) <= set(self.columns)]
        return {
            "run": self.run.path.name,
            "experiment": self.run.experiment,
            "method": str(self.run.config.get("method", "")),
            "episodes": self.summaries.height,
            "groups": self.summaries.select("step", "group").n_unique(),
            "steps": self.summaries["step"].n_unique(),
            "columns": self.numeric(),
            "text_columns": [n for n, t in schema.items() if t == pl.String],
            "signals": [asdict(s) for s in recorded],
            "beliefs": self.has_beliefs,
        }

    # Rows of the list

    def rows(
        self,
        where: Sequence[Mapping[str, Any]] = (),
        text: str = "",
        sort: str = "",
        descending: bool = False,
        start: int = 0,
        count: int = 60,
        at: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """A window of the episodes that pass: {total, rows, picks, index}.

        where: clauses {column, op, value}, all of which hold; text: what an observation, an action or a response
        contains, in any case; sort: a column, or "" for the order of the run. picks: best, median, worst and most
        revised of all that pass. index: the place of the episode `at` (step, episode) among them, or None.
        Raises WorkbenchError on an unknown column or operator.
        """
        found = self.select(where, text, sort, descending)
        columns = [pl.col(n) for n in LISTED if n in found.columns]
        columns += [pl.col(sort).alias("value")] if sort else []
        place = None
        if at is not None:
            same = (found["step"] == at[0]) & (found["episode"] == at[1])
            place = int(same.arg_max()) if same.any() else None
        window = found.slice(max(start, 0), max(count, 0)).select(columns)
        picks = {name: list(key) for name, key in summaries.picks(found).items()}
        return {"total": found.height, "rows": plain(window), "picks": picks, "index": place}

    def select(
        self, where: Sequence[Mapping[str, Any]] = (), text: str = "", sort: str = "", descending: bool = False
    ) -> pl.DataFrame:
        """The summaries that pass, sorted; see `rows`."""
        found = filtered(self.summaries, where)
        if text.strip():
            found = found.join(self._search(text.strip().lower()), on=KEY, how="inner", maintain_order="left")
        if sort:
            if sort not in found.columns or not found.schema[sort].is_numeric():
                raise unknown("column to sort by", sort, self.numeric())
            value = pl.col(sort).fill_nan(None) if found.schema[sort].is_float() else pl.col(sort)
            found = found.sort(
                [value, "step", "group", "episode"], descending=[descending, False, False, False], nulls_last=True
            )
        return found

    def _search(self, term: str) -> pl.DataFrame:
        """Episodes with the term in a text of a turn: hits (turns) and first_hit (turn). The last few are kept."""
        if term not in self._found:
            names = [n for n in TEXTS if n in self.columns]
            contains = pl.any_horizontal(pl.col(n).str.to_lowercase().str.contains(term, literal=True) for n in names)
            turns = self.run.scan("turns").filter(contains).select(*KEY, "turn")
            found = turns.group_by(KEY).agg(pl.len().alias("hits"), pl.col("turn").min().alias("first_hit"))
            while len(self._found) >= 8:
                del self._found[next(iter(self._found))]
            self._found[term] = found.collect()
        return self._found[term]

    def groups(self, where: Sequence[Mapping[str, Any]] = (), text: str = "", start: int = 0, count: int = 60) -> dict:
        """A window of the groups of the episodes that pass, those with both outcomes and large revisions first within
        the order of the run: {total, rows}; a row has step, group, task, n, won, mean, low, high (return), revised."""
        found = self.select(where, text)
        task = [pl.col("task").first()] if "task" in found.columns else []
        revised = [pl.col("revised").max()] if self.has_beliefs else []
        frame = found.group_by("step", "group", maintain_order=True).agg(
            *task,
            pl.len().alias("n"),
            pl.col("outcome").sum().alias("won"),
            pl.col("return").mean().alias("mean"),
            pl.col("return").min().alias("low"),
            pl.col("return").max().alias("high"),
            pl.col("episode").first(),
            *revised,
        )
        return {"total": frame.height, "rows": plain(frame.slice(max(start, 0), max(count, 0)))}

    # One episode

    def episode(self, step: int, episode: int) -> dict[str, Any]:
        """An episode without its tokens: its row of the summaries, and of each turn its numbers, its action's text and
        how many tokens it has. Raises WorkbenchError where there is none, naming the nearest."""
        head = pick(self.summaries, "episodes", step=step, episode=episode)
        if not head["recorded"][0]:
            return {"episode": plain(head)[0], "turns": []}
        cut = [pl.col("action").str.head(PREVIEW)] if "action" in self.columns else []
        numbers = [pl.col(n) for n in ("turn", *TURN_NUMBERS) if n in self.columns]
        length = [pl.col("token_ids").list.len().alias("n_tokens")] if "token_ids" in self.columns else []
        turns = self._turns(step).filter(pl.col("episode") == episode).sort("turn").select(*numbers, *cut, *length)
        return {"episode": plain(head)[0], "turns": plain(turns.collect())}

    def window(
        self, step: int, episode: int, first: int, last: int, start: int = 0, most: int = WINDOW
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Texts and tokens of turns first..last (included), as ({turns, signals, next}, [ids, values]).

        A turn has turn, observation (its first PREVIEW characters), observation_chars, action, and of its tokens from
        number `start` on (`start` is for the first turn only) cells (texts), starts (the first token of each cell,
        None where every cell is one token), offset (into ids) and count. At most about `most` tokens are sent; next is
        the (turn, token) to go on with, or None. ids: int32 (N,); values: float32 (signals, N), NaN where not recorded.
        """
        names = [n for n in ("turn", *TEXTS, "token_ids", "pieces") if n in self.columns]
        sources = [s.name for s in SIGNALS if s.name in self.columns]
        rows = (
            self._turns(step)
            .filter(pl.col("episode") == episode, pl.col("turn").is_between(first, last))
            .sort("turn")
            .select(*names, *sources)
            .collect()
        )
        if rows.is_empty():
            raise WorkbenchError(f"{self.run.path}: no turns {first} to {last} of step {step}, episode {episode}")
        signals = [s["name"] for s in self.overview()["signals"]]
        turns, ids, values, used, following = [], [], [], 0, None
        for row in rows.iter_rows(named=True):
            begin = start if row["turn"] == first else 0
            if used >= most:
                following = [row["turn"], 0]
                break
            out, cells = _texts(row), join(row.get("pieces") or [], row.get("response"))
            cells = [c for c in cells if c.start >= begin]
            room = [c for c in cells if c.stop - begin <= most - used] or cells[:1]
            stop = room[-1].stop if room else begin
            single = all(c.stop - c.start == 1 for c in room)
            out |= {"cells": [c.text for c in room], "starts": None if single else [c.start for c in room]}
            out |= {"first": begin, "offset": used, "count": stop - begin}
            turns.append(out)
            if room:
                ids.append(np.asarray(row["token_ids"][begin:stop], "<i4"))
                values.append(np.stack([numbers(row, name, begin, stop) for name in signals]))
            used += stop - begin
            if len(room) < len(cells):
                following = [row["turn"], stop]
                break
        flat = np.concatenate(ids) if ids else np.zeros(0, "<i4")
        table = np.concatenate(values, axis=1) if values else np.zeros((len(signals), 0), "<f4")
        return {"turns": turns, "signals": signals, "next": following}, [flat.tobytes(), table.tobytes()]

    def text(self, step: int, episode: int, turn: int) -> dict[str, str]:
        """The whole observation, action and response of a turn."""
        names = [n for n in TEXTS if n in self.columns]
        found = self._turns(step).filter(pl.col("episode") == episode, pl.col("turn") == turn).select(names).collect()
        if found.is_empty():
            raise WorkbenchError(f"{self.run.path}: no turn {turn} of step {step}, episode {episode}")
        return {name: value or "" for name, value in found.row(0, named=True).items()}

    def compare(self, step: int, episode: int) -> dict[str, Any]:
        """The members of an episode's group, itself first, then those that went another way latest: {members}.

        A member has episode, outcome, return, advantage, n_turns and `differs`, the first turn whose observation or
        action is not that of the given episode (None where there is none), with same_state, whether the observations
        up to and at that turn are equal, and credit and other_credit, the turn advantages of the two there.
        """
        head = pick(self.summaries, "episodes", step=step, episode=episode)
        if not head["recorded"][0]:
            raise WorkbenchError(f"{self.run.path}: no turns were recorded of step {step}, episode {episode}")
        group = head["group"][0]
        members = self.summaries.filter(pl.col("step") == step, pl.col("group") == group)
        credit = [pl.col("turn_advantage")] if "turn_advantage" in self.columns else []
        names = [n for n in ("observation", "action") if n in self.columns]
        turns = self._turns(step).filter(pl.col("group") == group).sort("episode", "turn")
        turns = turns.select("episode", "turn", *names, *credit).collect()
        played = {key[0]: part.to_dicts() for key, part in turns.group_by("episode", maintain_order=True)}
        mine, out = played.get(episode, []), []
        for row in plain(members):
            theirs = played.get(row["episode"], [])
            keep = {n: row.get(n) for n in ("episode", "outcome", "return", "advantage", "n_turns")}
            out.append(keep | _difference(mine, theirs, row))
        opposite = head["outcome"][0]
        out.sort(
            key=lambda m: (m["episode"] != episode, -_or(m["differs"], -1), m["outcome"] == opposite, m["episode"])
        )
        return {"step": step, "group": group, "members": out}

    def scale(self, signal: str) -> dict[str, Any]:
        """The colour limit of a signal over the run: the 98th centile of its distance from the centre, from at most 8
        steps spread over the run; limit None where nothing was recorded. Opens the signal's columns alone."""
        known = {s.name: s for s in SIGNALS}
        if signal not in known:
            raise unknown("signal", signal, known)
        if signal not in self._limits:
            far = (self._sample(signal) - (known[signal].centre or 0.0)).abs()
            limit = far.filter(far.is_finite()).quantile(0.98)
            self._limits[signal] = limit if limit is None else 0.5 if signal == "gate" else max(limit, 1e-9)
        return {"signal": signal, "limit": self._limits[signal]}

    def _sample(self, signal: str, steps: int = 8) -> pl.Series:
        """A signal's values in at most so many steps spread over the run."""
        sources, files = DERIVED.get(signal, (signal,)), self.run.table_files("turns")
        parts = []
        for i in sorted({round(i * (len(files) - 1) / (steps - 1)) for i in range(steps)}):
            lazy = pl.scan_parquet(files[i], hive_partitioning=False, glob=False)
            if set(sources) <= set(lazy.collect_schema().names()):
                lists = lazy.select(sources).drop_nulls().explode(sources, empty_as_null=False)
                flat = lists.cast(pl.Float64).collect()
                parts.append(flat[sources[0]] - flat[sources[1]] if len(sources) > 1 else flat[sources[0]])
        return pl.concat(parts) if parts else pl.Series([], dtype=pl.Float64)

    # Frames

    def turns_frame(self, step: int, episode: int) -> pl.DataFrame:
        """All columns of an episode's turns; no rows where they were not recorded."""
        if not pick(self.summaries, "episodes", step=step, episode=episode)["recorded"][0]:
            return self.run.scan("turns").head(0).collect()
        return self._turns(step).filter(pl.col("episode") == episode).sort("turn").collect()

    def tokens_frame(self, step: int, episode: int, turn: int | None = None, span: Sequence[int] | None = None):
        """One row a sampled token of an episode, a turn or a span of it: step, episode, turn, position, token_id,
        piece, text (of the cell of whole characters it is in) and every recorded signal."""
        rows = self.turns_frame(step, episode)
        rows = rows if turn is None else pick(rows, "turns", turn=turn)
        rows = rows.filter(pl.col("token_ids").list.len() > 0) if "token_ids" in rows.columns else rows.clear()
        start, stop = span or (0, None)
        parts = []
        names = [s["name"] for s in self.overview()["signals"]]
        for row in rows.iter_rows(named=True):
            n = len(row["token_ids"])
            texts = [c.text for c in join(row.get("pieces") or [], row.get("response")) for _ in range(c.start, c.stop)]
            place = {"step": [step] * n, "episode": [episode] * n, "turn": [row["turn"]] * n, "position": range(n)}
            said = {"token_id": row["token_ids"], "piece": row.get("pieces") or [None] * n, "text": texts or [None] * n}
            values = {name: pl.Series(numbers(row, name, 0, n)).fill_nan(None) for name in names}
            parts.append(pl.DataFrame(place | said | values).slice(start, None if stop is None else stop - start))
        columns = ["step", "episode", "turn", "position", "token_id", "piece", "text", *names]
        return pl.concat(parts, how="vertical_relaxed") if parts else pl.DataFrame(schema=columns)

    def _turns(self, step: int) -> pl.LazyFrame:
        """The turns of one step, from its own files, without a listing of all steps."""
        if files := self.run.step_files("turns", step):
            return scan_files(files)
        steps = (f.stem.removeprefix("step=").split(".")[0] for f in self.run.table_files("turns"))
        raise unknown("step of the turns table", str(step), (str(int(step)) for step in steps))


def plain(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows that JSON can hold: no infinity, no NaN."""
    return [{name: _finite(value) for name, value in row.items()} for row in frame.iter_rows(named=True)]


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    seen, said = row.get("observation") or "", row.get("response") or ""
    out = {"turn": row["turn"], "observation": seen[:PREVIEW], "observation_chars": len(seen)}
    return out | {"action": (row.get("action") or "")[:PREVIEW], "response": said[:PREVIEW]}


def _difference(mine: Sequence[Mapping], theirs: Sequence[Mapping], row: Mapping) -> dict[str, Any]:
    for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        same = a.get("observation") == b.get("observation")
        if not same or a.get("action") != b.get("action"):
            credit = {"credit": _finite(a.get("turn_advantage")), "other_credit": _finite(b.get("turn_advantage"))}
            return {"differs": k, "same_state": same} | credit
    return {"differs": None, "same_state": True, "credit": None, "other_credit": None}


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
