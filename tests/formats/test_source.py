"""What a path is taken for, and what of a folder is passed over or refused."""

import pickle
import shutil
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.formats import open_source

FIXTURES = Path(__file__).parent / "fixtures"
VERL = FIXTURES / "verl_v1" / "4.jsonl"
CHAT = FIXTURES / "messages" / "chats.jsonl"


def refused(path, *said):
    with pytest.raises(WorkbenchError) as error:
        source = open_source(path)
        list(source.episodes())
    assert "\n" not in str(error.value)
    for words in said:
        assert words in str(error.value)


def test_files_come_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9, 100):
        (tmp_path / f"{step}.jsonl").write_bytes(VERL.read_bytes())
    assert [f.name for f in open_source(tmp_path).files] == ["9.jsonl", "10.jsonl", "100.jsonl"]


def test_paths_with_spaces_and_a_byte_order_mark(tmp_path):
    folder = tmp_path / "my runs (old)"
    folder.mkdir()
    (folder / "step 4 é.jsonl").write_bytes(b"\xef\xbb\xbf" + VERL.read_bytes())
    source = open_source(str(folder))
    assert len(list(source.episodes())) == 2 and source.format == "verl"


def test_other_files_are_named_in_the_notes(tmp_path):
    shutil.copy(VERL, tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / ".hidden.jsonl").write_bytes(CHAT.read_bytes())
    (tmp_path / "data.pkl").write_bytes(pickle.dumps({"a": 1}))
    source = open_source(tmp_path)
    assert len(source.files) == 1 and len(source.notes) == 3
    assert "passed over empty.jsonl: the file is empty" in source.notes
    assert "passed over notes.txt: no format fits" in source.notes
    assert any(n.startswith("passed over data.pkl: a pickle can run any code") for n in source.notes)


def test_several_formats_in_a_folder(tmp_path):
    shutil.copy(VERL, tmp_path)
    shutil.copy(CHAT, tmp_path)
    refused(tmp_path, "holds several formats: verl (4.jsonl) and messages (chats.jsonl)", "import one")


def test_a_file_that_changes_format_on_the_way(tmp_path):
    (tmp_path / "4.jsonl").write_bytes(VERL.read_bytes() + CHAT.read_bytes())
    refused(tmp_path / "4.jsonl", "/4.jsonl:4: score is missing, expected a number")


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_an_empty_file(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    refused(tmp_path / "a.jsonl", "a.jsonl: the file is empty")
    refused(tmp_path, "nothing to import (a.jsonl: the file is empty)")


def test_nothing_there(tmp_path):
    refused(tmp_path, "nothing to import (no files); formats that are read: verl_agent, verl, trl")
    refused(tmp_path / "gone", "gone: no such file or folder")
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    refused(tmp_path / "a.jsonl", "a.jsonl: no format fits; formats that are read: ")


def test_a_torn_first_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(VERL.read_bytes()[:40])
    refused(tmp_path / "a.jsonl", "no format fits")


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was opened')",)


@pytest.mark.parametrize("name", ["global_step_3_training_input.pkl", "data.bin", "run.pickle"])
def test_a_pickle_is_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(pickle.dumps(Harmful()))
    refused(tmp_path / name, "a pickle can run any code when it is loaded")
    refused(tmp_path, "nothing to import", "a pickle can run any code when it is loaded")


def test_links(tmp_path):
    folder, outside = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    outside.mkdir()
    shutil.copy(VERL, folder)
    shutil.copy(VERL, outside / "5.jsonl")
    (folder / "again.jsonl").symlink_to(folder / "4.jsonl")
    (folder / "loop").symlink_to(folder)
    assert [f.name for f in open_source(folder).files] == ["4.jsonl"]
    link = tmp_path / "link.jsonl"
    link.symlink_to(VERL)
    assert open_source(link).format == "verl"  # a path that was named is what it leads to
    (folder / "5.jsonl").symlink_to(outside / "5.jsonl")
    refused(folder, "5.jsonl is a link that leads out of the folder")
    (folder / "5.jsonl").unlink()
    (folder / "more").symlink_to(outside)
    refused(folder, "more is a link that leads out of the folder")


def test_links_that_lead_to_nothing_are_named_in_the_notes(tmp_path):
    shutil.copy(VERL, tmp_path)
    (tmp_path / "gone.jsonl").symlink_to("nowhere")
    (tmp_path / "itself").symlink_to("itself")
    source = open_source(tmp_path)
    assert [f.name for f in source.files] == ["4.jsonl"]
    assert source.notes == ("passed over gone.jsonl, itself: a link that leads to nothing",)


def test_paths_that_cannot_be_looked_at(tmp_path):
    refused(tmp_path / ("a" * 300), "cannot be looked at (File name too long)")
    refused("~there-is-no-such-user/x", "~there-is-no-such-user/x: cannot be looked at (")


def test_a_file_that_begins_with_many_blanks(tmp_path):
    (tmp_path / "4.jsonl").write_bytes(b" " * 70_000 + b"\n" * 70_000 + VERL.read_bytes())
    assert len(list(open_source(tmp_path).episodes())) == 2


def test_a_run_folder_is_no_source(tmp_path):
    (tmp_path / "tables").mkdir()
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "is a run folder of this workbench already")


def test_long_first_lines_are_known_by_their_names(tmp_path):
    import json

    rows = [json.loads(line) for line in VERL.read_text().splitlines()]
    rows[0] = {"step": 4, "score": 0.0, "uid": "a_b_0_0", "output": "x", "gts": None, "input": 'é"{' * 100_000}
    (tmp_path / "4.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert len(list(open_source(tmp_path).episodes())) == 2
