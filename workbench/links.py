"""Deep links: a short string that names a place in a run, such as `run=20250301T101500Z-1a2b3c4d&step=10&episode=3`.

The parts are run, step, episode, turn and span, in this order; trailing ones may be left out. A span `2-7` is the
turn's sampled tokens 2 to 6, as a Python slice. The run is its folder's name, percent-encoded, and never a path.
"""

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import quote, unquote

from .errors import WorkbenchError, unknown

PARTS = ("run", "step", "episode", "turn", "span")
LARGEST = 2**53 - 1  # the largest integer that a page's script holds exactly
_NUMBER = re.compile(r"0|[1-9][0-9]{0,15}")
_SHAPE = "one is run=NAME&step=10&episode=3&turn=5&span=2-7"
_SPAN = re.compile(r"([0-9]+)-([0-9]+)")


@dataclass(frozen=True)
class Link:
    """A place in a run. None means the whole of what is above it; start and end are given together or not at all.

    Raises WorkbenchError on a run that is no plain folder name, a gap in the parts, or a number out of range.
    """

    run: str
    step: int | None = None
    episode: int | None = None
    turn: int | None = None
    start: int | None = None
    end: int | None = None

    def __post_init__(self):
        check_run(self.run)
        check_place(self.step, self.episode, self.turn, self.start, self.end)

    def __str__(self) -> str:
        parts = [f"run={quote(self.run, safe='')}"]
        parts += [f"{name}={getattr(self, name)}" for name in PARTS[1:4] if getattr(self, name) is not None]
        return "&".join(parts + ([f"span={self.start}-{self.end}"] if self.start is not None else []))


def parse(text: str) -> Link:
    """The link that `str(link)` wrote; a leading `#` or `?` and blanks around it are passed over.

    Raises WorkbenchError on anything else: an unknown, repeated, empty or missing part.
    """
    if not isinstance(text, str):
        raise WorkbenchError(f"a link is text, got {type(text).__name__}; {_SHAPE}")
    found: dict[str, str] = {}
    for part in text.strip().removeprefix("#").removeprefix("?").split("&"):
        name, equals, value = part.partition("=")
        if not equals:
            raise WorkbenchError(f"link {text[:80]!r}: {part[:40]!r} is not name=value; {_SHAPE}")
        if name not in PARTS:
            raise unknown("part of a link", name[:40], PARTS)
        if name in found:
            raise WorkbenchError(f"link {text[:80]!r}: {name} is given twice")
        found[name] = value
    if "run" not in found:
        raise WorkbenchError(f"link {text[:80]!r} names no run; {_SHAPE}")
    run = unquote(found.pop("run"), errors="replace")
    start = end = None
    if "span" in found:
        match = _SPAN.fullmatch(found.pop("span"))
        if not match:
            raise WorkbenchError(f"link {text[:80]!r}: a span is two numbers such as 2-7")
        start, end = (_number("span", piece) for piece in match.groups())
    return Link(run, **{name: _number(name, value) for name, value in found.items()}, start=start, end=end)


def check_run(run: str) -> None:
    """Raise WorkbenchError where `run` cannot be the name of one folder."""
    plain = isinstance(run, str) and 0 < len(run) <= 255 and run not in (".", "..") and not set(run) & set("/\\")
    if not plain or any(unicodedata.category(c) in ("Cc", "Cs") for c in run):
        raise WorkbenchError(f"a run is named by its folder's name, without its path; got {str(run)[:80]!r}")


def check_place(*place: int | None) -> None:
    """Raise WorkbenchError where (step, episode, turn, start, end) has a gap, an empty span or no whole number."""
    names = ("step", "episode", "turn", "span start", "span end")
    for name, value in zip(names, place, strict=True):
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST
        if value is not None and not whole:
            raise WorkbenchError(f"{name} must be a whole number from 0, got {str(value)[:40]!r}")
    for i in range(1, len(names)):
        if place[i] is not None and place[i - 1] is None:
            raise WorkbenchError(f"a place that names its {names[i]} needs the {names[i - 1]} too")
    start, end = place[3:]
    if start is not None and (end is None or end <= start):
        raise WorkbenchError(f"a span runs from a token to a later one, end not included; got {start}-{end}")


def _number(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise WorkbenchError(f"{name} of a link must be a whole number from 0, got {text[:40]!r}")
    return int(text)
