"""Notes: nothing written is lost, files merge in any order, and hostile text stays text."""

import errno
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import notes
from workbench.errors import WorkbenchError
from workbench.links import parse as parse_link
from workbench.notes import LABELS, TEXT_LIMIT, Note, NoteBook, Version, current, sanitised


@pytest.fixture
def book(tmp_path):
    folder = tmp_path / "run-1"
    folder.mkdir()
    return NoteBook(folder)


def test_a_note_is_added_edited_and_deleted_by_lines_alone(book):
    first = book.add(10, 3, 5, (2, 7), "*why*", ["odd", "odd", "turn"], "pivotal", "ada")
    whole = book.add(10, 3, text="the episode", author="ben")
    assert book.notes() == [whole, first], "notes on a whole episode come before those on its turns"
    assert first.tags == ("odd", "turn") and first.run == "run-1"
    assert parse_link(first.link).start == 2 and first.link.endswith("turn=5&span=2-7")
    before = book.path.read_bytes()
    edited = book.edit(first.id, text="because", label="wrong credit", span=None)
    assert (edited.text, edited.label, edited.start, edited.author) == ("because", "wrong credit", None, "ada")
    assert edited.time > first.time
    book.delete(whole.id)
    assert book.notes() == [edited] and book.path.read_bytes().startswith(before), "lines are only appended"
    assert [n.text for n in book.history(first.id)] == ["*why*", "because"]
    assert [json.loads(line)["deleted"] for line in book.path.read_text().splitlines()] == [False, False, False, True]
    with pytest.raises(WorkbenchError, match="no note"):
        book.edit(whole.id, text="again")


def test_the_frame_has_one_row_a_note_and_its_types_also_when_empty(book):
    assert book.frame().schema == pl.Schema(notes.SCHEMA) and book.frame().is_empty()
    note = book.add(1, 2, 3, text="a", tags=["x"], label="not pivotal", author="ada")
    frame = book.frame()
    assert frame.schema == pl.Schema(notes.SCHEMA)
    row = frame.row(0, named=True)
    assert (row["id"], row["turn"], row["start"], row["tags"], row["label"]) == (note.id, 3, None, ["x"], LABELS[1])
    assert row["time"].strftime("%Y-%m-%dT%H:%M:%S.%fZ") == note.time


def test_an_edit_wins_over_a_note_from_a_clock_that_is_ahead(book):
    note = book.add(1, 2, text="a")
    ahead = replace(note, time="2999-01-01T00:00:00.000000Z", text="ahead")
    with open(book.path, "a") as handle:
        handle.write(Version(ahead, "f" * 32, False).line() + "\n")
    assert book.notes()[0].text == "ahead"
    assert book.edit(note.id, text="mine") == book.notes()[0]


# What breaks


def test_a_note_after_which_there_is_no_time_stays_as_it_is(book):
    note = book.add(1, 1, text="a")
    book.path.write_text(book.path.read_text().replace(note.time, "9999-12-31T23:59:59.999998Z"))
    held = book.path.read_bytes()
    for change in (lambda: book.edit(note.id, text="b"), lambda: book.delete(note.id)):
        with pytest.raises(WorkbenchError, match="no later version"):
            change()
    assert book.path.read_bytes() == held and [n.text for n in book.notes()] == ["a"]


