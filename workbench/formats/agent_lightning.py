"""Agent Lightning v1: the zipped trajectories that its trainer logs, and the events of its server.

Trajectories (github microsoft/agent-lightning, c632d8dd, agentlightning/verl/rollout_adapter.py):
step_<N>/{train,validation}_trajectories.jsonl.zip with rollout_id, reward, prompt, response; the two texts are those of
the last model call, its whole context and its answer, and at most 24 rollouts of a training step are there.
Events (agentlightning/schemas.py, server/routes/events.py): objects with event_type, rollout_id, attempt_id, timestamp,
data, as a JSON list or a line each, those of an attempt together; model requests hold the chat response of the engine
with its token ids, in full or in the server's triplet form. As in training, a request that failed is no turn, of those
with the same prompt tokens only the last is one, and the last reward counts.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WorkbenchError
from .base import (
    MAX_RECORD,
    SourceEpisode,
    SourceTurn,
    first_record,
    floats,
    ids,
    is_record,
    items,
    jsonl,
    kind_of,
    number,
    open_member,
    open_zip,
    parse_object,
    place,
    text,
)  # fmt: skip
from .chat import prompt_of, turns_of

NAME = "agent_lightning"
DESCRIPTION = "Agent Lightning's zipped trajectories (text of the last call) and events (tokens of every call)"
LACKS = (
    "action", "mask", "teacher_logprobs", "trainer_logprobs", "reference_logprobs", "advantages", "success", "valid",
)  # fmt: skip

_STEP = re.compile(r"step_(\d+)")
_EVENT = ("event_type", "rollout_id", "data")


def sniff(path: Path, head: bytes) -> bool:
    if head.startswith(b"PK"):
        return path.name.endswith("_trajectories.jsonl.zip")
    if head.lstrip().startswith(b"["):
        return path.suffix == ".json" and all(f'"{name}"'.encode() in head for name in _EVENT)
    return is_record(first_record(head), *_EVENT)


def read(path: Path) -> Iterator[SourceEpisode]:
    yield from _trajectories(path) if path.suffix == ".zip" else _rollouts(path)


def _step(path: Path) -> int:
    found = next((found for part in reversed(path.parts[:-1]) if (found := _STEP.fullmatch(part))), None)
    return int(found[1]) if found else 0


def _trajectories(path: Path) -> Iterator[SourceEpisode]:
    with open_zip(path) as archive:
        for member in archive.namelist():
            with open_member(archive, member, path.name) as handle:
                for where, line in _member_lines(handle, place(path, member)):
                    record = parse_object(line, where)
                    yield SourceEpisode(
                        turns=(SourceTurn(text(record, "response", where), text(record, "prompt", where)),),
                        step=_step(path),
                        episode=text(record, "rollout_id", where),
                        reward=number(record, "reward", where),
                        where=where,
                        info={"split": path.name.partition("_")[0]},
                    )


def _member_lines(handle: io.BufferedIOBase, where: str) -> Iterator[tuple[str, bytes]]:
    """(where, line) of a member's lines that are not blank; an archive that is torn inside ends in WorkbenchError."""
    buffered = io.BufferedReader(handle, 1 << 16)
    line_number, blank = 0, False
    while True:
        line_number += 1
        at = f"{where}:{line_number}"
        try:
            if blank:  # an archive can hold any number of blank lines in a few bytes, so they go a block at a time
                line_number += _skip_blank(buffered)
                at = f"{where}:{line_number}"
            line = buffered.readline(MAX_RECORD + 1)
        except Exception as error:  # zlib, zipfile and struct each have their own errors for torn data
            raise WorkbenchError(f"{at}: the archive is torn ({error})") from None
        if len(line) > MAX_RECORD:
            raise WorkbenchError(f"{at}: a line over {MAX_RECORD >> 20} MiB, expected one record")
        if not line:
            return
        blank = line.isspace()
        if not blank:
            yield at, line


def _skip_blank(handle: io.BufferedReader) -> int:
    """Passes over the whole blank lines that come next, and says how many they were."""
    skipped = 0
    while block := handle.peek():
        end = block.rfind(b"\n", 0, len(block) - len(block.lstrip())) + 1
        skipped += block.count(b"\n", 0, end)
        handle.read(end)
        if end < len(block):
            break
    return skipped


