"""Run folders: what a run leaves on disk, and the result record a notebook ends with."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from .folder import RunFolder, checkpoint_step
from .listing import list_runs

__all__ = ["RESULT_MIME", "RunFolder", "checkpoint_step", "list_runs", "record_result", "recorded_result"]

RESULT_MIME = "application/vnd.workbench.result+json"


def record_result(result: Mapping[str, Any]) -> None:
    """Say what a notebook found: names and plain values, which the runner lifts into the manifest as `result`.

    Call it once, in the last cell. Numbers and arrays of numpy and polars become Python's, paths become text, and
    NaN or an infinity becomes null, which JSON has no word for. Raises WorkbenchError on a value that is not plain.
    """
    from IPython.display import display

    record = {str(name): _plain(value, str(name)) for name, value in result.items()}
    width = max(map(len, record), default=0)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in record.items())
    # Notebooks are stored with the names of every object sorted; lists keep their order.
    order = {RESULT_MIME: {"order": _names(record)}}
    display({RESULT_MIME: record, "text/plain": text or "(an empty result record)"}, metadata=order, raw=True)


def recorded_result(output: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result record of a notebook's output with its names in the order recorded; None where it holds none."""
    record = output.get("data", {}).get(RESULT_MIME)
    if record is None:
        return None
    try:
        return _ordered(dict(record), output["metadata"][RESULT_MIME]["order"])
    except (KeyError, TypeError, ValueError):  # of another version, or edited by hand
        return dict(record)


def _names(record: Mapping[str, Any]) -> list[Any]:
    """[name, names of what it holds] of every name."""
    return [[name, _names(value) if isinstance(value, dict) else []] for name, value in record.items()]


def _ordered(record: dict[str, Any], names: list[Any]) -> dict[str, Any]:
    first = {name: inner for name, inner in names if name in record}
    values = {name: record[name] for name in [*first, *record]}
    return {n: _ordered(v, first.get(n, [])) if isinstance(v, dict) else v for n, v in values.items()}


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist(), where)
    if isinstance(value, pl.Series):
        return _plain(value.to_list(), where)
    raise WorkbenchError(f"result record: {where} must be a plain value, got {type(value).__name__}")
