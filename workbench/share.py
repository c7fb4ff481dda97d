"""Chosen episodes of a run as one block of data that a page without a kernel explores, and the redaction of a run.

The block is a JSON header (columns of episodes, groups and turns, notes, the distinct texts of cells) followed by the
numbers of the tokens as byte planes, compressed together by gzip and written in base64. Numbers of tokens keep 24 of 32
bits, an error below 2e-5 of the value. widgets/static.js reads it and answers what the explorer asks.
"""

import base64
import gzip
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import polars as pl

from . import summaries
from .errors import WorkbenchError
from .figures.pieces import Cell, join
from .notebook_html import visible
from .notes import LABELS, Note, NoteBook
from .runs import RunFolder
from .signals import DERIVED, SIGNALS, Signal, numbers

KEY = ["step", "episode"]
TEXTS = ("observation", "action", "response")
COVER = "•"  # what stands for the text of a token that was dropped
_NUMBERED = ("panel", "role", "module")  # names that figures tell apart
_LISTS = ("path", *(s.name for s in SIGNALS))
_TURN = ("step", "episode", "turn", *summaries.TURN_NUMBERS, *TEXTS, "n_tokens", "seen", "did")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True)
class Shared:
    """What a page holds of a run: `episodes` (a row of summaries.episodes each) and `turns` of those that were chosen,
    `groups` of all members of their groups, the notes on them. recorded: episodes whose turns the run kept."""

    run: str
    experiment: str
    method: str
    redacted: bool
    recorded: int
    episodes: pl.DataFrame
    groups: pl.DataFrame
    turns: pl.DataFrame
    notes: tuple[Note, ...]

    @property
    def tokens(self) -> int:
        return int(self.turns["n_tokens"].sum() or 0)


def explorable(run: RunFolder) -> bool:
    """Whether the run has episodes and turns in tables that say which they are, and at least one turn."""
    if not {"episodes", "turns"} <= set(run.tables):
        return False
    turns, episodes = run.scan("turns"), run.scan("episodes")
    lacks = {*KEY, "turn"} - set(turns.collect_schema().names())
    lacks |= {*KEY, "group", "outcome", "return"} - set(episodes.collect_schema().names())
    return not lacks and turns.join(episodes, on=KEY, how="semi").head(1).collect().height > 0


def gather(run: RunFolder, limit: int | None = 200, redact: bool = False) -> Shared:
    """Choose at most `limit` episodes (None: all; see summaries.choose) and read what a page shows of them.

    redact drops all text and token ids and keeps numbers. Raises WorkbenchError where no turns were recorded.
    """
    frame = summaries.episodes(run)
    recorded = frame.filter(pl.col("recorded") > 0).height
    if not recorded:
        raise WorkbenchError(f"{run.path}: no episode whose turns were recorded, so there is nothing to explore")
    notes = NoteBook(run.path).notes()
    chosen = summaries.choose(frame, limit, ((n.step, n.episode) for n in notes))
    keys = set(chosen.iter_rows())
    notes = tuple(replace(n, run=run.path.name) for n in notes if (n.step, n.episode) in keys)
    groups = _groups(frame).join(_in(frame, chosen).select("step", "group").unique(), on=["step", "group"], how="semi")
    turns = _prepared(_in(run.scan("turns"), chosen).collect().sort(*KEY, "turn"))
    frame, method = _in(frame, chosen), str(run.config.get("method", ""))
    if redact:
        from .methods import METHODS

        frame, groups, turns = redacted(frame), redacted(groups), redacted(turns)
        notes = tuple(replace(note, author="", text="", tags=()) for note in notes)
        method = method if method in METHODS else ""
    return Shared(run.path.name, run.experiment, method, redact, recorded, frame, groups, turns, notes)


def redacted(frame: pl.DataFrame) -> pl.DataFrame:
    """A table without text. What stays is decided by type, so that a column nobody knows goes with its text.

    Numbers and flags stay, and the known signals of tokens; ids of tokens go, which a tokenizer turns into text. What
    was seen and said becomes empty, and names that figures tell apart become numbers, as "panel 1".
    """
    kept = []
    for name, kind in frame.schema.items():
        if not _NAME.fullmatch(name):
            continue
        if kind.is_numeric() or kind == pl.Boolean or name in _LISTS:
            kept.append(pl.col(name))
        elif kind == pl.String and name in _NUMBERED:
            known = frame[name].drop_nulls().unique(maintain_order=True)
            labels = [f"{name} {i}" for i in range(1, len(known) + 1)]
            kept.append(pl.col(name).replace_strict(known, labels, return_dtype=pl.String, default=None))
        elif kind == pl.String and name in (*TEXTS, "task"):
            kept.append(pl.lit("").alias(name))
    return frame.select(kept)


