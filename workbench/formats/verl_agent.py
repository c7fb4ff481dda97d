"""verl-agent family: per-turn dumps of sampled tokens with student and teacher log-probs (SDAR, AgentOPSD).

Written as step_<N>.jsonl when SAVE_SDAR_DEBUG=1 (github ZJU-REAL/SDAR, 8b85c23, skillsd_ray_trainer.py) or
SAVE_CGTD_DEBUG=1 (github ZethWang/AgentOPSD, 0c478b2, opsd_ray_trainer.py); the second adds seq_advantage and
token_advantages. One line a turn: only tokens of the response mask are written, and turns whose mask is empty are not.
The student's log-probs are the trainer's own pass over the policy that sampled, which PPO's ratio starts from; gaps is
their difference from the teacher's and is computed anew.
Both trainers fill a batch with copies of rows and may reorder it, so a trajectory's turns lie anywhere in the file and
some come twice: they are gathered by traj_uid and put in the order of turn_step, copies kept for the audit to count.
"""

import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from . import ndjson
from .base import (
    SourceEpisode,
    SourceTurn,
    first_record,
    floats,
    ids,
    integer,
    is_record,
    items,
    lines,
    number,
    parse_object,
    place,
    text,
)

NAME = "verl_agent"
DESCRIPTION = "per-turn debug dumps of the verl-agent family: tokens with student and teacher log-probs"
LACKS = ("observation", "action", "context_ids", "mask", "group", "task", "success", "valid", "truncated")

_NUMBERS = pl.List(pl.Float32)
_SCHEMA = {
    "global_step": pl.Int64,
    "turn_step": pl.Int64,
    "traj_uid": pl.String,
    "sample_idx": pl.Int64,
    "episode_reward": pl.Float64,
    "episode_length": pl.Float64,
    "response_length": pl.Float64,
    "seq_advantage": pl.Float64,
    "tokens": pl.List(pl.String),
    "token_ids": pl.List(pl.Int32),
    "student_log_probs": _NUMBERS,
    "teacher_log_probs": _NUMBERS,
    "token_advantages": _NUMBERS,
}
_SPANS = 4096  # places of lines turned from an array into Python's numbers at once
_UID = re.compile(
    rb'"traj_uid"\s*:\s*"([^"\\]*)"'
)  # quotes inside of a string are escaped, so this finds the name only


def sniff(path: Path, head: bytes) -> bool:
    return is_record(first_record(head), "traj_uid", "turn_step", "token_ids")


def read(path: Path) -> Iterator[SourceEpisode]:
    """One episode a trajectory, in order of first appearance. Holds a few numbers a line and about 16 MiB of lines."""
    owner, offsets = _index(path)
    order = np.argsort(owner, kind="stable")
    pending: list[SourceTurn] = []
    episode: dict[str, Any] = {}
    spans = (span for at in range(0, len(order), _SPANS) for span in offsets[order[at : at + _SPANS]].tolist())
    for where, record in ndjson.parse(path, spans, _SCHEMA):
        uid = text(record, "traj_uid", where)
        given = {
            "global_step": integer(record, "global_step", where, 0),
            "episode_reward": number(record, "episode_reward", where, None),
        }
        if pending and uid != episode["traj_uid"]:
            yield _episode(episode, pending)
            pending = []
        if not pending:
            episode = record | given | {"where": where}
        for name, value in given.items():
            if value != episode[name]:
                raise WorkbenchError(
                    f"{where}: {name} {value} of trajectory {uid!r} is {episode[name]} at {episode['where']}, "
                    f"expected one value a trajectory"
                )
        pending.append(_turn(record, where))
    if pending:
        yield _episode(episode, pending)


def _index(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(N,) the trajectory of each line, and (N,3) its number, start and end in bytes."""
    uids: dict[bytes, int] = {}
    owner, offsets = array("q"), array("q")
    for line_number, start, line in lines(path):
        found = _UID.search(line)
        if found is None:
            where = place(path, line_number)
            uid = text(parse_object(line, where), "traj_uid", where).encode("utf-8", "surrogatepass")
        else:
            uid = found[1]
        owner.append(uids.setdefault(uid, len(uids)))
        offsets.extend((line_number, start, start + len(line)))
    return np.frombuffer(owner, np.int64), np.frombuffer(offsets, np.int64).reshape(-1, 3)


def _turn(record: dict[str, Any], where: str) -> SourceTurn:
    def optional(name: str) -> np.ndarray | None:
        values = record.get(name)
        return values if values is None or isinstance(values, np.ndarray) else floats(values, name, where)

    pieces, response = record.get("tokens"), record.get("tokens.joined")
    if response is None:
        try:
            response = "".join(items(record, "tokens", where, ()))
        except TypeError:
            raise WorkbenchError(f"{where}: tokens holds something else than strings, expected strings") from None
    info = {"where": where} | ({} if pieces is None else {"pieces": pieces})
    return SourceTurn(
        response=response,
        token_ids=ids(record.get("token_ids"), "token_ids", where),
        logprobs=optional("student_log_probs"),
        teacher_logprobs=optional("teacher_log_probs"),
        advantages=optional("token_advantages"),
        turn=integer(record, "turn_step", where),
        info=info,
    )


def _episode(record: dict[str, Any], turns: list[SourceTurn]) -> SourceEpisode:
    where = record["where"]
    return SourceEpisode(
        turns=tuple(sorted(turns, key=lambda turn: turn.turn)),
        step=record["global_step"],
        episode=record["traj_uid"],
        reward=record["episode_reward"],
        advantage=number(record, "seq_advantage", where, None),
        fidelity="token",
        where=where,
        info={"episode_length": number(record, "episode_length", where, None)},
    )
