"""inspect_ai: .eval and .json logs, read by inspect_ai itself, which has to be installed.

An epoch of a sample is a rollout and the epochs of one sample are a group. Tokens are text there, also where log-probs
were asked for: these and the tokens' texts (info["pieces"]) are kept, and no id is made from them. Fields and reader:
github UKGovernmentBEIS/inspect_ai, 499e6152, src/inspect_ai/log (0.3.285 run).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import WorkbenchError
from .base import MAX_RECORD, SourceEpisode, SourceTurn, first_record, floats, is_record, open_zip, place
from .chat import turns_of

NAME = "inspect_ai"
DESCRIPTION = "inspect_ai's logs: messages and scores, log-probs of text tokens where they were asked for"
LACKS = (
    "token_ids", "context_ids", "mask", "teacher_logprobs", "trainer_logprobs", "reference_logprobs", "advantages",
    "valid",
)  # fmt: skip

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partly, incorrect, no answer


def sniff(path: Path, head: bytes) -> bool:
    if path.suffix == ".eval":
        return head.startswith(b"PK")
    return path.suffix == ".json" and is_record(first_record(head.replace(b"\n", b" ")), "version", "status", "eval")


def read(path: Path) -> Iterator[SourceEpisode]:
    log = _library(path)
    if path.suffix == ".eval":
        open_zip(path).close()
    elif path.stat().st_size > MAX_RECORD:
        raise WorkbenchError(
            f"{path}: a JSON log over {MAX_RECORD >> 20} MiB, expected the .eval form for one so large"
        )
    samples = _samples(log, path)
    while True:
        try:
            log_of, sample = next(samples)
        except StopIteration:
            return
        except Exception as error:  # its reader lets errors of zip, JSON and validation through
            why = str(error).splitlines()
            raise WorkbenchError(
                f"{path.name}: inspect_ai cannot read it ({why[0] if why else type(error).__name__})"
            ) from None
        yield _episode(log_of, sample, path)


def _library(path: Path) -> ModuleType:
    try:
        return import_module("inspect_ai.log")
    except ImportError:
        raise WorkbenchError(
            f"{path.name}: reading inspect_ai logs needs its own reader; install it with: pip install inspect_ai"
        ) from None


def _samples(log: ModuleType, path: Path) -> Iterator[tuple[str, Any]]:
    """(header, sample), one in memory at a time in an .eval file; a .json log is read as a whole."""
    name = str(path.resolve())
    if path.suffix == ".json":
        whole = log.read_eval_log(name, resolve_attachments=True)
        yield from ((whole.eval, sample) for sample in whole.samples or ())
        return
    header = log.read_eval_log(name, header_only=True).eval
    read_samples = log.read_eval_log_samples(
        name, all_samples_required=False, resolve_attachments=True, exclude_fields={"store"}
    )
    yield from ((header, sample) for sample in read_samples)


def _episode(header: Any, sample: Any, path: Path) -> SourceEpisode:
    where = place(path, f"{sample.id}/{sample.epoch}")
    values = {name: _value(score.value) for name, score in (sample.scores or {}).items()}
    known = [value for value in values.values() if value is not None]
    grade = next((score.value for score in (sample.scores or {}).values()), None)
    limit = sample.limit.type if sample.limit else ""
    return SourceEpisode(
        turns=_turns(sample, where),
        episode=f"{header.run_id}/{sample.id}/{sample.epoch}",
        group=f"{header.run_id}/{sample.id}",
        task=header.task,
        reward=known[0] if known else None,
        success={True: True, False: False, "C": True, "I": False, "N": False}.get(grade) if _plain(grade) else None,
        stop_reason=limit
        or ("error" if sample.error else str(sample.output.stop_reason) if sample.output.choices else ""),
        where=where,
        info={"scores": values, "target": sample.target, "metadata": sample.metadata, "model": header.model},
    )


def _turns(sample: Any, where: str) -> tuple[SourceTurn, ...]:
    messages, said = [], []
    given = [] if isinstance(sample.input, str) else sample.input
    prompt = max((i + 1 for i, m in enumerate(given) if m.role == "assistant"), default=0)
    for index, message in enumerate(sample.messages):
        one = {"role": message.role, "content": message.text}
        if message.role == "assistant" and index >= prompt:
            said.append(message.id)
            one["tool_calls"] = [
                {"name": call.function, "arguments": call.arguments} for call in message.tool_calls or ()
            ]
        messages.append(one)
    choices = {c.message.id: c for e in sample.events if e.event == "model" for c in e.output.choices}
    choices |= {c.message.id: c for c in sample.output.choices}
    turns = turns_of(messages, where, skip=prompt)
    return tuple(_with_logprobs(turn, choices.get(name), where) for turn, name in zip(turns, said, strict=True))


def _with_logprobs(turn: SourceTurn, choice: Any, where: str) -> SourceTurn:
    if choice is None:
        return turn
    turn = replace(turn, truncated=choice.stop_reason in ("max_tokens", "model_length"))
    if choice.logprobs is None:
        return turn
    turn.info["pieces"] = tuple(token.token for token in choice.logprobs.content)
    return replace(turn, logprobs=floats([t.logprob for t in choice.logprobs.content], "logprobs", where))


def _plain(value: Any) -> bool:
    return isinstance(value, str | bool)


def _value(value: Any) -> float | None:
    """A score as a number, as inspect_ai's metrics take it; None for one that is none, or was not given."""
    if isinstance(value, str):
        return _GRADES.get(value)
    if isinstance(value, bool | int | float | np.number):
        return float(value) if math.isfinite(value) else None
    return None
