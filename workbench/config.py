"""Typed configuration out of loose mappings: unknown names and ill-typed values are refused in one line."""

import ast
import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from .errors import WorkbenchError, unknown

T = TypeVar("T")


def from_mapping(cls: type[T], mapping: Mapping[str, Any], where: str = "parameters") -> T:
    """An instance of the dataclass `cls` from names and values; fields that are not named keep their defaults.

    Fields are str, int, float, bool, list, tuple, dict, Literal or unions of these with None. Values are coerced as
    in `coerce`. Raises WorkbenchError on an unknown name (nearest one named), an ill-typed value or a missing one.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in mapping:
        if name not in fields:
            raise unknown(f"name in {where}", str(name), fields)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in mapping:
            raise WorkbenchError(f"{where}: {name} ({type_name(hints[name])}) is missing and has no default")
    return cls(**{name: coerce(value, hints[name], name, where) for name, value in mapping.items()})


def coerce(value: Any, kind: Any, name: str, where: str = "parameters") -> Any:
    """`value` as the declared type, forgiving only what papermill and a command line do to plain values.

    An int where a float is declared, text that spells a number, "true" or "false" where a bool is declared, "none"
    where None is allowed, text that spells a list or a dict. Everything else that does not fit raises WorkbenchError.
    """
    fits, out = _fit(value, kind)
    if fits:
        return out
    if typing.get_origin(kind) is Literal and isinstance(value, str):
        raise unknown(f"value of {name} in {where}", value, [str(option) for option in typing.get_args(kind)])
    raise WorkbenchError(f"{where}: {name} must be {type_name(kind)}, got {_short(value)} ({type(value).__name__})")


def type_name(kind: Any) -> str:
    """A type as one would write it in an annotation."""
    if kind is Any:
        return "anything"
    if kind is type(None):
        return "None"
    if typing.get_origin(kind) in (Union, types.UnionType):
        return " | ".join(type_name(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if typing.get_args(kind):
        inner = ", ".join("..." if arg is Ellipsis else type_name(arg) for arg in typing.get_args(kind))
        return f"{typing.get_origin(kind).__name__}[{inner}]"
    return kind.__name__


def digest(mapping: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits (sha256) that depend on names and values only, not on their order or spelling."""
    return hashlib.sha256(canonical_json(mapping).encode()).hexdigest()[:8]


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces; dataclasses as dicts, tuples as lists. Raises WorkbenchError on others."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise WorkbenchError(f"a configuration holds a value that JSON cannot: {error}") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    raise TypeError(f"{_short(value)} ({type(value).__name__})")


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _fit(value: Any, kind: Any) -> tuple[bool, Any]:
    """(whether the value fits the type, the value coerced to it)."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True, value
    if origin in (Union, types.UnionType):
        return _fit_union(value, args)
    if origin is Literal:
        for option in args:
            if type(option) is type(value) and option == value:
                return True, option
        spelt = [o for o in args if isinstance(value, str) and not isinstance(o, str) and str(o) == value]
        return (True, spelt[0]) if spelt else (False, None)
    if (origin or kind) in (list, tuple, dict):
        return _fit_container(value, origin or kind, args)
    if kind is type(None):
        return value is None or value in ("none", "None", "null"), None
    if kind is bool:
        spelt = {"true": True, "false": False}.get(value.lower()) if isinstance(value, str) else value
        return isinstance(spelt, bool), spelt
    if kind is int:
        return _number(value, int)
    if kind is float:
        fits, number = _number(value, float)
        return fits and not math.isnan(number), number
    return isinstance(value, kind), value


def _number(value: Any, kind: type) -> tuple[bool, Any]:
    allowed = (str, int) if kind is int else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        return False, 0
    try:
        return True, kind(value)
    except (ValueError, OverflowError):
        return False, 0


def _fit_union(value: Any, options: tuple) -> tuple[bool, Any]:
    """A literal or the value's exact type wins, then None spelt out, then the first that can be coerced."""
    literals = [o for o in options if typing.get_origin(o) is Literal]
    exact = literals + [o for o in options if o is type(value) and o is not str]
    null = [o for o in options if o is type(None)]
    for option in exact + null + [o for o in options if o is type(value)] + list(options):
        fits, out = _fit(value, option)
        if fits:
            return True, out
    return False, None


def _fit_container(value: Any, kind: type, args: tuple) -> tuple[bool, Any]:
    if isinstance(value, str):
        value = _literal(value)
    if kind is dict:
        if not isinstance(value, dict):
            return False, None
        keys, values = args or (Any, Any)
        pairs = [(_fit(k, keys), _fit(v, values)) for k, v in value.items()]
        return all(k[0] and v[0] for k, v in pairs), {k[1]: v[1] for k, v in pairs}
    if not isinstance(value, list | tuple):
        return False, None
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(value):
            return False, None
        items = [_fit(v, a) for v, a in zip(value, args, strict=True)]
    else:
        items = [_fit(v, args[0] if args else Any) for v in value]
    return all(fits for fits, _ in items), kind(out for _, out in items)


def _literal(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None
