"""Per-turn dumps of the verl-agent family: order, copies and exact numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import ndjson, open_source, verl_agent

FIXTURES = Path(__file__).parent / "fixtures"
OPSD = FIXTURES / "verl_agent" / "step_5.jsonl"
SDAR = FIXTURES / "verl_agent_sdar" / "step_5.jsonl"


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("path", [OPSD, SDAR])
def test_trajectories_are_gathered_and_ordered_with_copies_kept(path):
    source = open_source(path)
    assert source.format == "verl_agent"
    b, a = source.episodes()
    assert (b.episode, a.episode) == ("traj-b", "traj-a")  # as they first appear
    assert [t.turn for t in b.turns] == [0, 1] and [t.turn for t in a.turns] == [0, 1, 1, 2]
    assert (a.reward, b.reward, a.step, a.fidelity) == (10.0, 0.0, 5, "token")
    assert [t.info["where"].rpartition(":")[2] for t in a.turns] == ["3", "2", "6", "5"]
    assert a.success is None and a.group == "" and a.turns[0].mask is None


def test_numbers_are_those_of_the_file():
    rows = {(r["traj_uid"], r["turn_step"]): r for r in rows_of(OPSD)}
    for episode in verl_agent.read(OPSD):
        for turn in episode.turns:
            row = rows[episode.episode, turn.turn]
            assert turn.token_ids.dtype == np.int32 and turn.token_ids.tolist() == row["token_ids"]
            for name, values in (
                ("student_log_probs", turn.logprobs),
                ("teacher_log_probs", turn.teacher_logprobs),
                ("token_advantages", turn.advantages),
            ):
                assert values.dtype == np.float32 and values.tolist() == row[name]
            assert list(turn.info["pieces"]) == row["tokens"] and turn.response == "".join(row["tokens"])
            assert episode.advantage == row["seq_advantage"]


def test_sdar_has_no_advantages():
    assert all(e.advantage is None and t.advantages is None for e in verl_agent.read(SDAR) for t in e.turns)


def test_json_and_polars_read_the_same(monkeypatch):
    fast = [t for e in verl_agent.read(OPSD) for t in e.turns]
    monkeypatch.setattr(ndjson, "_parsed", lambda data, rows, schema: None)
    slow = [t for e in verl_agent.read(OPSD) for t in e.turns]
    assert len(fast) == len(slow) == 6
    for a, b in zip(fast, slow, strict=True):
        assert (a.response, a.turn, list(a.info["pieces"])) == (b.response, b.turn, b.info["pieces"])
        for name in ("token_ids", "logprobs", "teacher_logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True)


def test_small_chunks_read_the_same(monkeypatch):
    whole = [t.token_ids.tolist() for e in verl_agent.read(OPSD) for t in e.turns]
    monkeypatch.setattr(ndjson, "CHUNK", 300)
    assert [t.token_ids.tolist() for e in verl_agent.read(OPSD) for t in e.turns] == whole


def test_lengths_that_disagree_are_kept_for_the_audit(tmp_path):
    rows = rows_of(OPSD)
    rows[0]["student_log_probs"] = rows[0]["student_log_probs"][:-1]
    turn = next(verl_agent.read(write(tmp_path / "step_5.jsonl", rows))).turns[0]
    assert len(turn.token_ids) == 3 and len(turn.logprobs) == 2


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("token_ids", [1, "2", 3], "token_ids holds a string, expected a list of token ids"),
        ("token_ids", [1, -2, 3], "token_ids holds -2, expected token ids"),
        ("token_ids", [1, 2.5, 3], "token_ids holds 2.5, expected token ids"),
        ("token_ids", [1, 2**31], "token_ids holds 2147483648, expected token ids"),
        ("token_ids", [1, 10**30], "token_ids holds "),
        ("token_ids", None, "token_ids is null, expected a list"),
        ("student_log_probs", [-1.0, float("nan"), -1.0], "student_log_probs is nan at token 1, expected finite"),
        ("student_log_probs", [-1.0, float("-inf"), -1.0], "student_log_probs is -inf at token 1, expected finite"),
        ("teacher_log_probs", [-1.0, None, -1.0], "teacher_log_probs holds null, expected a list of numbers"),
        ("teacher_log_probs", [True, False], "teacher_log_probs holds true or false, expected numbers"),
        ("teacher_log_probs", {"a": 1}, "teacher_log_probs is an object, expected a list of numbers"),
        ("teacher_log_probs", [[-1.0], [-2.0]], "teacher_log_probs holds a list, expected a list of numbers"),
        ("tokens", ["a", None], "tokens holds something else than strings"),
        ("tokens", "abc", "tokens is a string, expected a list"),
        ("turn_step", "first", "turn_step is a string, expected a whole number"),
        ("turn_step", None, "turn_step is missing, expected a whole number"),
        ("episode_reward", float("nan"), "episode_reward is nan, expected a finite number"),
        ("global_step", 1.5, "global_step is a number, expected a whole number"),
    ],
)
def test_wrong_values_are_told_in_one_line(tmp_path, name, value, said):
    rows = rows_of(OPSD)[:1]
    path = write(tmp_path / "step_5.jsonl", [rows[0] | {name: value}])
    with pytest.raises(WorkbenchError) as error:
        list(verl_agent.read(path))
    assert str(error.value).startswith(f"{tmp_path.name}/step_5.jsonl:1: ") and said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trajectory_of_two_rewards_is_told(tmp_path):
    rows = rows_of(OPSD)
    rows[3]["episode_reward"] = 1.0
    with pytest.raises(WorkbenchError, match=r"step_5.jsonl:4: episode_reward 1.0 of trajectory 'traj-b' is 0.0 at"):
        list(verl_agent.read(write(tmp_path / "step_5.jsonl", rows)))


def test_a_name_inside_of_a_token_is_no_trajectory(tmp_path):
    rows = rows_of(OPSD)[:1]
    rows[0] = {"tokens": ['"traj_uid": "x"', "b", "c"]} | {k: v for k, v in rows[0].items() if k != "tokens"}
    (episode,) = verl_agent.read(write(tmp_path / "step_5.jsonl", rows))
    assert episode.episode == "traj-b" and episode.turns[0].info["pieces"][0] == '"traj_uid": "x"'


def test_half_a_surrogate_pair_survives(tmp_path):
    rows = rows_of(OPSD)[:1]
    rows[0]["tokens"] = ["a", "\ud800", "\U0001f600"]
    (episode,) = verl_agent.read(write(tmp_path / "step_5.jsonl", rows))
    assert episode.turns[0].response == "a\ud800\U0001f600"
    rows[0] |= {"tokens": ["a"], "traj_uid": "b\ud800"}
    (episode,) = verl_agent.read(write(tmp_path / "step_5.jsonl", rows))
    assert episode.episode == "b\ud800"
