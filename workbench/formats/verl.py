"""verl: the generations a trainer dumps, one JSONL file a step (trainer.rollout_data_dir, validation_data_dir).

Fields input, output, gts, score, step and whatever the reward function adds (github verl-project/verl, 1dda039b,
trainer/ppo/ray_trainer.py); the v1 trainer adds uid "<prompt>_<session>_<index>" and sorts by it, so that a session's
outputs follow each other. Special tokens are stripped from the text, no token is written. In the legacy dump a row is
a whole rollout, and rows of one prompt are a group; forks that roll out in turns (the verl-agent family) write a row a
turn with nothing that says which rollout it is of, so their rows are read as rollouts of one turn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import SourceEpisode, SourceTurn, first_record, integer, is_record, jsonl, number, text
from .chat import digest_of

NAME = "verl"
DESCRIPTION = "verl's dumped generations (legacy and v1): text and a score a rollout"
LACKS = (
    "token_ids", "context_ids", "mask", "logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs",
    "advantages", "valid", "truncated",
)  # fmt: skip

_OWN = {"input", "output", "gts", "score", "step", "uid", "request_id"}


def sniff(path: Path, head: bytes) -> bool:
    return is_record(first_record(head), "input", "output", "score", "step")


def read(path: Path) -> Iterator[SourceEpisode]:
    """Legacy: an episode a row. v1: an episode a session, whose rows are its turns."""
    session: list[tuple[str, dict[str, Any]]] = []
    name: tuple[str, str] | None = None
    for where, record in jsonl(path):
        prompt, number_of_session, index = _split(text(record, "uid", where, None))
        if session and (prompt, number_of_session) != name:
            yield _episode(session, name)
            session = []
        if index is None:
            yield _episode([(where, record)], None)
        else:
            name = prompt, number_of_session
            session.append((where, record))
    if session:
        yield _episode(session, name)


def _split(uid: str | None) -> tuple[str, str, int | None]:
    parts = (uid or "").rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return parts[0], parts[1], int(parts[2])
    return uid or "", "", None


def _episode(rows: list[tuple[str, dict[str, Any]]], name: tuple[str, str] | None) -> SourceEpisode:
    """name: prompt and session in v1. The last row's score is the session's, those before it stay with their turns."""
    where, last = rows[-1]
    turns = []
    for at, record in rows:
        score = number(record, "score", at)
        index = _split(record.get("uid"))[2]
        turns.append(
            SourceTurn(
                text(record, "output", at), text(record, "input", at), turn=index, info={"where": at, "score": score}
            )
        )
    if name is None:
        group = text(last, "uid", where, "") or digest_of(last["input"])
        episode = text(last, "request_id", where, "") or where.rpartition(":")[2]
    else:
        group, episode = name[0], "_".join(name)
    return SourceEpisode(
        turns=tuple(turns),
        step=integer(last, "step", where),
        episode=episode,
        group=group,
        reward=turns[-1].info["score"],
        where=rows[0][0],
        info={"gts": last.get("gts")} | {key: value for key, value in last.items() if key not in _OWN},
    )
