"""Checks on one episode at a time: its turns, their tokens, log-probs, text and the teacher's context."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..formats.base import SourceEpisode, SourceTurn
from .checks import FINISHED, MISMATCH, POSITIVE, SAME_LOGPROB, SATURATED
from .tally import EXAMPLES, Place, Tally, number, numeric

_LOGPROBS = ("logprobs", "teacher_logprobs", "trainer_logprobs", "reference_logprobs")
_PER_TOKEN = ("token_ids", *_LOGPROBS, "advantages")
# Template marks that only the side that answers the policy writes.
_ROLES = re.compile(
    r"<\|im_start\|>\s*(?:user|tool|system)|<\|start_header_id\|>\s*(?:user|tool|ipython|system)|<\|observation\|>"
    r"|<\|user\|>|<start_of_turn>user|<tool_response>|\[TOOL_RESULTS\]"
)
_OBSERVATION = 20  # characters: shorter ones a policy may have guessed
_TEMPLATE = 64  # characters of template that may follow an observation at the end of a response
_PLACEHOLDER = 8  # tokens in a row that are never all sampled with probability exactly 1
_UNSURE = -0.01  # nats: tokens the student was sure of cannot tell one context from another
_SLACK = 8  # tokens by which a re-tokenised context may be shorter


def look_at_turn(tally: Tally, place: Place, turn: SourceTurn, index: int, tokenizer: Any = None) -> None:
    """The checks that need nothing but the turn."""
    place, k = place.turn(turn), number(turn, index)
    _lengths(tally, place, turn, k)
    _mask(tally, place, turn, k)
    _values(tally, place, turn, k)
    _finite(tally, place, turn, k)
    rescored = _held(turn, "scored_logprobs")
    for name, other in (("trainer_mismatch", turn.trainer_logprobs), ("rescore_differs", rescored)):
        if _fit(turn.logprobs, other):
            tally.look(name)
            apart = float(np.abs(turn.logprobs - other).mean())
            if apart > MISMATCH:
                tally.hit(name, place, f"{apart:.3f} nats apart on average over {len(other)} tokens", turn=k)
    belief = numeric(turn.info.get("belief"))
    if belief is not None and math.isfinite(belief):
        tally.look("saturated_beliefs")
        if not SATURATED <= belief <= 1 - SATURATED:
            tally.hit("saturated_beliefs", place, f"belief {belief:.6g}", turn=k)
    if tokenizer is not None and turn.token_ids is not None and len(turn.token_ids):
        _text(tally, place, turn, k, tokenizer)


def look_at_episode(tally: Tally, place: Place, episode: SourceEpisode) -> None:
    """The checks that need the episode's turns side by side."""
    _environment(tally, place, episode.turns)
    _teacher(tally, place, episode)
    given = {"reward": episode.reward, "return": episode.info.get("return"), "advantage": episode.advantage}
    if given["return"] is not None and given["reward"] is not None:
        given.pop("reward" if _odd(given["return"]) else "return")  # most often the same number under both names
    _scalars(tally, place, given)
    said = episode.stop_reason.lower()
    last = episode.turns[-1] if episode.turns else None
    if last is not None and last.truncated is not None and (said or episode.success is not None):
        tally.look("truncated_as_finished")
        if last.truncated and (said in FINISHED or (not said and episode.success)):
            ended = f"stop reason {episode.stop_reason!r}" if said else "counted as a success"
            tally.hit(
                "truncated_as_finished", place.turn(last), f"cut at the token limit, yet {ended}",
                turn=number(last, len(episode.turns) - 1),
            )  # fmt: skip


