"""OpenPipe ART: parquet and JSON lines hold the same rollouts, and say which messages the policy wrote."""

import json
from pathlib import Path

import polars as pl
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import art, open_source

FIXTURES = Path(__file__).parent / "fixtures"
PARQUET = FIXTURES / "art" / "trajectories" / "train" / "0012.parquet"
LINES = FIXTURES / "art_jsonl" / "0012.jsonl"


def _error(file):
    with pytest.raises(WorkbenchError) as caught:
        list(art.read(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_forms_are_told_from_their_heads():
    for file in (PARQUET, LINES):
        assert open_source(file).format == "art"


def test_both_forms_hold_the_same_rollouts():
    rows, lines = list(art.read(PARQUET)), list(art.read(LINES))
    assert len(rows) == len(lines) == 4
    for a, b in zip(rows, lines, strict=True):
        assert (a.step, a.task, a.reward, a.info["metrics"]) == (b.step, b.task, b.reward, b.info["metrics"])
        assert a.fidelity == b.fidelity == "text"
        assert [(t.response, t.observation, t.action) for t in a.turns] == [
            (t.response, t.observation, t.action) for t in b.turns
        ]
    for episodes in (rows, lines):
        assert [e.group == episodes[0].group for e in episodes] == [True, True, False, False]
        assert len({e.episode for e in episodes}) == 4
    assert [e.reward for e in rows] == [1.0, 0.0, 1.0, 0.0] and rows[0].step == 12


def test_an_answer_that_is_not_trained_is_observed():
    first, last = next(iter(art.read(PARQUET))).turns
    assert first.observation.startswith("Act.\n\nExample.\n\nAn example answer.")
    assert (first.response, first.action) == ("", 'act({"do": "take mug"})')
    assert (last.response, last.observation) == ("put mug in sink", "You take the mug.")
    assert list(art.read(LINES))[1].turns[1].truncated is True


def test_splits_of_one_step_do_not_share_groups(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "trajectories" / split).mkdir(parents=True)
        (tmp_path / "trajectories" / split / "0012.parquet").write_bytes(PARQUET.read_bytes())
    episodes = list(open_source(tmp_path).episodes())
    assert len({e.episode for e in episodes}) == 8 and len({e.group for e in episodes}) == 4


def test_files_longer_than_what_is_held_are_read_to_the_end(tmp_path):
    table = pl.read_parquet(PARQUET)
    whole = pl.concat([table] * (art.ROWS // len(table) + 1))
    whole.write_parquet(tmp_path / "0001.parquet")
    assert len(list(art.read(tmp_path / "0001.parquet"))) == len(whole)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("reward", ["high"] * 4, "0001.parquet:0: reward is a string, expected a number"),
        ("reward", [float("nan")] * 4, "0001.parquet:0: reward is nan, expected a finite number"),
        ("messages", ["x"] * 4, "messages is a string, expected a list"),
        ("metadata", ["{"] * 4, "metadata is not JSON"),
        ("group_index", ["a"] * 4, "group_index is a string, expected a whole number"),
    ],
)
def test_ill_typed_columns_name_the_row(tmp_path, column, values, said):
    table = pl.read_parquet(PARQUET).with_columns(pl.Series(column, values))
    table.write_parquet(tmp_path / "0001.parquet")
    assert said in _error(tmp_path / "0001.parquet")


def test_a_torn_parquet_file_is_one_line(tmp_path):
    file = tmp_path / "0001.parquet"
    file.write_bytes(PARQUET.read_bytes()[:-20])
    assert "0001.parquet: no whole parquet file" in _error(file)


@pytest.mark.parametrize(
    ("trajectory", "said"),
    [
        (3, "a trajectory is a number, expected an object"),
        ({"reward": 1.0}, "messages_and_choices is missing, expected a list"),
        ({"reward": 1.0, "messages_and_choices": [7]}, "messages_and_choices[0] is a number, expected a message"),
        ({"reward": None, "messages_and_choices": []}, "reward is missing, expected a number"),
        (
            {"reward": 1.0, "messages_and_choices": [{"message": {"role": "user", "content": "x"}}]},
            "trains a message that is not the assistant's",
        ),
    ],
)
def test_ill_typed_lines_name_the_place(tmp_path, trajectory, said):
    file = tmp_path / "0001.jsonl"
    file.write_text(json.dumps({"trajectories": [trajectory]}) + "\n")
    message = _error(file)
    assert said in message and "0001.jsonl:1" in message


def test_a_torn_line_names_its_number(tmp_path):
    file = tmp_path / "0001.jsonl"
    file.write_bytes(LINES.read_bytes()[:-30])
    assert "0001.jsonl:2: torn" in _error(file)
