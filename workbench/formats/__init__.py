"""Readers of other systems' rollouts: one module a format, each yielding episodes as its source wrote them."""

from types import ModuleType

from .base import SourceEpisode, SourceTurn

FORMATS: dict[str, ModuleType] = {}

__all__ = ["FORMATS", "SourceEpisode", "SourceTurn"]
