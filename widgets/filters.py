"""What the explorer's filter line says: `return > 0.5 and n_turns <= 6, kind = "fridge"`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from workbench.errors import WorkbenchError, unknown

OPERATORS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "=": "eq", "!=": "ne"}

_CLAUSE = re.compile(r'\s*([A-Za-z_]\w*)\s*(<=|>=|!=|==|=|<|>)\s*("[^"]*"|[^\s,&"]+)\s*')
_AND = re.compile(r"(?:,|&&?|and\b)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse(line: str) -> list[dict[str, Any]]:
    """Clauses {column, op, value} of a filter line, joined by `and`, `&` or a comma; none where it is blank.

    explorer.js reads the same language. Raises WorkbenchError naming where a clause was expected.
    """
    clauses, at = [], 0
    while line[at:].strip():
        if clauses:
            joined = _AND.match(line, at)
            at = joined.end() if joined else at
        clause = _CLAUSE.match(line, at)
        if not clause or (clauses and not joined):
            raise WorkbenchError(f"filter: expected such as `return > 0.5 and n_turns < 6` at {line[at:][:30]!r}")
        column, op, value = clause.groups()
        number = _NUMBER.fullmatch(value)
        value = float(value) if number else value.strip('"')
        clauses.append({"column": column, "op": "=" if op == "==" else op, "value": value})
        at = clause.end()
    return clauses


def filtered(frame: pl.DataFrame, where: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """Rows for which every clause {column, op, value} holds. Raises WorkbenchError on one that cannot be asked."""
    for clause in where:
        column, op, value = clause.get("column"), clause.get("op"), clause.get("value")
        known = [n for n, t in frame.schema.items() if t.is_numeric() or t == pl.String]
        if column not in known:
            raise unknown("column to filter by", str(column), known)
        if op not in OPERATORS:
            raise unknown("comparison", str(op), OPERATORS)
        text = frame.schema[column] == pl.String
        if isinstance(value, bool) or not isinstance(value, str if text else (int, float)):
            raise WorkbenchError(f"filter: {column} is compared with a {'text' if text else 'number'}, got {value!r}")
        if text and op not in ("=", "!="):
            raise WorkbenchError(f"filter: {column} is text, which is compared by = or !=, not by {op}")
        frame = frame.filter(getattr(pl.col(column), OPERATORS[op])(pl.lit(value)))
    return frame