def pack(shared: Shared) -> bytes:
    """The block of data, gzipped; see the module's docstring. The same input gives the same bytes."""
    turns, cells = shared.turns, [_cells(row, shared.redacted) for row in shared.turns.iter_rows(named=True)]
    counts = [part[-1].stop if part else 0 for part in cells]
    flat = [cell for part in cells for cell in part]
    words = {text: i for i, text in enumerate(dict.fromkeys(cell.text for cell in flat))}
    arrays = {"words": np.array([words[cell.text] for cell in flat], "<u4")}
    widths = np.array([cell.stop - cell.start for cell in flat], "<u4")
    if (widths != 1).any():
        arrays["widths"] = widths
    if not shared.redacted and "token_ids" in turns.columns:
        ids = [row[:count] for row, count in zip(turns["token_ids"].to_list(), counts, strict=True) if count]
        arrays["ids"] = np.array([i for part in ids for i in part], "<u4")
    values = {signal.name: _values(turns, signal.name, counts) for signal in SIGNALS}
    known = {name: array for name, array in values.items() if not np.isnan(array).all()}
    layout, planes, offset = {}, [], 0
    for name, array in (arrays | {n: a for n, a in known.items() if n not in DERIVED}).items():
        data = _planes(array)
        layout[name] = {"length": len(array), "offset": offset, "float": array.dtype.kind == "f"}
        planes.append(data)
        offset += len(data)
    head = {
        "run": shared.run,
        "experiment": shared.experiment,
        "method": shared.method,
        "redacted": shared.redacted,
        "recorded": shared.recorded,
        "labels": list(LABELS),
        "signals": [asdict(s) for s in SIGNALS if s.name in known],
        "derived": {name: sources for name, sources in DERIVED.items() if name in known},
        "limits": {s.name: _limit(s, known[s.name]) for s in SIGNALS if s.name in known},
        "numeric": _numeric(shared.episodes),
        "texts": [n for n, kind in shared.episodes.schema.items() if kind == pl.String],
        "episodes": _columns(shared.episodes),
        "groups": _columns(shared.groups),
        "turns": _columns(turns.select(n for n in turns.columns if n in _TURN)) | {"count": counts},
        "n_cells": [len(part) for part in cells],
        "cells": list(words),
        "notes": [asdict(note) for note in shared.notes],
        "arrays": layout,
    }
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return gzip.compress(len(text).to_bytes(4, "little") + text + b"".join(planes), 9, mtime=0)


def section(shared: Shared) -> str:
    """The explorer's place in a page, with its data. Everything of a run is in the data or escaped."""
    held = shared.episodes.height
    which = "all" if held == shared.recorded else f"{held} of the {shared.recorded}"
    said = f"{which} episodes whose turns the run kept, {shared.tokens:,} sampled tokens. Press ? for the keys."
    if held < shared.recorded:
        said += " Chosen: those with notes, then the best, median, worst and most revised of each step, then members of"
        said += " their groups."
    if shared.redacted:
        said += " Redacted: numbers and labels alone. What was seen and said, token ids, tasks, and text and authors of"
        said += " notes are left out."
    data = base64.b64encode(pack(shared)).decode()
    return (
        f'<section class="explorer"><h2>Episodes</h2><p class="sub">{said[0].upper()}{said[1:]}</p>\n'
        '<p class="sub" id="explorer-said" role="status"></p>'
        '<div id="explorer-view" class="cw-own-scheme"><p class="sub">The explorer needs JavaScript.</p></div>\n'
        f'<script type="application/octet-stream" id="explorer-data">{data}</script></section>\n'
    )


def notes_section(shared: Shared) -> str:
    """The notes as plain text, each with a link that opens the explorer at its place; "" where there are none."""
    if not shared.notes:
        return ""
    return f'<section class="notes"><h2>Notes</h2>{"".join(map(_note, shared.notes))}</section>\n'


def _note(note: Note) -> str:
    place = f"step {note.step}, episode {note.episode}" + ("" if note.turn is None else f", turn {note.turn}")
    place += "" if note.start is None else f", tokens {note.start} to {note.end - 1}"
    facts = [f"[{note.label}]"] if note.label else []
    facts += [f"#{tag}" for tag in note.tags] + [note.author, f"{note.time[:16].replace('T', ' ')} UTC"]
    told = " · ".join(plain_html(fact) for fact in facts if fact)
    text = f"<pre>{plain_html(note.text)}</pre>" if note.text.strip() else ""
    link = f'<a href="#{plain_html(note.link)}">{place}</a>'
    return f'<div class="note">{link} <span class="sub">{told}</span>{text}</div>'


