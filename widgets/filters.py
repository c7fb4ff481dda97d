"""What the explorer's filter line says: `return > 0.5 and n_turns <= 6, kind = "fridge"`."""

import re
from typing import Any

from workbench.errors import WorkbenchError

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
