"""What is about to be executed: a new run from its parameters, or an interrupted one from what its folder holds.

The notebook is read once and kept in the run folder, and what is executed is that copy: a file that is edited while the
run goes on changes nothing. A resumed run whose notebook has been edited since is refused until it is said which of
the two to execute, and its attempts record the hash of what each of them executed.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import shipped
from ..config import digest
from ..errors import WorkbenchError, printable, unknown
from . import manifest
from .account import shown
from .files import atomic_write
from .folder import RunFolder
from .parameters import RUN_DIR, Parameter, declared, resolve

CHANGED = ("refuse", "ignore", "use")


@dataclass(frozen=True)
class Plan:
    """A notebook as it was read, and every parameter it will be given, `run_dir` apart."""

    source: Path
    content: bytes
    names: dict[str, Parameter]
    values: dict[str, Any]
    given: frozenset[str]

    @property
    def experiment(self) -> str:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.stem).strip("-._")
        return self.values.get("experiment") or stem or "notebook"

    @property
    def sha256(self) -> str:
        return _sha256(self.content)

    def begin(self, out: str | Path, experiment: str | None = None) -> RunFolder:
        """Make the run folder, with the notebook's copy and a manifest of what is known before a run starts.

        experiment: the folder under `out`, where not the one of the property.
        """
        experiment = experiment or self.experiment
        facts = {
            "notebook": self.source.stem, "notebook_path": str(self.source), "notebook_sha256": self.sha256,
            "parameters": self.values, "seeds": manifest.seeds(self.values), "cwd": str(Path.cwd()),
            "command": shlex.join(["workbench", *sys.argv[1:]]) if Path(sys.argv[0]).name == "workbench" else None,
            "git": manifest.code_state(self.source),
            "versions": manifest.versions(), "device": None, "host": os.uname().nodename, "machine": manifest.machine(),
            "attempts": [], "cells": [], "error": None, "traceback": [], "result": None, "artifacts": [],
        }  # fmt: skip
        run = RunFolder.create(out, experiment, self.values)
        try:
            atomic_write(run.path / "notebook.ipynb", self.content)
            run.update_manifest(**facts)
        except BaseException:
            shutil.rmtree(run.path, ignore_errors=True)
            raise
        started, now = datetime.fromisoformat(run.manifest["started"]), datetime.now(UTC)
        if started > now:
            print(
                f"note: the clock says {now:%Y-%m-%d %H:%M:%S} UTC, which is before the newest run of "
                f"{experiment}; this one is stamped {started:%Y-%m-%d %H:%M:%S}, right after it",
                file=sys.stderr,
            )
        return run

    def lines(self, out: str | Path) -> list[str]:
        """What would run, a parameter a line with its type, its value and whether it was given or is the default."""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{digest(self.values)}"
        folder = Path(out).resolve() / self.experiment / name
        lines = [f"notebook    {shown(self.source)}", f"run folder  {shown(folder)}"]
        return [*map(printable, lines), *parameter_lines(self.names, self.values, self.given)]


@dataclass(frozen=True)
class Resumption:
    """What goes on in a run folder: the notebook to execute, its parameters, where, and what is worth telling."""

    notebook: Path  # in the run folder, made by `keep` where it is not there; the original where a run kept no copy
    content: bytes
    names: dict[str, Parameter]
    values: dict[str, Any]
    cwd: Path
    versions: dict[str, Any]  # package -> version, of those that differ from the run's beginning
    git: dict[str, Any] | None  # of the code, where it differs from the run's beginning
    notes: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return _sha256(self.content)

    def keep(self) -> None:
        """Write the notebook into the run folder where it is not there already."""
        if not self.notebook.is_file():
            atomic_write(self.notebook, self.content)


def plan(notebook: str | Path | None, parameters: Mapping[str, Any] | None = None) -> Plan:
    """A new run of a notebook, by path or shipped name. Raises WorkbenchError on what could not run; makes nothing."""
    if notebook is None:
        raise WorkbenchError("which notebook? give a path or the name of a shipped one")
    source = shipped.notebook(notebook)
    content = _read(source)
    names = declared(_parsed(content, source), source.name)
    values = resolve(names, parameters or {}, source.name)
    if source == shipped.notebook("train"):
        from ..settings import check_folders, from_parameters

        check_folders(from_parameters(values))  # what would fail in its second cell is refused before there is a folder
    return Plan(source, content, names, values, frozenset(parameters or {}))


def resumption(
    run: RunFolder, notebook: str | Path | None, parameters: Mapping[str, Any] | None, changed: str
) -> Resumption:
    """How a run goes on.

    changed: what to do where the notebook's file is no longer what the run last executed: "refuse", "ignore" (execute
    the copy in the run folder) or "use" (execute the file, and record that). Raises WorkbenchError where the
    run is complete, was not made by the runner, or is asked to go on with another notebook or other parameters.
    """
    if changed not in CHANGED:
        raise unknown("choice for a changed notebook", changed, CHANGED)
    if run.is_complete:
        raise WorkbenchError(f"{run.path} is complete; there is nothing to resume; without --resume a new run starts")
    stored, notes = run.manifest, []
    if "notebook_path" not in stored:
        raise WorkbenchError(f"{run.path} was not made by the runner, so it does not say which notebook to execute")
    attempts = stored.get("attempts") or []
    before = attempts[-1].get("notebook_sha256", stored["notebook_sha256"]) if attempts else stored["notebook_sha256"]
    copy = next((p for p in _copies(run) if manifest.sha256(p) == before), None)
    if notebook is None and copy and not Path(stored["notebook_path"]).is_file():
        notes.append(f"{stored['notebook_path']} is gone; the run goes on with its copy")
        source = copy
    else:
        source = shipped.notebook(notebook or stored["notebook_path"])
        if source.stem != stored["notebook"]:
            raise WorkbenchError(f"{run.path} is a run of {stored['notebook']!r}, not of {source.stem!r}")
    content = _read(source)
    if _sha256(content) == before:
        path = copy or source
    elif changed == "refuse":
        raise WorkbenchError(
            f"{source} has changed since this run began: --changed-notebook ignore goes on with the notebook as it "
            "was, --changed-notebook use with the one there is now"
        )
    elif changed == "use":
        path = run.path / f"notebook.{len(attempts) + 1}.ipynb"
        notes.append(f"{source} has changed since this run began; the run goes on with it as it is now")
    elif copy is None:
        raise WorkbenchError(f"{run.path} kept no copy of its notebook, and {source} has changed since the run began")
    else:
        notes.append(f"{source} has changed since this run began; the run goes on with the notebook as it was")
        path, content = copy, _read(copy)
    where = f"{stored['notebook']}.ipynb"
    names = declared(_parsed(content, source), where)
    values = resolve(names, run.config, where)
    for name, value in resolve(names, parameters or {}, where).items():
        if name in (parameters or {}) and value != values[name]:
            raise WorkbenchError(f"a resumed run keeps its parameters: {name} is {values[name]!r}, got {value!r}")
    begun = stored.get("versions") or {}
    versions = {name: version for name, version in manifest.versions().items() if version != begun.get(name, version)}
    if versions:
        told = ", ".join(f"{name} {begun[name]} to {version}" for name, version in versions.items())
        notes.append(f"versions have changed since this run began: {told}")
    git, was = manifest.code_state(source), stored.get("git")
    if git and was and git["commit"] != was["commit"]:
        notes.append(f"the code is at {git['commit'][:10]} and was at {was['commit'][:10]} when this run began")
    git = None if git == was else git
    cwd = Path(stored["cwd"])
    return Resumption(path, content, names, values, cwd if cwd.is_dir() else Path.cwd(), versions, git, tuple(notes))


def injected(names: Mapping[str, Parameter], values: Mapping[str, Any], run: RunFolder) -> dict[str, Any]:
    """The values that the executed notebook is given: those that are not its defaults, and `run_dir`."""
    chosen = {n: v for n, v in values.items() if v != names[n].default or type(v) is not type(names[n].default)}
    return chosen | ({RUN_DIR: str(run.path)} if RUN_DIR in names else {})


def parameter_lines(names: Mapping[str, Parameter], values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """A line a parameter: name, type, whether it is given or the default, and its value."""
    rows = [
        (name, type_name(names[name].kind), "given" if name in given else "default", repr(value))
        for name, value in values.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = ["  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]) for row in rows]
    return [printable(f"  {line}") for line in lines] or ["  (the notebook declares no parameters)"]


def type_name(kind: Any) -> str:
    """A declared type as its annotation says it."""
    if kind is Any or typing.get_origin(kind) or not isinstance(kind, type):
        return str(kind).replace("typing.", "")
    return kind.__name__


def _copies(run: RunFolder) -> list[Path]:
    """Notebooks as attempts of the run were given them."""
    return sorted(path for path in run.path.glob("notebook*.ipynb") if re.fullmatch(r"notebook(\.\d+)?", path.stem))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkbenchError(f"{path} cannot be read: {error.strerror}") from None


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        notebook = json.loads(content)
    except ValueError as error:
        raise WorkbenchError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(notebook, dict) or notebook.get("nbformat") != 4 or not isinstance(notebook.get("cells"), list):
        raise WorkbenchError(f"{path} is not a notebook of format 4")
    return notebook
