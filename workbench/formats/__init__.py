"""Readers of other systems' rollouts: one module a format, each yielding episodes as its source wrote them."""

from pathlib import Path
from types import ModuleType

from . import (
    agent_lightning,
    art,
    inspect_ai,
    messages,
    ms_swift,
    prime_rl,
    rllm,
    roll,
    skyrl,
    slime,
    source,
    trl,
    verifiers,
    verl,
    verl_agent,
)
from .base import SourceEpisode, SourceTurn
from .source import Source

# asked in this order whether a file is theirs; plain chat, which others contain, comes last
_ALL = (
    verl_agent, verl, trl, ms_swift, roll, skyrl, verifiers, prime_rl, rllm, art, agent_lightning, slime, inspect_ai,
    messages,
)  # fmt: skip
FORMATS: dict[str, ModuleType] = {module.NAME: module for module in _ALL}


def open_source(path: str | Path) -> Source:
    """What is at `path`, told by the heads of its files. See `workbench.formats.source.open_source`."""
    return source.open_source(path, FORMATS)


__all__ = ["FORMATS", "Source", "SourceEpisode", "SourceTurn", "open_source"]