def test_a_torn_last_line_loses_only_itself(book):
    kept = book.add(1, 1, text="kept", author="ada")
    book.add(1, 2, text="torn", author="ada")
    whole = book.path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole) - 1):
        book.path.write_bytes(whole[:cut])
        assert book.notes() == [kept]
        assert len(book.warnings) == 1 and "line 2 was passed over: its write was cut off" in book.warnings[0]
    later = book.add(1, 3, text="later")
    assert book.notes() == [kept, later], "the next line is not glued to the torn one"
    assert len(book.warnings) == 1 and "line 2" in book.warnings[0], "the torn line is still named"
    book.path.write_bytes(whole[:-1])
    assert len(book.notes()) == 2 and book.warnings == [], "a lost line end alone loses nothing"


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b"null",
        b'{"id": 1}',
        b"9" * 5000,
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": None},
        {"step": 10**30},
        {"turn": None, "start": 1, "end": 2},
        {"end": None},
        {"label": "nonsense"},
        {"label": ["pivotal"]},
        {"text": None},
        {"text": "x" * (TEXT_LIMIT + 1)},
        {"tags": "abc"},
        {"tags": [1]},
        {"tags": [""]},
        {"time": "yesterday"},
        {"time": "2025-13-01T00:00:00.000000Z"},
        {"time": None},
        {"time": "9999-12-31T23:59:59.999999Z"},
        {"id": "../x"},
        {"version": "x"},
        {"deleted": 1},
        {"run": "../other"},
        {"author": 3},
    ],
)
def test_a_line_that_is_no_note_is_named_and_passed_over(book, line):
    note = book.add(1, 1, 1, (0, 3), "a")
    if isinstance(line, dict):
        line = json.dumps(json.loads(book.path.read_text()) | {"id": "0" * 32} | line).encode()
    book.path.write_bytes(line + b"\n\n" + book.path.read_bytes())
    assert book.notes() == [note]
    assert len(book.warnings) == 1 and "line 1 was passed over" in book.warnings[0] and "\n" not in book.warnings[0]
    assert len(book.warnings[0]) < 400
    assert book.frame().height == 1


@pytest.mark.parametrize(
    "given",
    [
        dict(turn=None, span=(0, 1)),
        dict(turn=1, span=(3, 3)),
        dict(turn=1, span=(3,)),
        dict(turn=1, span="ab"),
        dict(turn=-1),
        dict(text="x" * (TEXT_LIMIT + 1)),
        dict(text=None),
        dict(tags="one"),
        dict(tags=["x" * 65]),
        dict(tags=[str(i) for i in range(33)]),
        dict(label="Pivotal"),
        dict(author="x" * 201),
    ],
)
def test_bad_input_writes_nothing(book, given):
    with pytest.raises(WorkbenchError) as caught:
        book.add(1, 2, **given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert not book.path.exists()
    note = book.add(1, 2, 3)
    with pytest.raises(WorkbenchError):
        book.edit(note.id, **given)
    with pytest.raises(WorkbenchError, match="did you mean 'text'"):
        book.edit(note.id, txt="a")
    assert book.notes() == [note]


def test_text_of_any_script_and_lone_surrogates_come_back_as_utf8(book):
    text = "na\u00efve \U0001f469\u200d\U0001f4bb \u2028 \x00 \ud83d\ude00 \udc00"
    note = book.add(1, 2, text=text, author="\u00e9\ud800")
    assert book.notes() == [note]
    assert note.text.endswith("\U0001f600 \ufffd") and note.author == "\u00e9\ufffd"
    assert book.path.read_bytes().isascii() and book.path.read_bytes().count(b"\n") == 1
    assert book.frame()["text"][0] == note.text


@pytest.mark.parametrize("code, said", [(errno.EROFS, "read-only"), (errno.EACCES, "permission denied")])
def test_a_folder_that_cannot_be_written_is_told_in_one_line(book, monkeypatch, code, said):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(notes.os, "open", refuse)
    with pytest.raises(WorkbenchError, match=said) as caught:
        book.add(1, 2)
    assert "\n" not in str(caught.value) and str(book.path) in str(caught.value)
    assert book.notes() == []


def test_a_full_disk_leaves_the_file_as_it_was(book, monkeypatch):
    note = book.add(1, 2)
    before, write = book.path.read_bytes(), os.write
    monkeypatch.setattr(notes.os, "write", lambda handle, data: write(handle, data[:20]))
    with pytest.raises(WorkbenchError, match="was not written"):
        book.add(1, 3)
    assert book.path.read_bytes() == before and book.notes() == [note]


def test_a_link_in_the_place_of_the_file_is_not_written_through(book, tmp_path):
    target = tmp_path / "profile"
    target.write_text("")
    book.path.symlink_to(target)
    with pytest.raises(WorkbenchError, match="was not written"):
        book.add(1, 2)
    assert target.read_text() == ""


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(WorkbenchError, match="is no folder"):
        NoteBook(tmp_path / "absent")


def test_processes_write_at_once_without_a_torn_or_lost_line(book):
    script = (
        "import sys; from workbench.notes import NoteBook; book = NoteBook(sys.argv[1])\n"
        "for i in range(40): book.add(i, int(sys.argv[2]), text='x' * 9000)"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(book.folder), str(i)]) for i in range(2)]
    assert [p.wait() for p in started] == [0, 0]
    found = book.notes()
    assert sorted((n.episode, n.step) for n in found) == [(e, s) for e in range(2) for s in range(40)]
    assert book.warnings == [] and all(len(n.text) == 9000 for n in found)