class Lengths:
    """Responses that stop at the longest length seen without the usual end token, and are not called truncated.

    One response may be the longest by chance; several that end there, without an end, were cut.
    """

    def __init__(self):
        self.ends: Counter[int] = Counter()
        self._start(0)

    def _start(self, longest: int) -> None:
        self.longest, self.called_whole, self.examples = longest, Counter(), {}

    def add(self, place: Place, turn: SourceTurn, index: int, stop_reason: str) -> None:
        if turn.token_ids is None or not len(turn.token_ids):
            return
        n, last = len(turn.token_ids), int(turn.token_ids[-1])
        self.ends[last] += 1
        if n > self.longest:
            self._start(n)
        whole = turn.truncated is False or (turn.truncated is None and stop_reason.lower() in FINISHED)
        if n == self.longest and whole:
            self.called_whole[last] += 1
            kept = self.examples.setdefault(last, [])
            if len(kept) < EXAMPLES:
                detail = f"{n} tokens, the most of any, without an end token, and not called truncated"
                kept.append(place.turn(turn).example(detail, number(turn, index)))

    def close(self, tally: Tally) -> None:
        total = self.ends.total()
        usual = {token for token, n in self.ends.items() if n >= total / 10}
        if sum(self.ends[token] for token in usual) < total / 2:
            return  # responses have no common end: the source takes the end token off
        cut = sum(n for last, n in self.called_whole.items() if last not in usual)
        if cut > 1 and cut >= self.called_whole.total() / 2:
            examples = [example for token, kept in self.examples.items() if token not in usual for example in kept]
            tally.add("truncated_as_finished", cut, examples)


class Presence:
    """Turns with tokens but no behaviour log-probs, in a source where others have them."""

    def __init__(self):
        self.some, self.count, self.examples = False, 0, []

    def add(self, place: Place, turn: SourceTurn, index: int) -> None:
        if turn.logprobs is not None:
            self.some = True
        elif turn.token_ids is not None and len(turn.token_ids):
            self.count += len(turn.token_ids)
            if len(self.examples) < EXAMPLES:
                detail = f"none for {len(turn.token_ids)} tokens"
                self.examples.append(place.turn(turn).example(detail, number(turn, index)))

    def close(self, tally: Tally) -> None:
        if self.some:
            tally.look("missing_logprobs", self.count)
            tally.add("missing_logprobs", self.count, self.examples)


def _lengths(tally: Tally, place: Place, turn: SourceTurn, k: int) -> None:
    found = {name: len(value) for name in _PER_TOKEN if (value := getattr(turn, name)) is not None}
    if turn.mask is not None:
        found["mask"] = int(np.count_nonzero(turn.mask))
    if len(found) > 1:
        tally.look("length_mismatch")
        if len(set(found.values())) > 1:
            tally.hit("length_mismatch", place, ", ".join(f"{name} {n}" for name, n in found.items()), turn=k)


def _mask(tally: Tally, place: Place, turn: SourceTurn, k: int) -> None:
    if turn.mask is None and turn.token_ids is None:
        return
    tally.look("empty_mask")
    if turn.mask is not None and not np.any(turn.mask):
        tally.hit("empty_mask", place, f"none of {len(turn.mask)} tokens trains", turn=k)
    elif turn.mask is None and not len(turn.token_ids):
        tally.hit("empty_mask", place, "no sampled tokens", turn=k)


def _values(tally: Tally, place: Place, turn: SourceTurn, k: int) -> None:
    for name in _LOGPROBS:
        values = getattr(turn, name)
        if values is None or not len(values):
            continue
        tally.look("positive_logprobs", len(values))
        tally.look("missing_logprobs", len(values))
        least, most = values.min(), values.max()
        if name == "logprobs" and len(values) >= _PLACEHOLDER and least == most == 0:
            tally.hit("missing_logprobs", place, f"{name} is exactly 0 throughout, a placeholder", len(values), turn=k)
        if -np.inf < least and most <= POSITIVE:  # neither is so where a value is not a number
            continue
        lost = ~np.isfinite(values)
        high = np.where(lost, 0, values) > POSITIVE
        for check, wrong in (("positive_logprobs", high), ("missing_logprobs", lost)):
            if wrong.any():
                at = int(wrong.argmax())
                detail = f"{name} is {values[at]:.6g} at token {at}"
                tally.hit(check, place, detail, int(wrong.sum()), turn=k, span=(at, at + 1))


