"""Chat messages as turns: an assistant message is an action, what was said since the one before is its observation."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ..errors import WorkbenchError
from .base import SourceTurn, kind_of

_KEPT = ("reasoning_content", "reasoning", "refusal")


def turns_of(messages: Iterable[Any], where: str, name: str = "messages", skip: int = 0) -> tuple[SourceTurn, ...]:
    """The turns of a conversation in the OpenAI form.

    The first `skip` messages are the prompt: assistant messages among them are few-shot text and no turns. A call of
    tools is the turn's action, written name(arguments). What follows the last assistant message is no turn's
    observation and is kept in its info as "after". Raises WorkbenchError for what is no list of messages.
    """
    if not isinstance(messages, list | tuple):
        raise WorkbenchError(f"{where}: {name} is {kind_of(messages)}, expected a list of messages")
    turns: list[SourceTurn] = []
    before: list[str] = []
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise WorkbenchError(f"{where}: {name}[{index}] is {kind_of(message)}, expected an object with a role")
        said = message.get("content")
        if not isinstance(said, str):
            said = content_of(said, f"{where}: {name}[{index}]")
        if role != "assistant" or index < skip:
            before.append(said)
            continue
        calls = message.get("tool_calls")
        action = _action(calls, f"{where}: {name}[{index}]") if calls else None
        info = {key: message[key] for key in _KEPT if message.get(key)} if len(message) > 2 else {}
        turns.append(SourceTurn(said, "\n\n".join(before), action, info=info))
        before = []
    if before and turns:
        turns[-1].info["after"] = "\n\n".join(before)
    return tuple(turns)


def prompt_of(messages: list[Any]) -> str:
    """An id of what came before the first assistant message: rollouts of one prompt have the same."""
    asked = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        asked.append([message.get("role"), message.get("content")])
    return digest_of(asked)


def digest_of(value: Any) -> str:
    """Twelve hex digits that are the same for equal JSON values."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def content_of(content: Any, where: str) -> str:
    """The text of a message's content, which may come in parts; a part that is no text is named in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise WorkbenchError(f"{where}.content is {kind_of(content)}, expected a string or a list of parts")
    parts = []
    for part in content:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, dict):
            parts.append(f"[{part.get('type', 'object')}]")
        else:
            raise WorkbenchError(f"{where}.content holds {kind_of(part)}, expected parts of text")
    return "".join(parts)


def _action(calls: Any, where: str) -> str | None:
    if not isinstance(calls, list | tuple):
        raise WorkbenchError(f"{where}.tool_calls is {kind_of(calls)}, expected a list")
    written = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise WorkbenchError(f"{where}.tool_calls holds {kind_of(call)}, expected calls of functions")
        arguments = function.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(f"{function.get('name', '')}({shown})")
    return "\n".join(written) or None
