"""Figures: pure functions from a run's tables to plotly figures, one file a question."""

from .display import html, say, setup, show

__all__ = ["html", "say", "setup", "show"]
