"""ROLL: rollout_dump_data.step_<N>.jsonl, one JSON object of columns a line (github alibaba/ROLL, 8eb27cc2).

Two sets of columns (roll/pipeline/rlvr/utils.py, roll/pipeline/agentic): RLVR writes prompt, messages, responses,
scores, tag, domain, id, …; the agentic pipeline writes trajectory_data and messages, each a JSON text, tools and
exp_name. Both have global_step. Special tokens are stripped and no token is written. A line is a whole step.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError
from .base import SourceEpisode, SourceTurn, first_record, integer, is_record, items, jsonl, number, parse_object, text
from .chat import digest_of, turns_of

NAME = "roll"
DESCRIPTION = "ROLL's rollout dumps, a line of columns a step: text and scores"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "valid",
)  # fmt: skip


def sniff(path: Path, head: bytes) -> bool:
    record = first_record(head)
    if not is_record(record, "global_step"):
        # of a line longer than the head the last names are not seen: the first ones and the file's name must do
        known = is_record(record, "prompt") or is_record(record, "trajectory_data") or is_record(record, "responses")
        return known and path.name.startswith("rollout_dump_data.step_")
    rlvr = is_record(record, "responses", "scores")
    return (rlvr or is_record(record, "trajectory_data", "messages")) and not isinstance(record["global_step"], int)


def read(path: Path) -> Iterator[SourceEpisode]:
    for where, columns in jsonl(path):
        agentic = "trajectory_data" in columns
        needed = "messages" if agentic else "responses"
        rows = len(items(columns, "trajectory_data" if agentic else needed, where))
        for name, column in columns.items():
            if not isinstance(column, list) or len(column) != rows:
                size = f"{len(column)} values" if isinstance(column, list) else "no list"
                raise WorkbenchError(f"{where}: column {name} has {size}, expected a list of {rows} as {needed} has")
        for row in range(rows):
            record = {name: column[row] for name, column in columns.items()}
            at = f"{where}[{row}]"
            yield _agentic(record, at, row) if agentic else _rlvr(record, at, row)


def _rlvr(record: dict[str, Any], where: str, row: int) -> SourceEpisode:
    prompt = text(record, "prompt", where, "")
    if not prompt and record.get("messages") is not None:
        prompt = record["messages"] if isinstance(record["messages"], str) else json.dumps(record["messages"])
    kept = ("source", "difficulty", "ground_truth", "case_type", "domain")
    return SourceEpisode(
        turns=(SourceTurn(text(record, "responses", where), prompt),),
        step=integer(record, "global_step", where, 0),
        episode=str(row),
        group=str(record["id"]) if record.get("id") is not None else digest_of(prompt),
        task=text(record, "tag", where, ""),
        reward=number(record, "scores", where),
        where=where,
        info={name: record[name] for name in kept if record.get(name) is not None},
    )


def _agentic(record: dict[str, Any], where: str, row: int) -> SourceEpisode:
    data = parse_object(text(record, "trajectory_data", where), f"{where}: trajectory_data")
    env, rewards, failure = (data.get(name) or {} for name in ("env_info", "reward_info", "failure_info"))
    if not all(isinstance(part, dict) for part in (env, rewards, failure)):
        raise WorkbenchError(f"{where}: env_info, reward_info and failure_info of trajectory_data must be objects")
    turns = _turns(text(record, "messages", where), where)
    steps = rewards.get("step_rewards")
    if isinstance(steps, list) and len(steps) == len(turns):
        given = [number({"step_rewards": reward}, "step_rewards", where) for reward in steps]
        turns = [_with_reward(turn, reward) for turn, reward in zip(turns, given, strict=True)]
    group = "_".join(str(env[name]) for name in ("tag", "group_id", "episode_id", "seed") if name in env)
    return SourceEpisode(
        turns=tuple(turns),
        step=integer(record, "global_step", where, 0),
        episode=str(data.get("trajectory_id") or row),
        group=group,
        task=str(env.get("tag", "")),
        reward=number(rewards, "episode_reward", f"{where}: reward_info"),
        stop_reason=str(failure.get("stop_reason") or ""),
        where=where,
        info={"exp_name": record.get("exp_name"), "reward_info": rewards},
    )


def _turns(written: str, where: str) -> list[SourceTurn]:
    """The turns of a JSON text that holds one list of messages, or several that follow each other."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        raise WorkbenchError(f"{where}: messages is not JSON, expected the text of a list of messages") from None
    parts = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    return [turn for part in parts for turn in turns_of(part, where)]


def _with_reward(turn: SourceTurn, reward: float) -> SourceTurn:
    return SourceTurn(turn.response, turn.observation, turn.action, reward=reward, info=turn.info)
