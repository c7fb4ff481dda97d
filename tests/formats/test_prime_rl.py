"""prime-rl: token exports keep every aligned list on the tokens that train."""

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import open_source, prime_rl

FILE = Path(__file__).parent / "fixtures" / "prime_rl" / "token_exports" / "step_4" / "rank_1.jsonl"


@pytest.fixture
def records():
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def _written(tmp_path, *records):
    file = tmp_path / "rank_0.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def _error(file):
    with pytest.raises(WorkbenchError) as caught:
        list(prime_rl.read(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_folder_is_told_apart_and_the_marker_passed_over():
    source = open_source(FILE.parents[2])
    assert source.format == "prime_rl" and source.files == (FILE,)
    assert any("STABLE" in note for note in source.notes)


def test_runs_of_the_loss_mask_are_turns_with_their_values(records):
    episode = next(iter(prime_rl.read(FILE)))
    record = records[0]
    assert (episode.step, episode.task, episode.fidelity, episode.reward) == (4, "kitchen", "token", None)
    for turn, span in zip(episode.turns, (slice(3, 5), slice(6, 8)), strict=True):
        assert turn.context_ids.tolist() == record["token_ids"][: span.start]
        assert turn.token_ids.tolist() == record["token_ids"][span]
        for field, name in (("logprobs", "inference_logprobs"), ("trainer_logprobs", "trainer_logprobs")):
            np.testing.assert_array_equal(getattr(turn, field), np.float32(record[name][span]))
        np.testing.assert_array_equal(turn.advantages, np.float32(record["advantages"][span]))
        np.testing.assert_array_equal(turn.info["entropy"], np.float32(record["entropy"][span]))
    assert [turn.mask.tolist() for turn in episode.turns] == [[1, 1, 0], [1, 1]]


def test_a_value_written_null_is_lost_and_not_zero():
    episode = list(prime_rl.read(FILE))[1]
    assert np.isnan(episode.turns[0].trainer_logprobs).all()
    np.testing.assert_array_equal(episode.turns[0].logprobs, np.float32([-2.0]))


def test_lines_without_null_are_parsed_in_one_go_with_the_same_result(tmp_path, records):
    (fast,) = prime_rl.read(_written(tmp_path, records[0]))
    slow = next(iter(prime_rl.read(FILE)))
    for a, b in zip(fast.turns, slow.turns, strict=True):
        for name in ("token_ids", "context_ids", "mask", "logprobs", "trainer_logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_a_list_of_another_length_is_kept_whole_for_the_audit(tmp_path, records):
    records[0]["inference_logprobs"] = records[0]["inference_logprobs"][:-1]
    (episode,) = prime_rl.read(_written(tmp_path, records[0]))
    (turn,) = episode.turns
    assert (len(turn.token_ids), len(turn.logprobs), len(turn.trainer_logprobs)) == (4, 7, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "rank_0.jsonl:1: token export of schema version 2, expected 1"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": None}, "token_ids is null, expected a list of token ids"),
        ({"loss_mask": [0.5] * 8}, "loss_mask holds something else than 0 and 1"),
        ({"trainer_logprobs": [float("nan")] * 8}, "trainer_logprobs is nan at token 0"),
        ({"advantages": 3}, "advantages is a number, expected a list of numbers"),
        ({"step": "four"}, "step is a string, expected a whole number"),
    ],
)
def test_ill_typed_records_name_the_line(tmp_path, records, change, said):
    assert said in _error(_written(tmp_path, records[0] | change))


def test_a_torn_line_names_its_number(tmp_path):
    file = tmp_path / "rank_0.jsonl"
    file.write_bytes(FILE.read_bytes()[:-40])
    assert "rank_0.jsonl:2: torn" in _error(file)
