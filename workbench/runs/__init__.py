"""Run folders: what a run leaves on disk, and the result record a notebook ends with."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from ..errors import WorkbenchError
from .folder import RunFolder, checkpoint_step, list_runs

__all__ = ["RESULT_MIME", "RunFolder", "checkpoint_step", "list_runs", "record_result"]

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
    display({RESULT_MIME: record, "text/plain": text or "(an empty result record)"}, raw=True)


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
