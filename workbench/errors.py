"""The one exception users meet: bad input, told in one line."""

import difflib
from collections.abc import Iterable


class WorkbenchError(ValueError):
    """Bad input: the message is one line that says what was wrong, where, and what was expected."""


def unknown(what: str, given: str, known: Iterable[str]) -> WorkbenchError:
    """An error for a name that does not exist, naming the nearest one that does and then all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return WorkbenchError(f"unknown {what} {given!r}{hint} known: {', '.join(known)}")


def printable(text: str) -> str:
    """Text in one line without characters that a terminal might obey; names of files and columns may hold them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