def _finite(tally: Tally, place: Place, turn: SourceTurn, k: int) -> None:
    """Values that are no finite numbers, but for log-probs, which missing_logprobs counts, and ids that are below 0."""
    bad = {"token_ids": lambda values: values < 0, "advantages": lambda values: ~np.isfinite(values)}
    for name, is_bad in bad.items():
        values = getattr(turn, name)
        if values is None or not len(values):
            continue
        tally.look("not_finite", len(values))
        if (wrong := is_bad(values)).any():
            at = int(wrong.argmax())
            detail = f"{name} is {values[at]:.6g} at token {at}"
            tally.hit("not_finite", place, detail, int(wrong.sum()), turn=k, span=(at, at + 1))
    scalars = {name: turn.info.get(name) for name in ("belief", "belief_before", "turn_advantage")}
    _scalars(tally, place, {"reward": turn.reward} | scalars, turn=k)


def _scalars(tally: Tally, place: Place, values: Mapping[str, Any], **where: Any) -> None:
    for name, value in values.items():
        if numeric(value) is not None:
            tally.look("not_finite")
            if _odd(value):
                tally.hit("not_finite", place, f"{name} is {value:.6g}", **where)


def _odd(value: Any) -> bool:
    return (given := numeric(value)) is not None and not math.isfinite(given)


def _held(holder: SourceTurn | SourceEpisode, name: str) -> np.ndarray | None:
    """An array of the info, which may hold anything."""
    value = holder.info.get(name)
    return value if isinstance(value, np.ndarray) and value.ndim == 1 and len(value) else None


