"""Where the runs of a study are, and who is running which."""

import fcntl
import os
import tempfile
from pathlib import Path

from ..config import digest
from ..runs.execute import shown
from ..runs.files import atomic_write, told
from .mirror import Mirror, is_url
from .study import Study


class Place:
    """The folder `out`/`name`; or the folder in which what is known of runs at a URL is kept for one sweep."""

    def __init__(self, out: str | Path, name: str):
        self.mirror: Mirror | None = None
        if is_url(out):
            self._scratch = tempfile.TemporaryDirectory(prefix="workbench-")
            self.out, self.folder = str(out), Path(self._scratch.name) / name
            self.mirror = Mirror(self.out, name, self.folder)
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            self.claims = cache / "credit-workbench" / "claims" / digest({"url": self.mirror.url})
        else:
            self.out, self.folder = str(Path(out).resolve()), Path(out).resolve() / name
            self.claims = self.folder / ".claims"

    def __str__(self) -> str:
        return self.mirror.url if self.mirror else shown(self.folder)

    def refresh(self, digest: str = "") -> None:
        """Look again at what a URL holds, of one cell or of all. A folder is always seen as it is."""
        if self.mirror:
            self.mirror.headers(digest)

    def save(self, study: Study, accepted: bool = False) -> None:
        """Leave study.json beside the runs (accepted: as in Study.save). Raises WorkbenchError where it cannot be
        written."""
        if self.mirror:
            self.mirror.fetch("study.json")
        study.save(self.folder, accepted)
        if self.mirror:
            self.mirror.put("study.json")

    def probe(self) -> None:
        """Raise WorkbenchError where no more files can be written."""
        atomic_write(self.claims / "probe", bytes(1 << 16))


class Claims:
    """Who runs which cell: a locked file a cell, held by the sweep and by the process that runs it."""

    def __init__(self, folder: Path):
        self.folder = folder
        with told(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._held: dict[str, int] = {}

    def take(self, digest: str) -> int | None:
        """The file descriptor of the cell's claim, or None where another process has it."""
        if digest in self._held:
            return None
        with told(self.folder / digest):
            handle = os.open(self.folder / digest, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        self._held[digest] = handle
        return handle

    def drop(self, digest: str) -> None:
        """Let go. The lock itself goes when the process that runs the cell has gone too."""
        os.close(self._held.pop(digest))

    def __enter__(self) -> "Claims":
        return self

    def __exit__(self, *_: object) -> None:
        for held in list(self._held):
            self.drop(held)
