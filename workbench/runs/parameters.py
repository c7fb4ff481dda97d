"""What a notebook's `parameters` cell declares, and given values checked against it before anything runs."""

import ast
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import coerce
from ..errors import WorkbenchError, unknown

RUN_DIR = "run_dir"
_TYPES = {
    "str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict, "tuple": tuple, "None": None,
    "Any": Any, "Literal": typing.Literal, "Optional": typing.Optional, "Union": typing.Union, "typing": typing,
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """One declared parameter: its type, from the annotation or else from the default, and its default."""

    name: str
    kind: Any
    default: Any


def declared(notebook: Mapping[str, Any], where: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook (parsed JSON), in order; none where it has no cell tagged `parameters`.

    Raises WorkbenchError on two such cells, on code Python cannot parse, on a default that is no plain value, and on
    an annotation other than str, int, float, bool, list, dict, tuple, Literal and unions of these with None.
    """
    cells = [c for c in notebook["cells"] if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(cells) > 1:
        raise WorkbenchError(f"{where}: {len(cells)} cells are tagged 'parameters'; one is expected")
    if not cells:
        return {}
    try:
        statements = ast.parse("".join(cells[0]["source"])).body
    except SyntaxError as error:
        raise WorkbenchError(f"{where}: the parameters cell is not Python: line {error.lineno}: {error.msg}") from None
    found = {}
    for statement in statements:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr() as value):
                default = _plain(value, name, where)
                kind = _kind(annotation, name, where)
                found[name] = Parameter(name, kind, coerce(default, kind, name, f"{where}, default"))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target, ast.Name):
                        default = _plain(value, target.id, where)
                        found[target.id] = Parameter(target.id, Any if default is None else type(default), default)
    return found


def resolve(parameters: Mapping[str, Parameter], given: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """Every declared parameter with its given value or its default, `run_dir` apart, which the runner sets.

    Raises WorkbenchError on an unknown name (nearest one named) or an ill-typed value.
    """
    settable = {name: p for name, p in parameters.items() if name != RUN_DIR}
    for name in given:
        if name == RUN_DIR and name in parameters:
            raise WorkbenchError(f"{where}: {RUN_DIR} is set by the runner; use --out for the folder that runs go into")
        if name not in settable:
            if not settable:
                raise WorkbenchError(f"{where} declares no parameters, so {name!r} cannot be set")
            raise unknown(f"parameter of {where}", str(name), settable)
    return {n: coerce(given[n], p.kind, n, str(where)) if n in given else p.default for n, p in settable.items()}


def _plain(value: ast.expr, name: str, where: str | Path) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        given = ast.unparse(value)
        raise WorkbenchError(f"{where}: the default of {name} must be a plain value, got {given}") from None


def _kind(annotation: ast.expr, name: str, where: str | Path) -> Any:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    try:
        code = compile(ast.Expression(annotation), "<annotation>", "eval")
        kind = eval(code, {"__builtins__": {}}, _TYPES)  # the notebook is about to be executed anyway
    except Exception:
        kind = object
    if not _known(kind):
        plain = "str, int, float, bool, list, dict, tuple, Literal[...] or X | None"
        raise WorkbenchError(f"{where}: {name} is annotated {ast.unparse(annotation)!r}; {plain} is expected")
    return type(None) if kind is None else kind


def _known(kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return True
    if origin in (typing.Union, types.UnionType, list, dict, tuple):
        return all(arg is Ellipsis or _known(arg) for arg in args)
    return kind is None or kind is Any or kind in (str, int, float, bool, list, dict, tuple, type(None))
