"""slime: what --save-debug-rollout-data and --save-debug-train-data write with torch.save, a file a rollout step.

Rollouts (github THUDM/slime, 624b824a, slime/observability/rollout_data_utils.py, slime/utils/types.py): rollout_id and
samples with prompt, tokens, response, response_length, loss_mask, rollout_log_probs, teacher_log_probs, reward, status;
what is per token is as long as the response, 0 on the environment's tokens. Training (train_data_utils.py,
format_version 2): samples of tensors with log_probs, ref_log_probs and advantages beside them, the raw rewards apart,
no text and no group. Samples of one rollout share rollout_id and are one episode; those of one group_index are
compared. The text of a response is whole, so it is a turn's only where there is one turn, and else in the episode's
info. Files are loaded with weights_only, which runs no code; one that holds anything but tensors, numbers, text, lists
and dicts is refused. A file is held as a whole.
"""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import WorkbenchError
from .base import (
    SourceEpisode,
    SourceTurn,
    boolean,
    floats,
    ids,
    integer,
    items,
    kind_of,
    mask,
    number,
    open_zip,
    place,
    text,
)  # fmt: skip
from .chat import content_of
from .spans import turns_of

NAME = "slime"
DESCRIPTION = "slime's debug dumps of rollouts and of training: tokens, mask, log-probs, teacher and advantages"
LACKS = ("action", "success", "valid")

# field of a turn -> its names in a rollout dump and in a training dump
_SIGNALS = {
    "logprobs": ("rollout_log_probs",),
    "teacher_logprobs": ("teacher_log_probs",),
    "trainer_logprobs": ("log_probs",),
    "reference_logprobs": ("ref_log_probs",),
    "advantages": ("advantages",),
}


def sniff(path: Path, head: bytes) -> bool:
    # torch.save puts data.pkl first and does not compress it, so the names at its start can be seen
    return head.startswith(b"PK") and b"data.pkl" in head and b"rollout_id" in head and b"samples" in head


def read(path: Path) -> Iterator[SourceEpisode]:
    data = _load(path)
    step = integer(data, "rollout_id", path.name)
    raw = items(data, "raw_reward", path.name, [])
    samples = []
    for index, sample in enumerate(items(data, "samples", path.name)):
        where = place(path, f"samples[{index}]")
        if not isinstance(sample, dict):
            raise WorkbenchError(f"{where} is {kind_of(sample)}, expected a sample")
        position = integer(sample, "rollout_position", where, None)
        if position is not None and 0 <= position < len(raw):
            sample = sample | {"reward": raw[position]}
        samples.append((where, index, sample))
    kind = "train/" if "format_version" in data else "eval/" if "eval_" in path.name else ""
    for _, siblings in groupby(samples, _rollout):
        yield _episode(list(siblings), step, kind)


def _load(path: Path) -> dict[str, Any]:
    """Raises WorkbenchError where the file is torn, would unpack to too much, or holds what could run code."""
    open_zip(path).close()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's own, on kinds of tensors that it is to drop
            data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file made by hand may raise anything inside of the unpickler
        why = str(error).splitlines()
        named = next((line.strip() for line in why if "GLOBAL" in line), why[0] if why else type(error).__name__)
        raise WorkbenchError(
            f"{path.name}: refused ({named[:160]}), expected a torch.save file of tensors, numbers, text, lists and "
            "dicts; loading anything else can run code"
        ) from None
    if not isinstance(data, dict):
        raise WorkbenchError(f"{path.name}: {kind_of(data)}, expected a dict with rollout_id and samples")
    return data


def _rollout(entry: tuple[str, int, dict[str, Any]]) -> tuple[str, int]:
    """What samples of one rollout have in common; a sample without a rollout_id is one of its own."""
    where, index, sample = entry
    name = "rollout_id" if "rollout_id" in sample else "rollout_ids"
    value = integer(sample, name, where, None)
    return ("sample", index) if value is None else ("rollout", value)


