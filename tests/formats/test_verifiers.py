"""verifiers: its own files keep ids, masks, log-probs and rewards; bad ones end in one line that names the place."""

import json
from pathlib import Path

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.formats import open_source, verifiers

FIXTURES = Path(__file__).parent / "fixtures"
TRACES = FIXTURES / "verifiers" / "step_3" / "train" / "effective" / "traces.jsonl"
RESULTS = FIXTURES / "verifiers_legacy" / "results.jsonl"


@pytest.fixture
def episode():
    return json.loads(TRACES.read_text().splitlines()[1])


def _written(tmp_path, *records, name="traces.jsonl"):
    file = tmp_path / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def _error(file):
    with pytest.raises(WorkbenchError) as caught:
        list(verifiers.read(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_both_forms_are_told_from_their_heads():
    for file in (TRACES, RESULTS):
        assert open_source(file).format == "verifiers"


def test_tokens_of_a_path_from_the_root_are_the_sequence_and_each_node_keeps_what_was_written(episode):
    first, second = verifiers.read(TRACES)
    assert (first.step, first.episode, first.group, first.task) == (3, "trace0", "group7", "sink")
    assert (first.reward, second.reward) == (1.125, 0.125)  # 1 * solved + 0.25 * 0.5
    assert first.fidelity == "token" and first.stop_reason == "agent_completed"
    nodes = episode["traces"][0]["nodes"]
    for turn in second.turns:
        node, path, at = nodes[turn.info["node"]], [], turn.info["node"]
        while at is not None:
            path, at = nodes[at]["token_ids"] + path, nodes[at].get("parent")
        assert [*turn.context_ids, *turn.token_ids] == path
        assert turn.token_ids.tolist() == [i for i, m in zip(node["token_ids"], node["mask"], strict=True) if m]
        for name in ("logprobs", "reference_logprobs", "trainer_logprobs", "advantages"):
            np.testing.assert_array_equal(getattr(turn, name), np.float32(node[name]))
        assert turn.mask.sum() == len(turn.token_ids) == len(turn.logprobs)
    assert [turn.truncated for turn in second.turns] == [False, True, False]


def test_a_rewritten_history_is_another_path_and_shares_no_turn(episode):
    turns = list(verifiers.read(TRACES))[1].turns
    assert [turn.info["node"] for turn in turns] == [2, 4, 6]
    assert turns[2].context_ids.tolist() == [101, 5, 102, 41, 42, 103]
    assert turns[2].observation == "Act.\n\nSo far: the mug is taken."
    assert turns[1].observation == "You take the mug."
    assert turns[0].action == 'act({"do": "take mug"})' and turns[1].response == "put mug in sink"


def test_trained_tokens_that_nobody_sampled_are_counted(episode, tmp_path):
    episode["traces"][0]["nodes"][3]["mask"] = [False, True, True]
    (got,) = verifiers.read(_written(tmp_path, episode))
    assert [turn.info.get("trained_environment_tokens") for turn in got.turns] == [None, 2, None]


def test_lengths_that_disagree_are_kept_for_the_audit(episode, tmp_path):
    node = episode["traces"][0]["nodes"][2]
    node["logprobs"] = node["logprobs"][:-1]
    node["mask"] = node["mask"][:-1]
    (got,) = verifiers.read(_written(tmp_path, episode))
    assert (len(got.turns[0].token_ids), len(got.turns[0].mask), len(got.turns[0].logprobs)) == (4, 3, 2)


def test_an_evaluation_without_tokens_is_text(episode, tmp_path):
    for node in episode["traces"][0]["nodes"]:
        node |= {"token_ids": [], "mask": [], "logprobs": []}
    (got,) = verifiers.read(_written(tmp_path, episode))
    assert got.fidelity == "text" and all(turn.token_ids is None and turn.logprobs is None for turn in got.turns)


def test_each_agents_trace_is_a_rollout_of_its_own_group(episode, tmp_path):
    other = json.loads(json.dumps(episode["traces"][0]))
    other["id"], other["agent"]["name"], other["agent"]["trainable"] = "trace2", "judge", False
    episode["traces"].append(other)
    solver, judge = verifiers.read(_written(tmp_path, episode))
    assert (solver.group, judge.group) == ("group7:solver", "group7:judge")
    assert solver.info["trainable"] and not judge.info["trainable"]


def test_an_unscored_trace_has_no_reward_and_a_step_may_come_from_the_folder(episode, tmp_path):
    del episode["run"]
    episode["traces"][0]["rewards"] = {}
    folder = tmp_path / "rollouts" / "step_12" / "train" / "all"
    folder.mkdir(parents=True)
    (got,) = verifiers.read(_written(folder, episode))
    assert (got.reward, got.step, got.episode) == (None, 12, "all/trace1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t["nodes"][2]["token_ids"].append(-1), "traces.jsonl:1: nodes[2]: token_ids holds -1"),
        (lambda t: t["nodes"][2]["logprobs"].__setitem__(1, float("nan")), "nodes[2]: logprobs is nan at token 1"),
        (lambda t: t["nodes"][2].update(parent=9), "nodes[2]: parent is 9, expected a node before it"),
        (lambda t: t["nodes"][2].update(message={"role": "user", "content": "x"}), "expected role assistant"),
        (lambda t: t["nodes"].__setitem__(0, 3), "nodes holds a number, expected objects"),
        (lambda t: t["nodes"][2].update(mask=[0, 1, 2, 1]), "mask holds something else than 0 and 1"),
        (lambda t: t.update(version=2), "a trace of version 2, expected 1"),
        (lambda t: t["rewards"].update(solved={"score": "high"}), "score is a string, expected a number"),
    ],
)
def test_ill_typed_traces_name_the_place(episode, tmp_path, change, said):
    change(episode["traces"][0])
    assert said in _error(_written(tmp_path, episode))


def test_a_torn_line_names_its_number(tmp_path):
    file = tmp_path / "traces.jsonl"
    file.write_bytes(TRACES.read_bytes()[:-40])
    assert "traces.jsonl:2: torn" in _error(file)


def test_results_keep_tokens_where_the_trajectory_was_saved():
    token, text = verifiers.read(RESULTS)
    assert token.group == text.group and token.episode != text.episode
    assert (token.fidelity, text.fidelity, token.reward, text.reward) == ("token", "text", 1.0, 0.0)
    last = token.turns[1]
    assert last.context_ids.tolist() == [1, 2, 3, 21, 22, 4]
    assert last.token_ids.tolist() == [23, 24] and last.mask.tolist() == [1, 1, 0]
    np.testing.assert_array_equal(last.logprobs, np.float32([-0.25, -1.0]))
    np.testing.assert_array_equal(last.advantages, np.float32([0.75, 0.75]))
    assert [turn.reward for turn in token.turns] == [0.0, 1.0]
    for episode in (token, text):
        assert [turn.observation for turn in episode.turns][1] == "You take the mug."
        assert [turn.response for turn in episode.turns] == ["take mug", "put mug in sink"]
    assert all(turn.token_ids is None for turn in text.turns)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["trajectory"][1].update(tokens=[]), "trajectory[1]: tokens holds a list, expected objects"),
        (lambda r: r["trajectory"][1]["tokens"].update(completion_ids="x"), "completion_ids is a string"),
        (lambda r: r.update(completion=7), "completion is a number, expected a list"),
        (lambda r: r.update(reward=float("inf")), "reward is inf, expected a finite number"),
    ],
)
def test_ill_typed_results_name_the_place(tmp_path, change, said):
    record = json.loads(RESULTS.read_text().splitlines()[0])
    change(record)
    if isinstance(record["completion"], int):
        del record["trajectory"]
    assert said in _error(_written(tmp_path, record, name="results.jsonl"))
