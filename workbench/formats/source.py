"""A file or folder that somebody brings: the format it is in, which files hold rollouts, what was passed over."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..errors import WorkbenchError
from .base import HEAD_BYTES, SourceEpisode

_PICKLE = (
    "a pickle can run any code when it is loaded, so it is never opened here; load it where it was written and save "
    "its rows as JSON lines"
)
_SHOWN = 3  # files named in a message


@dataclass(frozen=True)
class Source:
    """What was found at a path. format: its name; files: those with rollouts, in the order of the numbers in their
    names; notes: a sentence for each thing passed over; lacks: signals that the format never holds."""

    path: Path
    format: str
    description: str
    files: tuple[Path, ...]
    notes: tuple[str, ...]
    lacks: tuple[str, ...]
    reader: ModuleType

    def episodes(self) -> Iterator[SourceEpisode]:
        """Every episode of every file, one by one. Raises WorkbenchError naming the record it cannot read."""
        for file in self.files:
            yield from self.reader.read(file)


def open_source(path: str | Path, formats: Mapping[str, ModuleType]) -> Source:
    """Look at the heads of the files at `path` and say what they are.

    Raises WorkbenchError where there is nothing, no format fits, several do, a file is a pickle, or a link in the
    folder leads out of it.
    """
    path = expanded(path)
    if not path.exists():
        raise WorkbenchError(f"{path}: no such file or folder")
    if path.is_dir():
        return _folder(path, formats)
    if not path.is_file():
        raise WorkbenchError(f"{path}: neither a file nor a folder")
    found, why = _sniff(path, formats)
    if found is None:
        raise WorkbenchError(f"{path}: {why}; {_known(formats)}")
    return _source(path, formats[found], [path], [])


def expanded(path: str | Path) -> Path:
    """The path with ~ as a home. Raises WorkbenchError where the system cannot look at it, as at a name too long."""
    try:
        found = Path(path).expanduser()
        found.exists()
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise WorkbenchError(f"{path}: cannot be looked at ({why})") from None
    return found


def _folder(path: Path, formats: Mapping[str, ModuleType]) -> Source:
    if (path / "config.json").is_file() and (path / "tables").is_dir():
        raise WorkbenchError(f"{path} is a run folder of this workbench already; nothing is to be imported")
    found: dict[str, list[Path]] = {}
    passed: dict[str, list[Path]] = {}
    for file in _walk(path):
        name, why = (None, "a link that leads to nothing") if file.is_symlink() else _sniff(file, formats)
        (found.setdefault(name, []) if name else passed.setdefault(why, [])).append(file)
    if len(found) > 1:
        parts = [f"{name} ({_names(files, path)})" for name, files in found.items()]
        raise WorkbenchError(f"{path} holds several formats: {' and '.join(parts)}; import one file or folder of each")
    notes = [f"passed over {_names(files, path)}: {why}" for why, files in passed.items()]
    if not found:
        what = "; ".join(notes).removeprefix("passed over ") or "no files"
        raise WorkbenchError(f"{path}: nothing to import ({what}); {_known(formats)}")
    name, files = found.popitem()
    return _source(path, formats[name], files, notes)


def _source(path: Path, reader: ModuleType, files: Sequence[Path], notes: Sequence[str]) -> Source:
    return Source(path, reader.NAME, reader.DESCRIPTION, tuple(files), tuple(notes), tuple(reader.LACKS), reader)


def _walk(root: Path) -> Iterator[Path]:
    """Files below a folder, by the numbers in their names, and links that lead to nothing.

    Hidden ones and links to what is inside are passed over.
    """
    top = root.resolve()

    def stop(error: OSError) -> None:
        raise WorkbenchError(f"{error.filename}: cannot be read ({error.strerror})")

    for folder, folders, names in os.walk(root, onerror=stop):
        links = [Path(folder, name) for name in (*folders, *names) if Path(folder, name).is_symlink()]
        dangling = [link for link in links if not os.path.exists(link)]  # one that leads to itself, too
        for link in links:
            if link not in dangling and not link.resolve().is_relative_to(top):
                raise WorkbenchError(
                    f"{link} is a link that leads out of the folder; import what it leads to by its path"
                )
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=_natural)
        for name in sorted(names, key=_natural):
            file = Path(folder, name)
            if not name.startswith(".") and (file in dangling or (file not in links and file.is_file())):
                yield file


def _sniff(path: Path, formats: Mapping[str, ModuleType]) -> tuple[str | None, str]:
    """The name of the format, or None and why there is none."""
    try:
        with open(path, "rb") as handle:
            head = handle.read(HEAD_BYTES).lstrip()
            while len(head) < HEAD_BYTES and (more := handle.read(HEAD_BYTES - len(head))):
                head = (head + more).lstrip()
    except OSError as error:
        raise WorkbenchError(f"{path}: cannot be read ({error.strerror})") from None
    if not head:
        return None, "the file is empty"
    for name, module in formats.items():
        if module.sniff(path, head):
            return name, ""
    if path.suffix in (".pkl", ".pickle") or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05"):
        return None, _PICKLE
    return None, "no format fits"


def _names(files: Sequence[Path], root: Path) -> str:
    shown = ", ".join(str(file.relative_to(root)) for file in files[:_SHOWN])
    return f"{shown} and {len(files) - _SHOWN} more" if len(files) > _SHOWN else shown


def _known(formats: Mapping[str, ModuleType]) -> str:
    return f"formats that are read: {', '.join(formats)}"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() and part.isascii() else (-1, part) for part in re.split(r"(\d+)", name)]
