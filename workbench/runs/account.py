"""What became of a notebook's cells, and how a run that stopped early is told: where, why, how to go on."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError
from . import recorded_result
from .folder import RunFolder
from .text import first_line, one_line, without_controls

FRAMES = 3  # of a traceback, the innermost
_FRAME = re.compile(r"(?:Cell In\s?\[\d+\]|File |Input In )\S*.*?(?:line \d+|:\d+).*")
_ARROW = re.compile(r"-+>\s*\d+ ?(.*)")


def resume_command(run: RunFolder) -> str:
    """The command that goes on with a run, for the present working directory."""
    return f"workbench run --resume {shlex.quote(shown(run.path))}"


def shown(path: Path) -> str:
    """A path as short as it can be said from the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def cells(notebook: Any, broken: str, stopped: bool) -> list[dict[str, Any]]:
    """Status of each code cell, and its first line, or the one that raised. Where the kernel died, papermill marks
    cells it never reached as completed."""
    rows = []
    for number, cell in enumerate(_code(notebook), 1):
        facts = cell.metadata.get("papermill", {})
        status = facts.get("status", "pending") if facts.get("start_time") else "pending"
        status = broken if status in ("running", "failed") else status
        line = first_line(cell.source)
        rows.append({"cell": number, "status": status, "seconds": facts.get("duration"), "line": line})
    reached = [row for row in rows if row["status"] != "pending"]
    if stopped and reached and all(row["status"] == "completed" for row in reached):
        reached[-1]["status"] = broken
    if failed := stopped_cell(rows):
        failed["line"] = _raising(notebook, failed) or failed["line"]
    return rows


def _raising(notebook: Any, failed: Mapping[str, Any]) -> str:
    """The cell's own line in its traceback, which is the outermost; empty where there is none."""
    for output in _errors(notebook, failed):
        for line in without_controls("\n".join(output.get("traceback", []))).splitlines():
            if arrow := _ARROW.fullmatch(line.strip()):
                return one_line(arrow[1], 100)
    return ""


def stopped_cell(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first cell that did not complete."""
    return next((row for row in rows if row["status"] != "completed"), None)


def reason(notebook: Any, failed: Mapping[str, Any] | None, stopped: BaseException | None) -> str:
    """Why the cell failed, in one line."""
    for output in _errors(notebook, failed):
        hint = " (leaving early counts as a failure)" if output.ename == "SystemExit" else ""
        return one_line(f"{output.ename}: {output.evalue}" if output.evalue else output.ename) + hint
    if isinstance(stopped, WorkbenchError):
        return one_line(str(stopped))
    return one_line(f"{type(stopped).__name__}: {stopped}") if stopped else "the cell did not complete"


def frames(notebook: Any, failed: Mapping[str, Any] | None) -> list[str]:
    """The innermost frames of the failed cell's traceback, outermost first: where, and the line of code there."""
    for output in _errors(notebook, failed):
        found: list[str] = []
        for line in without_controls("\n".join(output.get("traceback", []))).splitlines():
            if place := _FRAME.fullmatch(line.strip()):
                found.append(one_line(place[0].split(", in ")[0], 120).rstrip(": "))
            elif found and (arrow := _ARROW.fullmatch(line.strip())):
                code = one_line(arrow[1], 100)
                found[-1] += f": {code}" if code and not found[-1].endswith(code) else ""
        return found[-FRAMES:]
    return []


def account(run: RunFolder, facts: Mapping[str, Any]) -> str:
    """Where a run stopped, why, its folder and the command that resumes it; facts: as in its manifest."""
    rows, status = facts.get("cells") or [], facts["status"]
    stopped = stopped_cell(rows)
    if stopped:
        where = f" in cell {stopped['cell']} of {len(rows)}: {stopped['line']}"
    else:
        where = " after its last cell" if rows else " before its first cell"
    lines = [f"run {status}{where}"]
    if status == "failed":
        lines += [f"  {facts.get('error')}", *(f"    at {frame}" for frame in facts.get("traceback") or [])]
    return "\n".join([*lines, f"  folder: {shown(run.path)}", f"  resume: {resume_command(run)}"])


def result(notebook: Any) -> dict[str, Any] | None:
    """The last result record among the outputs."""
    found = (recorded_result(output) for cell in _code(notebook) for output in cell.outputs)
    records = [record for record in found if record is not None]
    return records[-1] if records else None


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"] if notebook else []


def _errors(notebook: Any, failed: Mapping[str, Any] | None) -> list[Any]:
    outputs = _code(notebook)[failed["cell"] - 1].outputs if notebook and failed else []
    return [output for output in outputs if output.output_type == "error"]
