"""Notes on a run: append-only lines in its `notes.jsonl`, so that two people's files merge without conflict.

Each line holds one whole version of a note: an edit is a new version, a deletion a version marked as deleted. Of a
note's versions the last by (time, version id) is the current one, whatever the order of the lines; merging is the union
of lines. Ids are random, so files written apart never clash. A line that cannot be read costs that line alone and is
named in `NoteBook.warnings`.
"""

import contextlib
import fcntl
import getpass
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bleach
import mistune
import polars as pl

from . import links
from .errors import WorkbenchError, unknown
from .runs.files import told

FILE = "notes.jsonl"
LABELS = ("pivotal", "not pivotal", "wrong credit")
TEXT_LIMIT = 10_000  # characters of a note's text
TAG_LIMIT, TAGS_LIMIT, AUTHOR_LIMIT = 64, 32, 200  # characters of a tag, tags of a note, characters of an author's name

SCHEMA = {
    "id": pl.String,
    "run": pl.String,
    "step": pl.Int64,
    "episode": pl.Int64,
    "turn": pl.Int64,
    "start": pl.Int64,
    "end": pl.Int64,
    "author": pl.String,
    "time": pl.Datetime("us", "UTC"),
    "text": pl.String,
    "tags": pl.List(pl.String),
    "label": pl.String,
}

_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_END = "9999-12-31T23:59:59.999999Z"  # the last time that can be written
_ID = re.compile(r"[0-9a-f]{32}")
_EDITABLE = ("turn", "span", "text", "tags", "label", "author")


@dataclass(frozen=True)
class Note:
    """One note as it stands. turn None: on the whole episode; start and end: the turn's sampled tokens start to end - 1
    or None. time is when this version was written, UTC, `2025-03-01T10:15:00.000000Z`, which sorts as text."""

    id: str
    run: str
    step: int
    episode: int
    turn: int | None
    start: int | None
    end: int | None
    author: str
    time: str
    text: str
    tags: tuple[str, ...]
    label: str | None

    @property
    def link(self) -> str:
        """The deep link that opens at the note's place."""
        return str(links.Link(self.run, self.step, self.episode, self.turn, self.start, self.end))


@dataclass(frozen=True)
class Version:
    """One line of the file: a note as somebody wrote it, or its deletion."""

    note: Note
    version: str
    deleted: bool

    @property
    def order(self) -> tuple[str, ...]:
        """Versions of a note sort by time, then by id; the rest only orders lines that were tampered with."""
        return (self.note.time, self.version, self.line())

    def line(self) -> str:
        """The version as one line of ASCII JSON without its line end."""
        return json.dumps(asdict(self.note) | {"version": self.version, "deleted": self.deleted}, sort_keys=True)


