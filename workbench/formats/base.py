"""What every reader yields, and the checks on what a file holds that all readers share.

A reader is a module of this package with `NAME`, `DESCRIPTION`, `LACKS`, `sniff(path, head)` and `read(path)`. It
yields episodes one by one and holds no more than one of them (or one group), keeps what the source wrote, right or
wrong in length or value, and leaves judgement to workbench/audit.py; it raises WorkbenchError only for what it cannot
read: a torn record, a value of another type, a number that is not finite. Nothing is ever tokenised here.
"""

import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from ..errors import WorkbenchError

HEAD_BYTES = 1 << 16
MAX_RECORD = 1 << 28  # bytes of one line or one member of an archive; a longer one is no record
MAX_RATIO = 200  # of an archive member's size to its compressed size; JSON of tokens reaches about 30
MAX_ARCHIVE = 1 << 36  # bytes of all members of an archive
MAX_INTEGER = 2**63 - 1  # of a table's columns
_RATIO_FLOOR = 1 << 20  # members that are below this size together may compress as well as they like
_REQUIRED: Any = object()


@dataclass(frozen=True, eq=False)
class SourceTurn:
    """One action of the policy as the source holds it; None: the source does not say.

    response: the policy's text; observation: the environment's or user's text that it answers.
    token_ids (L,) int32: the sampled tokens, environment tokens taken out by the source's own mask; context_ids (P,)
    int32: every token in context when the response began. logprobs (L,) float32, nats: of the sampled tokens under the
    behaviour policy; teacher_logprobs, trainer_logprobs, reference_logprobs (L,): of the same tokens under the
    privileged teacher, the trainer's own forward pass and the KL reference; advantages (L,): what was trained on.
    mask: the source's own trainable mask (int8) over its raw response tokens, kept for audits.
    turn: the number written in the source. Lengths are those of the source and may disagree.
    info: what else the source says; "pieces" (L strings: a list or a polars Series) are the tokens' texts if there.
    """

    response: str
    observation: str = ""
    action: str | None = None
    token_ids: np.ndarray | None = None
    context_ids: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    trainer_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    mask: np.ndarray | None = None
    reward: float | None = None
    valid: bool | None = None
    truncated: bool | None = None
    turn: int | None = None
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SourceEpisode:
    """One rollout as the source holds it; None or "": the source does not say.

    step: the training step, 0 where there is none; episode, group: ids in the source, as text; episodes of one group
    are compared with each other. advantage: one number for the whole rollout. fidelity: "token" when ids and log-probs
    are the sampled ones, "text" when only text was recorded. where: "folder/file.jsonl:17", for errors and links.
    """

    turns: tuple[SourceTurn, ...]
    step: int = 0
    episode: str = ""
    group: str = ""
    task: str = ""
    reward: float | None = None
    success: bool | None = None
    advantage: float | None = None
    stop_reason: str = ""
    fidelity: Literal["token", "text"] = "text"
    where: str = ""
    info: dict[str, Any] = field(default_factory=dict)


# Where a record is, and the checks on its values; `where` is the first word of every message.


def place(path: Path, line: int | str) -> str:
    """`folder/file:line`, short enough for a message and enough to find the record."""
    return f"{Path(*path.parts[-2:]) if path.parent.name else path.name}:{line}"


def is_record(value: Any, *names: str) -> bool:
    """Whether a parsed value is an object that has all these names."""
    return isinstance(value, dict) and all(name in value for name in names)


def first_record(head: bytes) -> Any:
    """The first line of a file's head as JSON; None where it is none, {"a": None, …} where the line goes on beyond it.

    Of a line longer than the head, the names at its top level seen so far are given, without their values.
    """
    line, ended, _ = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None if ended or len(head) < HEAD_BYTES else dict.fromkeys(_top_names(line))


def jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line that is not blank. Raises WorkbenchError naming the line that is torn."""
    file = place(path, "")
    for number, _, line in lines(path):
        where = f"{file}{number}"
        yield where, parse_object(line, where)


def lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset in bytes, line) of every line that is not blank, one in memory at a time."""
    try:
        with open(path, "rb", buffering=1 << 20) as handle:
            number = offset = 0
            while line := handle.readline(MAX_RECORD + 1):
                number, start, offset = number + 1, offset, offset + len(line)
                if len(line) > MAX_RECORD:
                    size = f"{MAX_RECORD >> 20} MiB"
                    raise WorkbenchError(f"{place(path, number)}: a line over {size}, expected one record")
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    line, start = line[3:], 3
                if line and not line.isspace():
                    yield number, start, line
    except OSError as error:
        raise WorkbenchError(f"{path}: cannot be read ({error.strerror})") from None


def parse_object(text: bytes | str, where: str) -> dict[str, Any]:
    """One JSON object. NaN and Infinity pass here and are refused where a number is taken. Raises WorkbenchError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"torn or not JSON ({_reason(error)})"
        raise WorkbenchError(f"{where}: {what}, expected one JSON object") from None
    if not isinstance(value, dict):
        raise WorkbenchError(f"{where}: {kind_of(value)}, expected a JSON object")
    return value


def text(record: dict[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    """A string of the record; `default` where it is absent or null."""
    value = record.get(name)
    if isinstance(value, str):
        return value
    return _absent_or_wrong(value, name, where, "a string", default)


def number(record: dict[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    """A finite number of the record as float; true and false are no numbers."""
    value = record.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return finite(value, name, where)
    return _absent_or_wrong(value, name, where, "a number", default)


def integer(record: dict[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    """A whole number of the record, one that int64 holds; 3.0 is one."""
    value = record.get(name)
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        return _absent_or_wrong(value, name, where, "a whole number", default)
    if not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise WorkbenchError(f"{where}: {name} is beyond 64 bits, expected -2^63 to 2^63-1")
    return int(value)


def boolean(record: dict[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    """true or false of the record; 1, 0, 1.0 and 0.0 are taken for them, as tensors write them."""
    value = record.get(name)
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    return _absent_or_wrong(value, name, where, "true or false", default)


def items(record: dict[str, Any], name: str, where: str, default: Any = _REQUIRED) -> Any:
    """A list of the record."""
    value = record.get(name)
    if isinstance(value, list):
        return value
    return _absent_or_wrong(value, name, where, "a list", default)


def finite(value: float, name: str, where: str) -> float:
    """The number as float. Raises WorkbenchError where it is NaN, infinite or beyond a float."""
    try:
        value = float(value)
    except OverflowError:
        value = np.inf
    if not np.isfinite(value):
        raise WorkbenchError(f"{where}: {name} is {value}, expected a finite number")
    return value


def ids(values: Sequence[int] | np.ndarray, name: str, where: str) -> np.ndarray:
    """(L,) int32 token ids. Raises WorkbenchError where a value is no whole number of 0 .. 2^31-1."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1 and values.min(initial=0) >= 0:
        return values
    out = _array(values, name, where, "token ids")
    if out.size and (out.dtype.kind not in "iu" or out.min() < 0 or out.max() >= 2**31):
        wrong = next((v for v in values if isinstance(v, bool) or not 0 <= v < 2**31 or v != int(v)), out.dtype)
        raise WorkbenchError(f"{where}: {name} holds {wrong}, expected token ids, whole numbers of at least 0")
    return out.astype(np.int32, copy=False)


def floats(values: Sequence[float] | np.ndarray, name: str, where: str) -> np.ndarray:
    """(L,) float32. Raises WorkbenchError where a value is no finite number, naming the first such token."""
    out = _array(values, name, where, "numbers")
    if out.size and out.dtype.kind not in "iuf":
        raise WorkbenchError(f"{where}: {name} holds true or false, expected numbers")
    with np.errstate(over="ignore"):
        out = out.astype(np.float32, copy=False)
    if not np.isfinite(out).all():
        at = int(np.argmin(np.isfinite(out)))
        raise WorkbenchError(f"{where}: {name} is {out[at]} at token {at}, expected finite numbers")
    return out


