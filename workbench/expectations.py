"""What a notebook's result record is expected to be: values with tolerances, as lines of a TOML file.

    [train.expect]
    steps = 2                                                # exactly
    "final.heldout/student" = { min = 0.0, max = 1.0 }       # either bound alone will do
    gap_mean_last = { value = -0.031, abs = 1e-4, rel = 0.01 }   # within the larger of the two
    kappa = { null = true }                                  # undefined in this run

Names are paths in the record: "final.heldout/student" is record["final"]["heldout/student"], "order[0]" a list's first.
"""

import json
import math
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import WorkbenchError, unknown
from .runs.verify import TIMES

NEW_REL = 1e-3  # of a number that is written for the first time
_FIELDS = ("value", "abs", "rel", "min", "max", "null")
_LONGEST = 200  # characters of a text that is expected to the letter


@dataclass(frozen=True)
class Expectation:
    """One expected value: exactly `value`, within abs or rel of it, between min and max, or null."""

    value: Any = None
    abs: float | None = None
    rel: float | None = None
    min: float | None = None
    max: float | None = None
    null: bool = False

    def problem(self, found: Any) -> str | None:
        """Why a value is not what was expected, None where it is."""
        if self.null:
            return None if found is None else f"{_short(found)}, null is expected"
        if self.min is not None or self.max is not None:
            low, high = (-math.inf if self.min is None else self.min), (math.inf if self.max is None else self.max)
            inside = _number(found) and low <= found <= high
            return None if inside else f"{_short(found)}, between {low:g} and {high:g} is expected"
        if self.abs is None and self.rel is None:
            same = found == self.value and (type(found) is type(self.value) or (_number(found) and _number(self.value)))
            return None if same else f"{_short(found)}, {_short(self.value)} is expected"
        room = max(self.abs or 0.0, (self.rel or 0.0) * abs(self.value))
        near = _number(found) and abs(found - self.value) <= room * (1 + 1e-9)  # the bound itself is within
        return None if near else f"{_short(found)}, {self.value!r} within {room:.3g} is expected"

    def refreshed(self, found: Any) -> "Expectation":
        """The same tolerance around another value; bounds stay, unless the value is null now."""
        if found is None:
            return Expectation(null=True)
        if self.min is not None or self.max is not None:
            return self
        if not _number(found) or self.null:
            return first(found)
        return Expectation(found, self.abs, self.rel)

    def line(self, name: str) -> str:
        """As a line of TOML."""
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        given = {f: getattr(self, f) for f in _FIELDS if getattr(self, f) is not None and getattr(self, f) is not False}
        if self.value is not None and len(given) <= 1:
            return f"{key} = {_toml(self.value)}"
        if self.value is False:
            return f"{key} = false"
        return f"{key} = {{ {', '.join(f'{f} = {_toml(v)}' for f, v in given.items())} }}"


def first(found: Any) -> Expectation:
    """What a value is expected to be from now on: floats within NEW_REL, everything else exactly."""
    if found is None:
        return Expectation(null=True)
    return Expectation(found, rel=NEW_REL) if isinstance(found, float) else Expectation(found)


def parse(table: Mapping[str, Any], where: str) -> dict[str, Expectation]:
    """The expectations of a table, nested ones by their path. Raises WorkbenchError on what is none."""
    out: dict[str, Expectation] = {}
    for name, given in table.items():
        if isinstance(given, bool | int | float | str):
            out[name] = Expectation(given)
        elif not isinstance(given, Mapping):
            raise WorkbenchError(f"{where}: {name} must be a value or a table of {', '.join(_FIELDS)}")
        elif any(isinstance(value, Mapping) for value in given.values()):
            out |= {f"{name}.{inner}": e for inner, e in parse(given, f"{where}.{name}").items()}
        else:
            out[name] = _expectation(given, f"{where}: {name}")
    return out


def flatten(record: Any, path: str = "") -> dict[str, Any]:
    """A result record's plain values by path."""
    if isinstance(record, Mapping):
        pairs = [(f"{path}.{name}" if path else str(name), value) for name, value in record.items()]
    elif isinstance(record, list):
        pairs = [(f"{path}[{i}]", value) for i, value in enumerate(record)]
    else:
        return {path: record}
    return {name: value for at, inner in pairs for name, value in flatten(inner, at).items()}


