"""How a game becomes a conversation in tokens, and how a response becomes a command.

Prompts are built from the tokenizer's own chat template, piece by piece, so that each prompt extends the tokens before
it and nothing that was sampled is ever tokenised again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from .envs.base import State
from .errors import WorkbenchError

_MARK = "\u241f"  # stands for a message while the template's own text around it is read off

_INSTRUCTIONS = (
    "You play a text game. Each turn, think briefly if you need to, then give exactly one command between "
    "<action> and </action>."
)


@dataclass(frozen=True)
class PromptStyle:
    """What a turn's message says and how its response is read.

    style: "plain", the message is the observation and the whole response is the command; "action", instructions come
    first and the command stands between <action> tags.
    history: -1 keeps the whole conversation (each prompt extends the last: one row of tokens an episode); k >= 0 shows
    only the last k turns in one fresh message (the form of the released ALFWorld scripts: one row of tokens a turn).
    show_admissible: list the commands that the environment accepts.
    """

    style: Literal["plain", "action"] = "plain"
    history: int = -1
    show_admissible: bool = False

    def message(self, state: State, past: Sequence[tuple[str, str]], first: bool) -> str:
        """The text of one user message. past: (observation, command) of the turns before, oldest first."""
        parts = []
        if first:
            if self.style == "action":
                parts.append(_INSTRUCTIONS)
            task = state.info.get("task", "")
            if task and task not in state.observation:
                parts.append(task)
        if self.history > 0 and past:
            parts += [f"{observation}\n> {command}" for observation, command in past[-self.history :]]
        parts.append(state.observation)
        if self.show_admissible:
            parts.append("Commands: " + "; ".join(state.admissible))
        return "\n".join(parts)

    def command(self, response: str, admissible: Sequence[str]) -> str:
        """The command in a response, spelt as the environment spells it where only case or spacing differ."""
        text = response
        if self.style == "action":
            tagged = re.findall(r"<action>(.*?)</action>", response, re.DOTALL)
            text = tagged[-1] if tagged else response
        text = re.sub(r"\s+", " ", text).strip()
        spelt = {re.sub(r"\s+", " ", a).strip().casefold(): a for a in admissible}
        return spelt.get(text.casefold(), text[:200] or "(nothing)")


class Chat:
    """Builds token prompts for one tokenizer and style. Raises WorkbenchError where the chat template is unusable."""

    def __init__(self, tokenizer: Any, style: PromptStyle):
        self.tokenizer, self.style = tokenizer, style
        if not tokenizer.chat_template:
            raise WorkbenchError(f"tokenizer {tokenizer.name_or_path!r} has no chat template; a chat model is needed")
        opening = self._render([("user", _MARK)], True)
        exchange = [("user", "u"), ("assistant", _MARK)]
        closed = self._render(exchange, False)
        following = self._render([*exchange, ("user", _MARK)], True)
        end = tokenizer.eos_token
        after = closed.rsplit(_MARK, 1)[1]
        if end is None or end not in after or opening.count(_MARK) != 1 or following.count(_MARK) != 2:
            raise WorkbenchError(
                f"tokenizer {tokenizer.name_or_path!r}: its chat template must close a turn with {end!r} "
                "and show each message once"
            )
        self._head, self._tail = opening.split(_MARK)
        between, self._next_tail = following.rsplit(_MARK, 2)[1:]
        self._next_head = between.split(end, 1)[1]
        self.end_id = tokenizer.eos_token_id
        self._ids = lru_cache(4096)(self._encode)  # members of a group read the same messages

    def first(self, text: str) -> np.ndarray:
        """A conversation's first prompt, up to where the response begins."""
        return self._ids(self._head + text + self._tail)

    def following(self, text: str, truncated: bool) -> np.ndarray:
        """The tokens between a response and the next: an end of turn where the response was cut, and the message."""
        ids = self._ids(self._next_head + text + self._next_tail)
        return np.concatenate([[self.end_id], ids]).astype(np.int32) if truncated else ids

    def insertion_point(self, position: str) -> int:
        """How many tokens stand before privileged text: in "front" of everything, or in the first "user" message."""
        if position not in ("front", "user"):
            raise WorkbenchError(f"skill position must be front or user, got {position!r}")
        bos = self.tokenizer.bos_token_id
        if position == "front":
            return int(bos is not None and len(first := self.first("x")) > 0 and first[0] == bos)
        return len(self._ids(self._head))

    def opening(self, count: int) -> np.ndarray:
        """The first `count` tokens of every prompt."""
        return self.first("x")[:count]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _encode(self, text: str) -> np.ndarray:
        ids = np.asarray(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def _render(self, messages: list[tuple[str, str]], generate: bool) -> str:
        chat = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generate)
