"""verifiers: traces.jsonl (v1) and results.jsonl (before v1), as its evaluations and prime-rl's rollouts write them.

v1 (github PrimeIntellect-ai/verifiers, a60a606e, verifiers/v1/episode.py, trace.py, graph.py): a line is an episode of
traces, one an agent; a trace is a graph of messages, each with the tokens it adds, so that those of a path from root to
leaf follow each other. mask is as long as token_ids, logprobs and what else is per token as the mask's sum. Here a
trace is a rollout and each sampled message a turn, once however many paths go through it. The writer rounds log-probs
to four decimals. Before v1: a line is a rollout; tokens are in trajectory[].tokens, there only where asked for.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import WorkbenchError
from .base import (
    SourceEpisode,
    SourceTurn,
    boolean,
    first_record,
    floats,
    ids,
    integer,
    is_record,
    items,
    jsonl,
    kind_of,
    mask,
    number,
    text,
)  # fmt: skip
from .chat import digest_of, turns_of

NAME = "verifiers"
DESCRIPTION = "verifiers' traces (v1, as prime-rl's rollouts) with tokens and log-probs, and results from before v1"
LACKS = ("teacher_logprobs", "success", "valid")

_VERSION = 1
_STEP = re.compile(r"step_(\d+)")
_SIGNALS = ("logprobs", "reference_logprobs", "trainer_logprobs", "advantages")
_RESULT = {"prompt", "completion", "reward", "trajectory", "example_id", "stop_condition", "task"}


def sniff(path: Path, head: bytes) -> bool:
    record = first_record(head)
    traces = is_record(record, "id", "task") and ("traces" in record or path.name == "traces.jsonl")
    return traces or is_record(record, "example_id", "prompt", "completion")


def read(path: Path) -> Iterator[SourceEpisode]:
    for where, record in jsonl(path):
        if "traces" in record:
            yield from _traces(record, path, where)
        else:
            yield _result(record, path, where)


def _traces(record: dict[str, Any], path: Path, where: str) -> Iterator[SourceEpisode]:
    """One rollout a trace. An episode that failed before its first trace gives none."""
    traces = [_object(trace, "traces", where) for trace in items(record, "traces", where)]
    agents = [text(_part(trace, "agent", where), "name", where, "agent") for trace in traces]
    group, step = _group(record, where), _step(record, path, where)
    kind = "all/" if path.parent.name == "all" else ""  # prime-rl writes what it trained on under "effective" again
    for index, (trace, agent) in enumerate(zip(traces, agents, strict=True)):
        at = where if len(traces) == 1 else f"{where}[{index}]"
        version = integer(trace, "version", at, _VERSION)
        if version != _VERSION:
            raise WorkbenchError(f"{at}: a trace of version {version}, expected {_VERSION}")
        turns = _turns(trace, at)
        task = _part(trace, "task", at) or _part(record, "task", at)
        yield SourceEpisode(
            turns=turns,
            step=step,
            episode=kind + text(trace, "id", at),
            group=kind + (group if len(set(agents)) == 1 else f"{group}:{agent}"),
            task=str(task.get("key") or _part(task, "data", at).get("name") or task.get("type") or ""),
            reward=_reward(trace, at),
            stop_reason=text(trace, "stop_condition", at, ""),
            fidelity="token" if turns and all(turn.token_ids is not None for turn in turns) else "text",
            where=at,
            info={
                "episode": record.get("id"),
                "env": _part(record, "env", at).get("id"),
                "agent": agent,
                "trainable": boolean(_part(trace, "agent", at), "trainable", at, True),
                "rewards": trace.get("rewards"),
                "metrics": trace.get("metrics"),
                "ok": trace.get("ok"),
                "errors": trace.get("errors"),
            },
        )


def _turns(trace: dict[str, Any], where: str) -> tuple[SourceTurn, ...]:
    """The sampled messages of a trace, in the order they were made."""
    nodes = [_object(node, "nodes", where) for node in items(trace, "nodes", where, [])]
    calls = [_object(call, "calls", where) for call in items(trace, "calls", where, [])]
    finish = {call.get("node"): call.get("finish_reason") for call in calls}
    contexts: list[np.ndarray] = []  # of each node, the tokens from the root up to its end
    told: list[list[Any]] = []  # of each node, the messages since the last sampled one before it, its own included
    turns = []
    for index, node in enumerate(nodes):
        at = f"{where}: nodes[{index}]"
        parent = integer(node, "parent", at, None)
        if parent is not None and not 0 <= parent < index:
            raise WorkbenchError(f"{at}: parent is {parent}, expected a node before it")
        context = np.empty(0, np.int32) if parent is None else contexts[parent]
        said = [] if parent is None or nodes[parent].get("sampled") else told[parent]
        tokens = ids(node.get("token_ids") or [], "token_ids", at)
        contexts.append(np.concatenate([context, tokens]))
        told.append([*said, node.get("message")])
        if boolean(node, "sampled", at, False):
            turn = turns_of(told[index], at, "messages", skip=len(said))
            if not turn:
                raise WorkbenchError(f"{at}: a sampled message that is not the assistant's, expected role assistant")
            turn = replace(turn[0], truncated=finish[index] == "length" if finish.get(index) else None)
            turn.info.update(node=index, parent=parent, **_trained(told[index], nodes, parent, at))
            turns.append(_with_tokens(turn, node, tokens, context, at))
    return tuple(turns)


def _with_tokens(
    turn: SourceTurn, node: dict[str, Any], tokens: np.ndarray, context: np.ndarray, where: str
) -> SourceTurn:
    """The turn with what its node holds a token. What comes before the first sampled token is the template's."""
    trained = mask(node.get("mask") or [], "mask", where)
    if not len(tokens) and not len(trained):
        return turn
    signals = {name: None if not node.get(name) else floats(node[name], name, where) for name in _SIGNALS}
    if node.get("entropies"):
        turn.info["entropy"] = floats(node["entropies"], "entropies", where)
    start = int(trained.argmax()) if trained.any() and len(trained) == len(tokens) else 0
    keep = trained.astype(bool) if len(trained) == len(tokens) else np.ones(len(tokens), bool)
    return replace(
        turn,
        token_ids=tokens[keep],
        context_ids=np.concatenate([context, tokens[:start]]),
        mask=trained[start:],
        **signals,
    )