def _episode(siblings: list[tuple[str, int, dict[str, Any]]], step: int, kind: str) -> SourceEpisode:
    """kind: put before ids, as dumps of one step of rollouts, of evaluation and of training count from 0 each."""
    where, index, sample = siblings[0]
    last = siblings[-1][2]
    turns, responses = [], []
    for at, _, each in siblings:
        turns += _turns(each, at)
        responses.append(text(each, "response", at, ""))
    reward, rewards = last.get("reward", last.get("rewards")), None
    if isinstance(reward, dict):
        reward, rewards = None, reward
    name = "index" if "index" in sample else "sample_index"
    own = integer(sample, name, where, None)
    return SourceEpisode(
        turns=tuple(turns),
        step=step,
        episode=f"{kind}{index if own is None else own}",
        group=f"{kind}{integer(sample, 'group_index', where)}" if sample.get("group_index") is not None else "",
        task=text(sample, "label", where, "") if isinstance(sample.get("label"), str) else "",
        reward=number({"reward": _plain(reward)}, "reward", where, None),
        stop_reason=text(last, "status", where, ""),
        fidelity="token",
        where=where,
        info={
            name: value
            for name, value in {
                "rewards": rewards,
                "processed_reward": _plain(last.get("rewards")),
                "response": responses if len(turns) > 1 and any(responses) else None,
                "metadata": sample.get("metadata"),
                "weight_versions": sample.get("weight_versions"),
                "removed": sample.get("remove_sample") or None,
            }.items()
            if value is not None
        },
    )


def _turns(sample: dict[str, Any], where: str) -> list[SourceTurn]:
    tokens = ids(_row(sample, ("tokens",), where), "tokens", where)
    names = ("response_length", "response_lengths")
    length = next((integer({n: _plain(sample[n])}, n, where) for n in names if sample.get(n) is not None), None)
    if length is None or not 0 <= length <= len(tokens):
        raise WorkbenchError(f"{where}: response_length is {length}, expected 0 to {len(tokens)}, the number of tokens")
    trained = _row(sample, ("loss_mask", "loss_masks"), where)
    trained = np.ones(length, np.int8) if trained is None else mask(trained, "loss_mask", where)
    signals = {}
    for field, written in _SIGNALS.items():
        values = _row(sample, written, where)
        signals[field] = None if values is None else floats(values, written[0], where)
    turns = turns_of(tokens, len(tokens) - length, trained, signals)
    cut = boolean({"truncated": _plain(sample.get("truncated"))}, "truncated", where, None)
    status = sample.get("status", None if cut is None else "truncated" if cut else "")
    turns[0] = replace(turns[0], observation=_prompt(sample.get("prompt"), where))
    if len(turns) == 1:
        turns[0] = replace(turns[0], response=text(sample, "response", where, ""))
    turns[-1] = replace(turns[-1], truncated=None if status is None else status == "truncated")
    return turns


def _prompt(prompt: Any, where: str) -> str:
    """A text, or messages one after another."""
    if not isinstance(prompt, list):
        return content_of(prompt, f"{where}: prompt")
    texts = [message.get("content") if isinstance(message, dict) else message for message in prompt]
    return "\n\n".join(content_of(one, f"{where}: prompt") for one in texts)


def _row(sample: dict[str, Any], names: tuple[str, ...], where: str) -> Any:
    """The first of these that is there, a tensor as an array. Raises WorkbenchError for one that is not plain data."""
    name = next((name for name in names if sample.get(name) is not None), None)
    value = None if name is None else sample[name]
    if not isinstance(value, torch.Tensor):
        return value
    if not _is_plain(value):
        raise WorkbenchError(f"{where}: {name} is a sparse, quantized, nested or meta tensor, expected a plain one")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():  # strides of 0 repeat what is stored
        raise WorkbenchError(
            f"{where}: {name} has {value.numel()} values and {value.untyped_storage().nbytes()} bytes, expected all of "
            "them to be stored"
        )
    return (value.float() if value.is_floating_point() else value).numpy(force=True)


def _is_plain(value: torch.Tensor) -> bool:
    return value.layout == torch.strided and not (value.is_meta or value.is_quantized or value.is_nested)


def _plain(value: Any) -> Any:
    """A tensor of one value as a number."""
    if isinstance(value, torch.Tensor) and _is_plain(value) and value.numel() == 1:
        return value.item()
    return value
