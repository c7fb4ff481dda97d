"""A study whose runs are kept at an fsspec URL (s3://, gs://, file://, …): worked on in a local folder, mirrored there.

Only whole files travel. Of a run the manifest goes after everything else and COMPLETE last, of a checkpoint the mark
that makes it one; so a run that is cut off at any moment is, at the URL too, a run that can be resumed.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import WorkbenchError
from ..runs import RunFolder

POLL = 1.0  # seconds between looks for a new checkpoint
_HEADERS = ("config.json", "manifest.json", "executed.ipynb", "COMPLETE")
_LAST = ("checkpoint.json", "manifest.json", "COMPLETE")


def is_url(out: str | Path) -> bool:
    return "://" in str(out)


class Mirror:
    """The runs of one study at `url`/`study`, with what is needed of them in `folder`."""

    def __init__(self, url: str, study: str, folder: Path):
        import fsspec

        self.url, self.folder = f"{url.rstrip('/')}/{study}", folder
        folder.mkdir(parents=True, exist_ok=True)
        with self._told():
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        self._sent: dict[str, tuple[int, int]] = {}  # by path in the study: size and time of what lies at the URL

    def headers(self, digest: str = "") -> None:
        """Fetch what tells the runs' states: of all, or of those with this digest."""
        with self._told():
            self._files.invalidate_cache()
            if not self._files.isdir(self._root):
                return
            for path in self._files.ls(self._root, detail=False):
                run = PurePosixPath(path.rstrip("/")).name
                if "-" not in run or run.startswith(".") or (digest and run.split("-")[1] != digest):
                    continue
                held = {PurePosixPath(name).name for name in self._files.ls(path, detail=False)}
                for name in held.intersection(_HEADERS):
                    if name == "manifest.json" or not (self.folder / run / name).is_file():
                        self._get(f"{run}/{name}")

    def pull(self, run: str) -> None:
        """Fetch a run whole, to go on with it."""
        with self._told():
            for path in self._files.find(f"{self._root}/{run}"):
                if PurePosixPath(path).name.startswith("."):
                    continue
                self._get(str(PurePosixPath(path).relative_to(self._root)))

    def push(self, run: RunFolder) -> None:
        """Bring the URL up to what the run's folder holds now, files that were dropped included."""
        base = run.path.relative_to(self.folder).as_posix()
        for name in sorted(_whole_files(run.path), key=_when):
            try:
                self.put(f"{base}/{name}")
            except (FileNotFoundError, WorkbenchError):
                if (run.path / name).exists():  # and is no checkpoint that has just been replaced
                    raise
        with self._told():
            self._files.invalidate_cache()
            for path in self._files.find(f"{self._root}/{base}"):
                name = str(PurePosixPath(path).relative_to(self._root))
                if not (self.folder / name).exists() and not PurePosixPath(name).name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        self._files.rm_file(path)
                    self._sent.pop(name, None)

    def put(self, name: str) -> None:
        """Send one file of the study's folder, if it is not there as it is now."""
        stat = (self.folder / name).stat()
        mark = (stat.st_size, stat.st_mtime_ns)
        if self._sent.get(name) == mark:
            return
        folder, _, last = f"{self._root}/{name}".rpartition("/")
        with self._told():
            self._files.makedirs(folder, exist_ok=True)
            if last == "manifest.json":  # written again and again: a killed copy must not leave half of one
                self._files.put_file(str(self.folder / name), f"{folder}/.{last}")
                self._files.mv(f"{folder}/.{last}", f"{folder}/{last}")
            else:
                self._files.put_file(str(self.folder / name), f"{folder}/{last}")
        self._sent[name] = mark

    def fetch(self, name: str) -> None:
        """Fetch one file of the study, where the URL holds it."""
        with self._told():
            if self._files.isfile(f"{self._root}/{name}"):
                self._get(name)

    @contextlib.contextmanager
    def following(self, run: RunFolder) -> Iterator[None]:
        """Push the run now, after each checkpoint while the context lasts, and at its end."""
        done = threading.Event()

        def follow() -> None:
            seen: Any = run.path
            while True:
                newest = run.latest_checkpoint()
                if newest != seen:
                    seen = newest
                    with contextlib.suppress(WorkbenchError):  # the last push tells
                        self.push(run)
                if done.wait(POLL):
                    return

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.push(run)

    def _get(self, name: str) -> None:
        if ".." in PurePosixPath(name).parts:  # a store may hold any name
            raise WorkbenchError(f"{self.url} holds {name!r}, which leads out of it")
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        self._files.get_file(f"{self._root}/{name}", str(draft))
        draft.replace(target)
        stat = target.stat()
        self._sent[name] = (stat.st_size, stat.st_mtime_ns)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Each file system has errors of its own; all of them in one line."""
        try:
            yield
        except WorkbenchError:
            raise
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise WorkbenchError(f"{self.url} cannot be used: {why}") from error


def _whole_files(folder: Path) -> list[str]:
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [n.as_posix() for n in names if n.name != "LOCK" and not any(part.startswith(".") for part in n.parts)]


def _when(name: str) -> tuple[int, str]:
    """Tables before checkpoints, a checkpoint's mark after its files, then the manifest, then COMPLETE."""
    path = PurePosixPath(name)
    if path.name in _LAST[1:] and len(path.parts) == 1:
        return 2 + _LAST.index(path.name), name
    if path.parts[0] == "checkpoints":
        return (2 if path.name == _LAST[0] else 1), name
    return 0, name