# Merging


def test_two_copies_of_a_run_merge_into_the_same_notes(tmp_path):
    books = []
    for person in ("ada", "ben"):
        folder = tmp_path / person / "run-1"
        folder.mkdir(parents=True)
        books.append(NoteBook(folder))
    ada, ben = books
    shared = ada.add(1, 1, text="first", author="ada")
    assert ben.merge(ada.folder) == 1
    ben.edit(shared.id, text="ben's"), ada.edit(shared.id, text="ada's later")
    mine, theirs = ada.add(2, 1, author="ada"), ben.add(2, 1, author="ben")
    ada.delete(mine.id)
    ben.path.write_bytes(ben.path.read_bytes() + b'{"torn')
    assert ada.merge(ben.path) == 2 and len(ada.warnings) == 1
    assert ben.merge(ada.path) == 3 and ada.merge(ben.path) == ben.merge(ada.path) == 0
    assert ada.notes() == ben.notes() and [n.text for n in ada.notes()] == ["ada's later", ""]
    assert ada.notes()[1] == theirs
    assert "ben's" in [n.text for n in ada.history(shared.id)], "what lost is still in the file"


def test_lines_of_another_run_are_refused_unless_it_is_a_renamed_copy(tmp_path, book):
    (tmp_path / "run-2").mkdir()
    other = NoteBook(tmp_path / "run-2")
    other.add(1, 1)
    with pytest.raises(WorkbenchError, match="renamed=True"):
        book.merge(other.path)
    assert not book.path.exists()
    assert book.merge(other.path, renamed=True) == 1 and len(book.notes()) == 1
    with pytest.raises(WorkbenchError, match="no notes file"):
        book.merge(tmp_path)


ids = st.integers(0, 3).map(lambda i: f"{i:032x}")
times = st.integers(0, 3).map(lambda s: f"2025-01-01T00:00:0{s}.000000Z")


@st.composite
def versions(draw):
    turn = draw(st.none() | st.integers(0, 2))
    span = (None, None) if turn is None or draw(st.booleans()) else (1, 3)
    text, label = draw(st.text('ab\n"\u00e9\u2028\U0001f600', max_size=5)), draw(st.none() | st.sampled_from(LABELS))
    tags = tuple(draw(st.lists(st.sampled_from("abc"), unique=True, max_size=2)))
    note = Note(draw(ids), "run", draw(st.integers(0, 2)), 0, turn, *span, "a", draw(times), text, tags, label)
    return Version(notes.checked(note), draw(ids), draw(st.booleans()))


files = st.lists(versions(), max_size=8)


def written(*parts):
    data = "".join(v.line() + "\n" for part in parts for v in part).encode()
    found, warnings = notes.parse(data)
    assert warnings == []
    return current(found)


@given(files, files, files, st.randoms())
def test_merging_is_commutative_associative_and_idempotent(a, b, c, random):
    assert written(a, b) == written(b, a)
    assert written(a, a) == written(a)
    assert written(a, written_versions(b, c)) == written(written_versions(a, b), c)
    shuffled = [*a, *b, *c]
    random.shuffle(shuffled)
    assert written(shuffled) == written(a, b, c), "the order of lines says nothing"


def written_versions(*parts):
    return notes.parse("".join(v.line() + "\n" for part in parts for v in part).encode())[0]


