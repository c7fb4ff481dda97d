"""OpenPipe ART: trajectories/<split>/<step>.parquet, and the JSON lines written before it.

Parquet (openpipe-art 0.5.18, art/utils/trajectory_logging.py): a row a trajectory with group_index, reward, messages
(role, content, tool_calls, tool_call_id, trainable) and JSON texts of metrics, metadata and tools. JSON lines
(trajectory_migration.py): a line a group, {"trajectories": [{reward, messages_and_choices, …}]}; a choice, which has a
message and a finish_reason, is what the policy said. Both leave out the log-probs, and neither has tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from ..errors import WorkbenchError
from .base import SourceEpisode, SourceTurn, first_record, integer, is_record, items, jsonl, kind_of, number, place
from .chat import turns_of

NAME = "art"
DESCRIPTION = "OpenPipe ART's trajectories (parquet and JSON lines): messages and a reward"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "success", "valid",
)  # fmt: skip

ROWS = 256  # of a parquet file in memory at once
_NEEDED = ("group_index", "reward", "messages")


def sniff(path: Path, head: bytes) -> bool:
    if head.startswith(b"PAR1"):
        try:
            return all(name in pl.read_parquet_schema(path) for name in _NEEDED)
        except (pl.exceptions.PolarsError, OSError):
            return False
    if is_record(first := first_record(head), "trajectories") and path.suffix == ".jsonl":
        return set(first) <= {"trajectories", "metadata", "metrics", "logs"}
    return False


def read(path: Path) -> Iterator[SourceEpisode]:
    yield from _parquet(path) if path.suffix == ".parquet" else _lines(path)


def _parquet(path: Path) -> Iterator[SourceEpisode]:
    start = 0
    while True:
        try:
            rows = pl.scan_parquet(path).slice(start, ROWS).collect().to_dicts()
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise WorkbenchError(f"{path.name}: no whole parquet file ({str(error).splitlines()[0]})") from None
        for index, row in enumerate(rows, start):
            yield _episode(row, str(integer(row, "group_index", place(path, index))), "messages", path, str(index))
        start += ROWS
        if len(rows) < ROWS:
            return


def _lines(path: Path) -> Iterator[SourceEpisode]:
    for where, record in jsonl(path):
        line = where.rpartition(":")[2]
        for index, trajectory in enumerate(items(record, "trajectories", where)):
            if not isinstance(trajectory, dict):
                raise WorkbenchError(f"{where}[{index}]: a trajectory is {kind_of(trajectory)}, expected an object")
            yield _episode(trajectory, line, "messages_and_choices", path, f"{line}[{index}]")


def _episode(row: dict[str, Any], group: str, name: str, path: Path, at: str) -> SourceEpisode:
    where = place(path, at)
    messages = [_message(message, f"{where}: {name}[{k}]", row) for k, message in enumerate(items(row, name, where))]
    metadata = _decoded(row, "metadata", where)
    split = path.parent.name if path.parent.parent.name == "trajectories" else ""
    return SourceEpisode(
        turns=_turns(messages, where, name),
        step=int(path.stem) if path.stem.isdigit() else 0,
        episode=f"{split}/{at}" if split else at,
        group=f"{split}/{group}" if split else group,
        task=str(metadata.get("scenario_id") or metadata.get("task") or ""),
        reward=number(row, "reward", where),
        where=where,
        info={
            "split": split,
            "metadata": metadata,
            "metrics": _decoded(row, "metrics", where),
            "logs": row.get("logs"),
            "additional_histories": len(_decoded_list(row, "additional_histories", where)),
        },
    )


def _message(message: Any, where: str, row: dict[str, Any]) -> dict[str, Any]:
    """A message of either form in the OpenAI form, "trainable" beside it."""
    if not isinstance(message, dict):
        raise WorkbenchError(f"{where} is {kind_of(message)}, expected a message")
    if isinstance(message.get("message"), dict):
        inner = dict(message["message"])
        return inner | {
            "role": inner.get("role", "assistant"),
            "trainable": True,
            "finish": message.get("finish_reason"),
        }
    out = dict(message)
    if isinstance(out.get("tool_calls"), str):
        out["tool_calls"] = _json(out["tool_calls"], f"{where}: tool_calls")
    return out | {"trainable": out.get("trainable") is True}


def _turns(messages: list[dict[str, Any]], where: str, name: str) -> tuple[SourceTurn, ...]:
    """Assistant messages that nobody trains (few-shot, another model's) are part of what is observed."""
    shown = [
        message
        if message["trainable"] or message.get("role") != "assistant"
        else message | {"role": "user", "content": message.get("content"), "tool_calls": None}
        for message in messages
    ]
    turns = turns_of(shown, where, name)
    finish = [message.get("finish") for message in messages if message["trainable"]]
    if len(finish) != len(turns):
        raise WorkbenchError(f"{where}: {name} trains a message that is not the assistant's, expected role assistant")
    return tuple(replace(t, truncated=f == "length" if f else None) for t, f in zip(turns, finish, strict=True))


def _decoded(row: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    value = _json(row[name], f"{where}: {name}") if isinstance(row.get(name), str) else row.get(name)
    if value is not None and not isinstance(value, dict):
        raise WorkbenchError(f"{where}: {name} is {kind_of(value)}, expected an object")
    return value or {}


def _decoded_list(row: dict[str, Any], name: str, where: str) -> list[Any]:
    value = _json(row[name], f"{where}: {name}") if isinstance(row.get(name), str) else row.get(name)
    if value is not None and not isinstance(value, list):
        raise WorkbenchError(f"{where}: {name} is {kind_of(value)}, expected a list")
    return value or []


def _json(written: str, where: str) -> Any:
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        raise WorkbenchError(f"{where} is not JSON, expected the text of a JSON value") from None
