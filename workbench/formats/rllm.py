"""rLLM: an episode a JSON file, as evaluations and as its training logger write them.

Evaluations (github rllm-org/rllm, 9beb6e0f, rllm/eval/episode_store.py): <run>/episodes/episode_<index>_<task>.json
with every field of rllm/types.py, tokens too where the engine gave them. Training (rllm/utils/episode_logger.py):
<mode>_step_<N>_epoch_<E>/episode_hash<h>_id<id>.json, text only. Each trajectory of an episode is a rollout here, one
episode's by their names; those of one name and one task are compared, as rLLM groups them. An episode's id is
"<task>:<rollout>".
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WorkbenchError
from .base import (
    MAX_RECORD,
    SourceEpisode,
    SourceTurn,
    boolean,
    first_record,
    floats,
    ids,
    integer,
    is_record,
    items,
    kind_of,
    number,
    parse_object,
    place,
    text,
)  # fmt: skip
from .chat import turns_of

NAME = "rllm"
DESCRIPTION = "rLLM's episode files of evaluations (tokens where recorded) and of training (text)"
LACKS = ("teacher_logprobs", "trainer_logprobs", "reference_logprobs", "mask", "valid", "truncated")

_MODE = re.compile(r"(train|val)_step_\d+_epoch_\d+")


def sniff(path: Path, head: bytes) -> bool:
    # The files are indented; a line break inside of a JSON text is escaped, so joining lines leaves what it says.
    record = first_record(head.replace(b"\n", b" "))
    if is_record(record, "termination_reason", "is_correct", "task"):
        return "trajectories" in record or path.name.startswith("episode_")
    return False


def read(path: Path) -> Iterator[SourceEpisode]:
    where = place(path, 1)
    record = parse_object(_content(path, where), where)
    name = text(record, "id", where, None) or text(record, "episode_id", where)
    trajectories = items(record, "trajectories", where)
    mode = _MODE.fullmatch(path.parent.name)
    task = name.rpartition(":")[0] or name
    kind = "val/" if mode and mode[1] == "val" else ""
    for index, trajectory in enumerate(trajectories):
        at = where if len(trajectories) == 1 else f"{where}: trajectories[{index}]"
        if not isinstance(trajectory, dict):
            raise WorkbenchError(f"{at} is {kind_of(trajectory)}, expected an object")
        steps = items(trajectory, "steps", at)
        turns = tuple(_turn(step, f"{at}: steps[{k}]") for k, step in enumerate(steps))
        agent = text(trajectory, "name", at, "")
        yield SourceEpisode(
            turns=turns,
            step=integer(record, "training_step", at, 0),
            episode=kind + (name if len(trajectories) == 1 else f"{name}/{index}"),
            group=f"{kind}{task}:{agent}" if agent else kind + task,
            task=task,
            reward=number(trajectory, "reward", at, None),
            success=boolean(record, "is_correct", at, None),
            stop_reason=str(record.get("termination_reason") or ""),
            fidelity="token" if turns and all(turn.token_ids is not None for turn in turns) else "text",
            where=at,
            info={
                "uid": trajectory.get("uid"),
                "agent": agent,
                "split": mode[1] if mode else "eval",
                "task": record.get("task"),
                "metrics": record.get("metrics"),
            },
        )


def _content(path: Path, where: str) -> bytes:
    try:
        with open(path, "rb") as handle:
            content = handle.read(MAX_RECORD + 1)
    except OSError as error:
        raise WorkbenchError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MAX_RECORD:
        raise WorkbenchError(f"{where}: a file over {MAX_RECORD >> 20} MiB, expected one episode")
    return content


def _turn(step: Any, where: str) -> SourceTurn:
    if not isinstance(step, dict):
        raise WorkbenchError(f"{where} is {kind_of(step)}, expected an object")
    said = turns_of(items(step, "chat_completions", where, []), where, "chat_completions")
    turn = said[-1] if said else SourceTurn("")
    observation, action = step.get("observation"), step.get("action")
    sampled = ids(step.get("response_ids") or [], "response_ids", where)
    advantage = step.get("advantage")
    if isinstance(advantage, list):
        advantages = floats(advantage, "advantage", where) if advantage else None
    else:
        value = number(step, "advantage", where, None)
        advantages = None if value is None or not len(sampled) else np.full(len(sampled), value, np.float32)
    return replace(
        turn,
        response=text(step, "model_response", where, "") or turn.response,
        observation=turn.observation if observation is None else _shown(observation),
        action=turn.action if action is None else _shown(action),
        token_ids=sampled if len(sampled) else None,
        context_ids=ids(step.get("prompt_ids") or [], "prompt_ids", where) if len(sampled) else None,
        logprobs=floats(step["logprobs"], "logprobs", where) if step.get("logprobs") else None,
        advantages=advantages,
        reward=number(step, "reward", where, None),
        info=turn.info | {name: step[name] for name in ("thought", "mc_return", "weight_version") if step.get(name)},
    )


def _shown(value: Any) -> str:
    """A value as text; an action is wrapped as {"action": …}."""
    if is_record(value, "action") and len(value) == 1:
        value = value["action"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
