"""TRL: completions/completions_<step>.parquet of GRPOTrainer, and the batch it trains on, in memory.

The table (github huggingface/trl, f2cd57710, trainer/grpo_trainer.py `log`) has step, prompt, completion, a column for
each reward function, columns that rewards logged, and advantage. Prompts and completions are lists of messages or text.
It is written anew at every logging step from the last generations, so that rollouts used for several updates come again
under a later step. With `rollout_func` all turns and the environment's text lie in one assistant message.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from ..errors import WorkbenchError
from .base import SourceEpisode, SourceTurn, finite, integer, kind_of, number, place
from .chat import digest_of, turns_of

NAME = "trl"
DESCRIPTION = "TRL's completions parquet: text, rewards and the advantage a rollout"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "valid", "truncated", "stop_reason",
)  # fmt: skip

_ROWS = 1024
_COLUMNS = {"step", "prompt", "completion", "advantage"}


def sniff(path: Path, head: bytes) -> bool:
    if not head.startswith(b"PAR1"):
        return False
    try:
        return set(pl.read_parquet_schema(path)) >= _COLUMNS
    except (pl.exceptions.PolarsError, OSError):
        return False


def read(path: Path) -> Iterator[SourceEpisode]:
    """An episode a row. Its reward is the sum of the reward columns, as with TRL's default weights of 1.

    Reward columns are numeric ones whose name has "reward" in it, all numeric ones where none has; each is kept in
    info["rewards"]. A reward function that does not apply to a row leaves null or NaN there, which adds nothing.
    """
    try:
        # a memory map of the file is no copy of it, and row groups are read one after another
        table = pl.scan_parquet(path, glob=False, hive_partitioning=False)
        schema = table.collect_schema()
        rows = table.select(pl.len()).collect().item()
        numeric = [name for name, kind in schema.items() if name not in _COLUMNS and kind.is_numeric()]
        named = [name for name in numeric if "reward" in name.lower()] or numeric
        for start in range(0, rows, _ROWS):
            for index, record in enumerate(table.slice(start, _ROWS).collect().to_dicts(), start):
                yield _episode(record, named, index, place(path, f"row {index}"))
    except (pl.exceptions.PolarsError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WorkbenchError(f"{path.name}: torn or no parquet file ({first})") from None


def _episode(record: dict[str, Any], named: list[str], index: int, where: str) -> SourceEpisode:
    rewards = {name: _reward(record[name], name, where) for name in named}
    given = [reward for reward in rewards.values() if reward is not None]
    prompt, completion = record["prompt"], record["completion"]
    extra = {name: value for name, value in record.items() if name not in _COLUMNS and name not in rewards}
    return SourceEpisode(
        turns=_turns(prompt, completion, where),
        step=integer(record, "step", where),
        episode=str(index),
        group=digest_of(prompt),
        reward=sum(given) if given else None,
        advantage=number(record, "advantage", where, None),
        where=where,
        info={"rewards": rewards} | extra,
    )


def _reward(value: Any, name: str, where: str) -> float | None:
    return None if value is None or value != value else finite(value, name, where)


def _turns(prompt: Any, completion: Any, where: str) -> tuple[SourceTurn, ...]:
    if isinstance(completion, str) and isinstance(prompt, str):
        return (SourceTurn(completion, prompt),)
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    if not all(isinstance(value, str | list) for value in (prompt, completion)):
        wrong = next(value for value in (prompt, completion) if not isinstance(value, str | list))
        raise WorkbenchError(f"{where}: prompt or completion is {kind_of(wrong)}, expected text or messages")
    turns = turns_of([*asked, *said], where, "prompt and completion", skip=len(asked))
    if not turns:
        raise WorkbenchError(f"{where}: completion holds no assistant message, expected one or more")
    return turns


def from_batch(
    batch: Mapping[str, Any],
    step: int = 0,
    rewards: Sequence[float] | None = None,
    decode: Callable[[np.ndarray], str] | None = None,
) -> list[SourceEpisode]:
    """The rows of a dict from GRPOTrainer._generate_and_score_completions, an episode each.

    prompt_ids, prompt_mask (B,P) left-padded; completion_ids, completion_mask (B,C) right-padded; tool_mask (B,C), 1 on
    the model's tokens: it is padded with 1, so only its product with completion_mask says what trains. Optional (B,C):
    sampling_per_token_logps, old_per_token_logps, ref_per_token_logps, teacher_per_token_logps; advantages (B,) or
    (B,C). A stretch of the model's tokens is a turn, whose mask goes on over the environment's tokens after it; rows of
    the same prompt are a group. rewards (B,): what the dict does not hold; decode: ids -> text, else texts are empty.
    Raises WorkbenchError naming the tensor whose shape does not fit.
    """
    ids = _array(batch, "completion_ids")
    prompts, present = _array(batch, "prompt_ids"), _array(batch, "prompt_mask", bool)
    masks = {"completion_mask": None, "tool_mask": None}
    names = ("sampling_per_token_logps", "teacher_per_token_logps", "old_per_token_logps", "ref_per_token_logps")
    for name in (*masks, *names):
        masks[name] = None if batch.get(name) is None else _array(batch, name, None if name in names else bool)
    if masks["completion_mask"] is None:
        raise WorkbenchError("batch: completion_mask is missing, expected a (B,C) tensor")
    advantages = None if batch.get("advantages") is None else _array(batch, "advantages")
    for name, value in masks.items():
        if value is not None and value.shape != ids.shape:
            raise WorkbenchError(f"batch: {name} has shape {value.shape}, completion_ids {ids.shape}")
    if prompts.ndim != 2 or present.shape != prompts.shape or len(prompts) != len(ids):
        raise WorkbenchError(f"batch: prompt_ids {prompts.shape} and prompt_mask {present.shape} must be (B,P)")
    if advantages is not None and advantages.shape not in ((len(ids),), ids.shape):
        raise WorkbenchError(f"batch: advantages has shape {advantages.shape}, expected (B,) or {ids.shape}")
    if rewards is not None and len(rewards) != len(ids):
        raise WorkbenchError(f"batch: {len(rewards)} rewards for {len(ids)} rows")
    return [
        _row(row, ids, prompts[row][present[row]], masks, advantages, step, rewards, decode) for row in range(len(ids))
    ]


def _row(
    row: int,
    ids: np.ndarray,
    prompt: np.ndarray,
    tensors: Mapping[str, np.ndarray | None],
    advantages: np.ndarray | None,
    step: int,
    rewards: Sequence[float] | None,
    decode: Callable[[np.ndarray], str] | None,
) -> SourceEpisode:
    where = f"batch:{row}"
    filled = tensors["completion_mask"][row]
    tools = tensors["tool_mask"]
    mask = (filled if tools is None else filled & tools[row])[filled]
    tokens = ids[row][filled].astype(np.int32)
    prompt = prompt.astype(np.int32)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    read = decode or (lambda _: "")

    def picked(name: str, chosen: slice, own: np.ndarray) -> np.ndarray | None:
        values = tensors[name]
        if values is None:
            return None
        out = values[row][filled][chosen][own].astype(np.float32)
        if not np.isfinite(out).all():
            raise WorkbenchError(f"{where}: {name} is not finite on a token of the model, expected log-probs")
        return out

    turns, answered = [], 0
    for start, end in zip(starts, [*starts, len(mask)][1:], strict=True):
        chosen = slice(start, end)
        own = mask[chosen]
        per_token = advantages is not None and advantages.ndim == 2
        turns.append(
            SourceTurn(
                response=read(tokens[chosen][own]),
                observation=read(tokens[answered:start] if start else prompt),
                token_ids=tokens[chosen][own],
                context_ids=np.concatenate([prompt, tokens[:start]]),
                logprobs=picked("sampling_per_token_logps", chosen, own),
                teacher_logprobs=picked("teacher_per_token_logps", chosen, own),
                trainer_logprobs=picked("old_per_token_logps", chosen, own),
                reference_logprobs=picked("ref_per_token_logps", chosen, own),
                advantages=advantages[row][filled][chosen][own].astype(np.float32) if per_token else None,
                mask=own.astype(np.int8),
            )
        )
        answered = start + int(own.sum())
    if not turns:
        nothing = np.empty(0, np.int32)
        turns.append(SourceTurn("", read(prompt), token_ids=nothing, context_ids=prompt, mask=mask.astype(np.int8)))
    single = advantages is not None and advantages.ndim == 1
    return SourceEpisode(
        turns=tuple(turns),
        step=step,
        episode=str(row),
        group=digest_of(prompt.tolist()),
        reward=None if rewards is None else finite(rewards[row], "reward", where),
        advantage=finite(advantages[row], "advantages", where) if single else None,
        fidelity="token",
        where=where,
    )


def _array(batch: Mapping[str, Any], name: str, kind: type | None = None) -> np.ndarray:
    value = batch.get(name)
    if value is None:
        raise WorkbenchError(f"batch: {name} is missing, expected a tensor")
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        value = (value.float() if value.is_floating_point() else value).numpy()
    out = np.asarray(value)
    return out if kind is None else out.astype(kind)