def _trained(told: list[Any], nodes: list[dict[str, Any]], parent: int | None, where: str) -> dict[str, int]:
    """How many tokens that nobody sampled the mask trains, between the turn before and this one; {} for none."""
    count = 0
    for _ in told[1:]:
        count += sum(map(bool, items(nodes[parent], "mask", where, [])))
        parent = nodes[parent].get("parent")
    return {"trained_environment_tokens": count} if count else {}


def _reward(trace: dict[str, Any], where: str) -> float | None:
    """Sum of score times weight; None where nothing was scored."""
    rewards = [_object(reward, "rewards", where) for reward in _part(trace, "rewards", where).values() if reward]
    if not rewards:
        return None
    return sum(number(reward, "score", where) * number(reward, "weight", where, 1.0) for reward in rewards)


def _group(record: dict[str, Any], where: str) -> str:
    """The group the trainer gave; else rollouts of one task are one."""
    task = _part(record, "task", where)
    env = _part(record, "env", where).get("id") or ""
    if name := _part(record, "group", where).get("id"):
        return str(name)
    work = _part(_part(record, "run", where), "work", where).get("type") or "eval"
    return f"{work}:{task.get('key') or task.get('hash') or digest_of([env, task.get('data')])}"


def _step(record: dict[str, Any], path: Path, where: str) -> int:
    work = _part(_part(record, "run", where), "work", where)
    folder = next((found for part in reversed(path.parts[:-1]) if (found := _STEP.fullmatch(part))), None)
    return integer(work, "step", where, int(folder[1]) if folder else 0)


def _result(record: dict[str, Any], path: Path, where: str) -> SourceEpisode:
    """A line of results.jsonl; its folder is named for the run."""
    steps = [_object(step, "trajectory", where) for step in items(record, "trajectory", where, [])]
    if steps:
        turns = tuple(_result_turn(step, f"{where}: trajectory[{k}]") for k, step in enumerate(steps))
    else:
        turns = _result_text(record, where)
    example, run = str(record["example_id"]), path.parent.name
    return SourceEpisode(
        turns=turns,
        episode=f"{run}/{where.rpartition(':')[2]}",
        group=f"{run}/{example}",
        task=text(record, "task", where, "") or example,
        reward=number(record, "reward", where, None),
        stop_reason=text(record, "stop_condition", where, ""),
        fidelity="token" if turns and all(turn.token_ids is not None for turn in turns) else "text",
        where=where,
        info={name: value for name, value in record.items() if name not in _RESULT},
    )


def _result_turn(step: dict[str, Any], where: str) -> SourceTurn:
    """A turn with the step's one advantage given to each of its tokens, as the trainer does."""
    prompt = _messages(step, "prompt", "user", where)
    last = max((i + 1 for i, message in enumerate(prompt) if is_record(message) and message.get("role") == "assistant"),
               default=0)  # fmt: skip
    turns = turns_of([*prompt[last:], *_messages(step, "completion", "assistant", where)], where)
    turn = replace(
        turns[0] if turns else SourceTurn(""),
        reward=number(step, "reward", where, None),
        truncated=boolean(step, "is_truncated", where, None),
    )
    tokens = _part(step, "tokens", where)
    if not tokens:
        return turn
    sampled = ids(items(tokens, "completion_ids", where), "completion_ids", where)
    trained = mask(items(tokens, "completion_mask", where, [1] * len(sampled)), "completion_mask", where)
    fits = len(trained) == len(sampled)
    logprobs = tokens.get("completion_logprobs")
    logprobs = floats(logprobs, "completion_logprobs", where) if logprobs else None
    if logprobs is not None and fits and len(logprobs) == len(sampled):
        logprobs = logprobs[trained.astype(bool)]
    sampled = sampled[trained.astype(bool)] if fits else sampled
    advantage = number(step, "advantage", where, None)
    return replace(
        turn,
        token_ids=sampled,
        context_ids=ids(items(tokens, "prompt_ids", where), "prompt_ids", where),
        mask=trained,
        logprobs=logprobs,
        advantages=None if advantage is None else np.full(len(sampled), advantage, np.float32),
    )


def _result_text(record: dict[str, Any], where: str) -> tuple[SourceTurn, ...]:
    prompt = _messages(record, "prompt", "user", where)
    return turns_of([*prompt, *_messages(record, "completion", "assistant", where)], where, skip=len(prompt))


def _messages(record: dict[str, Any], name: str, role: str, where: str) -> list[Any]:
    """A list of messages, which may be written as one text; null where a rollout failed."""
    value = record.get(name)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return items(record, name, where, [])


def _object(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WorkbenchError(f"{where}: {name} holds {kind_of(value)}, expected objects")
    return value


def _part(record: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object of the record, {} where it is absent or null."""
    value = record.get(name)
    return {} if value is None else _object(value, name, where)
