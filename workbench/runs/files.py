"""Whole-file writes: a temporary name, flushed to the disk, then renamed; the operating system's errors in one line."""

import contextlib
import errno
import json
import os
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import WorkbenchError

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied",
    errno.EROFS: "the file system is read-only",
}


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into a WorkbenchError that says in one line what could not be written and why."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno, error.strerror or str(error))
        raise WorkbenchError(f"{path} was not written: {reason}") from error


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new and never a part. Raises WorkbenchError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(draft, "wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(draft, path)
            sync_folder(path.parent)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def sync_folder(path: Path) -> None:
    """Make a rename in this folder outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people to read, atomically. Raises WorkbenchError, also on a value JSON cannot hold."""
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise WorkbenchError(f"{path.name}: {error}") from None
    atomic_write(path, (text + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises WorkbenchError where it is missing, torn or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WorkbenchError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise WorkbenchError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise WorkbenchError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises WorkbenchError where it is missing, torn or nested too deeply."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkbenchError(f"{path} cannot be read as TOML: {' '.join(str(error).split())}") from None
