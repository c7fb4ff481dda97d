"""prime-rl: token exports, token_exports/step_<N>/rank_<R>.jsonl, a line a training sequence.

Schema version 1 (github PrimeIntellect-ai/prime-rl, 559b4477, src/prime_rl/trainer/rl/token_export.py): lists as long
as token_ids for the loss mask, advantages, log-probs of the sampling engine (inference_logprobs) and of the trainer.
No text, reward, group or id is written. A value that was not finite is written null and read as NaN, for the audit to
find. A file named STABLE beside them says that the step is whole. The rollouts beside token_exports
(rollouts/step_<N>/…/traces.jsonl) are verifiers' traces: there "effective" is the part of "all" that was trained on.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from . import ndjson
from .base import SourceEpisode, first_record, floats, ids, integer, is_record, kind_of, mask, text
from .spans import turns_of

NAME = "prime_rl"
DESCRIPTION = "prime-rl's token exports: tokens, mask, advantages and log-probs of sampler and trainer"
LACKS = (
    "response", "observation", "action", "teacher_logprobs", "reference_logprobs", "reward", "group", "success",
    "valid", "truncated",
)  # fmt: skip

_VERSION = 1
_NUMBERS = pl.List(pl.Float64)
_SCHEMA = {
    "schema_version": pl.Int64,
    "step": pl.Int64,
    "rank": pl.Int64,
    "export_sequence_idx": pl.Int64,
    "env_name": pl.String,
    "token_ids": pl.List(pl.Int64),
    "loss_mask": pl.List(pl.Boolean),
    "advantages": _NUMBERS,
    "inference_logprobs": _NUMBERS,
    "trainer_logprobs": _NUMBERS,
    "entropy": _NUMBERS,
}


def sniff(path: Path, head: bytes) -> bool:
    return is_record(first_record(head), "schema_version", "micro_step", "token_ids")


def read(path: Path) -> Iterator[SourceEpisode]:
    """An episode a sequence; each run of the loss mask is a turn."""
    stable = (path.parent / "STABLE").exists()
    for where, record in ndjson.records(path, _SCHEMA):
        version = integer(record, "schema_version", where)
        if version != _VERSION:
            raise WorkbenchError(f"{where}: token export of schema version {version}, expected {_VERSION}")
        tokens = ids(record.get("token_ids"), "token_ids", where)
        trained = record.get("loss_mask")
        trained = mask(trained.to_numpy() if isinstance(trained, pl.Series) else trained, "loss_mask", where)
        names = {"logprobs": "inference_logprobs", "trainer_logprobs": "trainer_logprobs", "advantages": "advantages"}
        turns = turns_of(tokens, 0, trained, {field: _values(record, name, where) for field, name in names.items()})
        entropy = _values(record, "entropy", where)
        if entropy is not None and len(entropy) == len(tokens):
            for turn in turns:
                start = len(turn.context_ids)
                turn.info["entropy"] = entropy[start : start + len(turn.token_ids)]
        rank, index = integer(record, "rank", where, 0), integer(record, "export_sequence_idx", where)
        yield SourceEpisode(
            turns=tuple(turns),
            step=integer(record, "step", where),
            episode=f"rank {rank} sequence {index}",
            task=text(record, "env_name", where, ""),
            fidelity="token",
            where=where,
            info={"stable": stable},
        )


def _values(record: dict[str, Any], name: str, where: str) -> np.ndarray | None:
    """(T,) float32, NaN where the exporter wrote null; None where it wrote nothing but null."""
    values = record.get(name)
    if isinstance(values, np.ndarray):
        return floats(values, name, where)
    if not isinstance(values, list):
        raise WorkbenchError(f"{where}: {name} is {kind_of(values)}, expected a list of numbers")
    lost = [value is None for value in values]
    if not any(lost):
        return floats(values, name, where)
    if all(lost):
        return None
    out = floats([0.0 if value is None else value for value in values], name, where)
    out[lost] = np.nan
    return out