@given(files)
def test_the_last_version_by_time_and_id_is_the_note(lines):
    last = {}
    for version in sorted(lines, key=lambda v: (v.note.time, v.version, v.line())):
        last[version.note.id] = version
    assert {n.id: n for n in current(lines)} == {i: v.note for i, v in last.items() if not v.deleted}


@given(versions())
def test_a_line_is_read_back_as_it_was(version):
    assert notes.parse(version.line().encode()) == ([version], [])


# Markdown

ALLOWED = set("p br hr em strong del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 a".split())


class Reader(HTMLParser):
    """All tags and attributes of a piece of HTML, as a browser would see them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.links = set(), set(), []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href"]
        if tag == "a":
            assert dict(attrs).get("rel") == "nofollow noreferrer noopener" or "href" not in dict(attrs)

    def handle_decl(self, decl):
        raise AssertionError(decl)

    handle_pi = unknown_decl = handle_decl

    def handle_comment(self, data):
        raise AssertionError(data)


def harmless(text):
    html = sanitised(text)
    seen = Reader(html)
    assert seen.tags <= ALLOWED, html
    assert seen.attributes <= {("a", "href"), ("a", "rel"), ("a", "target")}, html
    assert all(re.match(r"https?://[A-Za-z0-9.-]+([:/?#]|$)", link) for link in seen.links), html
    return html


HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<style>*{display:none}</style>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt&colon;alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](//evil.example)",
    "[x](/lab/tree/secret)",
    "[x](file:///etc/passwd)",
    "[x](http://user:pass@evil.example)",
    '[x](http://a.b "onmouseover=alert(1)")',
    '[x](<http://a.b/"onmouseover="alert(1)>)',
    "<javascript:alert(1)>",
    "<http://a.b/'onclick='alert(1)>",
    "![x](http://a.b/c.png)",
    "![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[r]\n\n[r]: javascript:alert(1)",
    "```html\n</code></pre><script>alert(1)</script>\n```",
    '``` x" onload="alert(1)\na\n```',
    "`</code><script>alert(1)</script>`",
    "<!--<script>-->alert(1)",
    "<![CDATA[<script>alert(1)</script>]]>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "| a |\n|---|\n| <script> |",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "\x00<scr\x00ipt>",
    "<" * 500,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_never_live(text):
    html = harmless(text)
    assert "<script" not in html and "<img" not in html


pieces = st.sampled_from(
    [*HOSTILE[:22], "[", "](", ")", "`", "```\n", "<", ">", '"', "'", "&#", "&#x3c;", "\n", "http://a.b"]
)


@given(st.lists(pieces | st.text("ab <>&\"'()[]:/\\`*_\n\x00\u202e\u00e9", max_size=8), max_size=8).map("".join))
def test_no_mixture_of_hostile_pieces_is_live(text):
    harmless(text)


def test_plain_markdown_is_kept():
    html = harmless(
        "# A\n\n**b** *c* ~~d~~ `e<f`\n\n- x\n- y\n\n> q\n\n```python\n1 < 2\n```\n\n[site](https://a.b/c?d=1&e=2)"
    )
    for part in ("<h1>A</h1>", "<strong>b</strong>", "<em>c</em>", "<del>d</del>", "<code>e&lt;f</code>", "<li>y</li>"):
        assert part in html
    assert "<blockquote>" in html and "1 &lt; 2" in html
    assert '<a href="https://a.b/c?d=1&amp;e=2" rel="nofollow noreferrer noopener" target="_blank">site</a>' in html
    assert "http" not in harmless("![alt text](https://a.b/pixel.png)"), "an image shows as its words"


def test_direction_marks_are_seen_and_lone_surrogates_do_no_harm():
    assert sanitised("a\u202eb\ud800") == "<p>a\ufffdb\ufffd</p>\n"
    assert "\u200d" in sanitised("\U0001f469\u200d\U0001f4bb")


def test_text_over_the_limit_is_refused():
    with pytest.raises(WorkbenchError, match="at most"):
        sanitised("x" * (TEXT_LIMIT + 1))