class NoteBook:
    """The notes of one run folder; every call reads the file anew, so other writers are seen.

    Raises WorkbenchError where the folder is not there, and on a write that the disk refuses.
    """

    def __init__(self, run: str | Path):
        self.folder = Path(run).resolve()
        if not self.folder.is_dir():
            raise WorkbenchError(f"notes: {run} is no folder; the folder of a run is expected")
        self.path = self.folder / FILE
        self.warnings: list[str] = []  # of the last read: lines that were passed over and why

    def __repr__(self) -> str:
        return f"NoteBook({str(self.folder)!r})"

    def add(
        self,
        step: int,
        episode: int,
        turn: int | None = None,
        span: tuple[int, int] | None = None,
        text: str = "",
        tags: Sequence[str] = (),
        label: str | None = None,
        author: str | None = None,
    ) -> Note:
        """Write a new note and return it. span: (start, end) in the turn's sampled tokens; author: default the login's
        name. Raises WorkbenchError on a value out of range (see LABELS and the limits above), with nothing written."""
        start, end = _span(span)
        by, now = _login() if author is None else author, datetime.now(UTC).strftime(_TIME)
        tags = _tags(tags)
        note = Note(uuid.uuid4().hex, self.folder.name, step, episode, turn, start, end, by, now, text, tags, label)
        note = checked(note)
        with self._locked() as handle:
            _append(handle, [Version(note, uuid.uuid4().hex, False)], self.path)
        return note

    def edit(self, id: str, **changes: Any) -> Note:
        """Write a new version of a note: any of turn, span, text, tags, label, author. Returns the note as it stands.

        Raises WorkbenchError where there is no such note (any more), on an unknown name or a value out of range.
        """
        for name in changes:
            if name not in _EDITABLE:
                raise unknown("part of a note to edit", name, _EDITABLE)
        if "span" in changes:
            changes["start"], changes["end"] = _span(changes.pop("span"))
        if "tags" in changes:
            changes["tags"] = _tags(changes["tags"])
        return self._write(id, changes, deleted=False)

    def delete(self, id: str) -> None:
        """Write that a note is deleted; its lines stay in the file. Raises WorkbenchError where there is none."""
        self._write(id, {}, deleted=True)

    def notes(self) -> list[Note]:
        """The notes as they stand, in order of their place in the run."""
        return current(self._read())

    def frame(self) -> pl.DataFrame:
        """`notes()` as a frame of SCHEMA, one row a note."""
        rows = [asdict(n) | {"time": datetime.strptime(n.time, _TIME), "tags": list(n.tags)} for n in self.notes()]
        columns = {name: [row[name] for row in rows] for name in SCHEMA}
        naive = SCHEMA | {"time": pl.Datetime("us")}
        return pl.DataFrame(columns, schema=naive).with_columns(pl.col("time").dt.replace_time_zone("UTC"))

    def history(self, id: str) -> list[Note]:
        """Every version of a note, oldest first, whoever wrote it; deletions are left out."""
        found = sorted((v for v in self._read() if v.note.id == id and not v.deleted), key=lambda v: v.order)
        return [v.note for v in found]

    def merge(self, other: str | Path, renamed: bool = False) -> int:
        """Take in the lines of another notes file (or of another copy of the run folder); returns how many were new.

        Lines of a run with another folder name are refused, unless `renamed` says that it is a copy of this run under
        another name. Unreadable lines of either file are named in `warnings`. Raises WorkbenchError.
        """
        source = Path(other) / FILE if Path(other).is_dir() else Path(other)
        if not source.is_file():
            raise WorkbenchError(f"notes: {other} is no notes file and no run folder with one")
        theirs, unread = parse(_bytes(source), source)
        names = sorted({v.note.run for v in theirs} - {self.folder.name})
        if names and not renamed:
            raise WorkbenchError(
                f"notes: {source} is about run {names[0]!r} and this folder is {self.folder.name!r}; "
                "pass renamed=True if they are copies of one run"
            )
        with self._locked() as handle:
            mine, warnings = parse(_all(handle), self.path)
            new = sorted(set(theirs) - set(mine), key=lambda v: v.order)
            if new:
                _append(handle, new, self.path)
        self.warnings = warnings + unread
        return len(new)

    def _read(self) -> list[Version]:
        data = _bytes(self.path) if self.path.exists() else b""
        versions, self.warnings = parse(data, self.path)
        return versions

    def _write(self, id: str, changes: dict[str, Any], deleted: bool) -> Note:
        if not self.path.exists():
            raise WorkbenchError(f"no note {str(id)[:80]!r} in {self.path}")
        with self._locked() as handle:
            versions, self.warnings = parse(_all(handle), self.path)
            note = next((n for n in current(versions) if n.id == id), None)
            if note is None:
                raise WorkbenchError(f"no note {str(id)[:80]!r} in {self.path}")
            note = checked(replace(note, **changes, time=_after(note.time)))
            _append(handle, [Version(note, uuid.uuid4().hex, deleted)], self.path)
        return note

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The open file, made where it was missing, with its lock held; a link in its place is not followed."""
        with told(self.path):
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)


def parse(data: bytes, where: str | Path = FILE) -> tuple[list[Version], list[str]]:
    """The versions in a notes file's bytes, and one warning for each line that is none, naming line and reason.

    A last line without its line end that cannot be read is a write that was cut off.
    """
    versions, warnings = {}, []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            versions[_version(line)] = None
        except (ValueError, RecursionError) as error:
            torn = number == len(lines)
            reason = "its write was cut off" if torn else " ".join(str(error).split())[:160]
            warnings.append(f"{where}, line {number} was passed over: {reason}")
    return list(versions), warnings


def current(versions: Iterable[Version]) -> list[Note]:
    """The notes that the versions leave, whatever their order, sorted by place in the run (whole episodes first)."""
    last: dict[str, Version] = {}
    for version in versions:
        held = last.get(version.note.id)
        if held is None or version.order > held.order:
            last[version.note.id] = version
    alive = [v.note for v in last.values() if not v.deleted]
    return sorted(alive, key=lambda n: (n.step, n.episode, *(-1 if x is None else x for x in (n.turn, n.start)), n.id))


def checked(note: Note) -> Note:
    """The note with text that UTF-8 can hold. Raises WorkbenchError on a value out of range."""
    links.check_run(note.run)
    if note.step is None or note.episode is None:
        raise WorkbenchError("a note needs a step and an episode")
    links.check_place(note.step, note.episode, note.turn, note.start, note.end)
    if note.label is not None and note.label not in LABELS:
        raise unknown("label of a note", str(note.label)[:40], LABELS)
    for name, value, limit in (("text", note.text, TEXT_LIMIT), ("author", note.author, AUTHOR_LIMIT)):
        if not isinstance(value, str) or len(value) > limit:
            raise WorkbenchError(f"{name} of a note must be text of at most {limit} characters, got {_size(value)}")
    if len(note.tags) > TAGS_LIMIT:
        raise WorkbenchError(f"a note takes at most {TAGS_LIMIT} tags, got {len(note.tags)}")
    for tag in note.tags:
        if not isinstance(tag, str) or not 0 < len(tag) <= TAG_LIMIT:
            raise WorkbenchError(f"a tag must be text of 1 to {TAG_LIMIT} characters, got {_size(tag)}")
    tags = tuple(dict.fromkeys(map(_whole, note.tags)))
    return replace(note, text=_whole(note.text), author=_whole(note.author), tags=tags)


# Markdown

_TAGS = frozenset("p br hr em strong del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 a".split())
_REL = "nofollow noreferrer noopener"
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?([/?#][^\s\"'<>\\]*)?")
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class _Renderer(mistune.HTMLRenderer):
    """Links to the web alone, never an image or a title, raw HTML as the text it is."""

    def link(self, text: str, url: str, title: str | None = None) -> str:
        href = mistune.escape(url)
        return f'<a href="{href}" rel="{_REL}" target="_blank">{text}</a>' if _URL.fullmatch(url) else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return text


def _attribute(tag: str, name: str, value: str) -> bool:
    known = {"href": _URL.fullmatch(value), "rel": value == _REL, "target": value == "_blank"}
    return tag == "a" and bool(known.get(name))


_markdown = mistune.create_markdown(renderer=_Renderer(escape=True), plugins=["strikethrough"])


def sanitised(text: str) -> str:
    """A note's markdown as HTML that is safe to put into a page: paragraphs, emphasis, lists, quotes, headings, code
    and http(s) links (nofollow, noreferrer); no image, style, script or raw HTML. Control and direction marks show as
    U+FFFD.

    Raises WorkbenchError on text over TEXT_LIMIT characters.
    """
    if len(text) > TEXT_LIMIT:
        raise WorkbenchError(f"text of a note must be at most {TEXT_LIMIT} characters, got {len(text)}")
    plain = _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", _whole(text).replace("\r\n", "\n").replace("\r", "\n"))
    return bleach.clean(_markdown(plain), _TAGS, _attribute, protocols={"http", "https"})


# Lines and bytes


def _version(line: bytes) -> Version:
    row = json.loads(line.decode("utf-8"))
    names = {*SCHEMA, "version", "deleted"}
    if not isinstance(row, dict) or not names <= row.keys():
        raise WorkbenchError("a note's line is a JSON object with " + ", ".join(sorted(names)))
    ids = (row["id"], row["version"])
    if not all(isinstance(i, str) and _ID.fullmatch(i) for i in ids) or not isinstance(row["deleted"], bool):
        raise WorkbenchError("id and version must be 32 hexadecimal digits and deleted true or false")
    time = row["time"]
    if not isinstance(time, str) or datetime.strptime(time, _TIME).strftime(_TIME) != time:
        raise WorkbenchError(f"time must be like 2025-03-01T10:15:00.000000Z, got {_size(time)}")
    if time >= _END:
        raise WorkbenchError(f"time must be before {_END}, after which no version can be written")
    if not isinstance(row["tags"], list):
        raise WorkbenchError("tags must be a list")
    note = Note(**{name: row[name] for name in SCHEMA} | {"tags": tuple(row["tags"])})
    return Version(checked(note), row["version"], row["deleted"])


def _append(handle: int, versions: Sequence[Version], path: Path) -> None:
    """One write at the file's end, flushed to the disk; a write the disk cut off is taken back."""
    size = os.fstat(handle).st_size
    # a line that was cut off must not swallow the next one
    data = b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""
    data += "".join(v.line() + "\n" for v in versions).encode("ascii")
    with told(path):
        try:
            if os.write(handle, data) != len(data):
                raise OSError("the disk took only a part")
            os.fsync(handle)
        except OSError:
            os.ftruncate(handle, size)
            raise


def _all(handle: int) -> bytes:
    return os.pread(handle, os.fstat(handle).st_size, 0)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkbenchError(f"{path} cannot be read: {error.strerror or error}") from None


def _after(time: str) -> str:
    """Now, or just after `time` where the clock is behind it, so that a write wins; raises where there is none."""
    soonest = datetime.strptime(time, _TIME).replace(tzinfo=UTC) + timedelta(microseconds=1)
    after = max(datetime.now(UTC), soonest).strftime(_TIME)
    if after >= _END:
        raise WorkbenchError(f"the note is of {time}, and no later version of it can be written")
    return after


def _span(span: tuple[int, int] | None) -> tuple[int | None, int | None]:
    if span is None:
        return None, None
    if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2 or None in span:
        raise WorkbenchError(f"span must be two whole numbers (start, end), got {str(span)[:40]!r}")
    return span[0], span[1]


def _tags(tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str):
        raise WorkbenchError(f"tags must be several texts, got the one text {tags[:40]!r}")
    return tuple(tags)


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def _whole(text: str) -> str:
    """Text without lone surrogates, which no UTF-8 file can hold."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _size(value: Any) -> str:
    return f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
