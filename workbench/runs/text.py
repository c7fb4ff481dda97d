"""Text from notebooks, logs and errors made fit for a terminal: nothing in it may move the cursor or hide a line."""

import re

from ..errors import printable

_ESCAPES = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?"
_CONTROL = re.compile(_ESCAPES + r"|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def without_controls(text: str) -> str:
    """The text without escape sequences and control characters, tabs, line ends and backspaces apart."""
    return _CONTROL.sub("", text)


def one_line(text: str, limit: int = 400) -> str:
    """The text in one printable line of at most `limit` characters."""
    text = printable(" ".join(without_controls(text).split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def first_line(source: str) -> str:
    """The first line of code in a cell, or its first comment where it holds no code."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    code = [line for line in lines if not line.startswith("#")]
    return one_line((code or lines or ["(empty)"])[0], 100)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "4.2 s", "3 min 05 s", "2 h 10 min"."""
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