def plain_html(text: str) -> str:
    """Text as HTML that is nothing but this text; marks that hide it or turn its direction show as U+FFFD."""
    return html.escape(visible(text))


def _in(frame: Any, chosen: pl.DataFrame) -> Any:
    """The rows of a frame, lazy or not, whose (step, episode) was chosen, in the frame's order."""
    chosen = chosen.lazy() if isinstance(frame, pl.LazyFrame) else chosen
    return frame.join(chosen, on=KEY, how="semi")


def _groups(frame: pl.DataFrame) -> pl.DataFrame:
    """A row a group, of all its episodes: step, group, task, n, won, mean, low, high (return), revised."""
    task = [pl.col("task").first()] if "task" in frame.columns else []
    revised = [pl.col("revised").max()] if "revised" in frame.columns else []
    earned = pl.col("return")
    return frame.group_by("step", "group", maintain_order=True).agg(
        *task, pl.len().cast(pl.Int64).alias("n"), pl.col("outcome").sum().alias("won"), earned.mean().alias("mean"),
        earned.min().alias("low"), earned.max().alias("high"), *revised,
    )  # fmt: skip


def _prepared(turns: pl.DataFrame) -> pl.DataFrame:
    """Turns with n_tokens, and with `seen` and `did`: equal numbers for equal observations and actions."""
    length = pl.col("token_ids").list.len().fill_null(0).cast(pl.Int64) if "token_ids" in turns.columns else pl.lit(0)
    codes = []
    for name, source in (("seen", "observation"), ("did", "action")):
        texts = turns[source] if source in turns.columns else pl.Series(source, [""] * turns.height)
        known = texts.unique(maintain_order=True)
        codes.append(texts.replace_strict(known, range(len(known)), return_dtype=pl.Int64).alias(name))
    return turns.with_columns(length.alias("n_tokens"), *codes)


def _cells(row: Mapping[str, Any], covered: bool) -> list[Cell]:
    """The cells of a turn's tokens; none where the pieces of its tokens were not recorded."""
    if covered:
        return [Cell(COVER, i, i + 1) for i in range(row["n_tokens"])]
    pieces = row.get("pieces") or []
    return join(pieces, row.get("response")) if len(pieces) == row["n_tokens"] else []


def _values(turns: pl.DataFrame, signal: str, counts: Sequence[int]) -> np.ndarray:
    """A signal of all tokens one after another, float32 (N,), NaN where it was not recorded."""
    sources = [n for n in DERIVED.get(signal, (signal,)) if n in turns.columns]
    if len(sources) < len(DERIVED.get(signal, (signal,))):
        return np.full(sum(counts), np.nan, "<f4")
    parts = [np.zeros(0, "<f4")]
    for row, count in zip(turns.select(sources).iter_rows(named=True), counts, strict=True):
        whole = all(row[n] is not None and len(row[n]) >= count for n in sources)
        parts.append(numbers(row, signal, 0, count) if whole else np.full(count, np.nan, "<f4"))
    return np.concatenate(parts)


def _planes(array: np.ndarray) -> bytes:
    """Bytes of the same place of all numbers together, which gzip packs better: four of an integer, and of a float the
    upper three, rounded."""
    if array.dtype.kind != "f":
        return array.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes()
    bits = np.where(np.isnan(array), np.float32(np.nan), array).astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x80) >> 8).astype("<u4").view(np.uint8).reshape(-1, 4).T[:3].tobytes()


def _limit(signal: Signal, values: np.ndarray) -> float:
    """Distance from the centre at which the colour is full: the 98th centile of these tokens, one half of a gate."""
    far = np.abs(values[np.isfinite(values)] - (signal.centre or 0.0))
    return 0.5 if signal.name == "gate" else max(float(np.quantile(far, 0.98)) if len(far) else 0.0, 1e-9)


def _numeric(frame: pl.DataFrame) -> list[str]:
    return [n for n, kind in frame.schema.items() if kind.is_numeric() and frame[n].null_count() < frame.height]


def _columns(frame: pl.DataFrame) -> dict[str, list]:
    """Columns that JSON can hold, numbers, flags and texts or lists of them, without infinity and NaN."""
    kinds = {n: kind.inner if isinstance(kind, pl.List) else kind for n, kind in frame.schema.items()}
    held = [n for n, kind in kinds.items() if kind.is_numeric() or kind in (pl.Boolean, pl.String)]
    return {n: [_finite(v) for v in frame[n].to_list()] for n in held}


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