def _events(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix != ".json":
        yield from jsonl(path)
        return
    if path.stat().st_size > MAX_RECORD:
        raise WorkbenchError(f"{path}: a JSON list over {MAX_RECORD >> 20} MiB, expected one event a line (.jsonl)")
    try:
        events = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WorkbenchError(f"{path.name}: torn or not JSON ({error}), expected a list of events") from None
    if not isinstance(events, list):
        raise WorkbenchError(f"{path.name}: {kind_of(events)}, expected a list of events")
    for index, event in enumerate(events):
        where = place(path, f"[{index}]")
        if not isinstance(event, dict):
            raise WorkbenchError(f"{where}: {kind_of(event)}, expected an event")
        yield where, event


def _rollouts(path: Path) -> Iterator[SourceEpisode]:
    """An episode an attempt. Holds the events of one."""
    closed: set[tuple[str, str]] = set()
    for key, events in groupby(_events(path), _owner):
        events = list(events)
        if key in closed:
            raise WorkbenchError(f"{events[0][0]}: rollout {key[0]} comes again, expected its events together")
        closed.add(key)
        yield _episode(key, events, path)


def _owner(event: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    where, record = event
    return text(record, "rollout_id", where), text(record, "attempt_id", where, "0")


def _episode(key: tuple[str, str], events: list[tuple[str, dict[str, Any]]], path: Path) -> SourceEpisode:
    where, rollout, attempt = events[0][0], *key
    turns: dict[Any, SourceTurn] = {}
    group, reward, asked = "", None, 0
    for at, event in events:
        kind, data = text(event, "event_type", at), event.get("data")
        if not isinstance(data, dict):
            raise WorkbenchError(f"{at}: data is {kind_of(data)}, expected an object")
        if kind == "reward":
            reward = number(data, "value", at)
        if kind != "model_request" or data.get("status") == "error" or number(data, "http_status", at, 200) >= 400:
            continue
        turn, messages = _turn(data, at)
        group = group or (prompt_of(messages) if messages else "")
        asked += 1
        prompt = turn.context_ids
        turns.pop(name := asked if prompt is None or not len(prompt) else prompt.tobytes(), None)
        turns[name] = turn
    return SourceEpisode(
        turns=tuple(turns.values()),
        step=_step(path),
        episode=rollout if attempt == "0" else f"{rollout}#{attempt}",
        group=group,
        reward=reward,
        fidelity="token" if turns and all(turn.token_ids is not None for turn in turns.values()) else "text",
        where=where,
        info={"requests_asked_again": asked - len(turns)},
    )


def _turn(data: dict[str, Any], where: str) -> tuple[SourceTurn, list[dict[str, Any]]]:
    """A model request as a turn, and the messages that were asked; none in the triplet form."""
    if "response_token_ids" in data:
        prompt, sampled = data.get("prompt_token_ids"), data["response_token_ids"]
        return _with_tokens(SourceTurn(""), prompt, sampled, data.get("response_log_probs"), where), []
    response, request = data.get("response"), data.get("request")
    if not isinstance(response, dict) or not isinstance(request, dict):
        raise WorkbenchError(f"{where}: request or response is {kind_of(response)}, expected objects of the chat form")
    choices = items(response, "choices", where)
    if not choices or not is_record(choices[0], "message") or not isinstance(choices[0]["message"], dict):
        raise WorkbenchError(f"{where}: choices holds no message, expected one of the chat form")
    choice, asked = choices[0], items(request, "messages", where, [])
    last = max((i for i, m in enumerate(asked) if is_record(m, "role") and m["role"] == "assistant"), default=-1)
    said = turns_of([*asked[last + 1 :], choice["message"] | {"role": "assistant"}], where, "messages")
    turn = replace(said[-1], truncated=choice["finish_reason"] == "length" if choice.get("finish_reason") else None)
    prompt = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    content = choice["logprobs"].get("content") if isinstance(choice.get("logprobs"), dict) else None
    if content is not None:
        content = items({"content": content}, "content", where)
        content = [one.get("logprob") if isinstance(one, dict) else one for one in content]
    return _with_tokens(turn, prompt, choice.get("token_ids"), content, where), asked


def _with_tokens(turn: SourceTurn, prompt: Any, sampled: Any, logprobs: Any, where: str) -> SourceTurn:
    if not sampled:
        return turn
    return replace(
        turn,
        token_ids=ids(sampled, "token_ids", where),
        context_ids=ids(prompt, "prompt_token_ids", where) if prompt else np.empty(0, np.int32),
        logprobs=floats(logprobs, "logprobs", where) if logprobs else None,
    )