def _fit(values: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Whether both are there, of one length of at least 1, and finite."""
    if values is None or other is None or len(values) != len(other) or not len(values):
        return False
    return bool(np.isfinite(values).all() and np.isfinite(other).all())


def _text(tally: Tally, place: Place, turn: SourceTurn, k: int, tokenizer: Any) -> None:
    if not turn.response:
        return
    tally.look("text_realigned")
    tally.look("text_forked")
    ids = turn.token_ids.tolist()
    whole, bare = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True))
    if turn.response in (whole, bare):
        return
    plain = [_normal(text) for text in (turn.response, whole, bare)]
    name = "text_realigned" if plain[0] in plain[1:] else "text_forked"
    at = next((i for i, (a, b) in enumerate(zip(turn.response, bare, strict=False)) if a != b), len(bare))
    shown = slice(max(at - 10, 0), at + 20)
    tally.hit(name, place, f"text {turn.response[shown]!r}, tokens {bare[shown]!r} at character {at}", turn=k)


def _normal(text: str) -> str:
    """Text without what a tokenizer may change: spacing, composed characters, bytes that are no character."""
    return "".join(unicodedata.normalize("NFKC", text).replace("\ufffd", "").split())


def _environment(tally: Tally, place: Place, turns: Sequence[SourceTurn]) -> None:
    heard = ""
    for index, turn in enumerate(turns):
        after = turns[index + 1] if index + 1 < len(turns) else None
        heard += turn.observation + "\n"
        if turn.token_ids is None or not len(turn.token_ids):
            continue
        why = [_untold(turn, after)] if after is not None and after.observation.strip() else []
        if turn.response and (turn.mask is None or np.all(turn.mask)):  # else it may hold text that is masked
            why += [_marks(turn.response), _echo(turn.response, after, heard)]
        if why:
            tally.look("environment_tokens")
        if found := next(filter(None, why), None):
            tally.hit("environment_tokens", place.turn(turn), found, turn=number(turn, index))


def _untold(turn: SourceTurn, after: SourceTurn) -> str:
    """The next observation has no tokens but those that are trained on: the context grew by no others."""
    if turn.context_ids is None or after.context_ids is None or not len(turn.context_ids):
        return ""
    before, now, n = len(turn.context_ids), len(after.context_ids), len(turn.token_ids)
    follows = before < now <= before + n and np.array_equal(after.context_ids[:before], turn.context_ids)
    if follows and np.array_equal(after.context_ids[before:], turn.token_ids[: now - before]):
        return f"the next turn's context holds no more than the {n} tokens trained here, and yet an observation"
    return ""


def _marks(text: str) -> str:
    found = _ROLES.search(text)
    return f"the trained text holds {found[0]!r}" if found and text[found.end() :].strip() else ""


def _echo(text: str, after: SourceTurn | None, heard: str) -> str:
    """The response ends with an observation that the policy had not been told yet."""
    told = after.observation.strip() if after else ""
    at = text.rfind(told) if len(told) >= _OBSERVATION and told not in heard else -1
    if at >= 0 and len(text) - at - len(told) <= _TEMPLATE:
        return f"the trained text ends with the next observation, {told[:40]!r}"
    return ""


def _teacher(tally: Tally, place: Place, episode: SourceEpisode) -> None:
    lacking, student, teacher = "", [], []
    looked = False
    for index, turn in enumerate(episode.turns):
        own = turn.logprobs if turn.trainer_logprobs is None else turn.trainer_logprobs
        if _fit(own, turn.teacher_logprobs):
            student.append(own)
            teacher.append(turn.teacher_logprobs)
        for context, privileged, seen in _contexts(episode, turn):
            looked = True
            whole, part = _holds(context, privileged)
            if privileged is None:
                if seen is not None and np.array_equal(context, seen):
                    lacking = lacking or f"turn {number(turn, index)}: the teacher's context is the student's"
                continue
            tally.look("truncated_teacher_context")
            short = "" if seen is None else _short(context, privileged, seen)
            if not whole and part:
                short = f"{part} of {len(privileged)} of the privileged text are left"
            elif not whole:
                lacking = lacking or f"turn {number(turn, index)}: the teacher's context does not hold it"
            if short and (whole or part):
                tally.hit("truncated_teacher_context", place.turn(turn), short, turn=number(turn, index))
    if student:
        ours, theirs = np.concatenate(student), np.concatenate(teacher)
        unsure = ours < _UNSURE
        if unsure.sum() >= _PLACEHOLDER:
            looked = True
            if np.abs(ours - theirs)[unsure].max() <= SAME_LOGPROB:
                lacking = lacking or f"the teacher's log-probs are the student's on all {len(ours)} tokens"
    if looked:
        tally.look("missing_privileged_text")
        if lacking:
            tally.hit("missing_privileged_text", place, lacking)


def _contexts(episode: SourceEpisode, turn: SourceTurn) -> Iterator[tuple[Any, Any, Any]]:
    """(what the teacher read, the privileged text, what the student read), as ids or as text, where they are there."""
    if isinstance(text := turn.info.get("teacher_context"), str):
        privileged, seen = turn.info.get("privileged", episode.info.get("privileged")), turn.info.get("context")
        yield text, *(value if isinstance(value, str) and value else None for value in (privileged, seen))
    elif (read := _held(turn, "teacher_context_ids")) is not None:
        privileged = _held(turn, "privileged_ids")
        yield read, _held(episode, "privileged_ids") if privileged is None else privileged, turn.context_ids


def _holds(context: Any, privileged: Any) -> tuple[bool, int]:
    """Whether the context holds all of the privileged text, and else how much of it is left at one of its ends."""
    if privileged is None:
        return True, 0
    if isinstance(context, str):
        if privileged in context:
            return True, 0
        sizes = range(min(len(context), len(privileged)), 7, -1)
        return False, next((n for n in sizes if context[:n] == privileged[-n:] or context[-n:] == privileged[:n]), 0)
    n = len(privileged)
    if len(context) >= n:
        starts = np.flatnonzero(context[: len(context) - n + 1] == privileged[0])
        if any(np.array_equal(context[i : i + n], privileged) for i in starts):
            return True, 0
    for size in range(min(len(context), n), 1, -1):
        if np.array_equal(context[:size], privileged[-size:]) or np.array_equal(context[-size:], privileged[:size]):
            return False, size
    return False, 0


def _short(context: Any, privileged: Any, seen: Any) -> str:
    """How much of the student's context the teacher's lacks, where that is more than a seam."""
    lost = len(privileged) + len(seen) - len(context)
    slack = max(_SLACK, len(seen) // 20)
    return f"{lost} of {len(seen)} of the student's context are missing" if lost > slack else ""
