"""ms-swift: completions.jsonl, and rollout samples written as JSON lines.

Three shapes (github modelscope/ms-swift, 3602360a): a line of columns a logging step (rlhf_trainers/grpo_trainer.py
`log`: step, prompt, completion, a column for each reward, advantages, …), a line a rollout (ray/megatron:
gen_step, prompt, completion, reward), and OnPolicySample (rl_core/data.py) as its fields, where response_token_ids,
response_loss_mask and rollout_logprobs are lists of turns. The first two hold text only. In a sample the log-probs are
those of tokens whose loss mask is 1; where a turn has another number of them they are kept as they are for the audit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError
from .base import (
    SourceEpisode,
    SourceTurn,
    finite,
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
)
from .chat import digest_of, prompt_of, turns_of

NAME = "ms_swift"
DESCRIPTION = "ms-swift completions (text, rewards, advantages) and rollout samples (tokens, masks, log-probs)"
LACKS = ("context_ids", "teacher_logprobs", "trainer_logprobs", "reference_logprobs", "advantages", "valid")

_COLUMNS = {"step", "prompt", "completion", "advantages", "entropy", "image"}


def sniff(path: Path, head: bytes) -> bool:
    record = first_record(head)
    if is_record(record, "messages", "response_token_ids"):
        return True
    if is_record(record, "gen_step", "prompt", "completion"):
        return True
    columns = is_record(record, "step", "prompt") and not isinstance(record["step"], int | str)
    # of a line longer than the head only the first names are seen, and no values
    return columns and (is_record(record, "completion") or path.name == "completions.jsonl")


def read(path: Path) -> Iterator[SourceEpisode]:
    for where, record in jsonl(path):
        if "response_token_ids" in record:
            yield _sample(record, where)
        elif "gen_step" in record:
            yield _row(record, where)
        else:
            yield from _columns(record, where)


def _columns(record: dict[str, Any], where: str) -> Iterator[SourceEpisode]:
    prompts = items(record, "prompt", where)
    for name, column in record.items():
        if isinstance(column, list) and len(column) != len(prompts):
            raise WorkbenchError(f"{where}: {name} has {len(column)} values, expected {len(prompts)} as prompt has")
    columns = {name: items(record, name, where, None) for name in record if name in _COLUMNS}
    extra = [name for name, column in record.items() if name not in _COLUMNS and isinstance(column, list)]
    named = [name for name in extra if _is_reward(record[name])]
    for index in range(len(prompts)):
        at = f"{where}[{index}]"
        row = {name: column[index] for name, column in columns.items() if column is not None}
        rewards = {name: _reward(record[name][index], name, at) for name in named}
        given = [reward for reward in rewards.values() if reward is not None]
        yield SourceEpisode(
            turns=(SourceTurn(text(row, "completion", at), text(row, "prompt", at)),),
            step=_step(row.get("step"), at),
            episode=at.rpartition(":")[2],
            group=digest_of(row["prompt"]),
            reward=sum(given) if given else None,
            advantage=number(row, "advantages", at, None),
            where=at,
            info={"rewards": rewards} | {name: record[name][index] for name in extra if name not in rewards},
        )


def _is_reward(column: list[Any]) -> bool:
    """Whether all values are numbers or null: reward functions and what else was logged are not told apart by name."""
    return all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column)


def _reward(value: float | None, name: str, where: str) -> float | None:
    """A reward function that does not apply to a row leaves null or NaN."""
    return None if value is None or value != value else finite(value, name, where)


def _step(value: Any, where: str) -> int:
    """The step, which the table writes as text."""
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return integer({"step": value}, "step", where)


def _row(record: dict[str, Any], where: str) -> SourceEpisode:
    prompt = text(record, "prompt", where)
    return SourceEpisode(
        turns=(SourceTurn(text(record, "completion", where), prompt),),
        step=integer(record, "gen_step", where, 0),
        episode=where.rpartition(":")[2],
        group=digest_of(prompt),
        reward=number(record, "reward", where, None),
        where=where,
    )


def _sample(record: dict[str, Any], where: str) -> SourceEpisode:
    messages = items(record, "messages", where)
    said = turns_of(messages, where)
    tokens = items(record, "response_token_ids", where)
    masks = items(record, "response_loss_mask", where, []) or [None] * len(tokens)
    logprobs = items(record, "rollout_logprobs", where, []) or [None] * len(tokens)
    for name, value in (("response_loss_mask", masks), ("rollout_logprobs", logprobs)):
        if len(value) != len(tokens):
            raise WorkbenchError(f"{where}: {name} has {len(value)} turns, response_token_ids {len(tokens)}")
    stop = text(record, "finish_reason", where, "")
    turns = []
    for index, (turn_ids, turn_mask, turn_logprobs) in enumerate(zip(tokens, masks, logprobs, strict=True)):
        at = f"{where}: turn {index}"
        sampled = ids(turn_ids, "response_token_ids", at)
        trained = None if turn_mask is None else mask(turn_mask, "response_loss_mask", at)
        if trained is not None and len(trained) == len(sampled):
            sampled = sampled[trained == 1]
        # turns of few-shot answers in the prompt come first, and a continued turn is one message
        text_of = said[index - len(tokens)] if len(said) >= len(tokens) else SourceTurn("")
        turns.append(
            SourceTurn(
                response=text_of.response,
                observation=text_of.observation,
                action=text_of.action,
                token_ids=sampled,
                logprobs=None if turn_logprobs is None else floats(turn_logprobs, "rollout_logprobs", at),
                mask=trained,
                truncated=stop == "length" if stop and index == len(tokens) - 1 else None,
                turn=index,
            )
        )
    extra = record.get("extra") or {}
    if not isinstance(extra, dict):
        raise WorkbenchError(f"{where}: extra is {kind_of(extra)}, expected an object")
    kept = ("teacher_prompt", "rollout_infos", "extra")
    reward = number(record, "reward", where, None)
    return SourceEpisode(
        turns=tuple(turns) or said,
        episode=text(record, "request_id", where, "") or where.rpartition(":")[2],
        step=integer(record, "step", where, 0),
        group=text(record, "prompt_id", where, "") or prompt_of(messages),
        reward=reward,
        stop_reason=stop,
        fidelity="token" if turns else "text",
        where=where,
        info={name: record[name] for name in kept if record.get(name)},
    )
