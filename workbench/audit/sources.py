"""Our own runs and batches as the episodes that readers yield, so that there is one set of checks."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from ..formats.base import SourceEpisode, SourceTurn
from ..links import Link
from ..records import Batch, Credit
from ..runs.files import read_json
from ..runs.folder import RunFolder

ROWS = 1024  # turns read at a time
_FLOATS = {
    "old_logprobs": "logprobs", "teacher_logprobs": "teacher_logprobs", "trainer_logprobs": "trainer_logprobs",
    "reference_logprobs": "reference_logprobs", "advantage": "advantages",
}  # fmt: skip
_INFO = ("belief", "belief_before", "turn_advantage")
_AS_WRITTEN = ("source_turn",)  # of an imported run alone; null where its source numbers no turns
_COLUMNS = (
    "step", "episode", "turn", "observation", "action", "response", "valid", "truncated", "reward", "context_ids",
    "continues", "token_ids", "source_mask", "scored_logprobs", *_FLOATS, *_INFO, *_AS_WRITTEN,
)  # fmt: skip


def run_episodes(run: RunFolder) -> Iterator[SourceEpisode]:
    """The training episodes of a run folder, step by step; those whose turns were not recorded come without turns.

    info holds "link", "prior", "return", "n_turns" and "optimizer_steps" (updates applied to the step's batch). Holds
    the episodes of one step, of which no turn, and the turns of one episode. Episodes and groups of an imported run go
    by the names that its source gave them. Raises WorkbenchError where the run has no table of episodes, a table cannot
    be read, turns have none of episodes beside them, an episode is there twice, or a turn has no number.
    """
    if not run.table_files("episodes"):
        raise WorkbenchError(f"{run.path} holds no table of episodes, so there is nothing to audit")
    origin = run.path / "source.json"
    # A trained run's advantages compare outcomes unless it says otherwise; an imported one has the source's rewards.
    reward = "return" if origin.is_file() or run.config.get("reward", "outcome") == "return" else "outcome"
    applied = _updates(run)
    turns = {path.name: path for path in run.table_files("turns")}
    files = run.table_files("episodes")
    if alone := sorted(turns.keys() - {file.name for file in files}):
        raise WorkbenchError(f"{turns[alone[0]]}: the table of episodes has no {alone[0]}, whose turns these are")
    for file in files:
        heads: dict[int, dict[str, Any]] = {}
        for row in _read(file).iter_rows(named=True):
            if row["episode"] is None or row["episode"] in heads:
                what = "without a number" if row["episode"] is None else f"{row['episode']} twice"
                raise WorkbenchError(f"{file} holds an episode {what}; every episode is one row")
            heads[row["episode"]] = row
        seen = set()
        for name, rows in _by_episode(turns[file.name]) if file.name in turns else ():
            if name not in heads:
                raise WorkbenchError(f"{turns[file.name]}: episode {name} is not in the table of episodes")
            seen.add(name)
            yield _episode(run, heads[name], rows, reward, applied)
        for name in sorted(heads.keys() - seen):
            yield _episode(run, heads[name], [], reward, applied)


def run_notes(run: RunFolder) -> list[str]:
    """What an import left out, which the run's tables cannot show any more. Raises WorkbenchError on a torn file."""
    origin = run.path / "source.json"
    left_out = read_json(origin).get("repeated_turns_left_out") if origin.is_file() else None
    repeats = sum(n for n in left_out.values() if type(n) is int) if isinstance(left_out, dict) else 0
    return [f"{repeats} turns that repeat others were left out when this run was imported"] if repeats else []


def batch_episodes(
    batch: Batch, credit: Credit | None = None, step: int = 0, where: str = "batch"
) -> Iterator[SourceEpisode]:
    """The episodes of an in-memory batch, with what was trained on where a credit rule's result is given.

    A turn that several rows hold comes once for each. What a Batch refuses to hold, no check can find in one.
    """
    advantages = None if credit is None else credit.advantages.float().cpu().numpy()
    table = {} if credit is None else {n: v.float().cpu().numpy() for n, v in credit.turns.items() if n in _INFO}
    names = {"logprobs": "old_logprobs", "teacher_logprobs": "teacher_logprobs"}
    names["reference_logprobs"] = "reference_logprobs"
    values = {n: v.float().cpu().numpy() for n, own in names.items() if (v := getattr(batch, own)) is not None}
    ids, of_turn = batch.input_ids.cpu().numpy(), batch.turn_index.cpu().numpy()
    owner = batch.episode_index.cpu().numpy()
    for e in range(len(batch.group_index)):
        turns = []
        for b in np.flatnonzero(owner == e):
            for k in np.unique(of_turn[b][of_turn[b] >= 0]).tolist():
                at = np.flatnonzero(of_turn[b] == k)
                signals = {name: value[b, at] for name, value in values.items()}
                if advantages is not None:
                    signals["advantages"] = advantages[b, at]
                turns.append(
                    SourceTurn(
                        "",
                        token_ids=ids[b, at].astype(np.int32),
                        context_ids=ids[b, : at[0]].astype(np.int32),
                        reward=None if batch.turn_rewards is None else float(batch.turn_rewards[e, k]),
                        turn=k,
                        info={"where": f"{where} row {b}"} | {n: float(value[e, k]) for n, value in table.items()},
                        **signals,
                    )
                )
        yield SourceEpisode(
            tuple(turns), step, str(e), str(int(batch.group_index[e])), "", float(batch.reward[e]),
            bool(batch.outcome[e]), fidelity="token", where=f"{where} episode {e}",
        )  # fmt: skip


def _by_episode(file: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows of each episode of a table of turns, which lie together."""
    name, rows, start = None, [], 0
    while len(part := _read(file, start, _COLUMNS)):
        start += ROWS
        for row in part.iter_rows(named=True):
            if row["episode"] != name and rows:
                yield name, rows
                rows = []
            name = row["episode"]
            rows.append(row)
    if rows:
        yield name, rows


def _episode(
    run: RunFolder,
    head: dict[str, Any],
    rows: list[dict[str, Any]],
    reward: str,
    applied: dict[int, tuple[int, int]],
) -> SourceEpisode:
    turns, context = [], np.empty(0, np.int32)
    for row in rows:
        if row["turn"] is None:
            raise WorkbenchError(f"turns: step {head['step']}, episode {head['episode']} has a turn without a number")
        ids, own = _array(row, "token_ids", np.int32), _array(row, "context_ids", np.int32)
        if own is not None:
            own = np.concatenate([context, own]) if row.get("continues") else own
            context = own if ids is None else np.concatenate([own, ids])
        turns.append(
            SourceTurn(
                row.get("response") or "",
                row.get("observation") or "",
                row.get("action"),
                token_ids=ids,
                context_ids=own,
                mask=_array(row, "source_mask", np.int8),
                reward=row.get("reward"),
                valid=row.get("valid"),
                truncated=row.get("truncated"),
                turn=row["turn"],
                info={name: row[name] for name in _INFO if row.get(name) is not None}
                | {name: row[name] for name in _AS_WRITTEN if name in row}
                | {"scored_logprobs": _array(row, "scored_logprobs", np.float32)},
                **{field: _array(row, column, np.float32) for column, field in _FLOATS.items()},
            )
        )
    step, episode = head["step"], head["episode"]
    link = Link(run.path.name, step, episode)
    info: dict[str, Any] = {"link": link, "prior": head.get("prior"), "return": head.get("return")}
    if rows:
        info["n_turns"] = head.get("n_turns")
    if step in applied:
        info["optimizer_steps"] = applied[step]
    outcome, group = head.get("outcome"), head.get("source_group", head.get("group"))
    named = str(head["source_episode"] or f"number {episode}") if "source_episode" in head else str(episode)
    return SourceEpisode(
        tuple(turns),
        step,
        named,
        "" if group is None else str(group),
        head.get("task") or "",
        head.get(reward),
        None if outcome is None else bool(outcome),
        head.get("advantage"),
        head.get("stop_reason") or "",
        head.get("fidelity") or "token",
        str(link),
        info,
    )


def _updates(run: RunFolder) -> dict[int, tuple[int, int]]:
    """Per step, optimizer steps taken on its batch and gradients that were discarded."""
    if not run.table_files("updates"):
        return {}
    out = {}
    for file in run.table_files("updates"):
        for row in _read(file, columns=("step", "applied")).iter_rows(named=True):
            taken, discarded = out.get(row["step"], (0, 0))
            out[row["step"]] = (taken + bool(row["applied"]), discarded + (not row["applied"]))
    return out


def _array(row: dict[str, Any], name: str, dtype: Any) -> np.ndarray | None:
    """A list of a row's tokens. Raises WorkbenchError where it is none, or holds what is no number."""
    values = row.get(name)
    if values is None:
        return None
    try:
        if isinstance(values, list):
            return np.asarray(values, dtype)
    except (ValueError, TypeError, OverflowError):
        pass
    where = f"turns: step {row['step']}, episode {row['episode']}, turn {row['turn']}"
    raise WorkbenchError(f"{where}: column {name} should be a list of numbers, and is not")


def _read(file: Path, start: int | None = None, columns: Sequence[str] = ("step", "episode")) -> pl.DataFrame:
    """A table, or ROWS rows of it from `start` on in those of the columns that are there; the first three must be."""
    try:
        frame = pl.scan_parquet(file, hive_partitioning=False, glob=False)
        known = frame.collect_schema().names()
        lacking = [name for name in columns[:3] if name not in known]
        if lacking:
            raise WorkbenchError(f"{file} cannot be read: column {lacking[0]} is missing")
        if start is not None:
            frame = frame.select([name for name in columns if name in known]).slice(start, ROWS)
        return frame.collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise WorkbenchError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