def mask(values: Sequence[int] | np.ndarray, name: str, where: str) -> np.ndarray:
    """(L,) int8 of 0 and 1, which may be written as numbers or as true and false. Raises WorkbenchError else."""
    out = _array(values, name, where, "0 and 1")
    if out.size and (out.dtype.kind not in "iufb" or not np.isin(out, (0, 1)).all()):
        raise WorkbenchError(f"{where}: {name} holds something else than 0 and 1")
    return out.astype(np.int8)


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


# Archives


def open_zip(path: Path) -> zipfile.ZipFile:
    """A zip archive whose sizes are those of data. Raises WorkbenchError for a torn one and for one made to explode."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise WorkbenchError(f"{path.name}: no whole zip archive ({error})") from None
    total = packed = 0
    for member in archive.infolist():
        total, packed = total + member.file_size, packed + member.compress_size
        if member.flag_bits & 1:
            archive.close()
            raise WorkbenchError(f"{path.name}: {member.filename} is encrypted, expected a plain member")
        if member.file_size > max(_RATIO_FLOOR, MAX_RATIO * member.compress_size) or total > MAX_ARCHIVE:
            archive.close()
            raise WorkbenchError(
                f"{path.name}: {member.filename} would unpack from {member.compress_size} to {member.file_size} bytes "
                f"({total} in all so far), expected at most {MAX_RATIO} times as much and {MAX_ARCHIVE} in all"
            )
    if total > max(_RATIO_FLOOR, MAX_RATIO * packed):
        archive.close()
        raise WorkbenchError(
            f"{path.name}: its members would unpack from {packed} to {total} bytes, expected at most {MAX_RATIO} times "
            "as much"
        )
    return archive


def open_member(archive: zipfile.ZipFile, name: str, where: str) -> IO[bytes]:
    """One member as a stream; zipfile itself stops at the size that `open_zip` checked. Raises WorkbenchError."""
    try:
        return archive.open(name)
    except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        raise WorkbenchError(f"{where}: {name} cannot be unpacked ({error})") from None


def read_member(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    """One member as bytes, at most MAX_RECORD of them. Raises WorkbenchError."""
    with open_member(archive, name, where) as handle:
        try:
            data = handle.read(MAX_RECORD + 1)
        except (zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise WorkbenchError(f"{where}: {name} is torn ({error})") from None
    if len(data) > MAX_RECORD:
        raise WorkbenchError(f"{where}: {name} is over {MAX_RECORD >> 20} MiB, expected one record")
    return data


def _absent_or_wrong(value: Any, name: str, where: str, expected: str, default: Any) -> Any:
    if value is not None:
        raise WorkbenchError(f"{where}: {name} is {kind_of(value)}, expected {expected}")
    if default is _REQUIRED:
        raise WorkbenchError(f"{where}: {name} is missing, expected {expected}")
    return default


def _array(values: Any, name: str, where: str, expected: str) -> np.ndarray:
    if not isinstance(values, list | tuple | np.ndarray):
        raise WorkbenchError(f"{where}: {name} is {kind_of(values)}, expected a list of {expected}")
    try:
        out = np.asarray(values)
    except (ValueError, OverflowError):
        out = np.empty((), object)
    if out.ndim != 1 or (out.size and out.dtype.kind not in "iufb"):
        wrong = next((v for v in values if v is None or isinstance(v, str | list | dict)), None)
        raise WorkbenchError(f"{where}: {name} holds {kind_of(wrong)}, expected a list of {expected}")
    return out


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, json.JSONDecodeError) else "not UTF-8"


def _top_names(line: bytes) -> list[str]:
    """Names at the top level of a JSON object whose end is not seen."""
    names, depth, at = [], 0, 0
    while at < len(line):
        mark = line[at : at + 1]
        if mark == b'"':
            end = at + 1
            while end < len(line) and line[end : end + 1] != b'"':
                end += 2 if line[end : end + 1] == b"\\" else 1
            if depth == 1 and line[end + 1 :].lstrip()[:1] == b":":
                names.append(line[at + 1 : end].decode("utf-8", "replace"))
            at = end
        depth += (mark in (b"{", b"[")) - (mark in (b"}", b"]"))
        at += 1
    return names