def problems(record: Mapping[str, Any] | None, expected: Mapping[str, Expectation]) -> list[str]:
    """What is not as expected in a result record, a line each."""
    if record is None:
        return ["it ends without a result record"] if expected else []
    found = flatten(record)
    lines = []
    for name, expectation in expected.items():
        if name not in found:
            lines.append(str(unknown("value of the result record", name, found)))
        elif problem := expectation.problem(found[name]):
            lines.append(f"{name} is {problem}")
    return lines


def updated(
    record: Mapping[str, Any], expected: Mapping[str, Expectation] | None, passing: Collection[str]
) -> dict[str, Expectation]:
    """What to expect after this record: the same names with its values; every name where nothing was expected yet.

    passing: words that change from run to run, such as a run's name. Texts that hold one, long texts and what a clock
    decides are not taken up.
    """
    found = flatten(record)
    if expected is not None:
        return {name: e.refreshed(found[name]) for name, e in expected.items() if name in found}
    return {name: first(value) for name, value in found.items() if name and not _passes(name, value, passing)}


def rewrite(text: str, tables: Mapping[str, Mapping[str, Expectation]], where: str) -> str:
    """A TOML file with the tables [<label>.expect] replaced or added; everything else and comments stay.

    Raises WorkbenchError where expectations are not written as one line each in a table of their own.
    """
    out, left, label = [], {name: dict(table) for name, table in tables.items()}, None
    for line in [*text.splitlines(), None]:
        header = None if line is None else re.fullmatch(r"\s*\[[^\[\]].*\]\s*(#.*)?", line)
        if label is not None and (line is None or header):
            blank = len(out) - len("\n".join(out).rstrip().split("\n"))
            rest = [e.line(name) for name, e in left.pop(label).items()]
            out[len(out) - blank : len(out) - blank] = rest
            label = None
        if header:
            path = _path(line, where)
            label = path[0] if len(path) == 2 and path[1] == "expect" and path[0] in left else None
        elif label is not None and line.strip() and not line.lstrip().startswith("#"):
            name = _name(line, f"{where}, [{label}.expect]")
            if name in left[label]:
                out.append(left[label].pop(name).line(name))
            continue
        if line is not None:
            out.append(line)
    for name, table in left.items():
        key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
        out += ["", f"[{key}.expect]", *(e.line(at) for at, e in table.items())]
    new = "\n".join(out).strip("\n") + "\n"
    try:
        loaded = tomllib.loads(new)
        same = all(parse(loaded[name]["expect"], where) == dict(table) for name, table in tables.items())
    except (tomllib.TOMLDecodeError, KeyError):
        same = False
    if not same:
        raise WorkbenchError(f"{where} cannot be updated: write expectations as lines of a table [NAME.expect]")
    return new


def _expectation(given: Mapping[str, Any], where: str) -> Expectation:
    for field, value in given.items():
        if field not in _FIELDS:
            raise unknown(f"field of {where}", field, _FIELDS)
        if field in ("abs", "rel", "min", "max") and not _number(value):
            raise WorkbenchError(f"{where}: {field} must be a number, got {value!r}")
    built = Expectation(**given)
    bounds, tolerance = not {"min", "max"}.isdisjoint(given), not {"abs", "rel"}.isdisjoint(given)
    kinds = ("value" in given) + bounds + built.null
    if kinds != 1 or (tolerance and not _number(built.value)):
        raise WorkbenchError(f"{where} must be a value (a number with abs or rel), min or max, or null = true")
    return built


def _passes(name: str, value: Any, passing: Collection[str]) -> bool:
    if name.rpartition(".")[2] in TIMES:
        return True
    return isinstance(value, str) and (len(value) > _LONGEST or any(word in value for word in passing))


def _path(header: str, where: str) -> list[str]:
    try:
        table = tomllib.loads(header)
    except tomllib.TOMLDecodeError as error:
        raise WorkbenchError(f"{where}: {error}") from None
    path = []
    while table:
        (name, table), *_ = table.items()
        path.append(name)
    return path


def _name(line: str, where: str) -> str:
    try:
        (name,) = parse(tomllib.loads(line), where)
    except (tomllib.TOMLDecodeError, ValueError):
        raise WorkbenchError(f"{where} cannot be updated: {line.strip()!r} is not one whole expectation") from None
    return name


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return _text(value) if isinstance(value, str) else repr(value)
