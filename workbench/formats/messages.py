"""Plain chat: a JSON object a line with `messages` in the OpenAI form and a `reward`.

Also understood, each by the first name that is there: the rollout's id (id, episode, trajectory_id, rollout_id, uid),
its group (group, group_id, prompt_id, task_id, example_id; else rollouts whose messages before the first answer are the
same), task, step, success, advantage and stop_reason (or finish_reason). `score` stands for reward. The rest is kept as
info.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError
from .base import SourceEpisode, boolean, first_record, integer, is_record, jsonl, kind_of, number, text
from .chat import prompt_of, turns_of

NAME = "messages"
DESCRIPTION = "plain chat messages with a reward, one rollout a line"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "valid",
)  # fmt: skip

_IDS = ("id", "episode", "trajectory_id", "rollout_id", "uid")
_GROUPS = ("group", "group_id", "prompt_id", "task_id", "example_id")
_OWN = {"messages", "reward", "score", "task", "step", "success", "advantage", "stop_reason", "finish_reason"}


def sniff(path: Path, head: bytes) -> bool:
    record = first_record(head)
    return is_record(record, "messages") and (is_record(record, "reward") or is_record(record, "score"))


def read(path: Path) -> Iterator[SourceEpisode]:
    for where, record in jsonl(path):
        turns = turns_of(record.get("messages"), where)
        if not turns:
            raise WorkbenchError(f"{where}: messages holds no assistant message, expected one or more")
        stop = text(record, "stop_reason", where, "") or text(record, "finish_reason", where, "")
        yield SourceEpisode(
            turns=turns,
            step=integer(record, "step", where, 0),
            episode=label(record, _IDS, where) or where.rpartition(":")[2],
            group=label(record, _GROUPS, where) or prompt_of(record["messages"]),
            task=text(record, "task", where, ""),
            reward=number(record, "reward" if "reward" in record else "score", where),
            success=boolean(record, "success", where, None),
            advantage=number(record, "advantage", where, None),
            stop_reason=stop,
            where=where,
            info={key: value for key, value in record.items() if key not in _OWN},
        )


def label(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of these names that is there, as text; "" where none is. Raises WorkbenchError unless text or whole."""
    for name in names:
        value = record.get(name)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
        if value is not None:
            raise WorkbenchError(f"{where}: {name} is {kind_of(value)}, expected text or a whole number")
    return ""
